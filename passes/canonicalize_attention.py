"""Prove that every attention mask is the causal one, or a sliding window of it, and drop it.

Before:
    %le : bool[1, 1, T, T] = ...                                  # arange <= arange
    %attention : f32[1, T, 4, 16] = pcp.attention.default(%q, %k, %v, %le, None, layer=0, kind='masked', scale=0.25)
After:
    %attention : f32[1, T, 4, 16] = pcp.attention.default(%q, %k, %v, None, None, layer=0, kind='full', scale=0.25)

Why here: before infer_placements, which could not shard a [T, T] mask; the calls themselves became `pcp::attention`
    while the model was traced, since after functionalisation an attention is no longer one call.

A mask is computed, on consecutive positions, for the proof lengths and around every integer that its computation
contains (a window is one of them); at the longest the last row tells the window, and all must equal the mask of it.
A window too long for that is proven with small numbers in its place, and only when the model itself names it.
Leaves alone: attention that was causal without a mask. Refuses every mask it cannot prove, attention without a mask,
    and attention kernels that bypassed SDPA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from pcp_compiler import ops
from pcp_compiler.errors import InvariantError
from pcp_compiler.pass_api import CallCheck, Pass, PassContext, PassResult, calls, erase_unused, refuse
from pcp_compiler.torch_private import size_expression
from pcp_compiler.trace import num_tokens, reads_sizes_only

KNOB = (
    "use causal attention: SDPA with is_causal=True, attn_implementation='sdpa' or 'pcp_spec', or "
    "pcp_compiler.attention"
)
PROOF_LENGTHS = (2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 64, 65)
"""Token counts at which a mask is compared with the causal one."""
LONGEST_PROOF = 4096
"""Integers in a mask's computation up to here get proof lengths around them; a mask of that length takes 16 MiB."""
STAND_INS = (5, 12)
"""What a longer window is replaced by, one after the other; the proof lengths reach well past them."""
OPEN_END = 2**62
"""Slices without an end are traced with the largest integer as theirs."""
Compute = Callable[..., Tensor]
"""Computes a mask from the number of tokens."""
WINDOW_KNOB = "load the model with attn_implementation='pcp_spec', whose layers say what their window is"


@dataclass(frozen=True)
class CanonicalizeAttention(Pass):
    """See the module."""

    name: ClassVar[str] = "canonicalize_attention"

    def requires(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        for node in gm.graph.nodes:
            text = str(node.target)
            if node.op == "call_function" and (
                "_scaled_dot_product" in text or "flash_attention" in text or "flex_attention" in text
            ):
                raise refuse(node, "this attention kernel was called directly and cannot be sharded", KNOB)
        for node in calls(gm, ops.ATTENTION):
            if node.kwargs["kind"] == "bidirectional":
                raise refuse(node, "attention without a causal mask: rows would see later rows", KNOB)

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        masked = [node for node in calls(gm, ops.ATTENTION) if node.kwargs["kind"] in ("masked", "padded")]
        proven: dict[tuple[object, object], int | None] = {}  # layers share a mask, and what they say of it
        for node in masked:
            key = (node.args[3], node.kwargs.get("window"))
            if key not in proven:
                proven[key] = _prove(gm, node, ctx)
        for node in masked:  # only now: a refusal leaves the graph as it was
            window = proven[node.args[3], node.kwargs.get("window")]
            node.update_kwarg("kind", "full" if window is None else "sliding_window")
            if node.kwargs.get("window") != window:
                node.update_kwarg("window", window)
            node.update_arg(3, None)
        erase_unused(gm)
        return PassResult(gm, len(masked))

    def ensures(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        for node in calls(gm, ops.ATTENTION):
            kind, window = node.kwargs["kind"], node.kwargs.get("window")
            if kind not in ops.ATTENTION_KINDS or (window is None) != (kind == "full"):
                raise InvariantError(f"{node.name} is of kind {kind} with window {window}")


def _prove(gm: fx.GraphModule, attention: fx.Node, ctx: PassContext) -> int | None:
    """Return the window of an attention's mask, None when it is the plain causal one; raise when it is neither."""
    mask = attention.args[3]
    assert isinstance(mask, fx.Node)
    needed = _ancestors(mask)
    checks = [_input_check(node, attention, needed, ctx) for node in needed if node.op == "placeholder"]
    length = num_tokens(gm, ctx.seeds)
    compute = partial(_evaluate, needed, mask, ctx)
    window = None
    if attention.kwargs["kind"] == "padded":
        _prove_all_ones(attention, compute, (length,) if isinstance(length, int) else PROOF_LENGTHS)
    elif isinstance(length, int):  # a static graph: no other length can meet this mask
        window = _prove_window(attention, compute, {length})
    else:
        window = _prove_any_length(attention, compute, _integers(needed))
    text = "causal" if window is None else f"causal with window {window}"
    ctx.decisions.add("masks", f"{attention.name}: mask {mask.name} proven {text}")
    ctx.decisions.call_checks.extend(c for c in checks if c is not None and c not in ctx.decisions.call_checks)
    return window


def _prove_any_length(attention: fx.Node, compute: Compute, integers: set[int]) -> int | None:
    """Prove a mask for every number of tokens; `integers` are those in its computation."""
    short = {number for number in integers if number <= LONGEST_PROOF}
    lengths = {length for number in short for length in range(number - 1, number + 3)} | set(PROOF_LENGTHS)
    long = sorted(integers - short)
    if not long:
        return _prove_window(attention, compute, lengths)
    claim = attention.kwargs.get("window")
    if not isinstance(claim, int) or any(abs(number - claim) > 1 for number in long):
        raise refuse(
            attention,
            f"its mask is computed with {long[0]}, which may be a window, and masks are proven up to {LONGEST_PROOF}",
            WINDOW_KNOB,
        )
    found = set()
    for stand_in in STAND_INS:
        replaced = {number: number - claim + stand_in for number in long}
        window = _prove_window(attention, partial(compute, replaced=replaced), set(PROOF_LENGTHS))
        found.add(None if window is None else window - stand_in + claim)
    if len(found) > 1:
        raise refuse(attention, f"its mask does not move with {claim}, the window that its layer names", KNOB)
    return found.pop()


def _prove_window(attention: fx.Node, compute: Compute, lengths: set[int]) -> int | None:
    """Return the window that the mask has at all of these lengths, None for none; raise when they do not agree."""
    window: int | None = None
    for tokens in sorted(lengths, reverse=True):  # the longest shows the window
        seen = _seen_keys(compute(tokens), tokens)
        if seen is not None and tokens == max(lengths):
            in_last_row = int(seen[..., -1, :].sum(-1).max())
            window = None if in_last_row == tokens else in_last_row
        if seen is None or not bool((seen == _band(tokens, window, seen.device)).all()):
            shape = "the causal one" if window is None else f"the causal one with a window of {window}"
            raise refuse(attention, f"its mask is not {shape} at {tokens} tokens", KNOB)
    return window


def _seen_keys(mask: Tensor, tokens: int) -> Tensor | None:
    """Return a boolean or additive mask as booleans [.., T, T]; None when it is neither."""
    if mask.shape[-2:] != (tokens, tokens):
        return None
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return mask == 0 if bool((hidden | (mask == 0)).all()) else None


def _band(tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys each row sees under the causal mask with a window: [T, T]."""
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    return causal if window is None else causal.triu(1 - window)


def _prove_all_ones(attention: fx.Node, compute: Compute, lengths: Sequence[int]) -> None:
    """Raise unless the padding flags that reached the attention hide nothing when the caller's are all one."""
    for tokens in lengths:
        if not bool((compute(tokens) == 1).all()):
            raise refuse(attention, f"its padding flags hide tokens at {tokens} tokens", KNOB)


def _integers(needed: list[fx.Node]) -> set[int]:
    """Return the integers >= 2 in a computation, those of small constant tensors too; not the end of an open slice."""
    found: set[int] = set()

    def visit(value: Argument) -> Argument:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1 and value < OPEN_END:
            found.add(int(value))
        return value

    for node in needed:
        fx.node.map_aggregate((node.args, node.kwargs), visit)
        if node.op == "get_attr" and node.meta["val"].numel() <= 8:
            constant = getattr(node.graph.owning_module, str(node.target))
            fx.node.map_aggregate(constant.flatten().tolist(), visit)
    return {number for number in found if number >= 2}


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """Return a node and all it is computed from, in graph order."""
    found, todo = {node}, [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                todo.append(source)
    return [candidate for candidate in node.graph.nodes if candidate in found]


def _input_check(node: fx.Node, attention: fx.Node, needed: list[fx.Node], ctx: PassContext) -> CallCheck | None:
    """Return what every call has to check so that the proof holds for it; refuse inputs it cannot depend on."""
    readers = [user for user in node.users if user in needed]  # none when the mask is the input itself
    if not isinstance(node.meta["val"], Tensor) or (readers and all(map(reads_sizes_only, readers))):
        return None
    if node.name in ctx.position_inputs:
        return CallCheck(node.name, "consecutive", "the attention mask was proven causal for consecutive positions")
    is_flags = not node.meta["val"].is_floating_point() and node.name not in ctx.seeds
    if is_flags and node.name in ctx.user_inputs and node.meta["val"].dim() == 2:
        return CallCheck(node.name, "all_ones", "a padding mask that hides tokens is not supported")
    raise refuse(attention, f"its mask depends on the values of input {node.name}", KNOB)


def _evaluate(
    needed: list[fx.Node], mask: fx.Node, ctx: PassContext, tokens: int, replaced: Mapping[int, int] | None = None
) -> Tensor:
    """Compute the mask for a number of tokens: consecutive positions, padding flags all one.

    Every symbol stands for T: what a mask is made of are the lengths of the prompt and of its companions.

    Args:
        replaced: integers of the computation that are to be others.
    """

    def size_of(size: int | torch.SymInt) -> int:
        expression = size_expression(size)
        return int(expression.subs(dict.fromkeys(expression.free_symbols, tokens)))

    def example(node: fx.Node) -> object:
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            return size_of(value)
        shape = [size_of(size) for size in value.shape]
        if node.name in ctx.position_inputs:
            return torch.arange(tokens, dtype=value.dtype, device=value.device).expand(shape)
        return torch.ones(shape, dtype=value.dtype, device=value.device)

    values: dict[fx.Node, object] = {}

    def argument(value: object) -> object:
        if isinstance(value, fx.Node):
            return values[value]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return replaced.get(value, value) if replaced and is_number else value  # type: ignore[call-overload]

    for node in needed:
        if node.op == "placeholder":
            values[node] = example(node)
        elif node.op == "get_attr":
            values[node] = getattr(node.graph.owning_module, str(node.target))
        else:
            args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), argument)  # type: ignore[arg-type]
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    result = values[mask]
    assert isinstance(result, Tensor)
    return result

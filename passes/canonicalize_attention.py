"""Prove that every attention mask is the causal one and drop it.

Before:
    %le : bool[1, 1, T, T] = ...                                  # arange <= arange
    %attention : f32[1, T, 4, 16] = pcp.attention.default(%q, %k, %v, %le, None, layer=0, kind='masked', scale=0.25)
After:
    %attention : f32[1, T, 4, 16] = pcp.attention.default(%q, %k, %v, None, None, layer=0, kind='full', scale=0.25)

Why here: before infer_placements, which could not shard a [T, T] mask; the calls themselves became `pcp::attention`
    while the model was traced, since after functionalisation an attention is no longer one call.
Leaves alone: attention that was causal without a mask. Refuses every mask it cannot prove, attention without a mask,
    and attention kernels that bypassed SDPA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

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
        proven: set[fx.Node] = set()
        for node in masked:
            mask = node.args[3]
            assert isinstance(mask, fx.Node)
            if mask not in proven:
                _prove_causal(gm, node, mask, ctx)
                proven.add(mask)
        for node in masked:
            node.update_arg(3, None)
            node.update_kwarg("kind", "full")
        erase_unused(gm)
        return PassResult(gm, len(masked))

    def ensures(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        for node in calls(gm, ops.ATTENTION):
            if node.kwargs["kind"] not in ops.ATTENTION_KINDS:
                raise InvariantError(f"{node.name} is still of kind {node.kwargs['kind']}")


def _prove_causal(gm: fx.GraphModule, attention: fx.Node, mask: fx.Node, ctx: PassContext) -> None:
    """Raise unless the mask reads no data and is causal at every proof length (a static graph has only its own)."""
    needed = _ancestors(mask)
    checks = [_input_check(node, attention, needed, ctx) for node in needed if node.op == "placeholder"]
    length = num_tokens(gm, ctx.seeds)
    proven = _is_causal if attention.kwargs["kind"] == "masked" else _is_all_ones
    for tokens in (length,) if isinstance(length, int) else PROOF_LENGTHS:
        if not proven(_evaluate(needed, mask, tokens, ctx), tokens):
            raise refuse(attention, f"its mask is not the causal one at {tokens} tokens", KNOB)
    ctx.decisions.add("masks", f"{attention.name}: mask {mask.name} proven causal")
    ctx.decisions.call_checks.extend(c for c in checks if c is not None and c not in ctx.decisions.call_checks)


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
    if not isinstance(node.meta["val"], Tensor) or all(reads_sizes_only(u) for u in node.users if u in needed):
        return None
    if node.name in ctx.position_inputs:
        return CallCheck(node.name, "consecutive", "the attention mask was proven causal for consecutive positions")
    is_flags = not node.meta["val"].is_floating_point() and node.name not in ctx.seeds
    if is_flags and node.name in ctx.user_inputs and node.meta["val"].dim() == 2:
        return CallCheck(node.name, "all_ones", "a padding mask that hides tokens is not supported")
    raise refuse(attention, f"its mask depends on the values of input {node.name}", KNOB)


def _evaluate(needed: list[fx.Node], mask: fx.Node, tokens: int, ctx: PassContext) -> Tensor:
    """Compute the mask for a number of tokens: consecutive positions, padding flags all one.

    Every symbol stands for T: what a mask is made of are the lengths of the prompt and of its companions.
    """

    def size_of(size: int | torch.SymInt) -> int:
        expression = size_expression(size)
        return int(expression.subs({symbol: tokens for symbol in expression.free_symbols}))

    def example(node: fx.Node) -> object:
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            return size_of(value)
        shape = [size_of(size) for size in value.shape]
        if node.name in ctx.position_inputs:
            return torch.arange(tokens, dtype=value.dtype, device=value.device).expand(shape)
        return torch.ones(shape, dtype=value.dtype, device=value.device)

    values: dict[fx.Node, object] = {}
    for node in needed:
        if node.op == "placeholder":
            values[node] = example(node)
        elif node.op == "get_attr":
            values[node] = getattr(node.graph.owning_module, str(node.target))
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    result = values[mask]
    assert isinstance(result, Tensor)
    return result


def _is_all_ones(mask: Tensor, _tokens: int) -> bool:
    """Return whether padding flags that reached the attention hide nothing when the caller's are all one."""
    return bool((mask == 1).all())


def _is_causal(mask: Tensor, tokens: int) -> bool:
    """Return whether a boolean or additive mask lets row i see exactly the keys 0..i."""
    allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).tril()
    if mask.shape[-2:] != allowed.shape:
        return False
    if mask.dtype == torch.bool:
        return bool((mask == allowed).all())
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return bool(((mask == 0) == allowed).all() and (hidden == ~allowed).all())

"""Reading a model into a `Trace`: one functional ATen graph, where its inputs come from, which dims count tokens.

Two ways in. `trace_module` traces a module that is ours to call, in one go, for every length. `trace_dynamo_graph`
takes the graph that torch.compile hands to a backend. Both replace attention calls while they are still single
calls, and both end in the same `Trace`, which is never edited: whoever lowers it takes a deep copy.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from pcp_compiler import ops, torch_private
from pcp_compiler.errors import ConfigError, UnsupportedGraphError

aten = torch.ops.aten
_TORCH_FOLDER = str(Path(torch.__file__).parent)
_OUR_FOLDER = str(Path(__file__).parent)
InputKind = Literal["size", "weight", "user"]
_READS_SIZES_ONLY = (
    aten.sym_size.int, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.empty_like.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty.default,
)  # fmt: skip
_PASSES_IDS_ON = (
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten._to_copy.default,
    aten.clone.default, aten.detach.default, aten.slice.Tensor, aten.clamp.default, aten.clamp_min.default,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TraceInput:
    """One placeholder: its name in the graph, the user's name for it, and what it is."""

    name: str
    source: str
    kind: InputKind


@dataclass(frozen=True, slots=True)
class Trace:
    """A functional ATen graph of a whole model and what the passes need to know about it."""

    graph_module: fx.GraphModule
    inputs: tuple[TraceInput, ...]
    seeds: Mapping[str, int]
    """Placeholders with a token dim, and that dim counted from the front."""

    def copy_graph(self) -> fx.GraphModule:
        """Return a graph that a pass may edit."""
        return copy_graph(self.graph_module)

    @property
    def num_tokens(self) -> int | torch.SymInt:
        """T: a number in a static graph, a symbol in a dynamic one."""
        return num_tokens(self.graph_module, self.seeds)

    @property
    def is_single_token(self) -> bool:
        """Whether the graph serves one token only, so that there is nothing to shard."""
        return torch_private.is_at_most_one(self.num_tokens)


@dataclass(frozen=True, slots=True)
class ModuleTrace:
    """A `Trace` made by `trace_module`, with what is needed to call it like the module."""

    trace: Trace
    weights: tuple[Tensor, ...]
    bind: Callable[[tuple[Any, ...], dict[str, Any]], list[Tensor]]
    out_spec: pytree.TreeSpec
    out_tensors: tuple[int, ...]
    out_constants: tuple[object, ...] = field(repr=False)

    def flat_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[object]:
        """Return the program's inputs for one call: weights as they are now, then the caller's tensors."""
        return [*self.weights, *self.bind(args, kwargs)]

    def rebuild(self, flat: Sequence[object]) -> Any:
        """Return the program's flat results in the structure that the module returns."""
        leaves = list(self.out_constants)
        for position, value in zip(self.out_tensors, flat, strict=True):
            leaves[position] = value
        return pytree.tree_unflatten(leaves, self.out_spec)


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a graph with nodes and notes of its own; tensors (constants, node values) are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def num_tokens(gm: fx.GraphModule, seeds: Mapping[str, int]) -> int | torch.SymInt:
    """Return T of a graph: the size of its first seed that a pass left among the inputs."""
    inputs = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
    name = next(name for name in seeds if name in inputs)
    size: int | torch.SymInt = inputs[name].meta["val"].shape[seeds[name]]
    return size


def source_line(node: fx.Node) -> str:
    """Return the user's file, line and code behind a node, or behind the next node that has them."""
    todo, seen = [node], {node}
    while todo:
        current = todo.pop(0)
        frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s+(.+)', current.meta.get("stack_trace") or "")
        own = [frame for frame in frames if not frame[0].startswith((_TORCH_FOLDER, _OUR_FOLDER))] or frames
        if own:
            path, line, function, code = own[-1]
            return f"{path}:{line} in {function}: {code.strip()}"
        for user in current.users:
            if user not in seen:
                seen.add(user)
                todo.append(user)
    return "no source line known"


# ---------------------------------------------------------------------------------------------------------------------
# Attention while it is still one call


class _AttentionMode(TorchFunctionMode):
    """Replaces SDPA by `pcp::attention` while a module is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.num_layers = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self.num_layers += 1
            return sdpa_as_pcp(self.num_layers - 1, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def sdpa_as_pcp(layer: int, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
                enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """Return what SDPA returns, computed by `pcp::attention`; arguments as SDPA's."""
    if dropout_p:
        raise UnsupportedGraphError(
            f"attention of layer {layer}: dropout_p is {dropout_p}; allowed: 0.0; call model.eval() before compiling"
        )
    if query.dim() < 3 or query.dim() > 4:
        raise UnsupportedGraphError(
            f"attention of layer {layer}: query has {query.dim()} dims; allowed: [batch, heads, tokens, head_dim] or "
            "[heads, tokens, head_dim]"
        )
    if query.dim() == 3:
        return sdpa_as_pcp(layer, query[None], key[None], value[None], attn_mask, 0.0, is_causal, scale, enable_gqa)[0]
    is_one_row = torch_private.is_at_most_one(query.shape[2]) and torch_private.is_at_most_one(key.shape[2])
    kind = "masked" if attn_mask is not None else "full" if is_causal or is_one_row else "bidirectional"
    out = ops.ATTENTION(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask, None, layer=layer, kind=kind,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
    )  # fmt: skip
    return out.transpose(1, 2)


def replace_sdpa(gm: fx.GraphModule) -> None:
    """Replace the SDPA calls of a Dynamo graph by `pcp::attention`, in place."""
    calls = [node for node in gm.graph.nodes if node.target is F.scaled_dot_product_attention]
    for layer, node in enumerate(calls):
        node.target = sdpa_as_pcp
        node.args = (layer, *node.args)
    gm.recompile()


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile's graph


def dynamo_inputs(gm: fx.GraphModule) -> tuple[TraceInput, ...]:
    """Return what each placeholder of a Dynamo graph is; read it before AOT runs, which empties the graph."""
    taken: set[str] = set()
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        source = torch_private.source_name(node)
        example = torch_private.source_example(node)
        is_module_state = bool(re.search(r"\._?(modules|parameters|buffers)\b|L\['self'\]|__self__", source))
        kind: InputKind = "user"
        if not isinstance(node.meta.get("example_value"), Tensor):
            kind = "size"
        elif is_module_state or isinstance(example, nn.Parameter):
            kind = "weight"
        found.append(TraceInput(_unique(_readable_name(source), taken), source, kind))
    return tuple(found)


def trace_dynamo_graph(aten_gm: fx.GraphModule, inputs: tuple[TraceInput, ...], tokens: Mapping[str, int]) -> Trace:
    """Return the `Trace` of what AOT made of a Dynamo graph, whose placeholders it kept in order.

    Args:
        inputs: from `dynamo_inputs`. tokens: option `tokens`, argument name to token dim.
    Raises:
        UnsupportedGraphError: no token input found, or two of different length.
    """
    gm = copy_graph(aten_gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs):
        raise UnsupportedGraphError(
            f"the graph has {len(placeholders)} inputs after functionalisation and had {len(inputs)} before: the model "
            "changes one of its inputs or buffers in place; return the new value instead"
        )
    _rename(gm, [entry.name for entry in inputs])
    return Trace(gm, inputs, find_seeds(gm, inputs, tokens))


def _rename(gm: fx.GraphModule, names: Sequence[str]) -> None:
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), names, strict=True):
        node.target = name
        node._rename(name)
    gm.recompile()


def _readable_name(source: str) -> str:
    """Turn "L['args'][0]._modules['layers']._modules['0']._parameters['w']" into "layers_0_w"."""
    parts = re.findall(r"\['?([A-Za-z0-9_]+)'?\]|\.([A-Za-z_][A-Za-z0-9_]*)", source)
    words = [a or b for a, b in parts]
    hidden = {"_modules", "_parameters", "_buffers", "self", "kwargs", "__self__"}
    if "_modules" in words:
        words = words[words.index("_modules") :]
    words = [word for word in words if word not in hidden] or [source]
    name = re.sub(r"\W+", "_", "_".join(words)).strip("_")
    return name if name and not name[0].isdigit() else f"arg_{name}"


def _unique(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    taken.add(candidate)
    return candidate


# ---------------------------------------------------------------------------------------------------------------------
# A module of ours


def trace_module(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *,
    tokens: Mapping[str, int] | None = None, other_sizes: Mapping[str, int] | None = None,
) -> ModuleTrace:  # fmt: skip
    """Trace a module once for every number of tokens, without running it.

    Args:
        args, kwargs: an example call. Token inputs are symbols in the graph: those named in `tokens`, otherwise the
            last dim of every integer tensor.
        tokens: argument name to token dim, for inputs that are not integer ids.
        other_sizes: argument name to a dim that varies between calls and does not count tokens.
    Returns:
        The trace; its inputs are the parameters and buffers, then the tensors of the call.
    Raises:
        UnsupportedGraphError: training mode, or no token input.
    Note: there are no Python guards. Trace again when a hyper-parameter of the module changes.
    """
    if module.training:
        raise UnsupportedGraphError(f"{type(module).__name__} is in training mode; call model.eval() before tracing")
    wanted = dict(tokens or {})
    names, leaves, rebuild_call = _named_leaves(module, args, kwargs or {})
    varying = wanted | dict(other_sizes or {})
    dims = [_token_dim(name, leaf, varying) for name, leaf in zip(names, leaves, strict=True)]
    weights = _unique_weights(module)
    mode = torch_private.fake_mode_with_symbols()
    fake_weights = [torch_private.fake_input(mode, w, frozenset(), n) for n, w in weights.items()]
    fake_leaves = [
        torch_private.fake_input(mode, leaf, frozenset() if dim is None else frozenset({dim}), name)
        for name, leaf, dim in zip(names, leaves, dims, strict=True)
    ]
    results: dict[str, Any] = {}

    def forward(*flat: Tensor) -> list[Tensor]:
        state = dict(zip(weights, flat[: len(weights)], strict=True))
        call_args, call_kwargs = rebuild_call(flat[len(weights) :])
        out = torch.func.functional_call(module, state, call_args, call_kwargs)
        out_leaves, results["spec"] = pytree.tree_flatten(out)
        results["tensors"] = tuple(i for i, leaf in enumerate(out_leaves) if isinstance(leaf, Tensor))
        results["constants"] = tuple(None if isinstance(leaf, Tensor) else _plain(leaf) for leaf in out_leaves)
        return [out_leaves[i] for i in results["tensors"]]

    with torch.no_grad(), _AttentionMode(), mode:
        gm = make_fx(forward, record_stack_traces=True)(*fake_weights, *fake_leaves)
    inputs = tuple(
        [TraceInput(name, source, "weight") for source, name in _weight_names(weights)]
        + [TraceInput(name, name, "user") for name in names]
    )
    _rename(gm, [entry.name for entry in inputs])
    seeds = find_seeds(gm, inputs, wanted)

    def bind(call_args: tuple[Any, ...], call_kwargs: dict[str, Any]) -> list[Tensor]:
        return _named_leaves(module, call_args, call_kwargs)[1]

    return ModuleTrace(
        Trace(gm, inputs, seeds), tuple(weights.values()), bind, results["spec"], results["tensors"],
        results["constants"],
    )  # fmt: skip


def _plain(leaf: object) -> object:
    """Return a result that holds no tensor; objects that may hide some (a KV cache) are refused."""
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    raise UnsupportedGraphError(
        f"the module returns a {type(leaf).__name__}, whose tensors cannot be traced; allowed: tensors, numbers, strings "
        "and containers of them; for transformers models pass use_cache=False"
    )


def _named_leaves(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[str], list[Tensor], Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Return name and value of each tensor of a call, and a function that puts other tensors in their place."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    paths, spec = pytree.tree_flatten_with_path((bound.args, bound.kwargs))
    positional = list(bound.arguments)
    names, tensors, positions = [], [], []
    taken: set[str] = set()
    for position, (path, leaf) in enumerate(paths):
        if isinstance(leaf, Tensor):
            words = re.findall(r"\w+", pytree.keystr(path[1:]))
            if path[0].idx == 0 and words and int(words[0]) < len(positional):  # type: ignore[attr-defined]
                words[0] = positional[int(words[0])]
            names.append(_unique("_".join(words), taken))
            tensors.append(leaf)
            positions.append(position)
    leaves = [leaf for _, leaf in paths]

    def rebuild(values: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = list(leaves)
        for position, value in zip(positions, values, strict=True):
            filled[position] = value
        return pytree.tree_unflatten(filled, spec)

    return names, tensors, rebuild


def _token_dim(name: str, leaf: Tensor, wanted: Mapping[str, int]) -> int | None:
    if name in wanted:
        return _checked_dim(name, wanted[name], leaf.dim())
    is_ids = not wanted and not leaf.is_floating_point() and leaf.dtype != torch.bool and leaf.dim() > 0
    return leaf.dim() - 1 if is_ids else None


def _checked_dim(name: str, dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise ConfigError(f"tokens.{name}: got {dim}; the input has {ndim} dims, allowed: {-ndim} to {ndim - 1}")
    return dim % ndim


def _unique_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, tied ones once."""
    state: dict[str, Tensor] = dict(module.named_parameters())
    state.update(module.named_buffers())
    return state


def _weight_names(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    for source in weights:
        yield source, source.replace(".", "_")


# ---------------------------------------------------------------------------------------------------------------------
# Token inputs


def find_seeds(gm: fx.GraphModule, inputs: Sequence[TraceInput], tokens: Mapping[str, int]) -> dict[str, int]:
    """Return the token inputs of a graph and their token dims.

    Without option `tokens`: integer inputs that an embedding looks up, and `position_ids`.

    Raises:
        ConfigError: `tokens` names no input. UnsupportedGraphError: no token input, or two of different length.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    user = [(node, entry) for node, entry in zip(placeholders, inputs, strict=True) if entry.kind == "user"]
    listing = ", ".join(f"{e.name} {tuple(n.meta['val'].shape)} {n.meta['val'].dtype}" for n, e in user) or "none"
    seeds: dict[str, int] = {}
    if tokens:
        known = {entry.name: node for node, entry in user}
        for name, dim in tokens.items():
            if name not in known:
                raise ConfigError(f"tokens.{name}: no tensor input of that name; allowed: one of {listing}")
            seeds[name] = _checked_dim(name, dim, known[name].meta["val"].dim())
    else:
        for node, entry in user:
            value = node.meta["val"]
            if value.dim() and (_feeds_embedding(node) or (is_positions(entry) and not value.is_floating_point())):
                seeds[entry.name] = value.dim() - 1
    if not seeds:
        raise UnsupportedGraphError(
            f"no token input found: no integer input feeds an embedding; inputs are: {listing}; "
            "name the input and its token dim in option tokens, for example {'tokens': {'inputs_embeds': 1}}"
        )
    _check_same_length({name: node.meta["val"].shape[seeds[name]] for node, e in user if (name := e.name) in seeds})
    return seeds


def is_positions(entry: TraceInput) -> bool:
    """Return whether an input is the position ids that a caller gave."""
    return "position_ids" in entry.source


def _check_same_length(lengths: Mapping[str, int | torch.SymInt]) -> None:
    first = next(iter(lengths.values()))
    for size in lengths.values():
        if not torch_private.is_surely_equal(size, first):
            table = ", ".join(f"{name} has {value}" for name, value in lengths.items())
            raise UnsupportedGraphError(
                f"token inputs have different lengths: {table}; say which ones count tokens in option tokens, "
                "for example {'tokens': {'input_ids': 1}}"
            )


def _feeds_embedding(node: fx.Node) -> bool:
    value = node.meta["val"]
    if value.is_floating_point() or value.dtype == torch.bool:
        return False
    for user in node.users:
        if user.target is aten.embedding.default and user.args[1] is node:
            return True
        if user.target in _PASSES_IDS_ON and _feeds_embedding(user):
            return True
    return False


def reads_sizes_only(user: fx.Node) -> bool:
    """Return whether a node looks at shape, dtype and device of its tensor input, never at its values."""
    return user.target in _READS_SIZES_ONLY

"""Reading a model into a `Trace`: one functional ATen graph, where its inputs come from, which dims count tokens.

Two ways in. `trace_module` traces a module that is ours to call, in one go, for every length. `trace_dynamo_graph`
takes the graph that torch.compile hands to a backend. Both replace attention calls while they are still single
calls, and both end in the same `Trace`, which is never edited: whoever lowers it takes a deep copy.
"""

from __future__ import annotations

import gc
import inspect
import operator
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from pcp_compiler import model_check, ops, torch_private
from pcp_compiler.errors import ConfigError, UnsupportedGraphError

aten = torch.ops.aten
_MUTATION_KNOB = "return the new value instead"
_TORCH_FOLDER = str(Path(torch.__file__).parent)
_OUR_FOLDER = str(Path(__file__).parent)
InputKind = Literal["size", "weight", "user"]
_READS_SIZES_ONLY = (
    aten.sym_size.int, aten.sym_numel.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
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
    """Return T of a graph: the size of its first seed."""
    name, dim = next(iter(seeds.items()))
    node = next(node for node in gm.graph.find_nodes(op="placeholder") if node.name == name)
    size: int | torch.SymInt = node.meta["val"].shape[dim]
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


class _SingleCallMode(TorchFunctionMode):
    """Replaces SDPA by `pcp::attention` while a module is traced, and grouped_mm by ours, which traces in any dtype.

    Notes the user's line for each call, at a tenth of what make_fx's own stack traces cost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_layers = 0
        self._lines: dict[tuple[CodeType, int], str] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        fx.traceback.set_stack_trace([self._user_line()])
        if func is F.scaled_dot_product_attention:
            self.num_layers += 1
            return sdpa_as_pcp(self.num_layers - 1, *args, **(kwargs or {}))
        if torch_private.is_grouped_mm(func):
            return grouped_mm_as_pcp(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _user_line(self) -> str:
        """Return file, line, function and code of the innermost frame that is neither torch's nor ours."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith((_TORCH_FOLDER, _OUR_FOLDER)):
            frame = frame.f_back
        if frame is None:
            return ""
        key = (frame.f_code, frame.f_lineno)
        if key not in self._lines:
            summary = traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            self._lines[key] = "".join(traceback.format_list([summary])).strip()
        return self._lines[key]


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
    out: Tensor = ops.ATTENTION(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask, None, layer=layer, kind=kind,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
    )  # fmt: skip
    return out.transpose(1, 2)


def grouped_mm_as_pcp(mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, bias: Tensor | None = None,
                      out_dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    """Return what grouped_mm returns, computed by `pcp::grouped_mm`; arguments as torch.nn.functional.grouped_mm's."""
    if mat_a.dim() != 2 or mat_b.dim() != 3 or offs is None or bias is not None or out_dtype is not None:
        return F.grouped_mm(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)
    out: Tensor = ops.GROUPED_MM(mat_a, mat_b, offs)
    return out


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
        UnsupportedGraphError: no token input found, two of different length, or an input or buffer is written in place.
        CallError: no tokens.
    """
    _refuse_mutated_inputs(aten_gm, inputs)
    gm = copy_graph(aten_gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs):
        raise UnsupportedGraphError(
            f"the graph has {len(placeholders)} inputs after functionalisation and had {len(inputs)} before: the model "
            "changes one of its inputs or buffers in place; return the new value instead"
        )
    _rename(gm, [entry.name for entry in inputs])
    return Trace(gm, inputs, find_seeds(gm, inputs, tokens))


def _refuse_mutated_inputs(aten_gm: fx.GraphModule, inputs: Sequence[TraceInput]) -> None:
    """Raise UnsupportedGraphError when a model writes an input or buffer, whose new value AOT made a result."""
    results = next(iter(aten_gm.graph.find_nodes(op="output"))).args[0]
    for position, result in zip(torch_private.mutated_inputs(), results, strict=False):
        raise _refuse_write(inputs[position].name, result)


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
    tokens: Mapping[str, int] | None = None,
) -> ModuleTrace:  # fmt: skip
    """Trace a module once for every number of tokens, without running it.

    Args:
        args, kwargs: an example call. Token inputs are symbols in the graph: those named in `tokens`, otherwise the
            last dim of every integer tensor.
        tokens: argument name to token dim, for inputs that are not integer ids.
    Returns:
        The trace; its inputs are the parameters and buffers, then the tensors of the call.
    Raises:
        UnsupportedGraphError: training mode, no token input, a wrapper or tensor that `model_check` refuses, or a model
            that fixes the number of tokens or asks for the value of a tensor. CallError: no tokens.
    Note: there are no Python guards. Trace again when a hyper-parameter of the module changes.
    """
    if module.training:
        raise UnsupportedGraphError(f"{type(module).__name__} is in training mode; call model.eval() before tracing")
    model_check.check_module(module)
    wanted = dict(tokens or {})
    names, leaves, rebuild_call = _named_leaves(module, args, kwargs or {})
    dims = [_token_dim(name, leaf, wanted) for name, leaf in zip(names, leaves, strict=True)]
    weights = dict(model_check.named_weights(module))
    for name, weight in weights.items():
        model_check.check_weight(name, weight)
    mode = torch_private.fake_mode_with_symbols()
    fake_weights = [torch_private.fake_input(mode, w, frozenset(), n) for n, w in weights.items()]
    fake_leaves = [
        torch_private.fake_input(mode, leaf, frozenset() if dim is None else frozenset({dim}), name)
        for name, leaf, dim in zip(names, _distinct(leaves), dims, strict=True)
    ]
    results: dict[str, Any] = {}

    def forward(*flat: Tensor) -> list[Tensor]:
        state = dict(zip(weights, flat[: len(weights)], strict=True))
        call_args, call_kwargs = rebuild_call(flat[len(weights) :])
        out = torch.func.functional_call(module, state, call_args, call_kwargs)
        _check_not_assigned(state, dict(zip(weights, flat, strict=False)))
        out_leaves, results["spec"] = pytree.tree_flatten(out)
        results["tensors"] = tuple(i for i, leaf in enumerate(out_leaves) if isinstance(leaf, Tensor))
        results["constants"] = tuple(None if isinstance(leaf, Tensor) else _plain(leaf) for leaf in out_leaves)
        return [out_leaves[i] for i in results["tensors"]]

    symbolic = torch_private.symbolic_composite_ops()
    with torch.no_grad(), paused_gc(), fx.traceback.preserve_node_meta(), mode, symbolic:
        with _kept_attributes(module), _explained(module, dict(zip(names, leaves, strict=True))), _SingleCallMode():
            gm = make_fx(forward)(*fake_weights, *fake_leaves)
        gm = _without_mutations(gm, [*fake_weights, *fake_leaves], [*weights, *names])
    for name, leaf, dim in zip(names, fake_leaves, dims, strict=True):
        if dim is not None and torch_private.is_number(leaf.shape[dim]):
            raise UnsupportedGraphError(
                f"input {name}: {type(module).__name__} fixes the number of tokens to {leaf.shape[dim]} while it is "
                "traced, as len(tensor), int(size) and complex tensors do; use tensor.shape, or compile each length on "
                "its own with torch.compile(model, backend='pcp_spec', dynamic=False)"
            )
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


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, copies for those that occur again: one tensor given twice would be one input of the trace."""
    return [t.clone() if any(t is other for other in tensors[:n]) else t for n, t in enumerate(tensors)]


@contextmanager
def _explained(module: nn.Module, inputs: dict[str, Tensor]) -> Iterator[None]:
    """Turn errors in which torch names neither tensor nor line into ours; those of the module itself pass."""
    try:
        yield
    except Exception as fault:
        at = f"\n  at {_line_of(fault)}\n  "
        if torch_private.value_was_read(fault):
            raise UnsupportedGraphError(
                f"{type(module).__name__} asks for the value of a tensor, which is not known when it is traced{at}"
                "choose between values with torch.where, and sizes by the sizes of inputs"
            ) from None
        if torch_private.devices_differ(fault):
            table = model_check.describe_devices(module, inputs)
            raise UnsupportedGraphError(
                f"tensors on several devices meet in one op ({table}){at}move model and inputs to one device"
            ) from None
        raise


def _line_of(fault: BaseException) -> str:
    """Return file, line, function and code of the innermost frame of an error that is neither torch's nor ours."""
    frames = traceback.extract_tb(fault.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((_TORCH_FOLDER, _OUR_FOLDER))]
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}" if own else "no source line known"


@contextmanager
def paused_gc() -> Iterator[None]:
    """Stop looking for unreachable objects: tracing keeps nearly all it makes, and looking takes a tenth of its time.

    Never switches the collector off for good, also when another thread is in here too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_not_assigned(state: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raise when a forward put another tensor in the place of a parameter or buffer."""
    for name, tensor in given.items():
        if state[name] is not tensor:
            raise UnsupportedGraphError(
                f"{name}: the module assigns a tensor to this buffer in forward, which would be lost; {_MUTATION_KNOB}"
            )


@contextmanager
def _kept_attributes(module: nn.Module) -> Iterator[None]:
    """Undo and refuse tensors that a forward assigns to attributes: the model would keep those of the trace."""
    before = {name: (part, dict(vars(part))) for name, part in module.named_modules()}
    assigned: list[str] = []
    try:
        yield
    finally:
        for name, (part, attributes) in before.items():
            changed = [key for key, value in vars(part).items() if isinstance(value, Tensor)]
            changed = [key for key in changed if attributes.get(key) is not vars(part)[key]]
            assigned += [f"{name}.{key}".strip(".") for key in changed]
            for key in changed:
                del vars(part)[key]
            if changed:
                vars(part).update(attributes)
    if assigned:
        raise UnsupportedGraphError(
            f"{assigned[0]}: the module assigns a tensor to this attribute in forward, which would be lost; "
            f"{_MUTATION_KNOB}"
        )


def _without_mutations(gm: fx.GraphModule, inputs: Sequence[Tensor], names: Sequence[str]) -> fx.GraphModule:
    """Return a graph that writes no tensor in place.

    A second trace, of graphs that need it only: transformers asks fake tensors whether they are being traced, and those
    of functionalisation do not answer.

    Args:
        inputs: fake tensors for the placeholders. names: what the user calls them.
    Raises:
        UnsupportedGraphError: an input, parameter, buffer or constant is written.
    """
    writes = _written_in_place(gm)
    if not writes:
        return gm
    for node in writes:
        if _storage_owner(node).op != "call_function":
            raise _refuse_write(_owner_name(node, names), node)
    run = torch.func.functionalize(lambda *flat: fx.Interpreter(gm).run(*flat), remove="mutations")
    functional = make_fx(run)(*inputs)
    for node in _written_in_place(functional):  # written through an alias that was not seen above
        raise _refuse_write(_owner_name(node, names), node)
    return functional


def _refuse_write(name: object, node: fx.Node) -> UnsupportedGraphError:
    at = source_line(node)
    return UnsupportedGraphError(f"{name}: the module writes into this tensor in place\n  at {at}\n  {_MUTATION_KNOB}")


def _owner_name(node: fx.Node, names: Sequence[str]) -> object:
    """Return what the user calls the tensor that a call writes; `names` are those of the placeholders."""
    owner, places = _storage_owner(node), node.graph.find_nodes(op="placeholder")
    return names[places.index(owner)] if owner in places else owner.target


def _written_in_place(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the calls that write one of their arguments."""
    schemas = ((node, getattr(node.target, "_schema", None)) for node in gm.graph.nodes)
    return [node for node, schema in schemas if schema is not None and schema.is_mutable]


def _storage_owner(node: fx.Node) -> fx.Node:
    """Return the node that made the storage which a call writes: its aliased argument, back through views."""
    source: object = node
    while isinstance(source, fx.Node):
        node, source = source, _aliased_argument(source)
    return node


def _aliased_argument(node: fx.Node) -> object:
    """Return the argument of a call that its result shares storage with, None when there is none."""
    if node.target is operator.getitem:
        return node.args[0]
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None:
            return node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
    return None


def _plain(leaf: object) -> object:
    """Return a result that holds no tensor; objects that may hide some (a KV cache) are refused."""
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    raise UnsupportedGraphError(
        f"the module returns a {type(leaf).__name__}, whose tensors cannot be traced; allowed: tensors, numbers, "
        "strings and containers of them; for transformers models pass use_cache=False"
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
    model_check.check_input(name, leaf)
    is_ids = not wanted and not leaf.is_floating_point() and leaf.dtype != torch.bool and leaf.dim() > 0
    if name not in wanted and not is_ids:
        return None
    dim = _checked_dim(name, wanted.get(name, -1), leaf.dim())
    model_check.check_not_empty(name, leaf.shape, dim)
    return dim


def _checked_dim(name: str, dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise ConfigError(f"tokens.{name}: got {dim}; the input has {ndim} dims, allowed: {-ndim} to {ndim - 1}")
    return dim % ndim


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
        CallError: a token input is empty.
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
    shapes = {entry.name: node.meta["val"].shape for node, entry in user if entry.name in seeds}
    for name, shape in shapes.items():
        model_check.check_not_empty(name, shape, seeds[name])
    _check_same_length({name: shape[seeds[name]] for name, shape in shapes.items()})
    return seeds


def is_positions(entry: TraceInput) -> bool:
    """Return whether an input is the position ids that a caller gave."""
    return "position_ids" in entry.source


def _check_same_length(lengths: Mapping[str, int | torch.SymInt]) -> None:
    first = next(iter(lengths.values()))
    for size in lengths.values():
        if not torch_private.is_surely_equal(size, first):
            table = ", ".join(f"{name} has {torch_private.size_now(size)}" for name, size in lengths.items())
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

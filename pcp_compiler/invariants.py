"""What must hold of every graph between two passes; each check has the short name that messages and tests use."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from pcp_compiler import kv_ops, ops
from pcp_compiler.errors import InvariantError
from pcp_compiler.graph_text import SymbolNames, find_segments, format_graph, format_value
from pcp_compiler.pass_api import calls, unused_nodes

Check = Callable[[fx.GraphModule], str | None]


def _well_formed(gm: fx.GraphModule) -> str | None:
    try:
        gm.graph.lint()
    except RuntimeError as fault:
        return str(fault)
    return None


def _op_allowed(gm: fx.GraphModule) -> str | None:
    segments = find_segments(gm)
    for node in gm.graph.nodes:
        if node.op == "call_method" or (node.op == "call_module" and node.target not in segments):
            return f"{node.name} is a {node.op}"
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return f"{node.name} changes a tensor in place ({node.target})"
    return None


def _has_value(gm: fx.GraphModule) -> str | None:
    missing = [node.name for node in gm.graph.nodes if node.op not in ("output", "get_attr") and "val" not in node.meta]
    return f"{missing[0]} has no value" if missing else None


def _no_dead_code(gm: fx.GraphModule) -> str | None:
    unused = unused_nodes(gm)
    return f"{unused[0].name} is unused" if unused else None


def _collective_paired(gm: fx.GraphModule) -> str | None:
    ends = (ops.GATHER_WAIT, kv_ops.STORE_GATHERED_KV)
    for start in calls(gm, ops.GATHER_START):
        num_ends = sum(user.target in ends for user in start.users)
        if num_ends != 1 or len(start.users) != 1:
            return f"{start.name} has {num_ends} waits or writes and {len(start.users)} users"
    for end in calls(gm, *ends):
        source = end.args[0]
        if not isinstance(source, fx.Node) or source.target is not ops.GATHER_START:
            return f"{end.name} takes no gather"
        if end.target is ops.GATHER_WAIT and source.args[0] != end.args[1]:
            return f"{end.name} does not wait for a gather of its own tensors"
    return None


def _index_is_input(gm: fx.GraphModule) -> str | None:
    """Index tensors change with every batch: as constants they would freeze one partition."""
    position = {
        ops.SHARD: 1,
        ops.DROP_PADS: 1,
        ops.UNSHARD: 1,
        ops.GATHER_WAIT: 2,
        ops.RESTORE_ROWS: 1,
        ops.ATTENTION: 4,
        kv_ops.STORE_GATHERED_KV: 1,
    }
    segments = find_segments(gm)
    for call, graph_module in [(None, gm), *_segment_calls(gm)]:
        for node in calls(graph_module, *position):
            index = _origin(node.args[position[node.target]], call, segments)  # type: ignore[index]
            if index is None and node.target is ops.ATTENTION:
                continue
            if not isinstance(index, fx.Node) or "index_input" not in index.meta:
                return f"{node.name} reads its rows from {index}"
    return None


def _segment_calls(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.GraphModule]]:
    segments = find_segments(gm)
    return ((call, segments[str(call.target)]) for call in gm.graph.find_nodes(op="call_module"))


def _origin(value: object, call: fx.Node | None, segments: Mapping[str, fx.GraphModule]) -> object:
    """Follow first arguments up to an input or constant of the graph, into segments and out of them.

    Args:
        call: that of the segment which `value` is in; None: it is in the outer graph.
    """
    while isinstance(value, fx.Node) and value.op in ("call_function", "placeholder"):
        source = value.args[0] if value.args else None
        if value.op == "placeholder":
            if call is None:
                return value
            value, call = call.args[value.graph.find_nodes(op="placeholder").index(value)], None
        elif value.target is operator.getitem and isinstance(source, fx.Node) and source.op == "call_module":
            call, number = source, value.args[1]
            value = _results(segments[str(call.target)])[number]
        elif not value.args:
            return value
        else:
            value = source
    return value


def _results(segment: fx.GraphModule) -> Any:
    return segment.graph.output_node().args[0]


def _source_kept(gm: fx.GraphModule) -> str | None:
    for node in calls(gm, *ops.COLLECTIVES, ops.ATTENTION):
        if not node.meta.get("stack_trace") and any(n.meta.get("stack_trace") for n in node.all_input_nodes):
            return f"{node.name} lost its source line"
    return None


def _segment_fits(gm: fx.GraphModule) -> str | None:
    for call, segment in _segment_calls(gm):
        given = [_kind(_value_of(gm, source)) for source in call.args]  # type: ignore[arg-type]
        taken = [_kind(node.meta["val"]) for node in segment.graph.find_nodes(op="placeholder")]
        if given != taken:
            return f"{call.name} gives {given} to {call.target}, which takes {taken}"
        read = {user.args[1] if user.target is operator.getitem else user.name for user in call.users}
        if read != set(range(len(_results(segment)))):
            return f"{call.name} has {len(_results(segment))} results, of which {read} are read"
    return None


def _kind(value: object) -> tuple[object, ...]:
    return (value.dtype, value.ndim) if isinstance(value, Tensor) else (type(value),)


INVARIANTS: Mapping[str, Check] = {
    "well-formed": _well_formed,
    "op-allowed": _op_allowed,
    "has-value": _has_value,
    "segment-fits": _segment_fits,
    "no-dead-code": _no_dead_code,
    "collective-paired": _collective_paired,
    "index-is-input": _index_is_input,
    "source-kept": _source_kept,
}
_ACROSS_SEGMENTS = ("index-is-input", "segment-fits")
"""Invariants that are checked on the graph with all its segments; the others on each of these graphs alone."""


def check_invariants(gm: fx.GraphModule, after: str) -> None:
    """Raise InvariantError with the graph when one does not hold after a pass."""
    parts = [gm, *find_segments(gm).values()]
    for name, check in INVARIANTS.items():
        faults = (check(part) for part in (parts[:1] if name in _ACROSS_SEGMENTS else parts))
        fault = next(filter(None, faults), None)
        if fault is not None:
            raise InvariantError(f"{name} does not hold after {after}: {fault}\n{format_graph(gm)}")


def check_values(gm: fx.GraphModule) -> None:
    """Raise InvariantError when a node's noted value differs from what its op computes (`value-matches`).

    Runs every op on fake tensors, which costs about a millisecond each: tests call it, the pipeline does not.
    """
    for call, segment in _segment_calls(gm):
        inputs = [node.meta["val"] for node in segment.graph.find_nodes(op="placeholder")]
        inside = _describe_call(segment, [*inputs, *(node.meta["val"] for node in _results(segment))])
        outside = _describe_call(segment, [*(_value_of(gm, node) for node in call.all_input_nodes), *call.meta["val"]])
        if inside != outside:
            raise InvariantError(f"value-matches does not hold: {call.name} is {outside}, {call.target} is {inside}")
    for segment in find_segments(gm).values():
        check_values(segment)
    mode = next((m for node in gm.graph.nodes if (m := getattr(node.meta.get("val"), "fake_mode", None))), None)
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), partial(_value_of, gm))
        with _quiet(mode):
            noted, computed = _describe(node.meta["val"]), _describe(node.target(*args, **kwargs))
        if noted != computed:
            raise InvariantError(f"value-matches does not hold: {node.name} is noted as {noted} and is {computed}")


@contextmanager
def _quiet(mode: FakeTensorMode | None) -> Iterator[None]:
    """Compute on fake tensors without keeping the symbols that an op makes up."""
    if mode is None:
        yield
        return
    with mode, mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env else nullcontext():
        yield


def _describe(value: object) -> str:
    """Return dtype and sizes of a value, of every part if it has several."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_describe(part) for part in value)}]"
    return str(value)


def _describe_call(segment: fx.GraphModule, values: list[object]) -> str:
    """Return types and sizes of arguments and results, with symbols named in order of use."""
    names = SymbolNames(segment, {})
    return ", ".join(format_value(value, names) for value in values)


def _value_of(gm: fx.GraphModule, node: fx.Node) -> Any:
    return getattr(gm, str(node.target)) if node.op == "get_attr" else node.meta["val"]

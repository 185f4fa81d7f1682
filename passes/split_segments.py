"""Cut the graph into segments, which can be captured and compiled one by one; what lies between them stays as it is.

Before:
    %embedding : f32[1, W, 16] = aten.embedding.default(%table, %shard_default)
    %gather_start_default : f32[W, 32] = pcp.gather_start.default([%transpose_1, %transpose_2], [2, 2])
    %attention : f32[1, W, 4, 4] = pcp.attention.default(%transpose_3, ..., layer=0, kind='full', scale=0.5)
    %relu : f32[1, 4, W, 4] = aten.relu.default(%transpose_6)
After:
    %call_0 : (f32[1, 4, W, 4], ...) = segment_0(%sym_size_int, %input_ids, %local_rows, %table)
    %transpose_1 : f32[1, 4, W, 4] = operator.getitem(%call_0, 1)
    %gather_start_default : f32[W, 32] = pcp.gather_start.default([%transpose_1, %transpose_2], [2, 2])
    %attention : f32[1, W, 4, 4] = pcp.attention.default(%transpose_3, ..., layer=0, kind='full', scale=0.5)
    %call_1 : (f32[1, 4, W, 4]) = segment_1(%attention)
    %relu : f32[1, 4, W, 4] = operator.getitem(%call_1, 0)

Why here: last; every other pass wants to see the whole graph. Only for phases that ask for it (`Phase.is_split`).
Leaves alone: the ops it cuts at; runs of views alone, which would be captures of nothing; arithmetic on sizes, and
    tensors of one value that take their size from a tensor outside of the run.

Cuts are attention, ops with an effect outside the graph (collectives, KV writes), a gather's wait, which has T rows
where its surroundings have W, and what `extra_ops` names. The order of calls does not change. Sizes enter a segment as
integers, and only those that no others make up: the rest is computed again inside, so that a layer is the same whether
or not it is the first to need one. Segments with the same calls, constants, types and sizes (up to the names of
symbols) are one child module, whatever weights they are called with; its node names are those of its first call.
"""

from __future__ import annotations

import difflib
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import sympy
import torch
from torch import Tensor, fx

from pcp_compiler import ops
from pcp_compiler.errors import ConfigError, InvariantError
from pcp_compiler.graph_text import find_segments, target_text
from pcp_compiler.pass_api import Pass, PassContext, PassResult, erase_unused
from pcp_compiler.torch_private import size_expression
from pcp_compiler.trace import reads_sizes_only

aten = torch.ops.aten
FIELD = "capture.splitting_ops"
_SCALARS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
_CUTS = (ops.ATTENTION, ops.GATHER_WAIT)
"""Ops to cut at beside those with an effect outside the graph."""


@dataclass(frozen=True)
class SplitSegments(Pass):
    """See the module."""

    name: ClassVar[str] = "split_segments"
    extra_ops: tuple[str, ...] = ()
    """More ops to cut at: "aten.mm.default", or "aten.mm" for all its overloads."""

    def requires(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        called = {node.target for node in gm.graph.nodes if node.op == "call_function"}
        for name in self.extra_ops:
            if called.isdisjoint(find_ops(name)):
                raise ConfigError(f"{FIELD}: {name} is not in the graph; {_nearest(name, called)}")

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        if find_segments(gm):
            return PassResult(gm, 0)
        extra = {op for name in self.extra_ops for op in find_ops(name)}
        runs = _find_runs(gm, partial(_is_cut, extra=extra))
        if not runs:
            return PassResult(gm, 0)
        splitter = _Splitter(gm, runs)
        gm.graph = splitter.run()
        erase_unused(gm)
        ctx.decisions.add("segments", splitter.summary())
        cuts = Counter(target_text(node.target) for node in _cuts(gm, extra))
        table = ", ".join(f"{op} x{count}" for op, count in cuts.items())
        ctx.decisions.add("segments", f"cut at {table or 'nothing'}")
        return PassResult(gm, len(runs))

    def ensures(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        extra = {op for name in self.extra_ops for op in find_ops(name)}
        for name, segment in find_segments(gm).items():
            for cut in _cuts(segment, extra):
                raise InvariantError(f"{cut.name} ({cut.target}) is inside {name}")


def find_ops(name: str) -> frozenset[object]:
    """Return the ops of a name as `capture.splitting_ops` has it: one, or all overloads.

    Raises:
        ConfigError: there is no such op.
    """
    namespace, *parts = name.split(".")
    found: object = getattr(torch.ops, namespace, None) if namespace and 1 <= len(parts) <= 2 else None
    for part in parts:
        found = getattr(found, part, None)
    if isinstance(found, torch._ops.OpOverload):
        return frozenset({found})
    if isinstance(found, torch._ops.OpOverloadPacket):
        return frozenset(getattr(found, overload) for overload in found.overloads())
    raise ConfigError(f"{FIELD}: got {name!r}, which is no op; allowed: names like aten.mm.default or mylib.my_op")


def _nearest(name: str, called: Iterable[object]) -> str:
    """Return what the graph calls that reads most like `name`."""
    names = sorted({target_text(target) for target in called if isinstance(target, torch._ops.OpOverload)})
    return f"nearest there: {', '.join(difflib.get_close_matches(name, names, n=3, cutoff=0.3)) or 'nothing'}"


# -- find -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """Calls that become one segment."""

    nodes: list[fx.Node] = field(default_factory=list)
    last: fx.Node | None = None
    """Where the segment is called: in the place of this node."""


def _find_runs(gm: fx.GraphModule, is_cut: Callable[[fx.Node], bool]) -> list[_Run]:
    """Return the calls between each two cuts, where there are any that compute.

    Parts of a result stay with the call that made it, so that tensors and numbers are all that crosses a cut. A call
    that only asks for the size of a value from outside stays outside: no tensor crosses a cut for its size.
    """
    runs, run_of = [_Run()], dict[fx.Node, _Run]()
    for node in gm.graph.nodes:
        if node.op != "call_function" or _is_size_arithmetic(node):
            continue
        if node.target is operator.getitem:
            run = run_of.get(node.args[0])
        elif is_cut(node):
            runs.append(_Run())
            continue
        elif reads_sizes_only(node) and run_of.get(node.args[0]) is not runs[-1]:
            continue
        else:
            run = runs[-1]
            run.last = node
        if run is not None:
            run.nodes.append(node)
            run_of[node] = run
    return [run for run in runs if not all(map(_is_view, run.nodes))]


def _cuts(gm: fx.GraphModule, extra: set[object]) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function" and _is_cut(node, extra)]


def _is_cut(node: fx.Node, extra: set[object]) -> bool:
    if node.target in _CUTS or node.target in extra or node.target in fx.node._side_effectful_functions:
        return True
    return isinstance(node.meta.get("val"), _SCALARS) and not _is_size_arithmetic(node)  # reads a tensor on the host


def _is_size_arithmetic(node: fx.Node) -> bool:
    """Return whether a call makes a number from numbers and sizes of inputs."""
    made_of = node.all_input_nodes
    return isinstance(node.meta.get("val"), _SCALARS) and all(
        source.op in ("placeholder", "get_attr") or isinstance(source.meta.get("val"), _SCALARS) for source in made_of
    )


def _is_view(node: fx.Node) -> bool:
    """Return whether a call only looks at a tensor in another way."""
    if node.target in (operator.getitem, aten._unsafe_view.default):
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)


# -- edit -----------------------------------------------------------------------------------------------------------


class _Splitter:
    """Builds the outer graph, and a child module for each segment that is not like an earlier one."""

    def __init__(self, gm: fx.GraphModule, runs: list[_Run]) -> None:
        self._gm = gm
        self._run_of = {node: run for run in runs for node in run.nodes}
        self._graph = fx.Graph()
        self._outer: dict[fx.Node, fx.Node] = {}
        self._sizes = _FirstOfEachSize()
        self._known: dict[Hashable, str] = {}
        self._num_calls: Counter[str] = Counter()

    def run(self) -> fx.Graph:
        """Return the outer graph; the child modules are added to the graph module."""
        for node in self._gm.graph.nodes:
            run = self._run_of.get(node)
            if run is None:
                self._outer[node] = self._graph.node_copy(node, self._outer.__getitem__)
                self._sizes.note(node)
            elif node is run.last:
                self._call(run)
        return self._graph

    def summary(self) -> str:
        """Return how many segments there are, and how many of each."""
        table = ", ".join(f"{name} x{count}" for name, count in self._num_calls.items())
        return f"{self._num_calls.total()} segments, {len(self._num_calls)} of them unique: {table}"

    def _call(self, run: _Run) -> None:
        inputs = _Inputs(run, self._sizes)
        graph = _make_graph(run, inputs)
        name = self._known.setdefault(_structure(graph), f"segment_{len(self._known)}")
        if name not in self._num_calls:
            self._gm.add_module(name, fx.GraphModule({}, graph, name))
        results = _results(run)
        arguments = tuple(self._outer[source] for source in inputs.arguments)
        call = self._graph.create_node("call_module", name, arguments, name=f"call_{self._num_calls.total()}")
        call.meta["val"] = tuple(node.meta["val"] for node in results)
        self._num_calls[name] += 1
        for number, node in enumerate(results):
            item = self._graph.create_node("call_function", operator.getitem, (call, number), name=node.name)
            item.meta.update(node.meta)
            self._outer[node] = item


class _FirstOfEachSize:
    """The first node of the graph for each size that is not made up of others."""

    def __init__(self) -> None:
        self._nodes: dict[sympy.Expr, fx.Node] = {}

    def note(self, node: fx.Node) -> None:
        """Take in a node, in graph order."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            self._nodes.setdefault(size_expression(value), node)

    def find(self, node: fx.Node) -> fx.Node | None:
        """Return the node whose number enters a segment for that of `node`; None: it is made up of others."""
        value = node.meta["val"]
        if isinstance(value, torch.SymInt) and size_expression(value).is_Symbol:
            return self._nodes[size_expression(value)]
        is_made_up = all(isinstance(source.meta.get("val"), _SCALARS) for source in node.all_input_nodes)
        return None if is_made_up and node.op == "call_function" else node


class _Inputs:
    """What a segment is called with, and the numbers that it makes of it again; each in order of first use."""

    def __init__(self, run: _Run, sizes: _FirstOfEachSize) -> None:
        self.made_up: dict[fx.Node, None] = {}
        self._sizes = sizes
        self._entries: dict[fx.Node, fx.Node] = {}
        self._own = set(run.nodes)
        for node in run.nodes:
            for source in node.all_input_nodes:
                self._read(source)

    def _read(self, source: fx.Node) -> None:
        if source in self._own or source in self._entries or source in self.made_up:
            return
        if not isinstance(source.meta.get("val"), _SCALARS):
            self._entries[source] = source
        elif (first := self._sizes.find(source)) is not None:
            self._entries[source] = first
        else:
            for part in source.all_input_nodes:
                self._read(part)
            self.made_up[source] = None

    @property
    def arguments(self) -> list[fx.Node]:
        """The nodes to call the segment with, numbers first."""
        entries = dict.fromkeys(self._entries.values())
        return sorted(entries, key=lambda node: not isinstance(node.meta.get("val"), _SCALARS))

    def add_to(self, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
        """Add the placeholders to a segment's graph; return what stands in it for each node from outside."""
        inner = {node: graph.placeholder(node.name) for node in self.arguments}
        for node, placeholder in inner.items():
            placeholder.meta["val"] = _value_of(node)
        return inner | {node: inner[first] for node, first in self._entries.items()}


def _make_graph(run: _Run, inputs: _Inputs) -> fx.Graph:
    """Return the graph of a segment, which returns a tuple."""
    graph = fx.Graph()
    inner = inputs.add_to(graph)
    for node in [*inputs.made_up, *run.nodes]:
        inner[node] = graph.node_copy(node, inner.__getitem__)
    graph.output(tuple(inner[node] for node in _results(run)))
    return graph


def _value_of(node: fx.Node) -> object:
    return node.meta["val"] if "val" in node.meta else getattr(node.graph.owning_module, str(node.target))


def _results(run: _Run) -> list[fx.Node]:
    """Return the nodes of a run that something else reads."""
    own = set(run.nodes)
    return [node for node in run.nodes if any(user not in own for user in node.users)]


# -- compare --------------------------------------------------------------------------------------------------------


def _structure(graph: fx.Graph) -> Hashable:
    """Return what two segments have in common when one can stand for the other."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    symbols: dict[sympy.Expr, int] = {}

    def frozen(value: object) -> Hashable:
        if isinstance(value, fx.Node):
            return numbers[value]
        if isinstance(value, (list, tuple)):
            return type(value).__name__, *map(frozen, value)
        return type(value), repr(value)  # by type: 1, 1.0 and True are equal

    def entry(node: fx.Node) -> Hashable:
        if node.op == "placeholder":
            return _kind(node.meta["val"], symbols)
        kwargs = tuple((key, frozen(value)) for key, value in sorted(node.kwargs.items()))
        return node.target, frozen(node.args), kwargs

    return tuple(map(entry, graph.nodes))


def _kind(value: object, symbols: dict[sympy.Expr, int]) -> Hashable:
    """Return type, sizes and strides of an input, with symbols numbered by first use."""
    if isinstance(value, Tensor):
        sizes = [_size(size_expression(size), symbols) for size in (*value.shape, *value.stride())]
        return value.dtype, str(value.device), value.layout, value.ndim, *sizes
    return _size(size_expression(value), symbols) if isinstance(value, torch.SymInt) else type(value).__name__


def _size(expression: sympy.Expr, symbols: dict[sympy.Expr, int]) -> Hashable:
    if expression.is_Symbol:
        return "symbol", symbols.setdefault(expression, len(symbols))
    if not expression.args:
        return str(expression)
    return type(expression).__name__, *(_size(part, symbols) for part in expression.args)

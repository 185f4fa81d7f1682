"""Multiply the rows of mixture-of-experts layers where they are, instead of sorting them by expert first.

Before:
    %sort : (i64[2*T], i64[2*T]) = aten.sort.default(%expert_ids)
    %cumsum : i32[4] = aten.cumsum.default(%histc, 0, dtype=int32)            # where each expert's rows end
    %index : f32[2*T, 16] = aten.index.Tensor(%x, [%pairs])                   # pairs: the sorting order // 2
    %grouped_mm : f32[2*T, 8] = pcp.grouped_mm.default(%index, %weight, %cumsum)
    %index_1 : f32[2*T, 8] = aten.index.Tensor(%grouped_mm, [%inverse])
After:
    %reshape : f32[2*T, 16] = aten.reshape.default(%expand, [%mul, 16])       # each row of x twice
    %experts : f32[2*T, 8] = pcp.experts.default(%reshape, %expert_ids, %weight, None)

Why here: before infer_placements, which refuses a sort of tokens. What lies between the sort and its undoing (gates,
    clamps, biases, routing weights) stays; that it treats each row on its own is asked of the placement rules.
Leaves alone: sorts that no grouped_mm depends on, and experts that `experts_implementation="pcp_spec"` made already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import ClassVar

import torch
from torch import fx

from pcp_compiler import ops
from pcp_compiler.errors import InvariantError
from pcp_compiler.pass_api import Pass, PassContext, PassResult, copy_meta, erase_unused, refuse
from pcp_compiler.placement import Call, Local, Rows, find_rule, size_numbers, tensor_inputs
from pcp_compiler.sizes import SizeNodes
from pcp_compiler.torch_private import size_expression

aten = torch.ops.aten
KNOB = "load the model with experts_implementation='pcp_spec' (import pcp_compiler.integrations.transformers first)"
GROUPED = ("pcp.grouped_mm.default", "aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
"""Names of the ops that multiply runs of rows by one matrix each: (rows, weight, ends of the runs)."""
SORTS = (aten.sort.default, aten.sort.stable)
SORTED_ROWS = Rows(0)


@dataclass(slots=True)
class _Region:
    """What one sort by expert leads to."""

    sort: fx.Node
    entries: dict[fx.Node, int] = field(default_factory=dict)
    """Rows brought into sorted order, and how often each row of their source is repeated."""
    grouped: list[fx.Node] = field(default_factory=list)
    exits: list[fx.Node] = field(default_factory=list)
    """Rows brought back into the order of the tokens."""

    @property
    def expert_ids(self) -> fx.Node:
        """The expert of each row, [S], in the order of the tokens."""
        assert isinstance(self.sort.args[0], fx.Node)
        return self.sort.args[0]

    def results(self, index: int) -> set[fx.Node]:
        """Return the nodes that hold the sorted expert numbers (0) or the sorting order (1)."""
        return {user for user in self.sort.users if user.args[1] == index}


@dataclass(frozen=True)
class CanonicalizeExperts(Pass):
    """See the module."""

    name: ClassVar[str] = "canonicalize_experts"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        regions = _find_regions(gm)
        nodes = list(gm.graph.nodes)
        position = {node: index for index, node in enumerate(nodes)}
        for region in regions:
            _follow(nodes, position, region)
        sizes = SizeNodes(gm.graph) if regions else None
        for region in regions:
            assert sizes is not None
            _rewrite(gm, region, sizes)
        erase_unused(gm)
        return PassResult(gm, sum(len(region.grouped) for region in regions))

    def ensures(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        left = next(_grouped_calls(gm), None)
        if left is not None:
            raise InvariantError(f"{left.name} still wants sorted rows")


def _grouped_calls(gm: fx.GraphModule) -> Iterator[fx.Node]:
    yield from [node for node in gm.graph.nodes if str(node.target) in GROUPED]


def _find_regions(gm: fx.GraphModule) -> list[_Region]:
    """Return the sorts that some grouped_mm depends on."""
    regions: dict[fx.Node, _Region] = {}
    for node in _grouped_calls(gm):
        sort = _sort_behind(node)
        if sort is None or len(node.args) > 3:
            raise refuse(node, "its groups of rows are not those of a sort by expert, as transformers makes them", KNOB)
        regions.setdefault(sort, _Region(sort)).grouped.append(node)
    return list(regions.values())


def _sort_behind(grouped: fx.Node) -> fx.Node | None:
    """Return the sort whose counts of experts 0..E-1, summed up, are the ends of the groups; None: it is not so."""
    ends, weight = grouped.args[2], grouped.args[1]
    assert isinstance(ends, fx.Node) and isinstance(weight, fx.Node)
    if ends.target is not aten.cumsum.default:
        return None
    counts = ends.args[0]
    assert isinstance(counts, fx.Node)
    num_experts = weight.meta["val"].shape[0]
    if counts.target is not aten.histc.default or tuple(counts.args[1:]) != (num_experts, 0, num_experts - 1):
        return None
    source = counts.args[0]
    while isinstance(source, fx.Node) and source.target is aten._to_copy.default:
        source = source.args[0]
    if not isinstance(source, fx.Node) or not source.args or source.args[1:] != (0,):
        return None
    sort = source.args[0]
    is_sort = isinstance(sort, fx.Node) and sort.target in SORTS and sort.meta["val"][0].dim() == 1
    ascends = is_sort and not sort.kwargs.get("descending", False) and len(sort.args) == 1  # type: ignore[union-attr]
    return sort if ascends else None  # type: ignore[return-value]


def _follow(nodes: list[fx.Node], position: Mapping[fx.Node, int], region: _Region) -> None:
    """Find where rows enter and leave the sorted order; raise when a row meets another one in between."""
    num_rows = region.expert_ids.meta["val"].shape[0]
    sizes, rows_number = size_numbers(region.sort.graph, num_rows)
    order, in_order = region.results(1), region.results(0)
    sources = {node: top_k for result in order for node, top_k in _row_sources(result)}
    counts = {node for grouped in region.grouped for node in _counts(grouped)}
    inverses: set[fx.Node] = set()
    todo, seen = [position[user] for user in region.sort.users], set[int]()
    heapify(todo)
    while todo:
        at = heappop(todo)
        if at in seen:
            continue
        seen.add(at)
        node = nodes[at]
        index = _single_index(node)
        if node in order or node in in_order or node in sources or node in counts:
            pass
        elif _is_inverse(node, order):
            inverses.add(node)
        elif index in inverses:
            if node.args[0] not in in_order:
                raise refuse(node, "rows that were not sorted by expert are put back as if they were", KNOB)
            region.exits.append(node)
            continue
        elif index in sources:
            _check_repeats(node, sources[index], num_rows)
            region.entries[node] = sources[index]
            in_order.add(node)
        elif (node in region.grouped and node.args[0] in in_order) or _keeps_rows_apart(
            node, in_order, sizes, rows_number
        ):
            in_order.add(node)
        else:
            raise refuse(node, "mixes the rows that were sorted by expert", KNOB)
        for user in node.users:
            heappush(todo, position[user])


def _row_sources(order: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Yield what is used as an index of rows: the sorting order of pairs, and order // k, with how many share a row."""
    yield order, 1
    for user in order.users:
        if user.target is aten.floor_divide.default or _is_floor_division(user):
            assert isinstance(user.args[1], int)
            yield user, user.args[1]


def _is_floor_division(node: fx.Node) -> bool:
    return node.target is aten.div.Tensor_mode and node.kwargs.get("rounding_mode") == "floor"


def _single_index(node: fx.Node) -> fx.Node | None:
    """Return the only index of a lookup along dim 0."""
    if node.target is not aten.index.Tensor:
        return None
    indices = node.args[1]
    assert isinstance(indices, (list, tuple))
    return indices[0] if len(indices) == 1 and isinstance(indices[0], fx.Node) else None


def _check_repeats(entry: fx.Node, top_k: int, num_rows: int | torch.SymInt) -> None:
    source = entry.args[0]
    assert isinstance(source, fx.Node)
    if size_expression(source.meta["val"].shape[0]) * top_k != size_expression(num_rows):
        raise refuse(entry, f"it has no {top_k} sorted rows for each of its rows", KNOB)


def _is_inverse(node: fx.Node, order: set[fx.Node]) -> bool:
    """Return whether a node is the inverse of the sorting order: result[order] = 0, 1, 2, ..."""
    if node.target is not aten.index_put.default or len(node.args) > 3:
        return False
    indices, values = node.args[1], node.args[2]
    assert isinstance(indices, (list, tuple)) and isinstance(values, fx.Node)
    is_iota = values.target is aten.arange.default and len(values.args) == 1
    return is_iota and len(indices) == 1 and indices[0] in order


def _counts(grouped: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that count the rows of each expert, from the ends of the groups up to the sorted numbers."""
    node = grouped.args[2]
    while isinstance(node, fx.Node) and node.target in (
        aten.cumsum.default, aten.histc.default, aten._to_copy.default,
    ):  # fmt: skip
        yield node
        node = node.args[0]


def _keeps_rows_apart(node: fx.Node, in_order: set[fx.Node], sizes, num_rows: int) -> bool:  # type: ignore[no-untyped-def]
    """Return whether a row of the result needs the same row of its inputs only."""
    if node.target in (aten.empty_like.default, aten.sym_size.int):
        return True
    if node.op == "output" or all(source not in in_order for source in tensor_inputs(node)):
        return False  # ends in the sorted order, or reads that order itself
    if len(node.all_input_nodes) == 1 and isinstance(node.all_input_nodes[0].meta["val"], (tuple, list)):
        return True  # takes one of several results, all of which are rows
    rule = find_rule(node.target)
    verdict = rule(Call(node, sizes, lambda n: SORTED_ROWS if n in in_order else None, num_rows)) if rule else None
    layouts = verdict.out if verdict is not None and isinstance(verdict.out, tuple) else (verdict and verdict.out,)
    return isinstance(verdict, Local) and all(layout == SORTED_ROWS for layout in layouts)


def _rewrite(gm: fx.GraphModule, region: _Region, sizes: SizeNodes) -> None:
    """Take the sorting out of a region."""
    for numbers in region.results(0):
        numbers.replace_all_uses_with(region.expert_ids)
    for entry, top_k in region.entries.items():
        source = entry.args[0]
        assert isinstance(source, fx.Node)
        entry.replace_all_uses_with(source if top_k == 1 else _repeat(gm, entry, source, top_k, sizes))
    for node in region.grouped:
        with gm.graph.inserting_before(node):
            experts = gm.graph.call_function(ops.EXPERTS, (node.args[0], region.expert_ids, node.args[1], None))
        experts.meta["val"] = node.meta["val"]
        copy_meta(node, experts)
        node.replace_all_uses_with(experts)
    for node in region.exits:
        rows = node.args[0]
        assert isinstance(rows, fx.Node)
        node.replace_all_uses_with(rows)


def _repeat(gm: fx.GraphModule, entry: fx.Node, source: fx.Node, top_k: int, sizes: SizeNodes) -> fx.Node:
    """Add nodes that hold each row of `source` k times in a row: [T, ..] -> [T * k, ..]."""
    value = source.meta["val"]
    repeated = [value.shape[0], top_k, *value.shape[1:]]
    with value.fake_mode:
        one = value.unsqueeze(1)
        many = one.expand(repeated)
    with gm.graph.inserting_before(entry):
        unsqueeze = gm.graph.call_function(aten.unsqueeze.default, (source, 1))
        expand = gm.graph.call_function(aten.expand.default, (unsqueeze, [sizes.node_for(size) for size in repeated]))
        shape = [sizes.node_for(size) for size in entry.meta["val"].shape]
        view = gm.graph.call_function(aten.reshape.default, (expand, shape))
    for node, val in ((unsqueeze, one), (expand, many), (view, entry.meta["val"])):
        node.meta["val"] = val
        copy_meta(entry, node)
    return view

"""Build attention metadata once, at the top, where layers and steps only differ in a constant added to the positions.

Before:
    %build_metadata : (i64[T, 4], i64[T]) = pcp.build_metadata.default(%positions, %block_tables, ...)
    %add : i64[1, T] = aten.add.Tensor(%positions, 1)
    %build_metadata_1 : (i64[T, 4], i64[T]) = pcp.build_metadata.default(%add, %block_tables, ...)
After:
    %build_metadata : (i64[T, 4], i64[T]) = pcp.build_metadata.default(%positions, %block_tables, ...)
    %advance_metadata : (i64[T, 4], i64[T]) = pcp.advance_metadata.default(%spans, %block_tables, by=1, ...)

Why here: after unroll_draft, when the metadata of every layer and step is in one graph.
Leaves alone: metadata of other block tables, or positions that are made in some other way than by adding
    constants to one value (a product, a lookup, a choice): they vary.

By dataflow each of the two values is *invariant* (the same over layers, or over steps too), *affine* (made from that
of an earlier step by `advance_metadata`) or *varying* (stays where it is); `decisions` lists them. An op is a function
of its arguments and nothing in a graph writes to one, so equal arguments are equal metadata; no name is looked at.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import ClassVar, NamedTuple

import torch
from torch import fx

from pcp_compiler.errors import InvariantError
from pcp_compiler.kv_ops import ADVANCE_METADATA, BUILD_METADATA
from pcp_compiler.pass_api import Decisions, Pass, PassContext, PassResult, add_call, calls, copy_meta, erase_unused

aten = torch.ops.aten


@dataclass(frozen=True)
class HoistPrologue(Pass):
    """See the module."""

    name: ClassVar[str] = "hoist_prologue"
    over_steps: bool = True
    """Advance metadata from step to step; otherwise only layers share it."""

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        groups = _find_groups(gm, self.over_steps)
        rewrites = sum(_rewrite(gm.graph, group) for group in groups)
        erase_unused(gm)
        for group in groups:
            _note(group, ctx.decisions)
        return PassResult(gm, rewrites)

    def ensures(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        for group in _find_groups(gm, self.over_steps):
            if group.same or group.advances:
                raise InvariantError(f"{[*group.same, *group.advances][0].name} builds again what could be reused")


class _Advance(NamedTuple):
    """A build that can be made from another one's metadata, `by` positions earlier."""

    source: fx.Node
    by: int


@dataclass(slots=True)
class _Group:
    """Builds over the same tables, at positions that are one value plus a constant each; in graph order."""

    base: fx.Node
    offsets: dict[int, fx.Node] = field(default_factory=dict)
    """The first build of each constant."""
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Builds with the arguments of an earlier one, and that one."""
    advances: dict[fx.Node, _Advance] = field(default_factory=dict)

    @property
    def own(self) -> list[fx.Node]:
        """Builds that stay."""
        return [build for build in self.offsets.values() if build not in self.advances]


class _Metadata(NamedTuple):
    spans: fx.Node
    slots: fx.Node


# -- find -----------------------------------------------------------------------------------------------------------


def _find_groups(gm: fx.GraphModule, over_steps: bool) -> list[_Group]:
    groups: dict[tuple[object, ...], _Group] = {}
    for build in calls(gm, BUILD_METADATA):
        positions, *others = build.args
        assert isinstance(positions, fx.Node)
        base, offset = _split_offset(positions)
        group = groups.setdefault((base, *others, *sorted(build.kwargs.items())), _Group(base))
        _add_to(group, build, offset, over_steps)
    return list(groups.values())


def _split_offset(positions: fx.Node) -> tuple[fx.Node, int]:
    """Return the value behind a chain of additions of constants, and their sum."""
    offset = 0
    while positions.target is aten.add.Tensor and type(positions.args[1]) is int and not positions.kwargs:
        offset += positions.args[1]
        positions = positions.args[0]  # type: ignore[assignment]
    return positions, offset


def _add_to(group: _Group, build: fx.Node, offset: int, over_steps: bool) -> None:
    if offset in group.offsets:
        group.same[build] = group.offsets[offset]
        return
    earlier = [known for known in group.offsets if known < offset]  # metadata goes forward only
    if earlier and over_steps:
        group.advances[build] = _Advance(group.offsets[max(earlier)], offset - max(earlier))
    group.offsets[offset] = build


# -- edit -----------------------------------------------------------------------------------------------------------


def _rewrite(graph: fx.Graph, group: _Group) -> int:
    """Move and replace the builds of a group; return how many."""
    moved = [build for build in group.own if _move_up(build)]
    if not group.same and not group.advances:
        return len(moved)
    metadata = {build: _unpack(graph, build) for build in group.own}
    for build, (source, by) in group.advances.items():
        metadata[build] = _advance(graph, build, metadata[source], by)
    for build in group.advances:
        _replace(build, metadata[build])
    for build, source in group.same.items():
        _replace(build, metadata[source])
    return len(moved) + len(group.same) + len(group.advances)


def _move_up(build: fx.Node) -> bool:
    """Move a build that is made of inputs only, with its parts, to the top; return whether it was not there."""
    if not _is_made_of_inputs(build):
        return False
    before = list(takewhile(lambda node: node.op != "placeholder", _backwards(build)))
    if all(_belongs_to_prologue(node) for node in before):
        return False
    for node in [build, *build.users]:
        before[-1].prepend(node)
    return True


def _is_made_of_inputs(build: fx.Node) -> bool:
    return all(source.op == "placeholder" for source in build.all_input_nodes)


def _backwards(node: fx.Node) -> Iterator[fx.Node]:
    while node.prev.op != "root":
        node = node.prev
        yield node


def _belongs_to_prologue(node: fx.Node) -> bool:
    """Return whether a node may stand before the metadata: sizes, constants, other metadata."""
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "get_attr" or node.target is BUILD_METADATA or isinstance(node.meta["val"], torch.SymInt)


def _unpack(graph: fx.Graph, build: fx.Node) -> _Metadata:
    """Return the parts of a build, made new behind it: the ones there are may not be all, and stand anywhere."""
    with graph.inserting_after(build):
        slots = add_call(graph, operator.getitem, (build, 1), name="slots")
        spans = add_call(graph, operator.getitem, (build, 0), name="spans")
    metadata = _Metadata(spans, slots)
    _replace(build, metadata)
    return metadata


def _advance(graph: fx.Graph, build: fx.Node, source: _Metadata, by: int) -> _Metadata:
    """Add an advance in the place of a build."""
    with graph.inserting_before(build):
        step = add_call(graph, ADVANCE_METADATA, (source.spans, build.args[1]), {"by": by, **build.kwargs})
        spans = add_call(graph, operator.getitem, (step, 0), name="spans")
        slots = add_call(graph, operator.getitem, (step, 1), name="slots")
    copy_meta(build, step)
    return _Metadata(spans, slots)


def _replace(build: fx.Node, metadata: _Metadata) -> None:
    """Let the users of a build's parts read the given ones."""
    for item in list(build.users):
        assert item.target is operator.getitem
        wanted = metadata[item.args[1]]  # type: ignore[index]
        if item is not wanted and item not in metadata:
            item.replace_all_uses_with(wanted)


# -- say ------------------------------------------------------------------------------------------------------------


def _note(group: _Group, decisions: Decisions) -> None:
    """Note the class of each value."""
    num_uses = len(group.offsets) + len(group.same)
    is_shared = num_uses > 1 or _is_made_of_inputs(group.own[0])
    invariant = "invariant" if len(group.own) == 1 and is_shared else "varying"
    made = f"{len(group.own)} builds, {len(group.advances)} advances for {num_uses} uses"
    where = f"positions {group.base.name} + {sorted(group.offsets)}"
    for value in _Metadata._fields:
        decisions.add("attention metadata", f"{value}: {'affine' if group.advances else invariant}: {made}, {where}")

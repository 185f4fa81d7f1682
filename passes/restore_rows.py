"""Fetch only the rows that are read instead of gathering all rows and picking some.

Before:
    %unshard : f32[1, T, 64] = pcp.unshard.default(%norm, %restore, 1)
    %slice : f32[1, 1, 64] = aten.slice.Tensor(%unshard, 1, -1, 9223372036854775807)
After:
    %slice_1 : i64[1] = aten.slice.Tensor(%restore, 0, -1, 9223372036854775807)
    %restore_rows : f32[1, 1, 64] = pcp.restore_rows.default(%norm, %slice_1, %rank, 1)

Why here: after shard_tokens, whose unshard of a row selection it replaces. Each rank puts the rows it owns into zeros
    and one all-reduce adds them up, which is exact: every row has one owner, and x + 0 is x.
Leaves alone: unshards that something else reads too, and selections of so many rows that gathering moves less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from pcp_compiler import ops
from pcp_compiler.pass_api import (
    Pass,
    PassContext,
    PassResult,
    add_index_input,
    calls,
    copy_meta,
    erase_unused,
)
from pcp_compiler.passes.shard_tokens import find_index_input

aten = torch.ops.aten
RANK = "rank"


@dataclass(frozen=True)
class RestoreRows(Pass):
    """See the module."""

    name: ClassVar[str] = "restore_rows"
    keeps_signature: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        found = [node for node in calls(gm, ops.UNSHARD) if _reads_few_rows(node, ctx.config.parallel.pcp_size)]
        selections = [(node, user) for node in found for user in list(node.users)]
        for unshard, selection in selections:
            _fetch(gm, unshard, selection)
        erase_unused(gm)
        for unshard in found:
            gm.graph.erase_node(unshard)
        return PassResult(gm, len(selections))


def _reads_few_rows(unshard: fx.Node, pcp_size: int) -> bool:
    """Return whether all users pick rows, fewer in all than one rank has (W is at least 2 above the threshold)."""
    wanted = 0
    for user in unshard.users:
        if user.target not in (aten.slice.Tensor, aten.select.int, aten.index_select.default):
            return False
        if user.args[0] is not unshard or user.args[1] != unshard.args[2]:
            return False
        if user.target is aten.index_select.default:  # rows that get logits: one a request or draft, far below W
            wanted += 1
            continue
        rows = 1 if user.target is aten.select.int else user.meta["val"].shape[unshard.args[2]]
        if not isinstance(rows, int):
            return False
        wanted += rows
    total = unshard.meta["val"].shape[unshard.args[2]]
    return 0 < wanted < (total / pcp_size if isinstance(total, int) else 2)


def _fetch(gm: fx.GraphModule, unshard: fx.Node, selection: fx.Node) -> None:
    x, restore, dim = unshard.args
    assert isinstance(restore, fx.Node) and isinstance(dim, int)
    rank = find_index_input(gm, RANK)
    if rank is None:
        with restore.meta["val"].fake_mode:
            value = torch.empty((), dtype=torch.int64, device=restore.meta["val"].device)
        rank = add_index_input(gm.graph, RANK, value)
    is_select = selection.target is aten.select.int
    with gm.graph.inserting_before(selection):
        if is_select:
            sources = gm.graph.call_function(aten.select.int, (restore, 0, selection.args[2]))
            sources = gm.graph.call_function(aten.unsqueeze.default, (sources, 0))
        else:
            target = selection.target
            sources = gm.graph.call_function(target, (restore, 0, *selection.args[2:]))  # type: ignore[arg-type]
        rows = gm.graph.call_function(ops.RESTORE_ROWS, (x, sources, rank, dim))
        result = gm.graph.call_function(aten.squeeze.dim, (rows, dim)) if is_select else rows
    _describe(restore, sources, rows, selection, result)
    selection.replace_all_uses_with(result)


def _describe(restore: fx.Node, sources: fx.Node, rows: fx.Node, selection: fx.Node, result: fx.Node) -> None:
    """Note values and source lines of the new nodes."""
    for node in (sources, rows, result):
        copy_meta(selection, node)
    result.meta["val"] = selection.meta["val"]
    with restore.meta["val"].fake_mode:
        if sources.target is aten.unsqueeze.default:
            inner = sources.args[0]
            assert isinstance(inner, fx.Node)
            copy_meta(selection, inner)
            inner.meta["val"] = restore.meta["val"].select(0, 0)
            sources.meta["val"] = inner.meta["val"].unsqueeze(0)
            rows.meta["val"] = selection.meta["val"].unsqueeze(rows.args[3])
        else:
            size = selection.meta["val"].shape[rows.args[3]]
            sources.meta["val"] = torch.empty(size, dtype=torch.int64, device=restore.meta["val"].device)

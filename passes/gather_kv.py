"""Gather K and V of a layer in one collective, started as soon as both are there.

Before:
    %unshard : f32[1, 2, T, 16] = pcp.unshard.default(%k, %restore, 2)
    %unshard_1 : f32[1, 2, T, 16] = pcp.unshard.default(%v, %restore, 2)
    %attention : f32[1, W, 4, 16] = pcp.attention.default(%q, %k_view, %v_view, None, %local_rows, layer=0, ...)
After:
    %gather_start : f32[W, 64] = pcp.gather_start.default([%k, %v], [2, 2])
    %gather_wait = pcp.gather_wait.default(%gather_start, [%k, %v], %restore, [2, 2])
    %getitem : f32[1, 2, T, 16] = operator.getitem(%gather_wait, 0)
    %getitem_1 : f32[1, 2, T, 16] = operator.getitem(%gather_wait, 1)
    %attention : f32[1, W, 4, 16] = pcp.attention.default(%q, %k_view, %v_view, None, %local_rows, layer=0, ...)

Why here: after shard_tokens put one unshard at K and one at V, before anything cuts the graph at collectives.
Leaves alone: K and V of different dtypes, K and V that are one tensor, unshards that no attention reads, and K (or V)
    that something reads before V (or K) is there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from pcp_compiler import kv_ops, ops
from pcp_compiler.pass_api import Pass, PassContext, PassResult, calls, copy_meta
from pcp_compiler.placement import REPLAYED_WHOLE


@dataclass(frozen=True)
class GatherKv(Pass):
    """See the module."""

    name: ClassVar[str] = "gather_kv"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        pairs = list(_find_pairs(gm))
        for k, v in pairs:
            _pack(gm, k, v)
        return PassResult(gm, len(pairs))


def _find_pairs(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the unshards of K and of V of each attention or KV write that has one of its own for both."""
    order = _positions(gm)
    taken: set[fx.Node] = set()
    for node in calls(gm, ops.ATTENTION, kv_ops.STORE_KV):
        first = 1 if node.target is ops.ATTENTION else 0
        k, v = (_unshard_behind(node.args[i]) for i in (first, first + 1))
        if k is None or v is None or k is v or taken & {k, v}:
            continue
        inputs_ready = max(order[_input(k)], order[_input(v)])
        is_read_early = any(order[user] < inputs_ready for user in (*k.users, *v.users))
        if k.meta["val"].dtype == v.meta["val"].dtype and not is_read_early:
            taken |= {k, v}
            yield k, v


def _unshard_behind(value: object) -> fx.Node | None:
    """Return the unshard that a tensor is a view of; a cat joins it with an empty cache only."""
    if isinstance(value, (list, tuple)):
        return next((found for part in value if (found := _unshard_behind(part)) is not None), None)
    if not isinstance(value, fx.Node) or value.target is ops.UNSHARD:
        return value if isinstance(value, fx.Node) else None
    return _unshard_behind(value.args[0]) if value.target in REPLAYED_WHOLE else None


def _positions(gm: fx.GraphModule) -> dict[fx.Node, int]:
    """Return the place of each node in graph order."""
    return {node: position for position, node in enumerate(gm.graph.nodes)}


def _input(unshard: fx.Node) -> fx.Node:
    """Return the node whose rows an unshard gathers."""
    assert isinstance(unshard.args[0], fx.Node)
    return unshard.args[0]


def _pack(gm: fx.GraphModule, k: fx.Node, v: fx.Node) -> None:
    """Replace two unshards by one gather; the second of them in graph order is where both inputs exist."""
    order = _positions(gm)
    xs, dims = [_input(k), _input(v)], [k.args[2], v.args[2]]
    ready = max(xs, key=order.__getitem__)
    first = min((k, v), key=order.__getitem__)
    with gm.graph.inserting_after(ready):
        start = gm.graph.call_function(ops.GATHER_START, (xs, dims))
    with gm.graph.inserting_after(max((first, start, ready), key=lambda n: order.get(n, order[ready] + 0.5))):
        wait = gm.graph.call_function(ops.GATHER_WAIT, (start, xs, k.args[1], dims))
    with gm.graph.inserting_after(wait):
        items = [gm.graph.call_function(operator.getitem, (wait, i)) for i in (1, 0)][::-1]
    with xs[0].meta["val"].fake_mode:
        start.meta["val"] = ops.GATHER_START([x.meta["val"] for x in xs], dims)
    wait.meta["val"] = [k.meta["val"], v.meta["val"]]
    for old, item in zip((k, v), items, strict=True):
        item.meta["val"] = old.meta["val"]
        for new in (item, wait, start):
            copy_meta(old, new)
        old.replace_all_uses_with(item)
        gm.graph.erase_node(old)

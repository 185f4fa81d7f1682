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

With a cache the gathered rows need no restore: they are written as they lie, rank after rank, each to the slot of its
token. So of the form above
    %view_3 : f32[1, T, 4, 4] = aten.view.default(%getitem_1, [1, %sym_size_int, 4, 4])
    %store_kv : f32[0] = pcp.store_kv.default(%view_3, %view_4, %slots, %k_cache_0, %v_cache_0, layer=0)
becomes
    %gather_start : f32[W, 32] = pcp.gather_start.default([%mul, %mul_1], [1, 1])
    %store_gathered_kv : f32[0] = pcp.store_gathered_kv.default(%gather_start, %expanded_slots, %k_cache_0, ...)
This leaves alone: restored K or V that something else reads too, rows that are not stored as they were gathered (heads
repeated or in another order), and slots that are computed in the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from pcp_compiler import kv_ops, ops
from pcp_compiler.pass_api import (
    Pass,
    PassContext,
    PassResult,
    add_call,
    add_index_input,
    calls,
    copy_meta,
    erase_unused,
)
from pcp_compiler.passes.attach_kv import SLOTS
from pcp_compiler.passes.shard_tokens import find_index_input
from pcp_compiler.placement import REPLAYED_WHOLE, tensor_inputs
from pcp_compiler.torch_private import new_row_symbol, size_expression

EXPANDED_SLOTS = "expanded_slots"
_PROBE_LENGTHS = (2, 3)
"""Tokens of the rows that show how restored rows are laid out anew: two, since a size may be equal to one of them."""


@dataclass(frozen=True)
class GatherKv(Pass):
    """See the module."""

    name: ClassVar[str] = "gather_kv"
    keeps_signature: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        pairs = list(_find_pairs(gm))
        for k, v in pairs:
            _pack(gm, k, v)
        writes = [(store, gather) for store in calls(gm, kv_ops.STORE_KV) if (gather := _gather_behind(store))]
        for store, gather in writes:
            _write_gathered(gm, store, gather)
        if writes:
            _erase_restores(gm)
        return PassResult(gm, len(pairs) + len(writes))


# -- pack -----------------------------------------------------------------------------------------------------------


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


# -- write ----------------------------------------------------------------------------------------------------------


def _gather_behind(store: fx.Node) -> fx.Node | None:
    """Return the gather whose rows a KV write, and nothing else, stores as they were packed; None: there is none."""
    slots = store.args[2]
    assert isinstance(slots, fx.Node)
    k, v = _path_from_gather(store.args[0]), _path_from_gather(store.args[1])
    if k is None or v is None or slots.meta.get("index_input") != SLOTS:
        return None
    wait = k[0].args[0]
    assert isinstance(wait, fx.Node)
    is_pair = v[0].args[0] is wait and (k[0].args[1], v[0].args[1]) == (0, 1) and len(wait.users) == 2
    if not is_pair or not _keeps_rows(k) or not _keeps_rows(v):
        return None
    assert isinstance(wait.args[0], fx.Node)
    return wait.args[0]


def _path_from_gather(value: object) -> list[fx.Node] | None:
    """Return the calls from the result of a gather to a tensor; None: another one made it, or something else reads it.

    The first call takes the tensor out of the results, the others look at it in another way.
    """
    path: list[fx.Node] = []
    while isinstance(value, fx.Node) and len(value.users) == 1:
        path.insert(0, value)
        sources = tensor_inputs(value)
        if value.target is operator.getitem:
            return path if sources[0].target is ops.GATHER_WAIT else None
        if value.target not in REPLAYED_WHOLE or len(sources) != 1:
            return None
        (value,) = sources
    return None


def _keeps_rows(path: list[fx.Node]) -> bool:
    """Return whether a tensor [1, T, H, D] has the numbers of each row in the order in which they were gathered.

    Numbers that are all different go through the calls: whatever these are, they may only name the dims anew.
    """
    item = path[0]
    wait, position = item.args
    dim = wait.args[3][position]  # type: ignore[union-attr, index]
    assert isinstance(dim, int)
    for num_tokens in _PROBE_LENGTHS:
        shape = [_number(size, num_tokens) for size in item.meta["val"].shape]
        gathered = torch.arange(torch.Size(shape).numel(), device="cpu").view(shape)
        stored = _replay(path, gathered, num_tokens)
        if not torch.equal(stored[0].flatten(1), ops.pack_rows([gathered], [dim])):
            return False
    return True


def _replay(path: list[fx.Node], gathered: Tensor, num_tokens: int) -> Tensor:
    """Return what the last call of a path gives for a tensor in the place of the first."""
    values = {path[0]: gathered}

    def argument(source: fx.Node) -> Tensor | int:
        return values[source] if source in values else _number(source.meta["val"], num_tokens)

    for node in path[1:]:
        args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[path[-1]]


def _number(size: int | torch.SymInt, num_tokens: int) -> int:
    """Return a size where every symbol, which can be T alone, is so many tokens."""
    expression = size_expression(size)
    return int(expression.subs(dict.fromkeys(expression.free_symbols, num_tokens)))


def _write_gathered(gm: fx.GraphModule, store: fx.Node, gather: fx.Node) -> None:
    """Replace a write of restored rows by one of gathered rows."""
    slots = find_index_input(gm, EXPANDED_SLOTS) or _add_expanded_slots(gm, store)
    with gm.graph.inserting_before(store):
        written = add_call(gm.graph, kv_ops.STORE_GATHERED_KV, (gather, slots, *store.args[3:]), dict(store.kwargs))
    copy_meta(store, written)
    store.replace_all_uses_with(written)
    gm.graph.erase_node(store)


def _add_expanded_slots(gm: fx.GraphModule, store: fx.Node) -> fx.Node:
    """Add the input with the slot of each gathered row; P is not in the graph, so its size is one of its own."""
    slots = store.args[2].meta["val"]  # type: ignore[union-attr]
    mode, num_rows = new_row_symbol(slots.fake_mode)
    with mode:
        value = torch.empty(num_rows, dtype=slots.dtype, device=slots.device)
    return add_index_input(gm.graph, EXPANDED_SLOTS, value)


def _erase_restores(gm: fx.GraphModule) -> None:
    """Erase what only the old writes read, the slots in global order too."""
    erase_unused(gm)
    slots = find_index_input(gm, SLOTS)
    if slots is not None and not slots.users:
        gm.graph.erase_node(slots)

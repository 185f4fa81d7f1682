"""Let attention read keys and values from a paged cache, and write the new ones there first.

Before:
    %attention : f32[1, T, 4, 16] = pcp.attention.default(%q, %k, %v, None, None, layer=0, kind='full', scale=0.25)
After:
    %store_kv : f32[0] = pcp.store_kv.default(%k, %v, %slots, %k_cache_0, %v_cache_0, layer=0)
    %paged_attention : f32[1, T, 4, 16] = pcp.paged_attention.default(%q, %store_kv, %k_cache_0, %v_cache_0, %spans, ...)

Why here: after canonicalize_attention, before infer_placements: rows of one call may belong to several requests, so what
    a row sees is no longer the rows before it, and K and V of all rows go to one place.
Leaves alone: graphs of a phase without a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from pcp_compiler import kv_ops, ops
from pcp_compiler.errors import InvariantError
from pcp_compiler.pass_api import Pass, PassContext, PassResult, add_index_input, calls, copy_meta, refuse
from pcp_compiler.torch_private import new_row_symbol

SLOTS, SPANS, BLOCK_TABLES = "slots", "spans", "block_tables"


@dataclass(frozen=True)
class AttachKv(Pass):
    """See the module."""

    name: ClassVar[str] = "attach_kv"
    keeps_signature: ClassVar[bool] = False

    def requires(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        for node in calls(gm, ops.ATTENTION):
            batch = node.args[0].meta["val"].shape[0]  # type: ignore[union-attr]
            if batch != 1:
                raise refuse(node, f"its batch size is {batch}", "trace the rows of all requests as one batch row")

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        attentions = list(calls(gm, ops.ATTENTION))
        if ctx.phase.block_size is None or not attentions:
            return PassResult(gm, 0)
        batch = _add_batch_inputs(gm.graph, attentions[0].meta["val"])
        for node in attentions:
            _attach(gm.graph, node, batch, ctx.phase.block_size)
        return PassResult(gm, len(attentions))

    def ensures(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        if ctx.phase.block_size is not None and list(calls(gm, ops.ATTENTION)):
            raise InvariantError("an attention reads no cache")


def _add_batch_inputs(graph: fx.Graph, like: Tensor) -> dict[str, fx.Node]:
    """Add the inputs that say where rows are stored and what each request has stored."""
    sizes = [new_row_symbol(like.fake_mode)[1] for _ in range(4)]  # type: ignore[attr-defined]
    num_tokens = like.shape[1]
    with like.fake_mode:  # type: ignore[attr-defined]
        values = {
            SLOTS: torch.empty(num_tokens, dtype=torch.int64, device=like.device),
            SPANS: torch.empty(sizes[0], 4, dtype=torch.int64),
            BLOCK_TABLES: torch.empty(sizes[1], sizes[2], dtype=torch.int32, device=like.device),
        }
    nodes = {role: add_index_input(graph, role, value) for role, value in values.items()}
    nodes["num_slots"] = sizes[3]  # type: ignore[assignment]
    return nodes


def _attach(graph: fx.Graph, node: fx.Node, batch: dict[str, fx.Node], block_size: int) -> None:
    q, k, v = node.args[:3]
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
    layer = node.kwargs["layer"]
    caches = []
    for name, tensor in (("k_cache", k), ("v_cache", v)):
        value = tensor.meta["val"]
        with value.fake_mode:
            cache = torch.empty(batch["num_slots"], *value.shape[2:], dtype=value.dtype, device=value.device)
        caches.append(add_index_input(graph, f"{name}_{layer}", cache))
    options = {key: node.kwargs[key] for key in ("scale", "window", "soft_cap", "sinks") if key in node.kwargs}
    with graph.inserting_before(node):
        stored = graph.call_function(kv_ops.STORE_KV, (k, v, batch[SLOTS], *caches), {"layer": layer})
        out = graph.call_function(
            kv_ops.PAGED_ATTENTION,
            (q, stored, *caches, batch[SPANS], batch[BLOCK_TABLES]),
            {"block_size": block_size, "layer": layer, **options},
        )
    with q.meta["val"].fake_mode:
        stored.meta["val"] = k.meta["val"].new_empty(0)
    out.meta["val"] = node.meta["val"]
    for new in (stored, out):
        copy_meta(node, new)
    node.replace_all_uses_with(out)
    graph.erase_node(node)

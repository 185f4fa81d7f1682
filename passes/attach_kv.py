"""Let attention read keys and values from a paged cache, and write the new ones there first.

Before:
    %attention : f32[1, T, 4, 16] = pcp.attention.default(%q, %k, %v, None, None, layer=0, kind='full', scale=0.25)
After:
    %store_kv : f32[0] = pcp.store_kv.default(%k, %v, %slots, %k_cache_0, %v_cache_0, layer=0)
    %paged_attention : f32[1, T, 4, 16] = pcp.paged_attention.default(%q, %store_kv, %k_cache_0, ..., %spans, ...)

Why here: after canonicalize_attention, before infer_placements: rows of one call may belong to several requests, so
    what a row sees is no longer the rows before it, and K and V of all rows go to one place.
Leaves alone: graphs of a phase without a cache.

In a phase whose rows are a request each (`Phase.rows`) every attention builds metadata of its own, from positions and
block tables; `hoist_prologue` finds out which of it is the same:
    %build_metadata : (i64[T, 4], i64[T]) = pcp.build_metadata.default(%positions, %block_tables, ...)
    %paged_attention : f32[1, T, 4, 16] = pcp.paged_attention.default(%q, %store_kv, ..., %spans, %block_tables, ...)

The attention backend of each layer is picked here, from the config and from what the layer needs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from pcp_compiler import kv_ops, ops
from pcp_compiler.errors import InvariantError
from pcp_compiler.pass_api import (
    Pass,
    PassContext,
    PassResult,
    Phase,
    add_call,
    add_index_input,
    calls,
    copy_meta,
    refuse,
)
from pcp_compiler.plan.capabilities import AttentionNeeds, describe_gaps, load_records, pick_backend, target_backends
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
        like = attentions[0].meta["val"]
        batch = _add_batch_inputs(gm.graph, like, ctx.phase)
        num_slots = new_row_symbol(like.fake_mode)[1]
        for node in attentions:
            backend = _pick_backend(node, ctx)
            _attach(gm.graph, node, _add_caches(gm.graph, node, num_slots), batch, ctx.phase, backend)
        return PassResult(gm, len(attentions))

    def ensures(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        if ctx.phase.block_size is not None and list(calls(gm, ops.ATTENTION)):
            raise InvariantError("an attention reads no cache")


def _add_batch_inputs(graph: fx.Graph, like: Tensor, phase: Phase) -> dict[str, fx.Node]:
    """Add the inputs that say where rows are stored and what each request has stored."""
    sizes = [new_row_symbol(like.fake_mode)[1] for _ in range(3)]  # type: ignore[attr-defined]
    num_tokens = like.shape[1]
    with like.fake_mode:  # type: ignore[attr-defined]
        if phase.rows is None:
            values = {
                SLOTS: torch.empty(num_tokens, dtype=torch.int64, device=like.device),
                SPANS: torch.empty(sizes[0], 4, dtype=torch.int64, device=like.device),
                BLOCK_TABLES: torch.empty(sizes[1], sizes[2], dtype=torch.int32, device=like.device),
            }
        else:
            values = {BLOCK_TABLES: torch.empty(num_tokens, sizes[2], dtype=torch.int32, device=like.device)}
    return {role: add_index_input(graph, role, value) for role, value in values.items()}


def _attach(
    graph: fx.Graph, node: fx.Node, caches: list[fx.Node], batch: Mapping[str, fx.Node], phase: Phase, backend: str
) -> None:
    q, k, v = node.args[:3]
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
    layer = node.kwargs["layer"]
    names = ("scale", "window", "soft_cap", "sinks")
    options: dict[str, Any] = {key: node.kwargs[key] for key in names if key in node.kwargs}
    with graph.inserting_before(node):
        if phase.rows is None:
            spans, slots = batch[SPANS], batch[SLOTS]
        else:
            spans, slots = _build_metadata(graph, node, batch, phase)
        stored = graph.call_function(kv_ops.STORE_KV, (k, v, slots, *caches), {"layer": layer})
        out = graph.call_function(
            kv_ops.PAGED_ATTENTION, (q, stored, *caches, spans, batch[BLOCK_TABLES]),
            {"layer": layer, **options, "backend": backend, "block_size": phase.block_size},
        )  # fmt: skip
    with q.meta["val"].fake_mode:
        stored.meta["val"] = k.meta["val"].new_empty(0)
    out.meta["val"] = node.meta["val"]
    for new in (stored, out):
        copy_meta(node, new)
    node.replace_all_uses_with(out)
    graph.erase_node(node)


def _add_caches(graph: fx.Graph, attention: fx.Node, num_slots: torch.SymInt) -> list[fx.Node]:
    """Add the inputs for keys and values of one layer."""
    caches = []
    for name, tensor in zip(("k_cache", "v_cache"), attention.args[1:3], strict=True):
        value = tensor.meta["val"]  # type: ignore[union-attr]
        with value.fake_mode:
            cache = torch.empty(num_slots, *value.shape[2:], dtype=value.dtype, device=value.device)
        caches.append(add_index_input(graph, f"{name}_{attention.kwargs['layer']}", cache))
    return caches


def _build_metadata(
    graph: fx.Graph, attention: fx.Node, batch: Mapping[str, fx.Node], phase: Phase
) -> tuple[fx.Node, fx.Node]:
    """Add metadata of one attention at the insertion point; return the nodes of spans and slots."""
    assert phase.rows is not None
    positions = next(n for n in graph.find_nodes(op="placeholder") if n.name == phase.rows.position_input)
    build = add_call(
        graph, kv_ops.BUILD_METADATA, (positions, batch[BLOCK_TABLES]),
        {"block_size": phase.block_size, "max_model_len": phase.rows.max_model_len},
    )  # fmt: skip
    copy_meta(attention, build)
    spans, slots = (
        add_call(graph, operator.getitem, (build, number), name=name) for number, name in enumerate(("spans", "slots"))
    )
    return spans, slots


def _pick_backend(attention: fx.Node, ctx: PassContext) -> str:
    """Return the backend of a layer, and note why it is that one.

    Raises:
        UnsupportedGraphError: the one that the config names, or with `auto` every one, lacks something.
    """
    needs = _needs(attention, ctx)
    key, name, candidates = target_backends(ctx.config.attention, needs.kind)
    picked = pick_backend(needs, candidates)
    gaps = describe_gaps(needs, candidates)
    if picked is None:
        able = [record.name for record in load_records() if not record.find_gaps(needs)]
        knob = f"set {key} to {' or '.join(able)}" if able else "use another model, dtype or device"
        raise refuse(attention, f"{key}: {name} cannot run this layer: {gaps}", knob)
    layer = attention.kwargs["layer"]
    why = f"set by {key}" if name != "auto" else f"automatic; {gaps}" if gaps else "automatic"
    ctx.decisions.add("attention backend", f"layer {layer}, kind {needs.kind}: {picked} ({why})")
    return picked


def _needs(attention: fx.Node, ctx: PassContext) -> AttentionNeeds:
    q, k, v = (tensor.meta["val"] for tensor in attention.args[:3])  # type: ignore[union-attr]
    options = attention.kwargs
    return AttentionNeeds(
        str(options["kind"]),
        pcp=ctx.phase.is_sharded and ctx.config.parallel.pcp_size > 1,
        ragged_queries=True,
        paged=True,
        device=q.device.type,
        dtype=str(q.dtype).removeprefix("torch."),
        head_dims=(int(k.shape[-1]), int(v.shape[-1])),
        grouped_queries=q.shape[2] != k.shape[2],
        soft_cap=options.get("soft_cap") is not None,
        sinks=options.get("sinks") is not None,
        fp8_kv=ctx.phase.has_fp8_kv,
        capture=ctx.phase.is_captured and q.device.type == "cuda",  # the emulator of a CPU captures whole calls
    )

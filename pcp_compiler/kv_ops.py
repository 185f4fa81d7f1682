"""Paged KV: the ops that write new keys and values and attend over what is stored; schema, shape function, reference.

A cache is two tensors, keys [S + 1, Hkv, D] and values [S + 1, Hkv, Dv], S slots and one row that takes what no slot
takes (padding); `kv_formats` says how a row lies in it. Slot of position p of a request:
block_table[p // block_size] * block_size + p % block_size.
Order is a data edge: `store_kv` returns an empty tensor that `paged_attention` takes.

What rows may read comes in two forms. *Spans*, made on the host, serve any mix of prompts and decodes. Where each row
is a request of its own, *row metadata* is made in the graph (`build_metadata`), so that passes can see of what it is
made, make it once, and advance it from one position to the next:

    kv_slots [N, L]  slot of each position of the request, L positions: enough for every request of the current batch
    slots [N]        where the row's own key and value go
    kv_lens [N]      positions that the row sees, itself included: its own + 1

A slot of -1 is none: nothing is written there, and what is read there is the spare row and is not looked at.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from pcp_compiler import kv_formats, ops

_lib = torch.library.Library("pcp", "FRAGMENT")  # lives as long as the process

_lib.define("store_kv(Tensor k, Tensor v, Tensor slots, Tensor k_cache, Tensor v_cache, *, int layer) -> Tensor")
_lib.define(
    "paged_attention(Tensor q, Tensor stored, Tensor k_cache, Tensor v_cache, Tensor spans, Tensor block_tables, *,"
    " int block_size, int layer, float scale, int? window=None, float? soft_cap=None, Tensor? sinks=None)"
    " -> Tensor"
)
_lib.define(
    "build_metadata(Tensor positions, Tensor block_tables, Tensor kv_positions, *, int block_size, int max_model_len)"
    " -> (Tensor, Tensor, Tensor)"
)
_lib.define("advance_metadata(Tensor kv_slots, Tensor kv_lens, *, int by, int max_model_len) -> (Tensor, Tensor)")
_lib.define(
    "paged_attention_rows(Tensor q, Tensor stored, Tensor k_cache, Tensor v_cache, Tensor kv_slots, Tensor kv_lens, *,"
    " int layer, float scale, int? window=None, float? soft_cap=None, Tensor? sinks=None) -> Tensor"
)


def store_kv(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor, *, layer: int) -> Tensor:
    """Write rows to their slots: k [1, N, Hkv, D], v [1, N, Hkv, Dv], slots [N], negative ones write nothing.

    Returns:
        An empty tensor, for those who have to run after the write.
    """
    spare = k_cache.shape[0] - 1
    targets = torch.where(slots < 0, spare, slots)
    kv_formats.write_rows(k_cache, targets, k[0])
    kv_formats.write_rows(v_cache, targets, v[0])
    return k.new_empty(0)


def paged_attention(
    q: Tensor, stored: Tensor, k_cache: Tensor, v_cache: Tensor, spans: Tensor, block_tables: Tensor, *,
    block_size: int, layer: int, scale: float, window: int | None = None, soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend from query rows to the stored keys of their request, each row up to its own position.

    Args:
        q: [1, W, Hq, D]. stored: from `store_kv` of the same layer.
        spans: [N, 4] int64 on the host: request, first row, rows, position of the last row + 1.
        block_tables: [R, max_blocks] int32.
    Returns:
        [1, W, Hq, Dv]; rows in no span are 0.
    """
    out = q.new_zeros(*q.shape[:3], kv_formats.row_width(v_cache))
    offsets = torch.arange(block_size, device=q.device)
    for request, start, num_rows, seq_len in spans.tolist():
        blocks = block_tables[request, : -(-seq_len // block_size)].to(torch.int64)
        slots = (blocks[:, None] * block_size + offsets).flatten()[:seq_len]
        positions = torch.arange(seq_len - num_rows, seq_len, device=q.device)
        k, v = (kv_formats.read_rows(cache, slots, q.dtype) for cache in (k_cache, v_cache))
        attend = functools.partial(
            ops.attention, layer=layer, kind="full", scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
        )
        rows = q[:, start : start + num_rows]
        if math.isfinite(float(k.sum() + v.sum())):
            out[:, start : start + num_rows] = attend(rows, k[None], v[None], None, positions)
            continue
        k, v, spoilt = _hide_spoilt(k, v)
        num_before = torch.nn.functional.pad(spoilt.cumsum(0), (1, 0))
        first_seen = (positions + 1 - (seq_len if window is None else window)).clamp(min=0)
        sees_spoilt = num_before[positions + 1] > num_before[first_seen]
        attended = attend(rows, k[None], v[None], None, positions)
        out[:, start : start + num_rows] = attended.masked_fill(sees_spoilt[:, None, None], float("nan"))
    return out


def _hide_spoilt(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values [S, H, D] with zeros in rows that are not finite, and which rows these are, [S].

    A row that may not see such a key must not be touched by it, and 0 times NaN is NaN.
    """
    spoilt = ~(k.isfinite().all(-1) & v.isfinite().all(-1)).all(-1)
    return k.masked_fill(spoilt[:, None, None], 0), v.masked_fill(spoilt[:, None, None], 0), spoilt


def build_metadata(
    positions: Tensor, block_tables: Tensor, kv_positions: Tensor, *, block_size: int, max_model_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the metadata of rows that are a request each.

    Args:
        positions: [1, N] int64. Rows at `max_model_len` or above are computable and write nothing.
        block_tables: [N, max_blocks] int32; block 0 is nobody's, rows there write nothing (padding rows).
        kv_positions: [L] int64, 0..L-1; L is more than every position below `max_model_len` that is asked for.
    Returns:
        kv_slots [N, L], slots [N], kv_lens [N]; int64.
    Raises:
        RuntimeError: L is too small for a position (on a CUDA device: a device-side assertion).
    """
    blocks = block_tables.index_select(1, kv_positions // block_size).to(torch.int64)
    kv_slots = torch.where(blocks > 0, blocks * block_size + kv_positions % block_size, -1)
    return kv_slots, _slots_at(kv_slots, positions[0], max_model_len), positions[0] + 1


def advance_metadata(kv_slots: Tensor, kv_lens: Tensor, *, by: int, max_model_len: int) -> tuple[Tensor, Tensor]:
    """Return slots and kv_lens of the same rows `by` >= 1 positions further on; kv_slots stays what it is."""
    positions = kv_lens if by == 1 else kv_lens + (by - 1)
    return _slots_at(kv_slots, positions, max_model_len), kv_lens + by


def _slots_at(kv_slots: Tensor, positions: Tensor, max_model_len: int) -> Tensor:
    """Return the slots of positions [N]; -1 for those that no request can have."""
    slots = kv_slots.gather(1, positions.clamp(max=max_model_len - 1)[:, None]).squeeze(1)
    return torch.where(positions < max_model_len, slots, -1)


def paged_attention_rows(
    q: Tensor, stored: Tensor, k_cache: Tensor, v_cache: Tensor, kv_slots: Tensor, kv_lens: Tensor, *,
    layer: int, scale: float, window: int | None = None, soft_cap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend from rows that are a request each to the stored keys of their request; all at once, shapes are static.

    Args:
        q: [1, N, Hq, D]. stored: from `store_kv` of the same layer. kv_slots: [N, L]. kv_lens: [N].
    Returns:
        [1, N, Hq, Dv]. What is stored behind a row's kv_len counts nothing, whatever its bits.
    """
    columns = torch.arange(kv_slots.shape[1], device=q.device)
    seen = columns < kv_lens[:, None]
    if window is not None:
        seen = seen & (columns >= kv_lens[:, None] - window)
    k, v = (kv_formats.read_rows(cache, kv_slots, q.dtype) for cache in (k_cache, v_cache))
    k, v = (torch.where(seen[:, :, None, None], rows, 0) for rows in (k, v))
    out = ops.attention(
        q[0][:, None], k, v, seen[:, None, None], None, layer=layer, kind="masked", scale=scale, soft_cap=soft_cap,
        sinks=sinks,
    )  # fmt: skip
    return out[:, 0][None]


def _build_metadata_fake(
    positions: Tensor, _tables: Tensor, kv_positions: Tensor, **_kw: object
) -> tuple[Tensor, Tensor, Tensor]:
    rows = positions.new_empty(positions.shape[1])
    return positions.new_empty(positions.shape[1], kv_positions.shape[0]), rows, torch.empty_like(rows)


def _paged_attention_fake(
    q: Tensor, _stored: Tensor, _k: Tensor, v_cache: Tensor, *_args: object, **_kw: object
) -> Tensor:
    return q.new_empty(*q.shape[:3], v_cache.shape[2])


for _name, _kernel, _fake in (
    ("store_kv", store_kv, lambda k, *_args, **_kwargs: k.new_empty(0)),
    ("paged_attention", paged_attention, _paged_attention_fake),
    ("paged_attention_rows", paged_attention_rows, _paged_attention_fake),
    ("build_metadata", build_metadata, _build_metadata_fake),
    ("advance_metadata", advance_metadata, lambda _kv, lens, **_kw: (torch.empty_like(lens), torch.empty_like(lens))),
):
    _lib.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pcp::{_name}", _fake, lib=_lib)

STORE_KV = torch.ops.pcp.store_kv.default
PAGED_ATTENTION = torch.ops.pcp.paged_attention.default
PAGED_ATTENTION_ROWS = torch.ops.pcp.paged_attention_rows.default
BUILD_METADATA = torch.ops.pcp.build_metadata.default
ADVANCE_METADATA = torch.ops.pcp.advance_metadata.default
for _op in (STORE_KV, PAGED_ATTENTION, PAGED_ATTENTION_ROWS):
    torch.fx.node.has_side_effect(_op)

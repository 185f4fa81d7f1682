"""Paged KV: the ops that write new keys and values and attend over what is stored; schema, shape function, reference.

A cache is two tensors, keys [S + 1, Hkv, D] and values [S + 1, Hkv, Dv], S slots and one row that takes what no slot
takes (padding); `kv_formats` says how a row lies in it. Slot of position p of a request:
block_table[p // block_size] * block_size + p % block_size.
Order is a data edge: `store_kv` and `store_gathered_kv` return an empty tensor that `paged_attention` takes.

What rows may read is said by *spans* [N, 4], runs of rows of one request at consecutive positions:

    request, row of the block tables | first row | number of rows | position of the last row + 1

in the order of the rows, without overlap; spans of 0 rows, at the end, are padding, and rows of no span too. The host
makes them for any mix of prompts and decodes. Where each row is a request of its own they are made in the graph
(`build_metadata`), so that passes can see of what they are made, make them once, and advance them from one position to
the next. How many positions a span may read is bounded by the width of the block tables, never by a number of the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pcp_compiler import kv_formats
from pcp_compiler.plan.capabilities import find_backend

_lib = torch.library.Library("pcp", "FRAGMENT")  # lives as long as the process

_lib.define("store_kv(Tensor k, Tensor v, Tensor slots, Tensor k_cache, Tensor v_cache, *, int layer) -> Tensor")
_lib.define(
    "store_gathered_kv(Tensor expanded, Tensor expanded_slots, Tensor k_cache, Tensor v_cache, *, int layer) -> Tensor"
)
_lib.define(
    "paged_attention(Tensor q, Tensor stored, Tensor k_cache, Tensor v_cache, Tensor spans, Tensor block_tables, *,"
    " str backend, int block_size, int layer, float scale, int? window=None, float? soft_cap=None,"
    " Tensor? sinks=None) -> Tensor"
)
_lib.define(
    "build_metadata(Tensor positions, Tensor block_tables, *, int block_size, int max_model_len) -> (Tensor, Tensor)"
)
_lib.define(
    "advance_metadata(Tensor spans, Tensor block_tables, *, int by, int block_size, int max_model_len)"
    " -> (Tensor, Tensor)"
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


def store_gathered_kv(
    expanded: Tensor, expanded_slots: Tensor, k_cache: Tensor, v_cache: Tensor, *, layer: int
) -> Tensor:
    """Write gathered rows to their slots as they come, rank after rank: what `store_kv` does with restored ones.

    Args:
        expanded: [P * W, Hkv * D + Hkv * Dv], keys and then values of each row, from `ops.gather_start`.
        expanded_slots: [P * W]; negative ones, of padding and of all but one copy of a row, write nothing.
    Returns:
        An empty tensor, for those who have to run after the write.
    """
    num_heads, k_width = k_cache.shape[1], kv_formats.row_width(k_cache)
    k, v = expanded.tensor_split((num_heads * k_width,), dim=1)
    k, v = (rows.unflatten(1, (num_heads, -1)) for rows in (k, v))
    return store_kv(k[None], v[None], expanded_slots, k_cache, v_cache, layer=layer)


def paged_attention(
    q: Tensor, stored: Tensor, k_cache: Tensor, v_cache: Tensor, spans: Tensor, block_tables: Tensor, *,
    backend: str, block_size: int, layer: int, scale: float, window: int | None = None, soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend from query rows to the stored keys of their request, each row up to its own position.

    Args:
        q: [1, W, Hq, D]. stored: from `store_kv` of the same layer.
        spans: [N, 4], int64. block_tables: [R, max_blocks], int32.
        backend: name of the attention backend that does it.
    Returns:
        [1, W, Hq, Dv]; rows in no span are 0. What a row may not see counts nothing, whatever its bits.
    """
    out: Tensor = find_backend(backend).attend(
        q, k_cache, v_cache, spans, block_tables, block_size=block_size, layer=layer, scale=scale, window=window,
        soft_cap=soft_cap, sinks=sinks,
    )  # fmt: skip
    return out


def build_metadata(
    positions: Tensor, block_tables: Tensor, *, block_size: int, max_model_len: int
) -> tuple[Tensor, Tensor]:
    """Return the metadata of rows that are a request each.

    Args:
        positions: [1, N] int64. Rows at `max_model_len` or above are computable and write nothing.
        block_tables: [N, max_blocks] int32, wide enough for every position below `max_model_len` that is asked for;
            block 0 is nobody's: a row whose first block it is is padding.
    Returns:
        spans [N, 4], slots [N]; int64. A slot of -1 is none: nothing is written there.
    Raises:
        RuntimeError: the block tables are too narrow for a position (on a CUDA device: a device-side assertion).
    """
    rows = torch.arange(positions.shape[1], device=positions.device)
    is_live = (block_tables[:, 0] > 0).to(torch.int64)
    spans = torch.stack([rows, rows, is_live, (positions[0] + 1).clamp(max=max_model_len)], dim=1)
    return spans, _slots_at(block_tables, positions[0], block_size, max_model_len)


def advance_metadata(
    spans: Tensor, block_tables: Tensor, *, by: int, block_size: int, max_model_len: int
) -> tuple[Tensor, Tensor]:
    """Return spans and slots of the same rows `by` >= 1 positions further on; arguments as in `build_metadata`."""
    positions = spans[:, 3] + (by - 1)
    advanced = torch.cat([spans[:, :3], (positions + 1).clamp(max=max_model_len)[:, None]], dim=1)
    return advanced, _slots_at(block_tables, positions, block_size, max_model_len)


def _slots_at(block_tables: Tensor, positions: Tensor, block_size: int, max_model_len: int) -> Tensor:
    """Return the slots of positions [N]; -1 for those that no request can have, and for padding."""
    known = torch.where(positions < max_model_len, positions, 0)
    blocks = block_tables.gather(1, (known // block_size)[:, None]).squeeze(1).to(torch.int64)
    has_slot = (positions < max_model_len) & (blocks > 0)
    return torch.where(has_slot, blocks * block_size + known % block_size, -1)


def _store_kv_cuda(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor, *, layer: int) -> Tensor:
    """`store_kv` in one launch."""
    from pcp_compiler.kernels import kv_rows

    kv_rows.store_kv(k[0], v[0], slots, k_cache, v_cache)
    return k.new_empty(0)


def _store_gathered_kv_cuda(
    expanded: Tensor, expanded_slots: Tensor, k_cache: Tensor, v_cache: Tensor, *, layer: int
) -> Tensor:
    """`store_gathered_kv` in one launch."""
    from pcp_compiler.kernels import kv_rows

    kv_rows.store_gathered_kv(expanded, expanded_slots, k_cache, v_cache)
    return expanded.new_empty(0)


def _build_metadata_cuda(
    positions: Tensor, block_tables: Tensor, *, block_size: int, max_model_len: int
) -> tuple[Tensor, Tensor]:
    """`build_metadata` in one launch."""
    from pcp_compiler.kernels import metadata

    return metadata.build_metadata(positions, block_tables, block_size=block_size, max_model_len=max_model_len)


def _advance_metadata_cuda(
    spans: Tensor, block_tables: Tensor, *, by: int, block_size: int, max_model_len: int
) -> tuple[Tensor, Tensor]:
    """`advance_metadata` in one launch."""
    from pcp_compiler.kernels import metadata

    return metadata.advance_metadata(spans, block_tables, by=by, block_size=block_size, max_model_len=max_model_len)


def _build_metadata_fake(positions: Tensor, _tables: Tensor, **_kw: object) -> tuple[Tensor, Tensor]:
    num_rows = positions.shape[1]
    return positions.new_empty(num_rows, 4), positions.new_empty(num_rows)


def _advance_metadata_fake(spans: Tensor, _tables: Tensor, **_kw: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(spans), spans.new_empty(spans.shape[0])


def _paged_attention_fake(
    q: Tensor, _stored: Tensor, _k: Tensor, v_cache: Tensor, *_args: object, **_kw: object
) -> Tensor:
    return q.new_empty(*q.shape[:3], v_cache.shape[2])


for _name, _kernel, _fake in (
    ("store_kv", store_kv, lambda k, *_args, **_kwargs: k.new_empty(0)),
    ("store_gathered_kv", store_gathered_kv, lambda expanded, *_args, **_kwargs: expanded.new_empty(0)),
    ("paged_attention", paged_attention, _paged_attention_fake),
    ("build_metadata", build_metadata, _build_metadata_fake),
    ("advance_metadata", advance_metadata, _advance_metadata_fake),
):
    _lib.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pcp::{_name}", _fake, lib=_lib)

for _name, _kernel in (
    ("store_kv", _store_kv_cuda),
    ("store_gathered_kv", _store_gathered_kv_cuda),
    ("build_metadata", _build_metadata_cuda),
    ("advance_metadata", _advance_metadata_cuda),
):
    _lib.impl(_name, _kernel, "CUDA")

STORE_KV = torch.ops.pcp.store_kv.default
STORE_GATHERED_KV = torch.ops.pcp.store_gathered_kv.default
PAGED_ATTENTION = torch.ops.pcp.paged_attention.default
BUILD_METADATA = torch.ops.pcp.build_metadata.default
ADVANCE_METADATA = torch.ops.pcp.advance_metadata.default
for _op in (STORE_KV, STORE_GATHERED_KV, PAGED_ATTENTION):
    torch.fx.node.has_side_effect(_op)

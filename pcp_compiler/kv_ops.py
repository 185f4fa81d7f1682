"""Paged KV: the ops that write new keys and values and attend over what is stored; schema, shape function, reference.

A cache is two tensors, keys [S + 1, Hkv, D] and values [S + 1, Hkv, Dv], S slots and one row that takes what no slot
takes (padding). Slot of position p of a request: block_table[p // block_size] * block_size + p % block_size.
Order is a data edge: `store_kv` returns an empty tensor that `paged_attention` takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pcp_compiler import ops

_lib = torch.library.Library("pcp", "FRAGMENT")  # lives as long as the process

_lib.define("store_kv(Tensor k, Tensor v, Tensor slots, Tensor k_cache, Tensor v_cache, *, int layer) -> Tensor")
_lib.define(
    "paged_attention(Tensor q, Tensor stored, Tensor k_cache, Tensor v_cache, Tensor spans, Tensor block_tables, *,"
    " int block_size, int layer, float scale, int? window=None, float? soft_cap=None, Tensor? sinks=None)"
    " -> Tensor"
)


def store_kv(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor, *, layer: int) -> Tensor:
    """Write rows to their slots: k [1, N, Hkv, D], v [1, N, Hkv, Dv], slots [N], negative ones write nothing.

    Returns:
        An empty tensor, for those who have to run after the write.
    """
    spare = k_cache.shape[0] - 1
    targets = torch.where(slots < 0, spare, slots)
    k_cache.index_copy_(0, targets, k[0].to(k_cache.dtype))
    v_cache.index_copy_(0, targets, v[0].to(v_cache.dtype))
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
    out = q.new_zeros(*q.shape[:3], v_cache.shape[2])
    offsets = torch.arange(block_size, device=q.device)
    for request, start, num_rows, seq_len in spans.tolist():
        blocks = block_tables[request, : -(-seq_len // block_size)].to(torch.int64)
        slots = (blocks[:, None] * block_size + offsets).flatten()[:seq_len]
        positions = torch.arange(seq_len - num_rows, seq_len, device=q.device)
        out[:, start : start + num_rows] = ops.attention(
            q[:, start : start + num_rows], k_cache[slots][None].to(q.dtype), v_cache[slots][None].to(q.dtype),
            None, positions, layer=layer, kind="full", scale=scale, window=window, soft_cap=soft_cap, sinks=sinks,
        )  # fmt: skip
    return out


def _paged_attention_fake(q: Tensor, _stored: Tensor, _k: Tensor, v_cache: Tensor, *_args: object, **_kw: object) -> Tensor:
    return q.new_empty(*q.shape[:3], v_cache.shape[2])


for _name, _kernel, _fake in (
    ("store_kv", store_kv, lambda k, *_args, **_kwargs: k.new_empty(0)),
    ("paged_attention", paged_attention, _paged_attention_fake),
):
    _lib.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pcp::{_name}", _fake, lib=_lib)

STORE_KV = torch.ops.pcp.store_kv.default
PAGED_ATTENTION = torch.ops.pcp.paged_attention.default
for _op in (STORE_KV, PAGED_ATTENTION):
    torch.fx.node.has_side_effect(_op)

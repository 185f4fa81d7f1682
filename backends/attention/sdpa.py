"""`sdpa`: the reference. Any rows, each masked by its own position; one call of torch's attention a span."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from pcp_compiler import kv_formats, ops
from pcp_compiler.plan.capabilities import AttentionBackend, AttentionCapabilities


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: Tensor, block_tables: Tensor, *, block_size: int, layer: int,
    scale: float, window: int | None = None, soft_cap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `kv_ops.paged_attention`. Reads `spans` on the host."""
    out = q.new_zeros(*q.shape[:3], kv_formats.row_width(v_cache))
    for request, start, num_rows, seq_len in spans.tolist():
        if not num_rows:
            continue
        k, v = read_span(k_cache, v_cache, block_tables[request], seq_len, block_size, q.dtype)
        positions = torch.arange(seq_len - num_rows, seq_len, device=q.device)
        reference = functools.partial(
            ops.attention, layer=layer, kind="full", scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
        )
        rows = q[:, start : start + num_rows]
        if math.isfinite(float(k.sum() + v.sum())):
            out[:, start : start + num_rows] = reference(rows, k[None], v[None], None, positions)
            continue
        k, v, spoilt = _hide_spoilt(k, v)
        num_before = torch.nn.functional.pad(spoilt.cumsum(0), (1, 0))
        first_seen = (positions + 1 - (seq_len if window is None else window)).clamp(min=0)
        sees_spoilt = num_before[positions + 1] > num_before[first_seen]
        attended = reference(rows, k[None], v[None], None, positions)
        out[:, start : start + num_rows] = attended.masked_fill(sees_spoilt[:, None, None], float("nan"))
    return out


def read_span(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_len: int, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return keys and values of a request's first positions, [seq_len, H, D] each."""
    num_blocks = -(-seq_len // block_size)
    if num_blocks > block_table.shape[0]:
        raise IndexError(f"{seq_len} positions are out of bounds of {block_table.shape[0]} KV blocks of {block_size}")
    blocks = block_table[:num_blocks].to(torch.int64)
    slots = (blocks[:, None] * block_size + torch.arange(block_size, device=blocks.device)).flatten()[:seq_len]
    return kv_formats.read_rows(k_cache, slots, dtype), kv_formats.read_rows(v_cache, slots, dtype)


def _hide_spoilt(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values [S, H, D] with zeros in rows that are not finite, and which rows these are, [S].

    A row that may not see such a key must not be touched by it, and 0 times NaN is NaN.
    """
    spoilt = ~(k.isfinite().all(-1) & v.isfinite().all(-1)).all(-1)
    return k.masked_fill(spoilt[:, None, None], 0), v.masked_fill(spoilt[:, None, None], 0), spoilt


BACKEND = AttentionBackend(
    AttentionCapabilities(
        name="sdpa",
        kinds=frozenset(["full", "sliding_window", "mla"]),
        supports_pcp=True,
        ragged_queries=True,
        paged=True,
        non_causal=False,
        priorities={"cpu": 1, "cuda": 3},
    ),
    attend,
)

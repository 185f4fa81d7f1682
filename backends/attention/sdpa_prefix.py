"""`sdpa_prefix`: query rows are the last positions of each request, so that requests of one row each run as one call.

Decode, verify, chunked prefill, and every pass of a replicated drafter are of that form; zigzag rows are not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pcp_compiler import kv_formats, ops
from pcp_compiler.backends.attention import sdpa
from pcp_compiler.plan.capabilities import AttentionBackend, AttentionCapabilities


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: Tensor, block_tables: Tensor, *, block_size: int, layer: int,
    scale: float, window: int | None = None, soft_cap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `kv_ops.paged_attention`. A request has one span at most."""
    if q.shape[1] == spans.shape[0] > 0 and int(spans[:, 2].max()) <= 1:
        return _attend_single_rows(
            q, k_cache, v_cache, spans, block_tables, block_size=block_size, layer=layer, scale=scale, window=window,
            soft_cap=soft_cap, sinks=sinks,
        )  # fmt: skip
    return sdpa.attend(
        q, k_cache, v_cache, spans, block_tables, block_size=block_size, layer=layer, scale=scale, window=window,
        soft_cap=soft_cap, sinks=sinks,
    )  # fmt: skip


def _attend_single_rows(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: Tensor, block_tables: Tensor, *, block_size: int,
    window: int | None, **options: Any,
) -> Tensor:  # fmt: skip
    """Attend from one row a request, all requests at once: N rows over L positions, the width of the block tables.

    What is stored behind a row's own position counts nothing, whatever its bits.
    """
    kv_lens = torch.where(spans[:, 2] > 0, spans[:, 3], 0)[:, None]
    columns = torch.arange(block_tables.shape[1] * block_size, device=q.device)
    seen = columns < kv_lens
    if window is not None:
        seen = seen & (columns >= kv_lens - window)
    blocks = block_tables.index_select(0, spans[:, 0]).to(torch.int64)
    slots = (blocks[:, :, None] * block_size + columns[:block_size]).flatten(1)
    k, v = (kv_formats.read_rows(cache, slots, q.dtype) for cache in (k_cache, v_cache))
    k, v = (torch.where(seen[:, :, None, None], rows, 0) for rows in (k, v))
    out = ops.attention(q[0][:, None], k, v, seen[:, None, None], None, kind="masked", **options)
    return torch.where((kv_lens > 0)[:, :, None, None], out, 0)[:, 0][None]


BACKEND = AttentionBackend(
    AttentionCapabilities(
        name="sdpa_prefix",
        kinds=frozenset(["full", "sliding_window", "mla"]),
        supports_pcp=False,  # its query rows are the last positions of the request, which zigzag rows are not
        ragged_queries=True,
        paged=True,
        non_causal=False,
        priorities={"cpu": 0, "cuda": 2},
    ),
    attend,
)

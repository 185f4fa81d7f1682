"""`flex`: torch's flex_attention, a call a span; compiled on a GPU, where the first call of a shape takes a while."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pcp_compiler import kv_formats
from pcp_compiler.backends.attention.sdpa import read_span
from pcp_compiler.plan.capabilities import AttentionBackend, AttentionCapabilities


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: Tensor, block_tables: Tensor, *, block_size: int, layer: int,
    scale: float, window: int | None = None, soft_cap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `kv_ops.paged_attention`. Reads `spans` on the host."""
    assert sinks is None, "flex does not claim sinks"
    out = q.new_zeros(*q.shape[:3], kv_formats.row_width(v_cache))
    call: Any = _compiled() if q.is_cuda else flex_attention
    for request, start, num_rows, seq_len in spans.tolist():
        if not num_rows:
            continue
        k, v = read_span(k_cache, v_cache, block_tables[request], seq_len, block_size, q.dtype)
        first = torch.tensor(seq_len - num_rows, device=q.device)
        mask = create_block_mask(_sees(first, window), None, None, num_rows, seq_len, device=q.device)
        rows = call(
            q[:, start : start + num_rows].transpose(1, 2), k[None].transpose(1, 2), v[None].transpose(1, 2),
            score_mod=None if soft_cap is None else _capped(torch.tensor(soft_cap, device=q.device)),
            block_mask=mask, scale=scale, enable_gqa=q.shape[2] != k.shape[1],
        )  # fmt: skip
        out[:, start : start + num_rows] = rows.transpose(1, 2)
    return out


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


def _sees(first: Tensor, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return which key a row sees; row 0 is at position `first`."""

    def causal(_batch: Tensor, _head: Tensor, row: Tensor, position: Tensor) -> Tensor:
        return position <= row + first

    def windowed(batch: Tensor, head: Tensor, row: Tensor, position: Tensor) -> Tensor:
        assert window is not None
        return causal(batch, head, row, position) & (position > row + first - window)

    return causal if window is None else windowed


def _capped(soft_cap: Tensor) -> Callable[..., Tensor]:
    """Return what caps scores; a number of Python's would be read on the host where this is compiled."""

    def cap(score: Tensor, *_place: Tensor) -> Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    return cap


BACKEND = AttentionBackend(
    AttentionCapabilities(
        name="flex",
        kinds=frozenset(["full", "sliding_window", "mla"]),
        supports_pcp=True,
        ragged_queries=True,
        paged=True,
        non_causal=False,
        priorities={"cpu": 2, "cuda": 4},
        dtypes=frozenset(["float32", "bfloat16", "float16"]),
        min_head_dim=16,
        sinks=False,
    ),
    attend,
)

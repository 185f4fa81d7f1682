"""`varlen`: torch's flash attention over packed sequences, one call for all spans; keys and values are copied first."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pcp_compiler import kv_formats
from pcp_compiler.backends.attention.sdpa import read_span
from pcp_compiler.plan.capabilities import AttentionBackend, AttentionCapabilities


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: Tensor, block_tables: Tensor, *, block_size: int, layer: int,
    scale: float, window: int | None = None, soft_cap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `kv_ops.paged_attention`. Reads `spans` on the host."""
    assert soft_cap is None and sinks is None, "varlen claims neither soft caps nor sinks"
    out = q.new_zeros(*q.shape[:3], kv_formats.row_width(v_cache))
    live = [span for span in spans.tolist() if span[2]]
    if not live:
        return out
    pieces = [read_span(k_cache, v_cache, block_tables[r], length, block_size, q.dtype) for r, _, _, length in live]
    k, v = (torch.cat(tensors) for tensors in zip(*pieces, strict=True))
    num_rows, seq_lens = [span[2] for span in live], [span[3] for span in live]
    first, last = live[0][1], live[-1][1] + live[-1][2]
    out[0, first:last] = _attend_packed(q[0, first:last], k, v, num_rows, seq_lens, scale, window)
    return out


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, num_rows: Sequence[int], seq_lens: Sequence[int], scale: float, window: int | None
) -> Tensor:
    """Attend within each of N sequences, whose query rows are its last positions: q [sum(num_rows), Hq, D]."""
    varlen_attn: Any = import_module("torch.nn.attention.varlen").varlen_attn  # its signature grows with torch
    starts = [torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=q.device) for lens in (num_rows, seq_lens)]
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in known:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    elif q.shape[1] != k.shape[1]:
        k, v = (kept.repeat_interleave(q.shape[1] // kept.shape[1], dim=1) for kept in (k, v))
    out: Tensor = varlen_attn(q, k, v, *starts, max(num_rows), max(seq_lens), **options)
    return out


def _find_missing() -> str | None:
    """Return what this environment lacks: the function came with torch 2.10, its windows with 2.11."""
    if find_spec("torch.nn.attention.varlen") is None:
        return "torch has no torch.nn.attention.varlen"
    varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn
    has_windows = {"scale", "window_size"} <= set(inspect.signature(varlen_attn).parameters)
    return None if has_windows else "torch's varlen_attn takes no window_size"


BACKEND = AttentionBackend(
    AttentionCapabilities(
        name="varlen",
        kinds=frozenset(["full", "sliding_window"]),
        supports_pcp=True,
        ragged_queries=True,
        paged=True,
        non_causal=False,
        priorities={"cuda": 1},
        dtypes=frozenset(["bfloat16", "float16"]),
        max_head_dim=256,
        equal_head_dims=True,
        soft_cap=False,
        sinks=False,
        missing=_find_missing(),
    ),
    attend,
)

"""How rows of keys or values lie in a cache: as they are, in another float type, or in eight bits with a scale.

A cache is [S + 1, H, D] in a float type, or [S + 1, H, D + 4] bytes: D numbers in float8_e4m3fn and behind them the
float32 scale of this row and head. The scale is the row's own, so a row reads the same whatever was written with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
SCALE_BYTES = 4
"""A float32."""


def cache_shape(row_shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and type of what one slot takes for rows of `row_shape` (H, D): the same, or bytes for fp8."""
    if dtype != FP8:
        return row_shape, dtype
    return (*row_shape[:-1], row_shape[-1] + SCALE_BYTES), torch.uint8


def row_width(cache: Tensor) -> int:
    """Return D of a cache."""
    width: int = cache.shape[-1]
    return width - SCALE_BYTES if cache.dtype == torch.uint8 else width


def write_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [N, H, D] to slots [N] of a cache."""
    cache.index_copy_(0, slots, _pack(rows) if cache.dtype == torch.uint8 else rows.to(cache.dtype))


def read_rows(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of slots [N], [N, H, D] in `dtype`."""
    rows = cache[slots]
    return _unpack(rows, dtype) if cache.dtype == torch.uint8 else rows.to(dtype)


def _pack(rows: Tensor) -> Tensor:
    largest = rows.abs().amax(dim=-1, keepdim=True).float()
    scale = largest / torch.finfo(FP8).max
    scale = scale.masked_fill(scale == 0, 1.0)  # zeros, and numbers so small that their scale is none
    numbers = (rows.float() / scale).to(FP8)
    return torch.cat([numbers.view(torch.uint8), scale.view(torch.uint8)], dim=-1)


def _unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    numbers = packed[..., :-SCALE_BYTES].view(FP8).float()
    scale = packed[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (numbers * scale).to(dtype)

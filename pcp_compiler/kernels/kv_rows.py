"""Rows on the move, one launch each: new keys and values into the paged cache, wanted rows out of a rank's own.

Layouts, with the letters of the kernels' argument suffixes:

    N  rows                     S  slots of a cache, or rows that are wanted
    H  KV heads                 W  rows of one rank
    D  width of a key head      C  columns of a gathered row: H * D of keys, then H * E of values
    E  width of a value head    B  bytes or numbers of a head in a cache: D or E, and in fp8 the scale's four more

`kv_formats` says how a row lies in a cache and is the reference: the bits are the same, on any device. So bfloat16 and
float8, which the interpreter truncates or rounds wrongly, are made by integer arithmetic here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcp_compiler import kv_formats
from pcp_compiler.kernels.launch import NO_KNOB, named_kernel

MAX_TILE_NUMEL = 4096
"""Numbers that one program of a write holds at most: 32 a thread."""
NUMBERS_PER_THREAD = 8
"""16 bytes of bfloat16, the widest load; what the number of warps is picked by."""


def store_kv(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Write keys and values to their slots; the counterpart of `kv_ops.store_kv`.

    Args:
        k: [N, H, D], v: [N, H, E]; any strides with the last 1.
        slots: [N], int64 or int32; a row whose slot is negative is not written, nor read.
        k_cache: [S + 1, H, D] or, fp8, [S + 1, H, D + 4] bytes; any strides with the last 1. v_cache: the same for E.
    Invariant: the cache holds the bits that `kv_formats.write_rows` leaves, in the other slots those from before.
    """
    num_rows, num_heads, k_width = k.shape
    v_width = v.shape[2]
    assert v.shape[:2] == k.shape[:2] and slots.shape == (num_rows,), "keys, values and slots of different rows"
    for cache, width in ((k_cache, k_width), (v_cache, v_width)):
        assert cache.shape[1] == num_heads and kv_formats.row_width(cache) == width, "a cache of other rows"
    if num_rows == 0:
        return
    assert all(x.stride(2) == 1 or x.shape[2] == 1 for x in (k, v, k_cache, v_cache)), "the last dim is not contiguous"
    tile_width = triton.next_power_of_2(max(k_width, v_width))
    tile_heads = min(triton.next_power_of_2(num_heads), max(1, MAX_TILE_NUMEL // tile_width))
    _store_kv_kernel[(num_rows, triton.cdiv(num_heads, tile_heads), 2)](
        k, v, slots, k_cache, v_cache,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), slots.stride(0),
        k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        num_heads, k_width, v_width, TILE_HEADS=tile_heads, TILE_WIDTH=tile_width,
        num_warps=_pick_num_warps(tile_heads * tile_width),
    )  # fmt: skip


def store_gathered_kv(expanded: Tensor, expanded_slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Write keys and values straight from gathered rows, without a copy in global order.

    Args:
        expanded: [P * W, C], rank-major: what `ops.gather_start` makes of a layer's keys and values, in this order
            (`ops.pack_rows`); any row stride.
        expanded_slots: [P * W], negative for padding and for all but one of the copies of a replicated row.
        k_cache, v_cache: as for `store_kv`; they say how wide a head is.
    """
    num_heads, k_width, v_width = k_cache.shape[1], kv_formats.row_width(k_cache), kv_formats.row_width(v_cache)
    k_columns, v_columns = num_heads * k_width, num_heads * v_width
    assert expanded.shape[1] == k_columns + v_columns, f"{expanded.shape[1]} columns for {k_columns} + {v_columns}"
    k, v = expanded.split((k_columns, v_columns), dim=1)
    store_kv(
        k.unflatten(1, (num_heads, k_width)), v.unflatten(1, (num_heads, v_width)), expanded_slots, k_cache, v_cache
    )


def restore_rows(x: Tensor, sources: Tensor, rank: Tensor) -> Tensor:
    """Return the wanted rows that this rank owns, zeros for the others; `ops.owned_rows` of dim 0.

    Args:
        x: [W, C], any row stride and any type.
        sources: [S], expanded row numbers (owner * W + local row); negative: nobody's.
        rank: [], on the device.
    Returns:
        [S, C]. The sum over ranks is exact: every row has one owner.
    """
    width, num_columns = x.shape
    assert (x.stride(1) == 1 or num_columns == 1) and rank.numel() == 1
    out = torch.empty(len(sources), num_columns, dtype=x.dtype, device=x.device)
    if out.numel():
        tile = min(triton.next_power_of_2(num_columns), 1024)
        _restore_rows_kernel[(len(sources), triton.cdiv(num_columns, tile))](
            x, sources, rank, out, x.stride(0), sources.stride(0), max(width, 1), num_columns, TILE=tile,
            num_warps=_pick_num_warps(tile),
        )  # fmt: skip
    return out


def _pick_num_warps(numel: int) -> int:
    return max(1, min(8, numel // (32 * NUMBERS_PER_THREAD)))


@triton.jit
def store_row(
    x_HD, cache_HB, x_head_stride, cache_head_stride, heads, num_heads, width, TILE_WIDTH: tl.constexpr
):  # fmt: skip
    """Write some heads of one row, from a pointer to the row to a pointer to its slot; a part of kernels.

    Args:
        heads: numbers of the heads, those from `num_heads` on are skipped. width: of a head.
    """
    columns = tl.arange(0, TILE_WIDTH)
    mask = (heads < num_heads)[:, None] & (columns < width)[None, :]
    wide_heads = heads.to(tl.int64)[:, None]
    x = tl.load(x_HD + wide_heads * x_head_stride + columns[None, :], mask=mask, other=0.0)
    target_heads = cache_HB + wide_heads * cache_head_stride
    targets = target_heads + columns[None, :]
    if cache_HB.dtype.element_ty == tl.uint8:
        x = x.to(tl.float32)
        scale = row_scale(x)
        tl.store(targets, to_e4m3(tl.div_rn(x, scale[:, None])), mask=mask)
        byte = tl.arange(0, 4)
        scale_bytes = scale.to(tl.int32, bitcast=True)[:, None] >> (8 * byte)[None, :]
        tl.store(target_heads + width + byte[None, :], scale_bytes.to(tl.uint8), mask=(heads < num_heads)[:, None])
    else:
        tl.store(targets, round_to(x, cache_HB.dtype.element_ty), mask=mask)


@triton.jit
def row_scale(x):
    """Return the fp8 scale of each row of float32 numbers: the largest becomes 448; NaN stays, 0 becomes 1."""
    largest = tl.max(tl.abs(x), axis=1)
    is_spoilt = tl.max((x != x).to(tl.int32), axis=1) > 0
    scale = tl.div_rn(largest, 448.0)
    scale = tl.where(scale == 0.0, 1.0, scale)
    return tl.where(is_spoilt, float("nan"), scale)


@triton.jit
def to_e4m3(x):
    """Return float32 numbers as bytes in float8_e4m3fn, to nearest even; from 480 on and NaN: NaN.

    Below 2^-6, its smallest normal number, e4m3 counts in steps of 2^-9, as float32 does from 2^14 on: the sum rounds.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = tl.abs(x)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, subnormal, normal)
    code = tl.where(size < 480.0, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Return numbers in another float type, to nearest even, over float32 as torch does it."""
    if x.dtype == dtype or dtype == tl.float64:
        rounded = x.to(dtype)
    elif dtype == tl.bfloat16:
        wide = x.to(tl.float32)
        bits = wide.to(tl.int32, bitcast=True)
        upper = tl.where(wide == wide, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        rounded = upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = x.to(tl.float32).to(dtype)
    return rounded


@named_kernel(NO_KNOB)
@triton.jit
def _store_kv_kernel(
    k_NHD, v_NHE, slots_N, k_cache_SHB, v_cache_SHB,
    k_row_stride, k_head_stride, v_row_stride, v_head_stride, slots_stride,
    k_slot_stride, k_cache_head_stride, v_slot_stride, v_cache_head_stride,
    num_heads, k_width, v_width, TILE_HEADS: tl.constexpr, TILE_WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_N + row * slots_stride).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    if slot >= 0:
        if tl.program_id(2) == 0:
            store_row(
                k_NHD + row * k_row_stride, k_cache_SHB + slot * k_slot_stride, k_head_stride, k_cache_head_stride,
                heads, num_heads, k_width, TILE_WIDTH,
            )  # fmt: skip
        else:
            store_row(
                v_NHE + row * v_row_stride, v_cache_SHB + slot * v_slot_stride, v_head_stride, v_cache_head_stride,
                heads, num_heads, v_width, TILE_WIDTH,
            )  # fmt: skip


@named_kernel(NO_KNOB)
@triton.jit(do_not_specialize=["width"])
def _restore_rows_kernel(
    x_WC, sources_S, rank, out_SC, row_stride, sources_stride, width, num_columns, TILE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    source = tl.load(sources_S + row * sources_stride).to(tl.int64)
    is_mine = (source >= 0) & (source // width == tl.load(rank))
    mask = columns < num_columns
    owned = tl.load(x_WC + (source % width) * row_stride + columns, mask=mask & is_mine, other=0)
    tl.store(out_SC + row * num_columns + columns, owned, mask=mask)

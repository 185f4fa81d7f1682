"""Attention of ragged query rows over a paged KV cache, or over keys and values that lie in order; one kernel for both.

Layouts: q [W, Hq, D], cache keys [S + 1, Hkv, D] and values [S + 1, Hkv, Dv] (also in the eight-bit form of
`kv_formats`), out [W, Hq, Dv]. Slot of position p: block_table[p // block_size] * block_size + p % block_size.

A program computes one *tile*: up to BLOCK_Q rows of one span with all query heads that share a key head (at most
BLOCK_M packed rows), over all positions they see or over one of `num_kv_splits` parts of them. Tiles are counted by
host integers only, W // BLOCK_Q + N + 1, and find their span on the device: the tiles of span s begin at number
first_row // BLOCK_Q + s, so no two spans meet in a tile; the last ones cover the rows of no span, which come out as 0.
Tiles run last to first: later rows of a prompt see more, and the longest work has to start first. Without spans (rows
of one prompt, each with its number) a tile has two programs: one for the rows that follow on its first, one for others,
so that the border between two runs of rows does not make a tile see all that lies between them.

The positions of a tile fall into three runs of whole blocks: at the window's edge, seen by all rows, at the causal
edge. Only the first and the last are masked. There a value that is not finite is replaced by 0 and the rows that see it
become NaN, since 0 * NaN would reach rows that do not.

Shape suffixes: M packed query rows, N key positions of a block, D the first piece of a key (the largest power of two
that fits), E the rest of it, V a value, S splits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pcp_compiler import kv_formats
from pcp_compiler.kernels.launch import named_kernel

KNOB = "choose another attention.backend, such as sdpa"
LOG2_E = 1.4426950408889634
NO_SCORE = -1.0e30
"""Running maximum of a row that has seen nothing: finite, so that a difference of two is not NaN."""
VALUE_SHIFT = 256.0
"""Eight-bit values meet weights times scale; the power of two keeps these out of float16's subnormals."""
SPANS_AT_ONCE = 64
"""Spans that a tile compares itself with at a time."""
NUM_SMS = 132
"""Multiprocessors of an H100 or H200; the stand-in where no device can be asked."""
MAX_SPLITS = 128
MIN_SPLIT_LEN = 256
"""Positions below which a split costs more to merge than it saves, where programs are few."""
MIN_EVENING_LEN = 4096
"""The same where they are enough, and a split only makes the last round of programs shorter."""
EVEN_ROUNDS = 3
"""Rounds of programs from which on the last one matters little."""

_TINY = tl.constexpr(1.0e-30)
_SPAN_WIDTH = tl.constexpr(4)
_NO_SCORE = tl.constexpr(NO_SCORE)
_LOG2_E = tl.constexpr(LOG2_E)
_VALUE_SHIFT = tl.constexpr(VALUE_SHIFT)
_SPANS_AT_ONCE = tl.constexpr(SPANS_AT_ONCE)


@triton.jit
def _tanh(x):
    """tanh to float32's precision; exp2 alone would lose the small arguments."""
    square = x * x
    small = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decay = tl.exp2(tl.abs(x) * (-2 * _LOG2_E))
    large = (1 - decay) / (1 + decay)
    return tl.where(tl.abs(x) < 0.25, small, tl.where(x < 0, -large, large))


@triton.jit
def _find_rows(spans_ptr, tile, num_spans, num_rows, BLOCK_Q: tl.constexpr):
    """Return the span of a tile, -1 for none, its seq_len, the tile's first row, and where the span's rows end."""
    span = -1
    spans_end = 0
    for base in range(0, num_spans, _SPANS_AT_ONCE):
        index = base + tl.arange(0, _SPANS_AT_ONCE)
        in_range = index < num_spans
        first = tl.load(spans_ptr + index * _SPAN_WIDTH + 1, mask=in_range, other=0).to(tl.int32)
        rows = tl.load(spans_ptr + index * _SPAN_WIDTH + 2, mask=in_range, other=0).to(tl.int32)
        first_tile = first // BLOCK_Q + index
        is_in = (tile >= first_tile) & (tile < first_tile + tl.cdiv(rows, BLOCK_Q))
        span = tl.maximum(span, tl.max(tl.where(is_in, index, -1), 0))
        spans_end = tl.maximum(spans_end, tl.max(tl.where(rows > 0, first + rows, 0), 0))
    if span < 0:  # rows behind all spans, or nothing
        first_row = spans_end + (tile - spans_end // BLOCK_Q - num_spans) * BLOCK_Q
        first_row = tl.where(first_row < spans_end, num_rows, first_row)
        end_row = num_rows
        seq_len = 0
    else:
        span_ptr = spans_ptr + span * _SPAN_WIDTH
        span_first = tl.load(span_ptr + 1).to(tl.int32)
        first_row = span_first + (tile - span_first // BLOCK_Q - span) * BLOCK_Q
        end_row = span_first + tl.load(span_ptr + 2).to(tl.int32)
        seq_len = tl.load(span_ptr + 3).to(tl.int32)
    return span, seq_len, first_row, end_row


@triton.jit
def _load_rows(ptr, base, offsets_N, stride, seen_N, FIRST: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
               UNIT: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Load columns FIRST.. of the rows base + offsets; `stride` counts UNITs, which tells how they are aligned."""
    columns = tl.arange(0, PADDED)
    pointers = ptr + base * stride * UNIT + (offsets_N * stride)[:, None] * UNIT + FIRST + columns[None, :]
    if MASKED and WIDTH < PADDED:
        return tl.load(pointers, mask=seen_N[:, None] & (columns < WIDTH)[None, :], other=0.0)
    if MASKED:
        return tl.load(pointers, mask=seen_N[:, None], other=0.0)
    if WIDTH < PADDED:
        return tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _load_pages(table_ptr, block, kv_high, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_WIDE: tl.constexpr):
    """Return the number of the KV block of each position from `block` on, 0 behind the last one that is seen."""
    positions_N = block + tl.arange(0, BLOCK_N)
    pages_N = tl.load(table_ptr + positions_N // BLOCK_SIZE, mask=positions_N < kv_high, other=0)
    return pages_N.to(tl.int64) if IS_WIDE else pages_N


@triton.jit
def _store_stats(part_stats_ptr, part_row_M, stats_size, max_M, sum_M, is_row_M):
    """Store the maxima, and one array further on the sums of weights, of a split's rows."""
    tl.store(part_stats_ptr + part_row_M, max_M, mask=is_row_M)
    tl.store(part_stats_ptr + stats_size + part_row_M, sum_M, mask=is_row_M)


@triton.jit
def _score(q_MD, k_ND):
    """Return q times k transposed, [M, N]; float32 in pieces of 64, since one long sum would round more."""
    ROWS: tl.constexpr = q_MD.shape[0]
    COLUMNS: tl.constexpr = k_ND.shape[0]
    PIECES: tl.constexpr = q_MD.shape[1] // 64
    if q_MD.dtype == tl.float32 and PIECES > 1:
        q_PMD = tl.permute(tl.reshape(q_MD, [ROWS, PIECES, 64]), [1, 0, 2])
        k_PDN = tl.permute(tl.reshape(k_ND, [COLUMNS, PIECES, 64]), [1, 2, 0])
        return tl.sum(tl.dot(q_PMD, k_PDN, input_precision="ieee"), 0)
    return tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")


@triton.jit
def _attend(
    acc_MV, max_M, sum_M, q_MD, q_ME, q_scale_M, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, kv_head, start,
    stop, low_M, high_M, kv_low, kv_high, stride_ks, stride_vs, stride_k_scales, stride_v_scales, factor, cap_in,
    cap_out,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr, VALUE_DIM: tl.constexpr, V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_WIDE: tl.constexpr, HAS_CAP: tl.constexpr,
    FP8: tl.constexpr, UNIT: tl.constexpr, V_IN_K: tl.constexpr, USE_TMA: tl.constexpr, MASKED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Take the positions start..stop - 1, whole blocks, into the running softmax of a tile."""
    IS_SCATTERED: tl.constexpr = BLOCK_SIZE % BLOCK_N != 0
    if IS_SCATTERED:
        pages_N = _load_pages(table_ptr, start, kv_high, BLOCK_N, BLOCK_SIZE, IS_WIDE)
    for block in tl.range(start, stop, BLOCK_N, num_stages=NUM_STAGES):
        positions_N = block + tl.arange(0, BLOCK_N)
        seen_N = (positions_N >= kv_low) & (positions_N < kv_high)
        base = tl.zeros([], tl.int64)
        offsets_N = tl.arange(0, BLOCK_N)
        if IS_SCATTERED:
            offsets_N = pages_N * BLOCK_SIZE + positions_N % BLOCK_SIZE
            # one block ahead, so that the copies under way need not wait for it
            pages_N = _load_pages(table_ptr, block + BLOCK_N, kv_high, BLOCK_N, BLOCK_SIZE, IS_WIDE)
        elif BLOCK_SIZE > 0:
            page = tl.load(table_ptr + block // BLOCK_SIZE).to(tl.int64)
            base += page * BLOCK_SIZE + block % BLOCK_SIZE
        else:
            base += block
        if USE_TMA:
            k_ND = k_ptr.load([base.to(tl.int32), kv_head, 0]).reshape(BLOCK_N, D)
        else:
            k_ND = _load_rows(k_ptr, base, offsets_N, stride_ks, seen_N, 0, D, D, UNIT, MASKED).to(q_MD.dtype)
        s_MN = _score(q_MD, k_ND)
        if E > 0:
            k_NE = _load_rows(k_ptr, base, offsets_N, stride_ks, seen_N, D, HEAD_DIM - D, E, UNIT, MASKED)
            s_MN += _score(q_ME, k_NE.to(q_MD.dtype))
        if FP8:
            k_scales_N = k_scales_ptr + base * stride_k_scales + offsets_N * stride_k_scales
            v_scales_N = v_scales_ptr + base * stride_v_scales + offsets_N * stride_v_scales
            v_scale_N = tl.load(v_scales_N, mask=seen_N, other=0.0) * _VALUE_SHIFT
            s_MN = s_MN * tl.load(k_scales_N, mask=seen_N, other=0.0)[None, :] * q_scale_M[:, None]
        if HAS_CAP:
            s_MN = cap_out * _tanh(s_MN * cap_in)
        if MASKED:
            sees_MN = (positions_N[None, :] >= low_M[:, None]) & (positions_N[None, :] < high_M[:, None])
            s_MN = tl.where(sees_MN, s_MN, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(s_MN, 1) * factor)
        p_MN = tl.exp2(s_MN * factor - new_max_M[:, None])
        decay_M = tl.exp2(max_M - new_max_M)
        sum_M = sum_M * decay_M + tl.sum(p_MN, 1)
        acc_MV = acc_MV * decay_M[:, None]
        max_M = new_max_M

        if V_IN_K:
            v_NV = k_ND
        elif USE_TMA:
            v_NV = v_ptr.load([base.to(tl.int32), kv_head, 0]).reshape(BLOCK_N, V)
        else:
            v_NV = _load_rows(v_ptr, base, offsets_N, stride_vs, seen_N, 0, VALUE_DIM, V, UNIT, MASKED).to(q_MD.dtype)
        if MASKED:
            is_finite_NV = tl.abs(v_NV.to(tl.float32)) < float("inf")
            v_NV = tl.where(is_finite_NV, v_NV, 0.0)
            is_spoilt_N = tl.min(is_finite_NV.to(tl.int32), 1) == 0
            if FP8:
                is_spoilt_N = is_spoilt_N | (tl.abs(v_scale_N) == float("inf")) | (v_scale_N != v_scale_N)
                v_scale_N = tl.where(is_spoilt_N, 0.0, v_scale_N)
            sees_spoilt_M = tl.max((sees_MN & is_spoilt_N[None, :]).to(tl.int32), 1)
            sum_M = tl.where(sees_spoilt_M > 0, float("nan"), sum_M)
        if FP8:
            p_MN = p_MN * v_scale_N[None, :]
        if q_MD.dtype == tl.float32:  # a sum per block: one sum over all positions would round more
            acc_MV += tl.dot(p_MN, v_NV, input_precision="ieee")
        else:
            acc_MV = tl.dot(p_MN.to(q_MD.dtype), v_NV, acc_MV)
    return acc_MV, max_M, sum_M


@named_kernel(KNOB)
@triton.jit(do_not_specialize=["num_rows", "num_spans"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, out_ptr, part_acc_ptr, part_stats_ptr, spans_ptr,
    tables_ptr, q_rows_ptr, sinks_ptr, num_rows, num_spans, stride_qr, stride_qh, stride_ks, stride_kh,
    stride_k_scales, stride_kh_scales, stride_vs, stride_vh, stride_v_scales, stride_vh_scales, stride_table, factor,
    cap_in, cap_out,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, VALUE_DIM: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_WIDE: tl.constexpr, WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_CAP: tl.constexpr, FP8: tl.constexpr, UNIT: tl.constexpr, V_IN_K: tl.constexpr,
    USE_TMA: tl.constexpr, IS_SPLIT: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute one tile, or one split of it: see the module's first lines."""
    BLOCK_Q: tl.constexpr = BLOCK_M // TILE_HEADS
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HEAD_BLOCKS: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    NUM_COLUMNS: tl.constexpr = NUM_KV_HEADS * HEAD_BLOCKS
    NUM_PARTS: tl.constexpr = 1 if q_rows_ptr is None else 2
    column = tl.program_id(0) % NUM_COLUMNS
    order = tl.program_id(0) // NUM_COLUMNS
    tile = tl.num_programs(0) // (NUM_COLUMNS * NUM_PARTS) - 1 - order // NUM_PARTS
    split = tl.program_id(1)
    kv_head = column // HEAD_BLOCKS
    packed_M = tl.arange(0, BLOCK_M)
    head_M = column % HEAD_BLOCKS * TILE_HEADS + packed_M % TILE_HEADS
    row_M = packed_M // TILE_HEADS

    if spans_ptr is None:
        first_row = tile * BLOCK_Q
        end_row = num_rows
        has_rows = True
    else:
        span, seq_len, first_row, end_row = _find_rows(spans_ptr, tile, num_spans, num_rows, BLOCK_Q)
        has_rows = span >= 0
    row_M = first_row + row_M
    is_row_M = (row_M < tl.minimum(end_row, first_row + BLOCK_Q)) & (head_M < GROUP)
    position_M = row_M
    if q_rows_ptr is not None:  # the rows that follow on the first one, or the others: a tile may hold a border
        position_M = tl.load(q_rows_ptr + row_M, mask=is_row_M, other=0).to(tl.int32)
        follows_M = position_M == tl.load(q_rows_ptr + first_row).to(tl.int32) + (row_M - first_row)
        is_row_M = is_row_M & (follows_M == (order % NUM_PARTS == 0))
        has_rows = tl.max(is_row_M.to(tl.int32), 0) > 0
    head_M = kv_head * GROUP + head_M
    out_row_M = row_M.to(tl.int64) * NUM_HEADS + head_M
    values = tl.arange(0, V)
    out_mask_MV = is_row_M[:, None] & (values < VALUE_DIM)[None, :]
    part_row_M = out_row_M + split.to(tl.int64) * num_rows * NUM_HEADS
    stats_size = tl.num_programs(1).to(tl.int64) * num_rows * NUM_HEADS
    nothing_M = tl.zeros([BLOCK_M], tl.float32)

    if not has_rows:  # rows of no span become 0
        if IS_SPLIT:
            _store_stats(part_stats_ptr, part_row_M, stats_size, nothing_M + _NO_SCORE, nothing_M, is_row_M)
        else:
            zeros_MV = tl.zeros([BLOCK_M, V], out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_row_M[:, None] * VALUE_DIM + values[None, :], zeros_MV, mask=out_mask_MV)
        return

    # which positions each row sees, low..high - 1, and which all rows of the tile do
    if spans_ptr is None:
        first_position = tl.min(tl.where(is_row_M, position_M, 2147483647), 0)
        last_position = tl.max(tl.where(is_row_M, position_M, 0), 0)
    else:
        position_M = seq_len - end_row + row_M
        first_position = seq_len - end_row + first_row
        last_position = tl.minimum(first_position + BLOCK_Q - 1, seq_len - 1)
    if CAUSAL:
        high_M = position_M + 1
        kv_high = last_position + 1
        all_high = first_position + 1
    else:
        high_M = tl.zeros([BLOCK_M], tl.int32) + seq_len
        kv_high = seq_len
        all_high = seq_len
    if WINDOW > 0:
        low_M = position_M + (1 - WINDOW)
        kv_low = tl.maximum(first_position + (1 - WINDOW), 0)
        all_low = tl.maximum(last_position + (1 - WINDOW), 0)
    else:
        low_M = tl.zeros([BLOCK_M], tl.int32)
        kv_low = 0
        all_low = 0

    start = kv_low // BLOCK_N * BLOCK_N
    stop = tl.cdiv(kv_high, BLOCK_N) * BLOCK_N
    if IS_SPLIT:
        split_len = tl.cdiv(tl.cdiv(stop - start, BLOCK_N), tl.num_programs(1)) * BLOCK_N
        start = start + split * split_len
        stop = tl.minimum(start + split_len, stop)
        if start >= stop:
            _store_stats(part_stats_ptr, part_row_M, stats_size, nothing_M + _NO_SCORE, nothing_M, is_row_M)
            return
    whole_start = tl.minimum(tl.maximum(tl.cdiv(all_low, BLOCK_N) * BLOCK_N, start), stop)
    whole_stop = tl.maximum(tl.minimum(all_high // BLOCK_N * BLOCK_N, stop), whole_start)

    q_row_M = q_ptr + row_M.to(tl.int64) * stride_qr + head_M * stride_qh
    keys = tl.arange(0, D)
    q_MD = tl.load(q_row_M[:, None] + keys[None, :], mask=is_row_M[:, None], other=0.0)
    if E > 0:
        rest = tl.arange(0, E)
        q_ME = tl.load(
            q_row_M[:, None] + D + rest[None, :],
            mask=is_row_M[:, None] & (rest < HEAD_DIM - D)[None, :],
            other=0.0,
        )
    else:
        q_ME = q_MD
    q_scale_M = tl.full([BLOCK_M], 1.0, tl.float32)
    if FP8 and q_MD.dtype == tl.bfloat16:  # eight bits fit float16 and get there faster
        q_scale_M = tl.maximum(tl.max(tl.abs(q_MD.to(tl.float32)), 1), tl.max(tl.abs(q_ME.to(tl.float32)), 1))
        q_scale_M = tl.maximum(q_scale_M, _TINY)
        q_MD = (q_MD.to(tl.float32) / q_scale_M[:, None]).to(tl.float16)
        q_ME = (q_ME.to(tl.float32) / q_scale_M[:, None]).to(tl.float16)
    max_M = tl.full([BLOCK_M], _NO_SCORE, tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        sink_M = tl.load(sinks_ptr + head_M, mask=is_row_M, other=0.0).to(tl.float32) * _LOG2_E
        max_M = tl.where(split == 0, tl.maximum(sink_M, _NO_SCORE), max_M)
        sum_M = tl.where(split == 0, 1.0, sum_M)
    acc_MV = tl.zeros([BLOCK_M, V], tl.float32)

    table_ptr = tables_ptr
    if BLOCK_SIZE > 0:
        request = tl.load(spans_ptr + span * _SPAN_WIDTH)
        table_ptr = tables_ptr + request.to(tl.int64) * stride_table
    if not USE_TMA:
        k_ptr = k_ptr + kv_head * (stride_kh * UNIT)
        v_ptr = v_ptr + kv_head * (stride_vh * UNIT)
    if FP8:
        k_scales_ptr = k_scales_ptr + kv_head * stride_kh_scales
        v_scales_ptr = v_scales_ptr + kv_head * stride_vh_scales
    if WINDOW > 0:
        acc_MV, max_M, sum_M = _attend(
            acc_MV, max_M, sum_M, q_MD, q_ME, q_scale_M, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, kv_head,
            start, whole_start, low_M, high_M, kv_low, kv_high, stride_ks, stride_vs, stride_k_scales, stride_v_scales,
            factor, cap_in, cap_out, HEAD_DIM, D, E, VALUE_DIM, V, BLOCK_N, BLOCK_SIZE, IS_WIDE, HAS_CAP, FP8, UNIT,
            V_IN_K, USE_TMA, True, 1,
        )  # fmt: skip
    acc_MV, max_M, sum_M = _attend(
        acc_MV, max_M, sum_M, q_MD, q_ME, q_scale_M, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, kv_head,
        whole_start, whole_stop, low_M, high_M, kv_low, kv_high, stride_ks, stride_vs, stride_k_scales, stride_v_scales,
        factor, cap_in, cap_out, HEAD_DIM, D, E, VALUE_DIM, V, BLOCK_N, BLOCK_SIZE, IS_WIDE, HAS_CAP, FP8, UNIT, V_IN_K,
        USE_TMA, False, NUM_STAGES,
    )  # fmt: skip
    acc_MV, max_M, sum_M = _attend(
        acc_MV, max_M, sum_M, q_MD, q_ME, q_scale_M, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, kv_head,
        whole_stop, stop, low_M, high_M, kv_low, kv_high, stride_ks, stride_vs, stride_k_scales, stride_v_scales,
        factor, cap_in, cap_out, HEAD_DIM, D, E, VALUE_DIM, V, BLOCK_N, BLOCK_SIZE, IS_WIDE, HAS_CAP, FP8, UNIT, V_IN_K,
        USE_TMA, True, 1,
    )  # fmt: skip

    if FP8:
        acc_MV = acc_MV * (1 / _VALUE_SHIFT)
    if IS_SPLIT:
        _store_stats(part_stats_ptr, part_row_M, stats_size, max_M, sum_M, is_row_M)
        tl.store(part_acc_ptr + part_row_M[:, None] * VALUE_DIM + values[None, :], acc_MV, mask=out_mask_MV)
    else:
        acc_MV = acc_MV / tl.where(sum_M == 0, 1.0, sum_M)[:, None]
        pointers = out_ptr + out_row_M[:, None] * VALUE_DIM + values[None, :]
        tl.store(pointers, acc_MV.to(out_ptr.dtype.element_ty), mask=out_mask_MV)


@named_kernel(KNOB)
@triton.jit(do_not_specialize=["num_out_rows", "num_splits"])
def _merge_kernel(
    part_acc_ptr, part_stats_ptr, out_ptr, num_out_rows, num_splits, VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row and head: part_acc [splits, W * Hq, Dv], part_stats [2, splits, W * Hq]."""
    row = tl.program_id(0)
    splits = tl.arange(0, BLOCK_S)
    values = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    part_row_S = splits.to(tl.int64) * num_out_rows + row
    max_S = tl.load(part_stats_ptr + part_row_S, mask=splits < num_splits, other=_NO_SCORE)
    part_sum_ptr = part_stats_ptr + num_splits.to(tl.int64) * num_out_rows
    sum_S = tl.load(part_sum_ptr + part_row_S, mask=splits < num_splits, other=0.0)
    weight_S = tl.exp2(max_S - tl.max(max_S, 0))
    total = tl.sum(weight_S * sum_S, 0)
    # a split that saw nothing has written no acc
    acc_SV = tl.load(
        part_acc_ptr + part_row_S[:, None] * VALUE_DIM + values[None, :],
        mask=(sum_S != 0)[:, None] & (values < VALUE_DIM)[None, :],
        other=0.0,
    )
    out_V = tl.sum(acc_SV * weight_S[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + row.to(tl.int64) * VALUE_DIM + values, out_V.to(out_ptr.dtype.element_ty),
             mask=values < VALUE_DIM)  # fmt: skip


class TileShape(NamedTuple):
    """What one program computes at a time, and with what."""

    block_m: int
    """Packed query rows: rows times the query heads of a key head."""
    block_n: int
    """Positions."""
    num_warps: int
    num_stages: int
    """Blocks of keys and values under way."""
    programs_per_sm: int
    """Programs that a multiprocessor runs at a time."""


def pick_tile_shape(packed_rows: int, head_dim: int, item_bytes: int, is_in_order: bool) -> TileShape:
    """Return the tile for spans of about `packed_rows` (rows times query heads per key head).

    Args:
        item_bytes: of a number of q. is_in_order: the copy engine can fetch 64 positions at a time.
    Source: measured on an H200 with `benchmarks/attention.py`; the wide heads are what registers and memory hold.
    """
    if item_bytes == 4:  # no matrix units: small tiles
        return TileShape(16 if packed_rows <= 16 else 32, 32 if head_dim <= 256 else 16, 4, 2, 2)
    if head_dim > 256:
        return TileShape(16, 32, 4, 3, 2) if packed_rows <= 16 else TileShape(64, 64, 8, 2, 1)
    if packed_rows <= 32:
        block_m, block_n = 16 if packed_rows <= 16 else 32, 128 if head_dim <= 128 else 64
        return TileShape(block_m, block_n, 4, 3, 3) if head_dim <= 64 else TileShape(block_m, block_n, 4, 2, 2)
    if head_dim <= 64:
        return TileShape(64, 64, 4, 4 if is_in_order else 3, 2)
    if packed_rows <= 64 or (packed_rows <= 4096 and is_in_order):
        return TileShape(64, 64, 4, 3 if head_dim <= 128 else 2, 2)
    if head_dim <= 128 and is_in_order:
        return TileShape(128, 64, 4, 2, 2)
    return TileShape(128, 64, 8, 3 if head_dim <= 192 else 2, 1)


def num_kv_splits(num_tiles: int, kv_bound: int, shape: TileShape, num_sms: int = NUM_SMS) -> int:
    """Return into how many parts the positions of each tile are split, from host numbers only: a capture keeps it.

    Args:
        num_tiles: programs of the unsplit launch that have work.
        kv_bound: the most positions that a row can see.
        num_sms: multiprocessors of the device.
    Returns:
        1 where the tiles fill the device or the rows see little; else the smallest number that keeps 90 % of the
        device's places busy in every round, or the one that keeps most busy. Large tiles that fill half of the device
        are split for `EVEN_ROUNDS` rounds only.
    """
    places = num_sms * shape.programs_per_sm
    if shape.block_m >= 64 and num_tiles >= places // 2:
        return max(1, min(EVEN_ROUNDS * places // max(num_tiles, 1), kv_bound // MIN_EVENING_LEN))
    most = min(MAX_SPLITS, kv_bound // MIN_SPLIT_LEN)
    if num_tiles >= places or num_tiles == 0 or most <= 1:
        return 1

    def busy(splits: int) -> float:
        programs = num_tiles * splits
        return programs / (places * -(-programs // places))

    choices = range(1, most + 1)
    return next((splits for splits in choices if busy(splits) >= 0.9), max(choices, key=busy))


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: Tensor, block_tables: Tensor, *, block_size: int,
    kv_bound: int, scale: float, window: int | None = None, soft_cap: float | None = None,
    sinks: Tensor | None = None, causal: bool = True,
) -> Tensor:  # fmt: skip
    """Attend from query rows to the stored keys of their request, each row up to its own position.

    Args:
        q: [W, Hq, D] float32, bfloat16 or float16; last dim contiguous.
        k_cache: [S + 1, Hkv, D]. v_cache: [S + 1, Hkv, Dv]; may be columns of `k_cache` (absorbed MLA), either may be
            in the eight-bit form. Last dim contiguous.
        spans: [N, 4] int64 or int32 on the device: request, first row, rows, position of the last row + 1. The first
            begins at row 0 and each where the one before ends; spans without rows may stand anywhere.
        block_tables: [R, max_blocks] int32; only the blocks of positions that are seen are read.
        block_size: positions per block, >= 1.
        kv_bound: upper bound of every span's last number; decides, with the shapes, the number of splits.
        scale: factor on q.k, > 0. window: positions that a row sees, itself included; None: all before it.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap). sinks: [Hq] scores of a key without a value.
        causal: False lets every row see all positions of its span, behind its own too; a window still begins at
            the row's own.
    Returns:
        [W, Hq, Dv] in q's type; rows of no span are 0. What a row does not see counts nothing, whatever its bits. One
        number that is not finite in a slot gives NaN in the rows that see it, in the query heads of its key head.
    """
    assert spans.ndim == 2 and spans.shape[1] == 4 and spans.is_contiguous(), f"spans {spans.shape}"
    assert block_tables.stride(-1) == 1 and block_size >= 1, f"tables {block_tables.shape}, block size {block_size}"
    return _launch(
        q, k_cache, v_cache, spans, block_tables, None, block_size=block_size, kv_bound=kv_bound, scale=scale,
        window=window, soft_cap=soft_cap, sinks=sinks, causal=causal,
    )  # fmt: skip


def attention_rows(
    q: Tensor, k: Tensor, v: Tensor, q_rows: Tensor | None, *, scale: float, window: int | None = None,
    soft_cap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend from rows of one prompt to its keys, without a cache; each row up to itself.

    Args:
        q: [W, Hq, D]. k: [T, Hkv, D]. v: [T, Hkv, Dv]; last dims contiguous.
        q_rows: [W] int64 or int32 on the device: the row of the prompt that each query row is, 0..T - 1, in any order;
            neighbours share a tile, so runs are fast (zigzag rows are two runs). None: query row i is row i (W <= T).
        scale, window, soft_cap, sinks: as in `paged_attention`.
    Returns:
        [W, Hq, Dv] in q's type.
    """
    assert k.shape[:2] == v.shape[:2], f"keys {k.shape}, values {v.shape}"
    return _launch(
        q, k, v, None, None, q_rows, block_size=0, kv_bound=k.shape[0], scale=scale, window=window, soft_cap=soft_cap,
        sinks=sinks, causal=True,
    )  # fmt: skip


def _launch(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor | None, tables: Tensor | None, q_rows: Tensor | None, *,
    block_size: int, kv_bound: int, scale: float, window: int | None, soft_cap: float | None, sinks: Tensor | None,
    causal: bool,
) -> Tensor:  # fmt: skip
    """Launch the kernel over spans and pages, or (block_size 0) over rows whose positions are `q_rows`."""
    _check(q, k, v, scale, window)
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, value_dim = v.shape[1], kv_formats.row_width(v)
    num_spans = 1 if spans is None else spans.shape[0]
    if num_rows == 0 or num_spans == 0:
        return q.new_zeros(num_rows, num_heads, value_dim)
    group = num_heads // num_kv_heads
    fits_descriptor = _fits_descriptor(k) and _fits_descriptor(v)
    is_in_order = fits_descriptor and block_size % 64 == 0
    shape = pick_tile_shape(group * -(-num_rows // num_spans), head_dim, q.element_size(), is_in_order)
    tile_heads = min(group, shape.block_m)
    block_q = shape.block_m // tile_heads
    columns = num_kv_heads * -(-group // tile_heads)
    tiles = -(-num_rows // block_q) if spans is None else num_rows // block_q + num_spans + 1
    parts = 1 if q_rows is None else 2
    seen = kv_bound if window is None else min(kv_bound, window + block_q)
    busy_tiles = columns * max(num_spans, -(-num_rows // block_q))
    splits = num_kv_splits(busy_tiles, seen, shape, _num_sms(q.device))

    out = q.new_empty(num_rows, num_heads, value_dim)
    part_acc = part_stats = None
    if splits > 1:  # sums of values; maxima and sums of weights
        part_acc = out.new_empty(splits, *out.shape, dtype=torch.float32)
        part_stats = out.new_empty(2, *part_acc.shape[:-1], dtype=torch.float32)
    first_piece = 1 << (head_dim.bit_length() - 1)
    rest = head_dim - first_piece
    use_tma = fits_descriptor and block_size % shape.block_n == 0  # also 0: a block of positions is a run of slots
    keys, values = _source(k, shape.block_n, use_tma), _source(v, shape.block_n, use_tma)
    cap = 1.0 if soft_cap is None else soft_cap
    _attention_kernel[(tiles * parts * columns, splits)](
        q, keys.numbers, values.numbers, keys.scales, values.scales, out, part_acc, part_stats, spans, tables, q_rows,
        sinks, num_rows, num_spans, q.stride(0), q.stride(1), *keys.strides, *values.strides,
        0 if tables is None else tables.stride(0), scale * LOG2_E if soft_cap is None else 1.0, scale / cap,
        cap * LOG2_E, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, TILE_HEADS=tile_heads, HEAD_DIM=head_dim,
        D=first_piece, E=max(triton.next_power_of_2(rest), 16) if rest else 0, VALUE_DIM=value_dim,
        V=max(triton.next_power_of_2(value_dim), 16), BLOCK_M=shape.block_m, BLOCK_N=shape.block_n,
        BLOCK_SIZE=block_size, IS_WIDE=max(x.shape[0] * x.stride(0) for x in (k, v)) >= 2**31, WINDOW=window or 0,
        CAUSAL=causal, HAS_CAP=soft_cap is not None, FP8=keys.scales is not None,
        UNIT=kv_formats.SCALE_BYTES if keys.scales is not None else 1,
        V_IN_K=_is_first_piece(v, k, first_piece), USE_TMA=use_tma, IS_SPLIT=splits > 1,
        NUM_STAGES=shape.num_stages, num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    if part_acc is not None and part_stats is not None:
        _merge(part_acc, part_stats, out)
    return out


class _Source(NamedTuple):
    """Keys or values as the kernel takes them."""

    numbers: Tensor | TensorDescriptor
    scales: Tensor | None
    """[S + 1, H], of the eight-bit form."""
    strides: tuple[int, int, int, int]
    """Of a row and a head of the numbers, in units of what they are aligned to; of a row and a head of the scales."""


def _source(x: Tensor, block_n: int, use_tma: bool) -> _Source:
    """Return how the kernel reads keys or values [S, H, D]."""
    row, head, _ = x.stride()
    if x.dtype == torch.uint8:
        row, head = row // kv_formats.SCALE_BYTES, head // kv_formats.SCALE_BYTES
        return _Source(x.view(kv_formats.FP8), x.view(torch.float32)[..., -1], (row, head, row, head))
    if use_tma:
        descriptor = TensorDescriptor(x, list(x.shape), list(x.stride()), [block_n, 1, x.shape[2]])
        return _Source(descriptor, None, (row, head, 0, 0))
    return _Source(x, None, (row, head, 0, 0))


def _is_first_piece(v: Tensor, k: Tensor, width: int) -> bool:
    """Whether values are the columns of the keys that the kernel loads first."""
    return v.dtype != torch.uint8 and v.shape[2] == width and v.data_ptr() == k.data_ptr() and v.stride() == k.stride()


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> None:
    """Refuse what the kernel cannot read; callers have checked what users give."""
    assert q.dtype in (torch.float32, torch.bfloat16, torch.float16), f"queries of {q.dtype}"
    assert q.shape[2] >= 16 and kv_formats.row_width(k) == q.shape[2], f"queries {q.shape}, keys {k.shape}"
    assert q.shape[1] % k.shape[1] == 0 and k.shape[1] == v.shape[1], f"heads of {q.shape}, {k.shape}, {v.shape}"
    assert k.dtype == v.dtype, f"keys of {k.dtype}, values of {v.dtype}"
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "the last dim is not contiguous"
    assert scale > 0 and (window is None or window >= 1), f"scale {scale}, window {window}"


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else NUM_SMS


def _fits_descriptor(x: Tensor) -> bool:
    """Whether the copy engine can read blocks of [T, H, D]: one power of two wide, rows aligned to 16 bytes."""
    is_aligned = x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in x.stride()[:-1])
    return is_aligned and x.shape[2].bit_count() == 1 and x.shape[2] <= 256 and x.element_size() == 2


def _merge(part_acc: Tensor, part_stats: Tensor, out: Tensor) -> None:
    """Merge what the splits wrote into out [W, Hq, Dv]."""
    num_rows, num_heads, value_dim = out.shape
    block_v = min(triton.next_power_of_2(value_dim), 64)
    _merge_kernel[(num_rows * num_heads, triton.cdiv(value_dim, block_v))](
        part_acc, part_stats, out, num_rows * num_heads, part_acc.shape[0], VALUE_DIM=value_dim,
        BLOCK_S=triton.next_power_of_2(part_acc.shape[0]), BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip

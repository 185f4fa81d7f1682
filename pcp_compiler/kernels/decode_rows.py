"""Kernels for steps of few rows, which read every weight once and are bound by that: 1 to 64 rows of a decode step.

    rms_norm_linear  y_i = rmsnorm(x) @ w_i^T + b_i           one launch for up to three weights (q, k, v)
    rms_norm_swiglu  y = silu(n @ gate^T) * (n @ up^T), n = rmsnorm(x)
    linear_residual  y = x @ w^T + b + residual
    rope_store_kv    q and k turned by their positions, k and v written to their cache slots
    linear_argmax    the best of x @ w^T + b, without storing these logits; two launches

Layouts: rows x [N, K] and results [N, O] with any stride between rows; weights [O, K] as `nn.Linear` has them, any
stride between outputs; caches [S + 1, H, D] (`kv_formats`, float types). The last dim of everything is dense.

A program owns BLOCK_O outputs of all rows and walks over the inputs, so that sums have a fixed order and nothing is
accumulated in memory. A single row is a plain reduction; more are a dot of the weights with rows padded to 16, 32 or
64. Sums are float32, results are rounded once. A norm costs no pass of its own: its factor of a row is applied to the
sums, x @ w^T being linear in it. In float16 x * gamma could overflow before that, so there the factors come first.

Tensors in kernels carry their dims: R rows (padded), O outputs, K inputs, H heads, D half a head, T tiles.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcp_compiler.kernels.kv_rows import round_to
from pcp_compiler.kernels.launch import named_kernel

KNOB = "set numerics: exact"
MAX_ROWS = 64
"""More rows are no longer bound by the weights: a matrix multiplication is the right kernel for them."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WEIGHTS_PER_LAUNCH = 3
HEADS_PER_PROGRAM = 8
NO_ID = tl.constexpr(2**31 - 1)
TILES_PER_STEP = 4096


class Tile(NamedTuple):
    """What one program computes at a time, and with what."""

    block_o: int
    block_k: int
    num_warps: int
    num_stages: int


TILES: tuple[tuple[int, int, Tile], ...] = (
    (1, 2048, Tile(4, 512, 2, 1)),  # a warp reads 256 numbers at a time: block_k = 256 warps needs no exchange of x
    (1, 32768, Tile(4, 1024, 4, 1)),
    (1, 1 << 31, Tile(8, 1024, 4, 1)),
    (16, 2048, Tile(16, 128, 4, 4)),
    (16, 32768, Tile(16, 256, 4, 4)),
    (16, 1 << 31, Tile(64, 128, 4, 4)),
    (32, 2048, Tile(16, 128, 4, 4)),
    (32, 32768, Tile(32, 128, 4, 4)),
    (32, 1 << 31, Tile(64, 128, 4, 4)),
    (64, 2048, Tile(16, 128, 4, 4)),
    (64, 32768, Tile(32, 128, 4, 4)),
    (64, 1 << 31, Tile(64, 128, 4, 4)),
)
"""Up to how many rows and outputs, and the tile. Few outputs need small tiles to occupy all of the device, many rows
need large ones, since every program reads them all. Vocabularies are the largest; their tiles bound the second launch.
"""


def pick_tile(num_rows: int, num_outputs: int, dtype: torch.dtype = torch.bfloat16) -> Tile:
    """Return the tile for a number of rows, 1 to MAX_ROWS, and of outputs of all weights together."""
    tile = next(tile for rows, outputs, tile in TILES if num_rows <= rows and num_outputs <= outputs)
    if dtype != torch.float32 or num_rows == 1:
        return tile
    return tile._replace(block_k=tile.block_k // 4)  # exact float32 products unroll in registers


# ---------------------------------------------------------------------------------------------------------------------
# Sums of products


@triton.jit
def _round(value, dtype: tl.constexpr, WIDE: tl.constexpr):
    """WIDE: float32 rows, and any in the interpreter, which truncates to bfloat16 and whose dot does not know it."""
    return round_to(value, dtype) if WIDE else value.to(dtype)


@triton.jit
def _dot(w_OK, x_KR, acc_OR, WIDE: tl.constexpr):
    if WIDE:
        return tl.dot(w_OK.to(tl.float32), x_KR.to(tl.float32), acc_OR, input_precision="ieee")
    return tl.dot(w_OK, x_KR, acc_OR)


@triton.jit
def _load_weights(w_ptr, o_O, k_K, num_outputs, NUM_INPUTS: tl.constexpr, stride):
    is_there = (o_O < num_outputs)[:, None] & (k_K < NUM_INPUTS)[None, :]
    return tl.load(w_ptr + o_O.to(tl.int64)[:, None] * stride + k_K[None, :], mask=is_there, other=0.0)


@triton.jit
def _load_rows(x_ptr, r_R, k_K, num_rows, NUM_INPUTS: tl.constexpr, stride):
    is_there = (k_K < NUM_INPUTS)[:, None] & (r_R < num_rows)[None, :]
    return tl.load(x_ptr + r_R[None, :] * stride + k_K[:, None], mask=is_there, other=0.0)


@triton.jit
def _inverse_rms(
    x_ptr, r_R, num_rows, NUM_INPUTS: tl.constexpr, stride, eps, ROWS: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    squares_KR = tl.zeros([BLOCK_K, ROWS], tl.float32)
    for start in range(0, NUM_INPUTS, BLOCK_K):
        k_K = start + tl.arange(0, BLOCK_K)
        x_KR = _load_rows(x_ptr, r_R, k_K, num_rows, NUM_INPUTS, stride).to(tl.float32)
        squares_KR += x_KR * x_KR
    return tl.rsqrt(tl.sum(squares_KR, axis=0) / NUM_INPUTS + eps)


@triton.jit
def _products_of_row(
    x_ptr, gamma_ptr, w_ptr, up_ptr, o_O, num_outputs, NUM_INPUTS: tl.constexpr, w_stride, up_stride, eps,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return rmsnorm(x) @ w^T and @ up^T of one row, both [O, 1] float32; without gamma x is taken as it is."""
    acc_OK = tl.zeros([BLOCK_O, BLOCK_K], tl.float32)
    up_OK = tl.zeros([BLOCK_O, BLOCK_K], tl.float32)
    squares_1K = tl.zeros([1, BLOCK_K], tl.float32)
    for start in range(0, NUM_INPUTS, BLOCK_K):
        k_K = start + tl.arange(0, BLOCK_K)
        is_in_1K = (k_K < NUM_INPUTS)[None, :]
        x_1K = tl.load(x_ptr + k_K[None, :], mask=is_in_1K, other=0.0).to(tl.float32)
        if gamma_ptr is not None:
            squares_1K += x_1K * x_1K
            x_1K *= tl.load(gamma_ptr + k_K[None, :], mask=is_in_1K, other=0.0).to(tl.float32)
        acc_OK += _load_weights(w_ptr, o_O, k_K, num_outputs, NUM_INPUTS, w_stride).to(tl.float32) * x_1K
        if up_ptr is not None:
            up_OK += _load_weights(up_ptr, o_O, k_K, num_outputs, NUM_INPUTS, up_stride).to(tl.float32) * x_1K
    acc_OR = tl.sum(acc_OK, axis=1)[:, None]
    up_OR = acc_OR
    if up_ptr is not None:
        up_OR = tl.sum(up_OK, axis=1)[:, None]
    if gamma_ptr is not None:
        scale = tl.rsqrt(tl.sum(tl.sum(squares_1K, axis=1), axis=0) / NUM_INPUTS + eps)
        acc_OR *= scale
        up_OR *= scale
    return acc_OR, up_OR


@triton.jit
def _products_of_rows(
    x_ptr, gamma_ptr, w_ptr, up_ptr, o_O, num_rows, num_outputs, NUM_INPUTS: tl.constexpr, x_stride, w_stride,
    up_stride, eps,
    ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, NORM_FIRST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return what `_products_of_row` returns, for several rows: [O, R] float32."""
    r_R = tl.arange(0, ROWS)
    acc_OR = tl.zeros([BLOCK_O, ROWS], tl.float32)
    up_OR = tl.zeros([BLOCK_O, ROWS], tl.float32)
    squares_KR = tl.zeros([BLOCK_K, ROWS], tl.float32)
    scale_R = tl.full([ROWS], 1.0, tl.float32)
    if NORM_FIRST:
        scale_R = _inverse_rms(x_ptr, r_R, num_rows, NUM_INPUTS, x_stride, eps, ROWS, BLOCK_K)
    for start in range(0, NUM_INPUTS, BLOCK_K):
        k_K = start + tl.arange(0, BLOCK_K)
        x_KR = _load_rows(x_ptr, r_R, k_K, num_rows, NUM_INPUTS, x_stride)
        if gamma_ptr is not None:
            wide_KR = x_KR.to(tl.float32)
            if NORM_FIRST:
                wide_KR *= scale_R[None, :]
            else:
                squares_KR += wide_KR * wide_KR
            gamma_K = tl.load(gamma_ptr + k_K, mask=k_K < NUM_INPUTS, other=0.0).to(tl.float32)
            x_KR = _round(wide_KR * gamma_K[:, None], x_ptr.dtype.element_ty, WIDE)
        acc_OR = _dot(_load_weights(w_ptr, o_O, k_K, num_outputs, NUM_INPUTS, w_stride), x_KR, acc_OR, WIDE)
        if up_ptr is not None:
            up_OR = _dot(_load_weights(up_ptr, o_O, k_K, num_outputs, NUM_INPUTS, up_stride), x_KR, up_OR, WIDE)
    if gamma_ptr is not None and not NORM_FIRST:
        scale_R = tl.rsqrt(tl.sum(squares_KR, axis=0) / NUM_INPUTS + eps)
        acc_OR *= scale_R[None, :]
        up_OR *= scale_R[None, :]
    return acc_OR, up_OR


@triton.jit
def _products(
    x_ptr, gamma_ptr, w_ptr, up_ptr, o_O, num_rows, num_outputs, NUM_INPUTS: tl.constexpr, x_stride, w_stride,
    up_stride, eps,
    ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, NORM_FIRST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    if ROWS == 1:
        acc_OR, up_OR = _products_of_row(
            x_ptr, gamma_ptr, w_ptr, up_ptr, o_O, num_outputs, NUM_INPUTS, w_stride, up_stride, eps, BLOCK_O, BLOCK_K
        )
    else:
        acc_OR, up_OR = _products_of_rows(
            x_ptr, gamma_ptr, w_ptr, up_ptr, o_O, num_rows, num_outputs, NUM_INPUTS, x_stride, w_stride, up_stride, eps,
            ROWS, BLOCK_O, BLOCK_K, NORM_FIRST, WIDE,
        )  # fmt: skip
    return acc_OR, up_OR


@triton.jit
def _add_bias(acc_OR, bias_ptr, o_O, num_outputs):
    if bias_ptr is not None:
        acc_OR += tl.load(bias_ptr + o_O, mask=o_O < num_outputs, other=0.0).to(tl.float32)[:, None]
    return acc_OR


# ---------------------------------------------------------------------------------------------------------------------
# Linear layers


@triton.jit
def _linear_tile(
    x_ptr, gamma_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr, tile, num_rows, num_outputs, NUM_INPUTS: tl.constexpr,
    x_stride, w_stride, residual_stride, eps,
    ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, NORM_FIRST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store one tile of rmsnorm(x) @ w^T + bias + residual, the norm only with gamma."""
    o_O = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    r_R = tl.arange(0, ROWS)
    acc_OR, _ = _products(
        x_ptr, gamma_ptr, w_ptr, None, o_O, num_rows, num_outputs, NUM_INPUTS, x_stride, w_stride, 0, eps,
        ROWS, BLOCK_O, BLOCK_K, NORM_FIRST, WIDE,
    )  # fmt: skip
    acc_OR = _add_bias(acc_OR, bias_ptr, o_O, num_outputs)
    is_there = (o_O < num_outputs)[:, None] & (r_R < num_rows)[None, :]
    if residual_ptr is not None:
        residual_OR = tl.load(residual_ptr + r_R[None, :] * residual_stride + o_O[:, None], mask=is_there, other=0.0)
        acc_OR += residual_OR.to(tl.float32)
    out_OR = _round(acc_OR, out_ptr.dtype.element_ty, WIDE)
    tl.store(out_ptr + r_R[None, :] * num_outputs + o_O[:, None], out_OR, mask=is_there)


@named_kernel(KNOB)
@triton.jit
def _norm_linear_kernel(
    x_ptr, gamma_ptr, w0_ptr, w1_ptr, w2_ptr, bias0_ptr, bias1_ptr, bias2_ptr, out0_ptr, out1_ptr, out2_ptr,
    num_outputs0, num_outputs1, num_outputs2, num_rows, NUM_INPUTS: tl.constexpr, x_stride, w0_stride, w1_stride,
    w2_stride, eps,
    ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, NORM_FIRST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    end0 = tl.cdiv(num_outputs0, BLOCK_O)
    end1 = end0 + tl.cdiv(num_outputs1, BLOCK_O)
    if tile < end0:
        _linear_tile(
            x_ptr, gamma_ptr, w0_ptr, bias0_ptr, None, out0_ptr, tile, num_rows, num_outputs0, NUM_INPUTS,
            x_stride, w0_stride, 0, eps, ROWS, BLOCK_O, BLOCK_K, NORM_FIRST, WIDE,
        )  # fmt: skip
    elif tile < end1:
        _linear_tile(
            x_ptr, gamma_ptr, w1_ptr, bias1_ptr, None, out1_ptr, tile - end0, num_rows, num_outputs1, NUM_INPUTS,
            x_stride, w1_stride, 0, eps, ROWS, BLOCK_O, BLOCK_K, NORM_FIRST, WIDE,
        )  # fmt: skip
    else:
        _linear_tile(
            x_ptr, gamma_ptr, w2_ptr, bias2_ptr, None, out2_ptr, tile - end1, num_rows, num_outputs2, NUM_INPUTS,
            x_stride, w2_stride, 0, eps, ROWS, BLOCK_O, BLOCK_K, NORM_FIRST, WIDE,
        )  # fmt: skip


@named_kernel(KNOB)
@triton.jit
def _linear_residual_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr, num_rows, num_outputs, NUM_INPUTS: tl.constexpr, x_stride, w_stride,
    residual_stride,
    ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, NORM_FIRST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    _linear_tile(
        x_ptr, None, w_ptr, bias_ptr, residual_ptr, out_ptr, tl.program_id(0), num_rows, num_outputs, NUM_INPUTS,
        x_stride, w_stride, residual_stride, 0.0, ROWS, BLOCK_O, BLOCK_K, NORM_FIRST, WIDE,
    )  # fmt: skip


@named_kernel(KNOB)
@triton.jit
def _norm_swiglu_kernel(
    x_ptr, gamma_ptr, gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, out_ptr, num_rows, num_outputs,
    NUM_INPUTS: tl.constexpr, x_stride, gate_stride, up_stride, eps,
    ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, NORM_FIRST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    o_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    r_R = tl.arange(0, ROWS)
    gate_OR, up_OR = _products(
        x_ptr, gamma_ptr, gate_ptr, up_ptr, o_O, num_rows, num_outputs, NUM_INPUTS, x_stride, gate_stride, up_stride,
        eps, ROWS, BLOCK_O, BLOCK_K, NORM_FIRST, WIDE,
    )  # fmt: skip
    gate_OR = _add_bias(gate_OR, gate_bias_ptr, o_O, num_outputs)
    up_OR = _add_bias(up_OR, up_bias_ptr, o_O, num_outputs)
    out_OR = _round(gate_OR / (1.0 + tl.exp(-gate_OR)) * up_OR, out_ptr.dtype.element_ty, WIDE)
    is_there = (o_O < num_outputs)[:, None] & (r_R < num_rows)[None, :]
    tl.store(out_ptr + r_R[None, :] * num_outputs + o_O[:, None], out_OR, mask=is_there)


# ---------------------------------------------------------------------------------------------------------------------
# Rotary embedding and cache


@triton.jit
def _load_heads(ptr, h_H, d_D, num_heads, width, stride):
    is_there = (h_H < num_heads)[:, None] & (d_D < width)[None, :]
    return tl.load(ptr + h_H[:, None] * stride + d_D[None, :], mask=is_there, other=0.0)


@triton.jit
def _store_heads(ptr, value_HD, h_H, d_D, num_heads, width, stride, is_written):
    is_there = is_written & (h_H < num_heads)[:, None] & (d_D < width)[None, :]
    tl.store(ptr + h_H[:, None] * stride + d_D[None, :], round_to(value_HD, ptr.dtype.element_ty), mask=is_there)


@triton.jit
def _turn_heads(
    x_ptr, out_ptr, cos_ptr, sin_ptr, h_H, num_heads, x_stride, out_stride, is_written, HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Turn heads of one row: (a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of a head."""
    d_D = tl.arange(0, BLOCK_D)
    is_half = d_D < HALF
    a_HD = _load_heads(x_ptr, h_H, d_D, num_heads, HALF, x_stride).to(tl.float32)
    b_HD = _load_heads(x_ptr + HALF, h_H, d_D, num_heads, HALF, x_stride).to(tl.float32)
    cos_a_D = tl.load(cos_ptr + d_D, mask=is_half, other=0.0).to(tl.float32)
    sin_a_D = tl.load(sin_ptr + d_D, mask=is_half, other=0.0).to(tl.float32)
    cos_b_D = tl.load(cos_ptr + HALF + d_D, mask=is_half, other=0.0).to(tl.float32)
    sin_b_D = tl.load(sin_ptr + HALF + d_D, mask=is_half, other=0.0).to(tl.float32)
    first_HD = round_to(a_HD * cos_a_D[None, :] - b_HD * sin_a_D[None, :], x_ptr.dtype.element_ty)
    second_HD = round_to(b_HD * cos_b_D[None, :] + a_HD * sin_b_D[None, :], x_ptr.dtype.element_ty)
    _store_heads(out_ptr, first_HD, h_H, d_D, num_heads, HALF, out_stride, is_written)
    _store_heads(out_ptr + HALF, second_HD, h_H, d_D, num_heads, HALF, out_stride, is_written)


@named_kernel(KNOB)
@triton.jit
def _rope_store_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, slots_ptr, k_cache_ptr, v_cache_ptr, out_ptr, num_q_heads, num_kv_heads,
    q_row, q_head, k_row, k_head, v_row, v_head, cos_row, sin_row, k_slot, k_slot_head, v_slot, v_slot_head,
    out_row, out_head,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    h_H = tl.arange(0, BLOCK_H)
    q_parts = tl.cdiv(num_q_heads, BLOCK_H)
    kv_parts = tl.cdiv(num_kv_heads, BLOCK_H)
    if part < q_parts:
        _turn_heads(
            q_ptr + row * q_row, out_ptr + row * out_row, cos_ptr + row * cos_row, sin_ptr + row * sin_row,
            h_H + part * BLOCK_H, num_q_heads, q_head, out_head, True, HALF, BLOCK_D,
        )  # fmt: skip
    elif part < q_parts + kv_parts:
        _turn_heads(
            k_ptr + row * k_row, k_cache_ptr + slot * k_slot, cos_ptr + row * cos_row, sin_ptr + row * sin_row,
            h_H + (part - q_parts) * BLOCK_H, num_kv_heads, k_head, k_slot_head, slot >= 0, HALF, BLOCK_D,
        )  # fmt: skip
    else:
        head_H = h_H + (part - q_parts - kv_parts) * BLOCK_H
        d_D = tl.arange(0, BLOCK_V)
        v_HD = _load_heads(v_ptr + row * v_row, head_H, d_D, num_kv_heads, V_WIDTH, v_head)
        target_ptr = v_cache_ptr + slot * v_slot
        _store_heads(target_ptr, v_HD, head_H, d_D, num_kv_heads, V_WIDTH, v_slot_head, slot >= 0)


# ---------------------------------------------------------------------------------------------------------------------
# Best output


@named_kernel(KNOB)
@triton.jit
def _tile_argmax_kernel(
    x_ptr, w_ptr, bias_ptr, best_ptr, ids_ptr, num_rows, num_outputs, NUM_INPUTS: tl.constexpr, x_stride, w_stride,
    ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, NORM_FIRST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    o_O = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    r_R = tl.arange(0, ROWS)
    logits_OR, _ = _products(
        x_ptr, None, w_ptr, None, o_O, num_rows, num_outputs, NUM_INPUTS, x_stride, w_stride, 0, 0.0,
        ROWS, BLOCK_O, BLOCK_K, NORM_FIRST, WIDE,
    )  # fmt: skip
    logits_OR = _add_bias(logits_OR, bias_ptr, o_O, num_outputs)
    logits_OR = _round(logits_OR, x_ptr.dtype.element_ty, WIDE).to(tl.float32)  # ties are those of the rounded logits
    logits_OR = tl.where(logits_OR != logits_OR, float("inf"), logits_OR)
    is_output = (o_O < num_outputs)[:, None]
    best_R = tl.max(tl.where(is_output, logits_OR, float("-inf")), axis=0)
    is_best = is_output & (logits_OR == best_R[None, :])
    ids_R = tl.min(tl.where(is_best, o_O[:, None], NO_ID), axis=0)
    target_R = r_R * tl.num_programs(0) + tile
    tl.store(best_ptr + target_R, best_R, mask=r_R < num_rows)
    tl.store(ids_ptr + target_R, ids_R, mask=r_R < num_rows)


@named_kernel(KNOB)
@triton.jit
def _row_argmax_kernel(tile_best_ptr, tile_ids_ptr, best_ptr, ids_ptr, NUM_TILES: tl.constexpr, BLOCK_T: tl.constexpr):
    row = tl.program_id(0)
    best_T = tl.full([BLOCK_T], float("-inf"), tl.float32)
    ids_T = tl.full([BLOCK_T], NO_ID, tl.int32)
    for start in range(0, NUM_TILES, BLOCK_T):
        t_T = start + tl.arange(0, BLOCK_T)
        is_tile = t_T < NUM_TILES
        values_T = tl.load(tile_best_ptr + row * NUM_TILES + t_T, mask=is_tile, other=float("-inf"))
        found_T = tl.load(tile_ids_ptr + row * NUM_TILES + t_T, mask=is_tile, other=NO_ID)
        is_better = (values_T > best_T) | ((values_T == best_T) & (found_T < ids_T))
        best_T = tl.where(is_better, values_T, best_T)
        ids_T = tl.where(is_better, found_T, ids_T)
    best = tl.max(best_T, axis=0)
    first = tl.min(tl.where(best_T == best, ids_T, NO_ID), axis=0)
    tl.store(best_ptr + row, best.to(best_ptr.dtype.element_ty))  # exact: it was rounded before
    tl.store(ids_ptr + row, first.to(tl.int64))


# ---------------------------------------------------------------------------------------------------------------------
# Host


def rms_norm_linear(
    x: Tensor, gamma: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, eps: float,
    tile: Tile | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return rmsnorm(x) @ w^T + b for each weight, one launch for three weights.

    Args:
        x: [N, K], 0 to MAX_ROWS rows, of a type in DTYPES. gamma: [K], any float type.
        weights: [O_i, K] each, of the type of x. biases: [O_i] each, or None.
        eps: added to the mean square of a row.
        tile: instead of the one from TILES.
    Returns:
        [N, O_i] each. Source: RMSNorm, Zhang and Sennrich 2019, as Llama has it.
    """
    outs = [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]
    x = _dense(x)
    for start in range(0, len(weights), WEIGHTS_PER_LAUNCH):
        part = slice(start, start + WEIGHTS_PER_LAUNCH)
        _launch_norm_linear(x, gamma, weights[part], biases[part], outs[part], eps, tile)
    return outs


def _launch_norm_linear(
    x: Tensor, gamma: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], outs: Sequence[Tensor],
    eps: float, tile: Tile | None,
) -> None:  # fmt: skip
    _check_rows(x, weights, biases)
    chosen = tile or pick_tile(x.shape[0], sum(weight.shape[0] for weight in weights), x.dtype)
    num_tiles = sum(triton.cdiv(weight.shape[0], chosen.block_o) for weight in weights)
    if x.shape[0] == 0 or num_tiles == 0:
        return
    missing = WEIGHTS_PER_LAUNCH - len(weights)
    weights, outs = [*weights, *[weights[0]] * missing], [*outs, *[outs[0]] * missing]
    sizes = [weight.shape[0] for weight in weights[: WEIGHTS_PER_LAUNCH - missing]] + [0] * missing
    _norm_linear_kernel[(num_tiles,)](
        x, gamma, *weights, *biases, *[None] * missing, *outs, *sizes, *x.shape, x.stride(0),
        *(weight.stride(0) for weight in weights), eps, **_constants(x, chosen, is_normed=True),
    )  # fmt: skip


def rms_norm_swiglu(
    x: Tensor, gamma: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None, *, eps: float, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Return silu(n @ gate^T + gate_bias) * (n @ up^T + up_bias) with n = rmsnorm(x), in one launch.

    Args:
        x: [N, K], 0 to MAX_ROWS rows, of a type in DTYPES. gamma: [K], any float type.
        gate, up: [O, K], of the type of x. gate_bias, up_bias: [O].
        eps, tile: as for `rms_norm_linear`.
    Returns:
        [N, O]. Source: SwiGLU, Shazeer 2020.
    """
    _check_rows(x, (gate, up), (gate_bias, up_bias))
    assert gate.shape == up.shape
    x, out = _dense(x), x.new_empty(x.shape[0], gate.shape[0])
    chosen = tile or pick_tile(x.shape[0], gate.shape[0], x.dtype)
    if out.numel():
        _norm_swiglu_kernel[(triton.cdiv(gate.shape[0], chosen.block_o),)](
            x, gamma, gate, up, gate_bias, up_bias, out, x.shape[0], *gate.shape, x.stride(0), gate.stride(0),
            up.stride(0), eps, **_constants(x, chosen, is_normed=True),
        )  # fmt: skip
    return out


def linear_residual(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, *, tile: Tile | None = None
) -> Tensor:
    """Return x @ weight^T + bias + residual, in one launch.

    Args:
        x: [N, K], 0 to MAX_ROWS rows, of a type in DTYPES. weight: [O, K]. bias: [O] or None. residual: [N, O].
        tile: as for `rms_norm_linear`.
    Returns:
        [N, O].
    """
    _check_rows(x, (weight,), (bias,))
    assert residual.shape == (x.shape[0], weight.shape[0])
    x, residual, out = _dense(x), _dense(residual), x.new_empty(residual.shape)
    chosen = tile or pick_tile(x.shape[0], weight.shape[0], x.dtype)
    if out.numel():
        _linear_residual_kernel[(triton.cdiv(weight.shape[0], chosen.block_o),)](
            x, weight, bias, residual, out, x.shape[0], *weight.shape, x.stride(0), weight.stride(0),
            residual.stride(0), **_constants(x, chosen, is_normed=False),
        )  # fmt: skip
    return out


def rope_store_kv(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Return the queries turned by their positions; write turned keys, and values, to their slots; one launch.

    Args:
        q: [N, Hq, D]. k: [N, Hkv, D]. v: [N, Hkv, Dv]. cos, sin: [N, D], of any number of rows.
        slots: [N] integers; negative ones write nothing.
        k_cache, v_cache: [S + 1, Hkv, D] and [S + 1, Hkv, Dv], of a float type.
    Returns:
        [N, Hq, D], contiguous. Source: rotary embeddings, Su et al. 2021, pairs half a head apart as transformers has
        them.
    """
    assert q.shape[2] == k.shape[2] == cos.shape[1] == sin.shape[1] and q.shape[2] % 2 == 0
    assert k_cache.is_floating_point() and v_cache.is_floating_point()
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1
    q, k, v, cos, sin = (_dense(rows) for rows in (q, k, v, cos, sin))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_parts = triton.cdiv(q.shape[1], HEADS_PER_PROGRAM) + 2 * triton.cdiv(k.shape[1], HEADS_PER_PROGRAM)
    if q.shape[0] == 0:
        return out
    half = q.shape[2] // 2
    strides = [size for rows in (q, k, v) for size in rows.stride()[:2]]
    strides += [cos.stride(0), sin.stride(0), *k_cache.stride()[:2], *v_cache.stride()[:2], *out.stride()[:2]]
    _rope_store_kernel[(q.shape[0], num_parts)](
        q, k, v, cos, sin, slots.contiguous(), k_cache, v_cache, out, q.shape[1], k.shape[1], *strides,
        HALF=half, BLOCK_D=triton.next_power_of_2(half), V_WIDTH=v.shape[2],
        BLOCK_V=triton.next_power_of_2(v.shape[2]), BLOCK_H=HEADS_PER_PROGRAM, num_warps=2,
    )  # fmt: skip
    return out


def linear_argmax(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Return the best of the logits x @ weight^T + bias of each row, the lowest id of equal ones; two launches.

    Args:
        x: [N, K], 0 to MAX_ROWS rows, of a type in DTYPES. weight: [V, K], V >= 1. bias: [V] or None.
        tile: as for `rms_norm_linear`.
    Returns:
        ids [N], int64, and their logits [N], of the type of x. Logits are compared as numbers of that type, as if they
        had been stored; NaN counts as +inf.
    """
    _check_rows(x, (weight,), (bias,))
    assert weight.shape[0] > 0
    ids, best = torch.empty(x.shape[0], dtype=torch.int64, device=x.device), x.new_empty(x.shape[0])
    if x.shape[0] == 0:
        return ids, best
    x = _dense(x)
    chosen = tile or pick_tile(x.shape[0], weight.shape[0], x.dtype)
    num_tiles = triton.cdiv(weight.shape[0], chosen.block_o)
    tile_best = torch.empty(x.shape[0], num_tiles, dtype=torch.float32, device=x.device)
    tile_ids = torch.empty(x.shape[0], num_tiles, dtype=torch.int32, device=x.device)
    _tile_argmax_kernel[(num_tiles,)](
        x, weight, bias, tile_best, tile_ids, x.shape[0], *weight.shape, x.stride(0), weight.stride(0),
        **_constants(x, chosen, is_normed=False),
    )  # fmt: skip
    block_t = min(TILES_PER_STEP, triton.next_power_of_2(num_tiles))
    _row_argmax_kernel[(x.shape[0],)](tile_best, tile_ids, best, ids, num_tiles, BLOCK_T=block_t, num_warps=8)
    return ids, best


def _check_rows(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    assert x.dim() == 2 and x.shape[0] <= MAX_ROWS and x.dtype in DTYPES and len(weights) == len(biases)
    for weight, bias in zip(weights, biases, strict=True):
        assert weight.shape[1] == x.shape[1] and weight.dtype == x.dtype and weight.stride(1) == 1
        assert bias is None or (bias.shape == weight.shape[:1] and bias.stride(0) == 1)


def _dense(rows: Tensor) -> Tensor:
    """Return rows whose last dim is dense: the same, or a copy."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _constants(x: Tensor, tile: Tile, *, is_normed: bool) -> dict[str, int | bool]:
    """Return the constants of a kernel that multiplies rows."""
    num_rows = 1 if x.shape[0] == 1 else max(16, triton.next_power_of_2(x.shape[0]))
    return {
        "ROWS": num_rows,
        "BLOCK_O": tile.block_o,
        "BLOCK_K": tile.block_k,
        "NORM_FIRST": is_normed and num_rows > 1 and x.dtype == torch.float16,
        "WIDE": x.dtype == torch.float32 or bool(triton.knobs.runtime.interpret),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }

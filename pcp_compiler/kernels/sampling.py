"""From rows of logits to tokens: argmax, draws of drafts, and the verdict on a round's drafts, for ragged rows.

`sampling_ops` and `runtime.rejection` have the definitions and are the references: distributions are float32, what is
made of several of them float64, draws are races of hashed exponential times. Only sums run in another order here.

A row is cut into tiles of the vocabulary. A launch leaves one number a tile, and each program of the next one combines
those of its row; how a row is cut depends on V alone, and sums over tiles are float64, so that their order does not
show in float32. A row's result therefore depends on no other row, nor on how many there are. Launches: `row_argmax` 2,
`sample_rows` 3, `judge_rows` 2 if all requests are greedy, else 3, with block verification of two drafts or more 4. All
of them can be captured.

Layouts, with the letters of the kernels' argument suffixes:

    N  rows                       R  requests             J  columns: the rows of one request, padded
    V  tokens of the vocabulary   D  drafts, N - R        T  tiles of a row

The rows of request r are `cu_rows[r]` to `cu_rows[r + 1]`. Before each request there are one draft fewer than rows, so
draft j of request r is entry `cu_rows[r] - r + j`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcp_compiler.kernels.launch import NO_KNOB, named_kernel

TILE_SIZE = 4096
"""Tokens that one program looks at, 16 a thread: 32 programs for the row of a large vocabulary."""
TILE_WARPS = 8
ROW_WARPS = 4
"""Of programs that combine the tiles of one row or request."""

GOLDEN_GAMMA: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
"""The hash of `sampling_ops`, here of unsigned words."""
MIX_FACTOR_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_FACTOR_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
UNIT: tl.constexpr = tl.constexpr(2.0**-52)
ACCEPT: tl.constexpr = tl.constexpr(1)
"""This and the next two: `runtime.noise.Stream`."""
RESIDUAL: tl.constexpr = tl.constexpr(2)
BONUS: tl.constexpr = tl.constexpr(3)
NO_TOKEN: tl.constexpr = tl.constexpr(-1)
MAX_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)
"""The largest int32; `x ^ MAX_ID` is MAX_ID - x."""
NOTHING_PACKED: tl.constexpr = tl.constexpr(-(2**63))
"""Below all that `_pack` makes."""


def row_argmax(logits: Tensor) -> Tensor:
    """Return the largest logit's token of each row, the lowest id of a tie; NaN counts as largest.

    Args:
        logits: [N, V], any float type, read as float32; any row stride. 0 < V < 2**31.
    Returns:
        [N], int64.
    """
    best = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        stats = _launch_stats(_with_unit_stride(logits), None, None, None, 1)
        tiling = _tiling(logits)
        _argmax_kernel[(len(logits),)](stats.packed, best, tiling.num_tiles, TILES=tiling.padded, num_warps=ROW_WARPS)
    return best


def sample_rows(logits: Tensor, temperatures: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return a token of each row and the distribution it was drawn from; the kernel of `sampling_ops.sample_draft`.

    Args:
        logits: see `row_argmax`. temperatures: [N], float32; 0 takes the most likely token. keys: [N], int64.
    Returns:
        Token ids [N], int64, below V whatever the logits are, and probabilities [N, V], float32.
    """
    num_rows, vocab_size = logits.shape
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    probs = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    if num_rows:
        logits, temperatures, tiling = _with_unit_stride(logits), temperatures.contiguous(), _tiling(logits)
        stats = _launch_stats(logits, None, None, temperatures, 1)
        scores, winners = _empty_winners(num_rows, 1, tiling.num_tiles, logits.device)
        _draw_kernel[(num_rows, tiling.num_tiles)](
            logits, temperatures, keys.contiguous(), stats.packed, stats.sums, probs, scores, winners,
            logits.stride(0), vocab_size, tiling.num_tiles, TILES=tiling.padded, TILE=tiling.size,
            num_warps=TILE_WARPS,
        )  # fmt: skip
        _winner_kernel[(num_rows,)](
            scores, winners, ids, tiling.num_tiles, TILES=tiling.padded, num_warps=ROW_WARPS
        )  # fmt: skip
    return ids, probs


def judge_rows(
    logits: Tensor, draft_ids: Tensor, draft_probs: Tensor | None, cu_rows: Tensor, max_drafts: int,
    temperatures: Tensor, seeds: Tensor, round_starts: Tensor, *, verification: Literal["token", "block"] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Judge the drafts of every request and choose the token after the accepted ones; `runtime.rejection.verify`.

    Args:
        logits: [N, V], as for `row_argmax`; -inf for tokens that top-k or top-p leave out.
        draft_ids: [D], int64. draft_probs: [D, V], float32, any row stride; None for greedy drafts.
        cu_rows: [R + 1], int64. max_drafts: the most drafts of a request, or more.
        temperatures: [R], float32. seeds, round_starts: [R], int64.
        verification: of requests with a temperature above 0; None says that there are none.
    Returns:
        The fields of `runtime.rejection.Verdict`: token ids [R, max_drafts + 1], accepted and emitted numbers [R],
        int64, and which requests failed, [R], bool.
    """
    num_requests, device = len(cu_rows) - 1, logits.device
    token_ids = torch.empty(num_requests, max_drafts + 1, dtype=torch.int64, device=device)
    num_accepted, num_emitted = torch.empty(2, num_requests, dtype=torch.int64, device=device)
    is_failed = torch.empty(num_requests, dtype=torch.bool, device=device)
    if num_requests:
        batch = _Batch(
            _with_unit_stride(logits), draft_ids.contiguous(),
            None if draft_probs is None or not len(draft_probs) else _with_unit_stride(draft_probs), cu_rows,
            temperatures.contiguous(),
        )  # fmt: skip
        is_sampled = verification is not None
        stats = _launch_stats(
            batch.logits, batch.draft_probs, cu_rows, batch.temperatures if is_sampled else None, max_drafts + 1
        )
        scores, winners = None, None
        if is_sampled:
            rests = _launch_rests(batch, stats, max_drafts) if verification == "block" else None
            scores, winners = _launch_picks(batch, stats, rests, seeds, round_starts, num_accepted, max_drafts)
        tiling = _tiling(logits)
        _finish_kernel[(num_requests,)](
            batch.draft_ids, cu_rows, batch.temperatures, stats.packed, scores, winners, token_ids, num_accepted,
            num_emitted, is_failed.view(torch.uint8), max_drafts + 1, tiling.num_tiles,
            COLUMNS=triton.next_power_of_2(max_drafts + 1), TILES=tiling.padded, num_warps=ROW_WARPS,
        )  # fmt: skip
    return token_ids, num_accepted, num_emitted, is_failed


class _Tiling(NamedTuple):
    """How a row is cut."""

    size: int
    num_tiles: int
    padded: int
    """The next power of two."""


class _Batch(NamedTuple):
    """What is judged; the first arguments of kernels."""

    logits: Tensor
    draft_ids: Tensor
    draft_probs: Tensor | None
    cu_rows: Tensor
    temperatures: Tensor


class _Stats(NamedTuple):
    """What `_stats_kernel` says of each tile; the next arguments of kernels."""

    packed: Tensor
    """The largest logit with its token, [N, T], int64."""
    sums: Tensor | None
    """Of `exp((logit - largest) / temperature)`, [N, T], float32."""
    draft_sums: Tensor | None
    """Of the draft's chances, [D, T], float32."""


def _launch_stats(
    logits: Tensor, draft_probs: Tensor | None, cu_rows: Tensor | None, temperatures: Tensor | None, num_columns: int
) -> _Stats:
    """Return what the temperatures, if any, ask for; without `cu_rows` each row is a request."""
    tiling, num_rows, device = _tiling(logits), len(logits), logits.device
    stats = _Stats(torch.empty(num_rows, tiling.num_tiles, dtype=torch.int64, device=device), None, None)
    if temperatures is not None:
        stats = stats._replace(sums=torch.empty(num_rows, tiling.num_tiles, dtype=torch.float32, device=device))
        if draft_probs is not None:
            shape = len(draft_probs), tiling.num_tiles
            stats = stats._replace(draft_sums=torch.empty(shape, dtype=torch.float32, device=device))
    num_requests = num_rows if cu_rows is None else len(cu_rows) - 1
    _stats_kernel[(num_requests, tiling.num_tiles, num_columns)](
        logits, draft_probs, cu_rows, temperatures, *stats, *_row_strides(logits, draft_probs), logits.shape[1],
        tiling.num_tiles, TILE=tiling.size, num_warps=TILE_WARPS,
    )  # fmt: skip
    return stats


def _launch_rests(batch: _Batch, stats: _Stats, max_drafts: int) -> Tensor:
    """Return the parts of each r_i that block verification needs, [N, T], float64; of other rows nothing."""
    tiling, num_requests = _tiling(batch.logits), len(batch.temperatures)
    rests = torch.empty(stats.packed.shape, dtype=torch.float64, device=batch.logits.device)
    if max_drafts > 1:
        _rests_kernel[(num_requests, tiling.num_tiles, max_drafts - 1)](
            *batch, *stats, rests, *_row_strides(batch.logits, batch.draft_probs), batch.logits.shape[1],
            tiling.num_tiles, COLUMNS=triton.next_power_of_2(max_drafts + 1), TILES=tiling.padded, TILE=tiling.size,
            num_warps=TILE_WARPS,
        )  # fmt: skip
    return rests


def _launch_picks(
    batch: _Batch, stats: _Stats, rests: Tensor | None, seeds: Tensor, round_starts: Tensor, num_accepted: Tensor,
    max_drafts: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill `num_accepted` of sampled requests; return score and token of the winner in each tile, both [R, 2, T]."""
    tiling, num_requests = _tiling(batch.logits), len(batch.temperatures)
    scores, winners = _empty_winners(num_requests, 2, tiling.num_tiles, batch.logits.device)
    _pick_kernel[(num_requests, tiling.num_tiles)](
        *batch, *stats, rests, seeds.contiguous(), round_starts.contiguous(), num_accepted, scores, winners,
        *_row_strides(batch.logits, batch.draft_probs), batch.logits.shape[1], tiling.num_tiles,
        COLUMNS=triton.next_power_of_2(max_drafts + 1), TILES=tiling.padded, TILE=tiling.size, num_warps=TILE_WARPS,
    )  # fmt: skip
    return scores, winners


def _tiling(logits: Tensor) -> _Tiling:
    vocab_size = logits.shape[1]
    assert 0 < vocab_size < 2**31, f"a vocabulary of {vocab_size} tokens"
    size = min(TILE_SIZE, triton.next_power_of_2(vocab_size))
    num_tiles = triton.cdiv(vocab_size, size)
    return _Tiling(size, num_tiles, triton.next_power_of_2(num_tiles))


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _row_strides(logits: Tensor, draft_probs: Tensor | None) -> tuple[int, int]:
    return logits.stride(0), 0 if draft_probs is None else draft_probs.stride(0)


def _empty_winners(num_rows: int, num_races: int, num_tiles: int, device: torch.device) -> tuple[Tensor, Tensor]:
    shape = (num_rows, num_races, num_tiles)
    return torch.empty(shape, dtype=torch.float64, device=device), torch.empty(shape, dtype=torch.int64, device=device)


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 30)) * MIX_FACTOR_1
    bits = (bits ^ (bits >> 27)) * MIX_FACTOR_2
    return bits ^ (bits >> 31)


@triton.jit
def _absorb(state, word):
    return _mix((state ^ word.to(tl.uint64)) + GOLDEN_GAMMA)


@triton.jit
def _round_key(seed, round_start):
    """Return what the keys of a request's draws in this round have in common."""
    return _absorb(_mix(seed.to(tl.uint64) + GOLDEN_GAMMA), round_start)


@triton.jit
def _to_uniform(bits):
    return ((bits >> 12).to(tl.int64).to(tl.float64) + 0.5) * UNIT


@triton.jit
def _accept_draws(round_key, positions):
    return _to_uniform(_absorb(_absorb(round_key, positions), tl.full((), ACCEPT, tl.int64)))


@triton.jit
def _speeds(key, ids):
    """Return `1 / E_x` of each token under a key, float64: the score of token x is its weight times this."""
    return 1.0 / -tl.log(_to_uniform(_absorb(key, ids)))


@triton.jit
def _pack(values, ids):
    """Return float32 numbers with their ids in one int64: the largest has the largest number, or of a tie the lowest
    id. NaN counts as largest, -0 as 0."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ MAX_ID, bits)  # as floats of one sign are ordered, so are their bits
    order = tl.where(values == values, order, MAX_ID)
    return (order.to(tl.int64) << 32) | (ids ^ MAX_ID).to(tl.int64)


@triton.jit
def _packed_value(packed):
    order = (packed >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ MAX_ID, order).to(tl.float32, bitcast=True)


@triton.jit
def _packed_id(packed):
    return (packed & MAX_ID) ^ MAX_ID


@triton.jit
def _take(values_J, columns_J, column):
    """Return the entry of one column."""
    return tl.sum(tl.where(columns_J == column, values_J, tl.zeros_like(values_J)), axis=0)


@triton.jit
def _weights(logits, best, temperature):
    """Return `exp((logit - best) / temperature)`, float32."""
    return tl.exp(tl.div_rn(logits - best, temperature + tl.zeros_like(logits)))


@triton.jit
def _load_tile(row_V, ids, vocab_size, other: tl.constexpr):
    return tl.load(row_V + ids, mask=ids < vocab_size, other=other).to(tl.float32)


@triton.jit
def _load_packed(packed_NT, rows_J, is_row_J, num_tiles, TILES: tl.constexpr):
    """Return the packed bests of each tile of some rows, [J, T]."""
    tiles = tl.arange(0, TILES)[None, :]
    mask = is_row_J[:, None] & (tiles < num_tiles)
    return tl.load(packed_NT + rows_J[:, None] * num_tiles + tiles, mask=mask, other=NOTHING_PACKED)


@triton.jit
def _load_scales(packed_NT, sums_NT, rows_J, is_row_J, temperature, num_tiles, TILES: tl.constexpr):
    """Return of some rows the largest logit and the sum of all weights, both [J]: p is weight / sum."""
    tiles = tl.arange(0, TILES)[None, :]
    mask = is_row_J[:, None] & (tiles < num_tiles)
    packed = _load_packed(packed_NT, rows_J, is_row_J, num_tiles, TILES)
    best_J = _packed_value(tl.max(packed, axis=1))
    sums = tl.load(sums_NT + rows_J[:, None] * num_tiles + tiles, mask=mask, other=0.0)
    parts = sums.to(tl.float64) * _weights(_packed_value(packed), best_J[:, None], temperature)
    return best_J, tl.sum(tl.where(mask, parts, 0.0), axis=1).to(tl.float32)


@triton.jit
def _load_tokens(
    logits_NV, draft_ids_D, draft_probs_DV, draft_sums_DT, first_row, request,
    num_rows, temperature, best_J, sum_J, logits_stride, draft_stride, vocab_size,
    num_tiles, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return the draft ids of a request, p_j(d_j), q_j(d_j), all [J], and how many drafts it has."""
    columns = tl.arange(0, COLUMNS)
    has_draft = columns < num_rows - 1
    drafts = first_row - request + columns
    ids = tl.load(draft_ids_D + drafts, mask=has_draft, other=NO_TOKEN)
    is_known = (ids >= 0) & (ids < vocab_size)
    logits = tl.load(logits_NV + (first_row + columns) * logits_stride + ids, mask=is_known, other=0.0)
    p = tl.div_rn(_weights(logits.to(tl.float32), best_J, temperature), sum_J).to(tl.float64)
    is_draft = ids >= 0
    q = tl.full((COLUMNS,), 1.0, tl.float64)
    if draft_probs_DV is not None:
        q = tl.load(draft_probs_DV + drafts * draft_stride + ids, mask=is_known, other=1.0).to(tl.float64)
        tiles = tl.arange(0, TILES)[None, :]
        mask = has_draft[:, None] & (tiles < num_tiles)
        sums = tl.load(draft_sums_DT + drafts[:, None] * num_tiles + tiles, mask=mask, other=0.0)
        is_draft &= tl.abs(tl.sum(sums, axis=1)) < float("inf")
    num_drafts = tl.min(tl.where(is_draft, COLUMNS, columns), axis=0)
    return ids, tl.where(is_known, p, 0.0), q, num_drafts


@triton.jit
def _prefix_scales(p_J, q_J, COLUMNS: tl.constexpr):
    """Return s_0 to s_K of block verification, [J], float64."""
    columns = tl.arange(0, COLUMNS)
    scales = tl.full((COLUMNS,), 1.0, tl.float64)
    scale = tl.full((), 1.0, tl.float64)
    for column in tl.static_range(COLUMNS - 1):
        weight, q = scale * _take(p_J, columns, column), _take(q_J, columns, column)
        scale = tl.where(weight > 0, tl.where(weight < q, weight / q, 1.0), 0.0)
        scales = tl.where(columns == column + 1, scale, scales)
    return scales


@triton.jit
def _target_tile(logits_NV, row, logits_stride, ids, vocab_size, best, total, temperature):
    """Return p of some tokens of a row, float32; 0 behind the vocabulary."""
    logits = _load_tile(logits_NV + row * logits_stride, ids, vocab_size, float("-inf"))
    weights = _weights(logits, best, temperature)
    return tl.div_rn(weights, total + tl.zeros_like(weights))


@triton.jit
def _draft_tile(draft_probs_DV, draft, draft_stride, draft_id, ids, vocab_size):
    """Return q of some tokens, float64; a point mass without distributions."""
    if draft_probs_DV is None:
        chances = (ids == draft_id).to(tl.float64)
    else:
        chances = _load_tile(draft_probs_DV + draft * draft_stride, ids, vocab_size, 0.0).to(tl.float64)
    return chances


@named_kernel(NO_KNOB)
@triton.jit
def _stats_kernel(
    logits_NV, draft_probs_DV, cu_rows, temperatures_R, packed_NT, sums_NT,
    draft_sums_DT, logits_stride, draft_stride, vocab_size, num_tiles, TILE: tl.constexpr,
):  # fmt: skip
    """Of a tile: best logit and token, sum of weights relative to that best, sum of the draft's chances."""
    request, tile, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row, end = request, request + 1
    if cu_rows is not None:
        row, end = tl.load(cu_rows + request) + column, tl.load(cu_rows + request + 1)
    if row < end:
        ids = tile * TILE + tl.arange(0, TILE)
        logits = _load_tile(logits_NV + row * logits_stride, ids, vocab_size, float("-inf"))
        packed = tl.max(_pack(logits, ids), axis=0)
        tl.store(packed_NT + row * num_tiles + tile, packed)
        if temperatures_R is not None:
            temperature = tl.load(temperatures_R + request)
            if temperature > 0:
                best = _packed_value(packed)
                best = tl.where(best == float("-inf"), 0.0, best)  # of a tile that allows no token
                weights = _weights(logits, best, temperature)
                tl.store(sums_NT + row * num_tiles + tile, tl.sum(weights, axis=0))
                if draft_probs_DV is not None:
                    draft, has_draft = row - request, row + 1 < end
                    bound = tl.where(has_draft, vocab_size, 0)
                    chances = _load_tile(draft_probs_DV + draft * draft_stride, ids, bound, 0.0)
                    tl.store(draft_sums_DT + draft * num_tiles + tile, tl.sum(chances, axis=0), mask=has_draft)


@named_kernel(NO_KNOB)
@triton.jit
def _argmax_kernel(packed_NT, best_N, num_tiles, TILES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    packed = tl.load(packed_NT + row * num_tiles + tiles, mask=tiles < num_tiles, other=NOTHING_PACKED)
    tl.store(best_N + row, _packed_id(tl.max(packed, axis=0)))


@triton.jit
def _store_winner(scores_T, winners_T, tile, scores, ids):
    best = tl.max(scores, axis=0)
    tl.store(scores_T + tile, best)
    tl.store(winners_T + tile, tl.min(tl.where(scores == best, ids, MAX_ID), axis=0).to(tl.int64))


@triton.jit
def _load_winner(scores_T, winners_T, num_tiles, TILES: tl.constexpr):
    """Return the best score of all tiles and its token, the lowest id of a tie."""
    tiles = tl.arange(0, TILES)
    scores = tl.load(scores_T + tiles, mask=tiles < num_tiles, other=-1.0)
    winners = tl.load(winners_T + tiles, mask=tiles < num_tiles, other=MAX_ID)
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, winners, MAX_ID), axis=0)


@triton.jit
def _race(weights, speeds):
    return tl.where(weights > 0, weights * speeds, 0.0)


@named_kernel(NO_KNOB)
@triton.jit
def _draw_kernel(
    logits_NV, temperatures_N, keys_N, packed_NT, sums_NT, probs_NV, scores_N1T,
    winners_N1T, logits_stride, vocab_size, num_tiles, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Distribution and race of one tile of one row."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures_N + row)
    ids = tile * TILE + tl.arange(0, TILE)
    tiles = tl.arange(0, TILES)
    packed = tl.load(packed_NT + row * num_tiles + tiles, mask=tiles < num_tiles, other=NOTHING_PACKED)
    best = tl.max(packed, axis=0)
    if temperature > 0:
        sums = tl.load(sums_NT + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
        parts = sums.to(tl.float64) * _weights(_packed_value(packed), _packed_value(best), temperature)
        total = tl.sum(tl.where(tiles < num_tiles, parts, 0.0), axis=0).to(tl.float32)
        probs = _target_tile(logits_NV, row, logits_stride, ids, vocab_size, _packed_value(best), total, temperature)
    else:
        probs = (ids == _packed_id(best)).to(tl.float32)
    tl.store(probs_NV + row * vocab_size + ids, probs, mask=ids < vocab_size)
    speeds = _speeds(tl.load(keys_N + row).to(tl.uint64), ids)
    scores = _race(tl.where(ids < vocab_size, probs, 0.0).to(tl.float64), speeds)
    _store_winner(scores_N1T + row * num_tiles, winners_N1T + row * num_tiles, tile, scores, ids)


@named_kernel(NO_KNOB)
@triton.jit
def _winner_kernel(scores_N1T, winners_N1T, ids_N, num_tiles, TILES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, winner = _load_winner(scores_N1T + row * num_tiles, winners_N1T + row * num_tiles, num_tiles, TILES)
    tl.store(ids_N + row, winner)


@named_kernel(NO_KNOB)
@triton.jit
def _rests_kernel(
    logits_NV, draft_ids_D, draft_probs_DV, cu_rows, temperatures_R, packed_NT,
    sums_NT, draft_sums_DT, rests_NT, logits_stride, draft_stride, vocab_size,
    num_tiles, COLUMNS: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile's part of r_i, for 0 < i < K."""
    request, tile, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) + 1
    first_row = tl.load(cu_rows + request)
    num_rows = tl.load(cu_rows + request + 1) - first_row
    temperature = tl.load(temperatures_R + request)
    if (temperature > 0) & (column < num_rows - 1):
        columns = tl.arange(0, COLUMNS)
        best_J, sum_J = _load_scales(
            packed_NT, sums_NT, first_row + columns, columns < num_rows, temperature, num_tiles, TILES
        )
        draft_ids, p_J, q_J, _ = _load_tokens(
            logits_NV, draft_ids_D, draft_probs_DV, draft_sums_DT, first_row, request, num_rows, temperature, best_J,
            sum_J, logits_stride, draft_stride, vocab_size, num_tiles, COLUMNS, TILES,
        )  # fmt: skip
        scale = _take(_prefix_scales(p_J, q_J, COLUMNS), columns, column)
        ids = tile * TILE + tl.arange(0, TILE)
        row = first_row + column
        p = _target_tile(
            logits_NV, row, logits_stride, ids, vocab_size, _take(best_J, columns, column),
            _take(sum_J, columns, column), temperature,
        )  # fmt: skip
        q = _draft_tile(draft_probs_DV, row - request, draft_stride, _take(draft_ids, columns, column), ids, vocab_size)
        rest = scale * p.to(tl.float64) - q
        rest = tl.where(rest < 0, 0.0, rest)  # NaN stays
        tl.store(rests_NT + row * num_tiles + tile, tl.sum(tl.where(ids < vocab_size, rest, 0.0), axis=0))


@triton.jit
def _count_by_token(p_J, q_J, num_drafts, round_key, round_start, COLUMNS: tl.constexpr):
    """Return how many drafts token verification accepts."""
    columns = tl.arange(0, COLUMNS)
    is_accepted = (_accept_draws(round_key, round_start + columns) * q_J < p_J) & (columns < num_drafts)
    return tl.min(tl.where(is_accepted, COLUMNS, columns), axis=0)


@triton.jit
def _count_by_block(
    scale_J, rests_NT, first_row, num_drafts, round_key, round_start, num_tiles,
    COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return how many drafts block verification accepts."""
    columns, tiles = tl.arange(0, COLUMNS), tl.arange(0, TILES)[None, :]
    has_rest = (columns > 0) & (columns < num_drafts)
    offsets = (first_row + columns)[:, None] * num_tiles + tiles
    parts = tl.load(rests_NT + offsets, mask=has_rest[:, None] & (tiles < num_tiles), other=0.0)
    rest = tl.sum(parts, axis=1)
    total = rest + 1.0 - scale_J
    chance = tl.where(total == 0, 1.0, rest / total)
    chance = tl.where(columns == num_drafts, scale_J, chance)
    draws = _accept_draws(round_key, round_start + columns - 1)
    is_kept = (columns > 0) & (columns <= num_drafts) & (draws < chance)
    return tl.max(tl.where(is_kept, columns, 0), axis=0)


@named_kernel(NO_KNOB)
@triton.jit
def _pick_kernel(
    logits_NV, draft_ids_D, draft_probs_DV, cu_rows, temperatures_R, packed_NT,
    sums_NT, draft_sums_DT, rests_NT, seeds_R, round_starts_R, num_accepted_R,
    scores_R2T, winners_R2T, logits_stride, draft_stride, vocab_size, num_tiles,
    COLUMNS: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Accepted drafts, and one tile's race for the token after them: by the residual, and by p in case it is empty."""
    request, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_row = tl.load(cu_rows + request)
    num_rows = tl.load(cu_rows + request + 1) - first_row
    temperature = tl.load(temperatures_R + request)
    if temperature > 0:
        columns = tl.arange(0, COLUMNS)
        best_J, sum_J = _load_scales(
            packed_NT, sums_NT, first_row + columns, columns < num_rows, temperature, num_tiles, TILES
        )
        draft_ids, p_J, q_J, num_drafts = _load_tokens(
            logits_NV, draft_ids_D, draft_probs_DV, draft_sums_DT, first_row, request, num_rows, temperature, best_J,
            sum_J, logits_stride, draft_stride, vocab_size, num_tiles, COLUMNS, TILES,
        )  # fmt: skip
        round_start = tl.load(round_starts_R + request)
        round_key = _round_key(tl.load(seeds_R + request), round_start)
        if rests_NT is None:
            scale = tl.full((), 1.0, tl.float64)
            num_accepted = _count_by_token(p_J, q_J, num_drafts, round_key, round_start, COLUMNS)
        else:
            scale_J = _prefix_scales(p_J, q_J, COLUMNS)
            num_accepted = _count_by_block(
                scale_J, rests_NT, first_row, num_drafts, round_key, round_start, num_tiles, COLUMNS, TILES
            )
            scale = _take(scale_J, columns, num_accepted)
        if tile == 0:
            tl.store(num_accepted_R + request, num_accepted.to(tl.int64))
        row = first_row + num_accepted
        ids = tile * TILE + tl.arange(0, TILE)
        p = _target_tile(
            logits_NV, row, logits_stride, ids, vocab_size, _take(best_J, columns, num_accepted),
            _take(sum_J, columns, num_accepted), temperature,
        ).to(tl.float64)  # fmt: skip
        stream = tl.where(num_accepted == num_drafts, BONUS, RESIDUAL)
        speeds = _speeds(_absorb(_absorb(round_key, round_start + num_accepted), stream), ids)
        rest = p
        if num_accepted < num_drafts:
            draft_id = _take(draft_ids, columns, num_accepted)
            rest = scale * p - _draft_tile(draft_probs_DV, row - request, draft_stride, draft_id, ids, vocab_size)
        is_token = ids < vocab_size
        scores_T, winners_T = scores_R2T + request * 2 * num_tiles, winners_R2T + request * 2 * num_tiles
        _store_winner(scores_T, winners_T, tile, _race(tl.where(is_token, rest, 0.0), speeds), ids)
        _store_winner(scores_T + num_tiles, winners_T + num_tiles, tile, _race(tl.where(is_token, p, 0.0), speeds), ids)


@named_kernel(NO_KNOB)
@triton.jit
def _finish_kernel(
    draft_ids_D, cu_rows, temperatures_R, packed_NT, scores_R2T, winners_R2T,
    token_ids_RM, num_accepted_R, num_emitted_R, is_failed_R, num_columns, num_tiles,
    COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Verdict of one request; greedy ones are judged here."""
    request = tl.program_id(0).to(tl.int64)
    first_row = tl.load(cu_rows + request)
    num_rows = tl.load(cu_rows + request + 1) - first_row
    columns = tl.arange(0, COLUMNS)
    is_row = columns < num_rows
    packed = tl.max(_load_packed(packed_NT, first_row + columns, is_row, num_tiles, TILES), axis=1)
    best_ids = _packed_id(packed)
    ids = tl.load(draft_ids_D + first_row - request + columns, mask=columns < num_rows - 1, other=NO_TOKEN)
    num_accepted = tl.min(tl.where(ids == best_ids, COLUMNS, columns), axis=0).to(tl.int64)
    last_id = _take(best_ids, columns, num_accepted)
    if scores_R2T is not None:
        is_sampled = tl.load(temperatures_R + request) > 0
        scores_T, winners_T = scores_R2T + request * 2 * num_tiles, winners_R2T + request * 2 * num_tiles
        score, winner = _load_winner(scores_T, winners_T, num_tiles, TILES)
        _, plain_winner = _load_winner(scores_T + num_tiles, winners_T + num_tiles, num_tiles, TILES)
        num_accepted = tl.where(is_sampled, tl.load(num_accepted_R + request), num_accepted)
        last_id = tl.where(is_sampled, tl.where(score > 0, winner, plain_winner), last_id)
    is_spoilt = is_row & (columns <= num_accepted) & ~(tl.abs(_packed_value(packed)) < float("inf"))
    is_failed = tl.max(is_spoilt.to(tl.int32), axis=0) > 0
    tokens = tl.where(columns < num_accepted, ids, tl.where(columns == num_accepted, last_id, NO_TOKEN))
    tl.store(
        token_ids_RM + request * num_columns + columns, tl.where(is_failed, NO_TOKEN, tokens),
        mask=columns < num_columns,
    )  # fmt: skip
    tl.store(num_accepted_R + request, tl.where(is_failed, 0, num_accepted))
    tl.store(num_emitted_R + request, tl.where(is_failed, 0, num_accepted + 1))
    tl.store(is_failed_R + request, is_failed.to(tl.uint8))

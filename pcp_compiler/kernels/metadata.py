"""Integers that say what rows read and write: attention metadata, shifted ids; one launch each.

Layouts, with the letters of the kernels' argument suffixes:

    N  rows that are a request each, or spans     R  requests of a step
    B  KV blocks of a request's table             V  requests that were judged in it
    T  rows of a step, padding included           M  columns of a verdict: the most drafts of a request, and one more

`kv_ops` says what metadata means and is its reference. Everything is read on the device and written to tensors whose
shapes the host knows, so all of it may be captured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcp_compiler.kernels.launch import NO_KNOB, named_kernel

TILE = 128
"""Rows of a program: one a thread."""
MAX_REQUESTS = 2**16 - 1
"""Of a step: what the search for a row's request can tell apart; its length is fixed: one variant serves all."""

_PAD_SLOT = tl.constexpr(-1)
_NUM_HALVINGS = tl.constexpr(MAX_REQUESTS.bit_length())
_WITH_ASSERTIONS = {"debug": True, "sanitize_overflow": False}  # launch options: our own device assertions, no others


def build_metadata(
    positions: Tensor, block_tables: Tensor, *, block_size: int, max_model_len: int
) -> tuple[Tensor, Tensor]:
    """Return the metadata of rows that are a request each: what `kv_ops.build_metadata` returns.

    Args:
        positions: [1, N] or [N], integers. A row at a negative one is padding, as is one without a first block.
        block_tables: [N, B], rows of any stride; entries of 0 or less are none.
    Returns:
        spans [N, 4], slots [N]; int64. Padding has no row in its span, and slot -1.
    Raises:
        RuntimeError: a table is too narrow for its row's position: a device-side assertion, shown by a later call. The
            interpreter knows none: there the row has no slot.
    """
    num_rows = positions.shape[-1]
    assert positions.numel() == num_rows
    _check_tables(block_tables, num_rows)
    spans, slots = _empty_metadata(num_rows, positions.device)
    if num_rows:
        _build_metadata_kernel[(triton.cdiv(num_rows, TILE),)](
            positions, block_tables, spans, slots, num_rows, positions.stride(-1), block_tables.stride(0),
            block_tables.shape[1], max_model_len, KV_BLOCK_SIZE=block_size, TILE=TILE, **_WITH_ASSERTIONS,
        )  # fmt: skip
    return spans, slots


def advance_metadata(
    spans: Tensor, block_tables: Tensor, *, by: int, block_size: int, max_model_len: int
) -> tuple[Tensor, Tensor]:
    """Return spans and slots of the same rows `by` >= 1 positions further on; `kv_ops.advance_metadata`.

    Args:
        spans: [N, 4], int64, contiguous, from `build_metadata` with the same tables and sizes.
    """
    num_rows = len(spans)
    assert spans.shape == (num_rows, 4) and spans.is_contiguous() and by >= 1
    _check_tables(block_tables, num_rows)
    advanced, slots = _empty_metadata(num_rows, spans.device)
    if num_rows:
        _advance_metadata_kernel[(triton.cdiv(num_rows, TILE),)](
            spans, block_tables, advanced, slots, num_rows, block_tables.stride(0), block_tables.shape[1], by,
            max_model_len, KV_BLOCK_SIZE=block_size, TILE=TILE, **_WITH_ASSERTIONS,
        )  # fmt: skip
    return advanced, slots


def shift_ids(
    input_ids: Tensor, query_start: Tensor, num_drafts: Tensor, next_prompt_ids: Tensor, verdict_rows: Tensor,
    token_ids: Tensor, num_emitted: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return for each row the token at the next position, which an MTP drafter reads, and each request's last row.

    The rows that a request emitted tokens at get these; the last row of a prompt that goes on gets the prompt's next
    token; every other row gets its right neighbour's own token, 0 at the end, which counts for rows before the last
    that counts.

    Args:
        input_ids: [1, T] or [T]. Rows from query_start[R] on are padding, whatever they hold.
        query_start: [R + 1], first row of each request, and the rows in all; requests may have none.
        num_drafts: [R], drafts among the rows of each request: its verdict begins at its row 1 + drafts from the end.
        next_prompt_ids: [R], the token after a request's last row; read where its prompt goes on only.
        verdict_rows: [R], row of each request in the verdict, negative while its prompt goes on.
        token_ids: [V, M] and num_emitted: [V], of `runtime.rejection.Verdict`. V may be 0.
        All integers of any width, contiguous except for the row stride of `token_ids`.
    Returns:
        next_ids [T], padding 0; last_rows [R], the row of each request's last token that counts, for a failed request
        the first that was judged; int64.
    """
    num_rows, num_requests = input_ids.shape[-1], len(num_drafts)
    per_request = (num_drafts, next_prompt_ids, verdict_rows)
    assert input_ids.numel() == num_rows and len(query_start) == num_requests + 1 <= MAX_REQUESTS + 1
    assert all(x.shape == (num_requests,) and x.is_contiguous() for x in per_request)
    assert input_ids.is_contiguous() and query_start.is_contiguous() and num_emitted.is_contiguous()
    assert len(token_ids) == len(num_emitted) and (token_ids.stride(1) == 1 or token_ids.shape[1] == 1)
    next_ids, last_rows = (
        torch.empty(size, dtype=torch.int64, device=input_ids.device) for size in (num_rows, num_requests)
    )
    if num_rows or num_requests:
        _shift_ids_kernel[(triton.cdiv(max(num_rows, num_requests), TILE),)](
            input_ids, query_start, *per_request, token_ids, num_emitted, next_ids, last_rows, num_rows, num_requests,
            token_ids.stride(0), token_ids.shape[1], TILE=TILE,
        )  # fmt: skip
    return next_ids, last_rows


def _check_tables(block_tables: Tensor, num_rows: int) -> None:
    assert len(block_tables) == num_rows, f"{len(block_tables)} block tables for {num_rows} rows"
    assert block_tables.stride(1) == 1 or block_tables.shape[1] == 1
    assert num_rows == 0 or block_tables.shape[1] > 0, "block tables without a column"


def _empty_metadata(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tensors for spans [N, 4] and slots [N]."""
    spans = torch.empty(num_rows, 4, dtype=torch.int64, device=device)
    return spans, torch.empty(num_rows, dtype=torch.int64, device=device)


@triton.jit
def _store_metadata(
    tables_NB, spans_N4, slots_N, rows, positions, is_live, mask, table_stride, num_blocks, max_model_len,
    KV_BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Write spans and slots of rows at some positions."""
    has_slot = is_live & (positions < max_model_len)
    columns = positions // KV_BLOCK_SIZE
    is_in_table = columns < num_blocks
    tl.device_assert(is_in_table, "the block tables are too narrow for a position", mask=has_slot)
    tables = tables_NB + rows.to(tl.int64) * table_stride
    kv_blocks = tl.load(tables + columns, mask=has_slot & is_in_table, other=0).to(tl.int64)
    slots = tl.where(kv_blocks > 0, kv_blocks * KV_BLOCK_SIZE + positions % KV_BLOCK_SIZE, _PAD_SLOT)
    tl.store(slots_N + rows, slots, mask=mask)
    tl.store(spans_N4 + rows * 4, rows, mask=mask)
    tl.store(spans_N4 + rows * 4 + 1, rows, mask=mask)
    tl.store(spans_N4 + rows * 4 + 2, is_live.to(tl.int64), mask=mask)
    tl.store(spans_N4 + rows * 4 + 3, tl.minimum(tl.maximum(positions + 1, 0), max_model_len), mask=mask)


@named_kernel(NO_KNOB)
@triton.jit(do_not_specialize=["num_rows", "table_stride", "num_blocks"])
def _build_metadata_kernel(
    positions_N, tables_NB, spans_N4, slots_N, num_rows, position_stride, table_stride, num_blocks, max_model_len,
    KV_BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = rows < num_rows
    positions = tl.load(positions_N + rows.to(tl.int64) * position_stride, mask=mask, other=-1).to(tl.int64)
    first_blocks = tl.load(tables_NB + rows.to(tl.int64) * table_stride, mask=mask, other=0)
    _store_metadata(
        tables_NB, spans_N4, slots_N, rows, positions, (positions >= 0) & (first_blocks > 0), mask, table_stride,
        num_blocks, max_model_len, KV_BLOCK_SIZE,
    )  # fmt: skip


@named_kernel(NO_KNOB)
@triton.jit(do_not_specialize=["num_rows", "table_stride", "num_blocks", "by"])
def _advance_metadata_kernel(
    spans_N4, tables_NB, advanced_N4, slots_N, num_rows, table_stride, num_blocks, by, max_model_len,
    KV_BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = rows < num_rows
    is_live = tl.load(spans_N4 + rows * 4 + 2, mask=mask, other=0) > 0
    positions = tl.load(spans_N4 + rows * 4 + 3, mask=mask, other=0) + (by - 1)
    _store_metadata(
        tables_NB, advanced_N4, slots_N, rows, positions, is_live, mask, table_stride, num_blocks, max_model_len,
        KV_BLOCK_SIZE,
    )  # fmt: skip


@named_kernel(NO_KNOB)
@triton.jit(do_not_specialize=["num_rows", "num_requests", "token_stride", "num_columns"])
def _shift_ids_kernel(
    input_ids_T, query_start_R, num_drafts_R, next_prompt_ids_R, verdict_rows_R, token_ids_VM, num_emitted_V,
    next_ids_T, last_rows_R, num_rows, num_requests, token_stride, num_columns, TILE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    stop = tl.load(query_start_R + num_requests).to(tl.int32)
    is_live = (rows < stop) & (rows < num_rows)
    neighbours = tl.load(input_ids_T + rows + 1, mask=is_live & (rows + 1 < stop), other=0).to(tl.int64)
    requests = _find_requests(query_start_R, rows, is_live, num_requests)
    ends, firsts, verdict_rows, emitted = _load_requests(
        query_start_R, num_drafts_R, verdict_rows_R, num_emitted_V, requests, is_live
    )
    is_judged = is_live & (rows >= firsts) & (rows - firsts < tl.minimum(emitted, num_columns))
    tokens = token_ids_VM + verdict_rows.to(tl.int64) * token_stride + rows - firsts
    goes_on = is_live & (verdict_rows < 0) & (rows == ends - 1)
    prompt_ids = tl.load(next_prompt_ids_R + requests, mask=goes_on, other=0).to(tl.int64)
    ids = tl.where(is_judged, tl.load(tokens, mask=is_judged, other=0).to(tl.int64), neighbours)
    tl.store(next_ids_T + rows, tl.where(goes_on, prompt_ids, ids), mask=rows < num_rows)

    in_batch = rows < num_requests
    ends, firsts, verdict_rows, emitted = _load_requests(
        query_start_R, num_drafts_R, verdict_rows_R, num_emitted_V, rows, in_batch
    )
    last_rows = tl.where(verdict_rows < 0, ends - 1, firsts + tl.maximum(emitted, 1) - 1)
    tl.store(last_rows_R + rows, last_rows.to(tl.int64), mask=in_batch)


@triton.jit
def _find_requests(query_start_R, rows, mask, num_requests):
    """Return the last request that begins at or before each row: the one whose row it is."""
    low = tl.zeros_like(rows)
    high = low + num_requests
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) // 2
        starts = tl.load(query_start_R + middle, mask=mask, other=0).to(tl.int32)
        low = tl.where(starts <= rows, middle, low)
        high = tl.where(starts <= rows, high, middle)
    return low


@triton.jit
def _load_requests(query_start_R, num_drafts_R, verdict_rows_R, num_emitted_V, requests, mask):
    """Return end and first judged row of requests, their rows in the verdict and how many tokens they emitted."""
    ends = tl.load(query_start_R + requests + 1, mask=mask, other=0).to(tl.int32)
    firsts = ends - 1 - tl.load(num_drafts_R + requests, mask=mask, other=0).to(tl.int32)
    verdict_rows = tl.load(verdict_rows_R + requests, mask=mask, other=-1).to(tl.int32)
    emitted = tl.load(num_emitted_V + verdict_rows, mask=mask & (verdict_rows >= 0), other=0).to(tl.int32)
    return ends, firsts, verdict_rows, emitted

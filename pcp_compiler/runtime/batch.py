"""The rows of one step in global order, and what one PCP rank sees of them.

`Batch` is the only source of positions, slots and logit rows; ranks and drafters derive theirs from it, so no two of
them can count differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pcp_compiler.plan.partition import Partition

PAD_SLOT = -1
"""Slot of a row that writes no K/V. Never an index: writers skip negative slots."""

Phase = Literal["prefill", "mixed", "decode", "verify"]


class RequestRows(NamedTuple):
    """The rows of one request in a step."""

    token_ids: Sequence[int]
    """Input of each row, drafts last; may be empty."""
    num_computed: int
    """Position of the first row."""
    is_prefilling: bool
    num_logits: int
    """Last rows whose logits are needed: 1 + drafts, or 0 while the prompt goes on after these rows."""
    block_table: Sequence[int]
    """KV block of each `block_size` positions, at least to the last row."""


class SpanRow(NamedTuple):
    """Consecutive rows of one request on one rank: attention over the first `seq_len` positions of its paged KV."""

    request: int
    """Index in the batch; a prefill can have two spans on a rank."""
    query_start: int
    """First row on this rank."""
    query_len: int
    """Rows, >= 1."""
    seq_len: int
    """Position of the last row + 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step of all requests; R requests, T rows in global order: request after request, positions ascending."""

    query_lens: NDArray[np.int64]
    """Rows of each request, [R], >= 0."""
    computed: NDArray[np.int64]
    """Positions of each request before its first row, [R]."""
    is_prefilling: NDArray[np.bool_]
    """Whether the rows belong to a prompt, [R]."""
    query_start: NDArray[np.int64]
    """First row of each request, and T, [R + 1]."""
    input_ids: NDArray[np.int64]
    """[T]."""
    positions: NDArray[np.int64]
    """[T]."""
    seq_lens: NDArray[np.int64]
    """Positions of each request after its last row, [R]."""
    slots: NDArray[np.int64]
    """KV slot of each row, [T], in no case one of block 0."""
    block_tables: NDArray[np.int32]
    """[R, max_blocks], unused entries 0."""
    logit_rows: NDArray[np.int64]
    """Rows whose logits are needed, [L], ascending: each verify row, the last row of a prompt."""
    logit_start: NDArray[np.int64]
    """First entry of each request in `logit_rows`, and L, [R + 1]."""

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def phase(self) -> Phase:
        """What the step does, for the choice of a program. Counts alone never make a prompt a decode."""
        has_rows = self.query_lens > 0
        assert has_rows.any(), "a step without rows has no phase"
        prefilling = self.is_prefilling[has_rows]
        if prefilling.all():
            return "prefill"
        if prefilling.any():
            return "mixed"
        return "verify" if self.query_lens.max() > 1 else "decode"


@dataclass(frozen=True, slots=True, eq=False)
class LocalView:
    """The rows of one rank; W rows with padding, P ranks, S spans. All of it may be padding."""

    input_ids: NDArray[np.int64]
    """[W], padding 0."""
    positions: NDArray[np.int64]
    """[W], padding 0."""
    is_padding: NDArray[np.bool_]
    """[W], true at the end only."""
    expanded_slots: NDArray[np.int64]
    """KV slot of each gathered row, [P * W], rank-major, equal on all ranks; PAD_SLOT on padding and on all but one of
    the copies of a replicated row."""
    local_slots: NDArray[np.int64]
    """KV slot of each row of this rank, [W], padding PAD_SLOT: for a step that gathers nothing, all rows replicated."""
    spans: tuple[SpanRow, ...]
    """[S], by `query_start`; they cover the rows that are no padding."""


def build_batch(rows: Sequence[RequestRows], block_size: int, max_blocks: int) -> Batch:
    """Lay the rows of all requests in one batch.

    Args:
        rows: one entry per request, [R]; decodes and prefills in any order.
        block_size: tokens per KV block.
        max_blocks: columns of `block_tables`, the same in every step.
    """
    query_lens = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
    computed = np.array([row.num_computed for row in rows], dtype=np.int64)
    num_logits = np.array([row.num_logits for row in rows], dtype=np.int64)
    assert (num_logits <= query_lens).all(), "a request without rows has no logits"
    query_start, owners, offsets = _ragged(query_lens)
    logit_start, logit_owners, logit_offsets = _ragged(num_logits)
    positions = computed[owners] + offsets
    block_tables = _stack_tables(rows, max_blocks)
    return Batch(
        query_lens=query_lens,
        computed=computed,
        is_prefilling=np.array([row.is_prefilling for row in rows], dtype=np.bool_),
        query_start=query_start,
        input_ids=np.array([token_id for row in rows for token_id in row.token_ids], dtype=np.int64),
        positions=positions,
        seq_lens=computed + query_lens,
        slots=slots_at(block_tables, owners, positions, block_size),
        block_tables=block_tables,
        logit_rows=(query_start[1:] - num_logits)[logit_owners] + logit_offsets,
        logit_start=logit_start,
    )


def slots_at(
    block_tables: NDArray[np.int32], requests: NDArray[np.int64], positions: NDArray[np.int64], block_size: int
) -> NDArray[np.int64]:
    """Return the KV slot of each (request, position) pair, both [N]; the tables [R, max_blocks] must reach it."""
    blocks = block_tables[requests, positions // block_size].astype(np.int64)
    assert (positions >= 0).all() and (blocks > 0).all(), "a position has no KV block"
    return blocks * block_size + positions % block_size


def local_view(batch: Batch, partition: Partition, rank: int) -> LocalView:
    """Return what `rank` runs of the batch, laid out by `partition_batch` of its lengths and phases."""
    assert len(partition.restore) == batch.num_tokens, "the partition is that of another batch"
    num_rows = partition.per_rank[rank]
    rows = partition.local_rows(rank)[:num_rows]
    writers = partition.write_mask
    expanded_slots = np.full(len(writers), PAD_SLOT, dtype=np.int64)
    expanded_slots[writers] = batch.slots[partition.gather[writers]]
    return LocalView(
        input_ids=_pad(batch.input_ids[rows], partition.width, 0),
        positions=_pad(batch.positions[rows], partition.width, 0),
        is_padding=np.arange(partition.width) >= num_rows,
        expanded_slots=expanded_slots,
        local_slots=_pad(batch.slots[rows], partition.width, PAD_SLOT),
        spans=tuple(
            SpanRow(span.request, span.local_start, span.num_tokens, int(batch.positions[span.global_stop - 1]) + 1)
            for span in partition.spans[rank]
        ),
    )


def _ragged(lens: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return start of each group and the total, [N + 1]; group and offset in it of each element, both [sum]."""
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lens)])
    owners = np.repeat(np.arange(len(lens)), lens)
    return starts, owners, np.arange(starts[-1]) - starts[owners]


def _stack_tables(rows: Sequence[RequestRows], max_blocks: int) -> NDArray[np.int32]:
    tables = np.zeros((len(rows), max_blocks), dtype=np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row.block_table)] = row.block_table
    return tables


def _pad(values: NDArray[np.int64], width: int, pad: int) -> NDArray[np.int64]:
    """Return `values` with `pad` behind them, [width]."""
    padded = np.full(width, pad, dtype=np.int64)
    padded[: len(values)] = values
    return padded

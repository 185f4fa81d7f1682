"""The model and drafter of `oracle` on virtual PCP ranks, each with paged K/V caches of its own.

Layout letters: P ranks, W rows of a rank, T rows of the batch, R requests. Every read checks that nobody reads a slot
whose content was given up; every write that it hits each slot once and no slot of block 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pcp_compiler.plan.partition import Partition
from pcp_compiler.runtime.batch import Batch, local_view
from tests.runtime.oracle import FACTOR, NUM_STATES, Tables

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]
FIRST, SECOND, DRAFT = range(3)
"""Caches: the target's two layers and the drafter."""
SENTINEL = 0xDEAD
GARBAGE = 0xBAD


def mix(words: Words) -> Words:
    """Return a hash of each word."""
    return (words ^ (words >> np.uint64(29))) * np.uint64(FACTOR)


@dataclass
class Forward:
    """A target pass: the sums of both layers, for each rank's rows, [P, W], and restored, [T]."""

    local_sums: tuple[Words, Words]
    sums: tuple[Words, Words]


class FakeRanks:
    """P ranks in lock-step. A pass gathers K/V unless all ranks run all rows and `always_gather` is false."""

    def __init__(self, tables: Tables, pcp_size: int, num_blocks: int, block_size: int) -> None:
        self.embed = np.array(tables.embed, dtype=np.uint64)
        self.draft_embed = np.array(tables.draft_embed, dtype=np.uint64)
        self.next_token = np.array(tables.next_token)
        self.error_rate = tables.error_rate
        self.block_size = block_size
        self.kv = np.full((pcp_size, 3, num_blocks * block_size), SENTINEL, dtype=np.uint64)
        self.is_stale = np.zeros(self.kv.shape, dtype=np.bool_)
        self.always_gather = False

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(len(self.kv))

    def start(self, batch: Batch, partition: Partition) -> None:
        """Lay out a step."""
        self.batch, self.partition = batch, partition
        self.views = [local_view(batch, partition, rank) for rank in self.ranks]
        offsets = np.arange(self.block_size)
        self.table_slots = (batch.block_tables[:, :, None] * self.block_size + offsets).reshape(batch.num_requests, -1)

    def give_up(self, request: int, start: int, num_blocks: int) -> None:
        """Declare the K/V of a request's positions from `start` on void, to the end of its table."""
        self.is_stale[:, :, self.table_slots[request, start : num_blocks * self.block_size]] = True

    def run_target(self) -> Forward:
        """Run both layers on each rank's rows."""
        ids = np.stack([view.input_ids for view in self.views])
        positions = np.stack([view.positions for view in self.views])
        first = self._run_layer(FIRST, self.embed[ids, positions])
        second = self._run_layer(SECOND, mix(first))
        return Forward((first, second), (self._restore(first), self._restore(second)))

    def pick_tokens(self, forward: Forward) -> Ids:
        """Return the greedy token of each logit row, [L]."""
        return self._next_ids(forward.sums[1][self.batch.logit_rows])

    def propose(
        self, forward: Forward, num_kept: Ids, next_ids: Ids, num_drafts: int, max_model_len: int,
        is_whole: Sequence[bool], is_sharded: bool,
    ) -> Ids:  # fmt: skip
        """Run the drafter: a first pass over the batch's rows, then a chain with one row per request.

        Args:
            num_kept: rows of each request that were not rejected, [R].
            next_ids: the token behind them, [R]: sampled, or the prompt's next one.
            is_whole: whether the drafter has all rows before this step, [R]; else its guesses mean nothing.
        Returns:
            [R, num_drafts].
        """
        last_rows = self.batch.query_start[:-1] + num_kept - 1
        self._run_first_pass(forward, self._shift_ids(last_rows, next_ids), is_sharded)
        owners = self.partition.restore[last_rows] // self.partition.width
        first, second = (sums[last_rows] for sums in forward.sums)
        ids, rows = next_ids, self.batch.positions[last_rows]
        drafts = np.empty((len(ids), num_drafts), dtype=np.int64)
        for step in range(num_drafts):
            states = self._read_draft_states(owners, rows, is_whole)
            rows = rows + 1
            clipped = np.minimum(rows, max_model_len - 1)  # what lies behind is dropped; it only must not crash
            first = first + self.embed[ids, clipped]
            second = second + mix(first)
            ids = self._guess(second, states)
            drafts[:, step] = ids
            if step + 1 < num_drafts:
                self._write_chain_rows(rows, mix(second + self.draft_embed[ids, clipped]), max_model_len)
                rows = clipped
        return drafts

    def _run_layer(self, cache: int, values: Words) -> Words:
        self._store(cache, values)
        sums = np.full(values.shape, GARBAGE, dtype=np.uint64)
        for rank, view in enumerate(self.views):
            for span in view.spans:
                seen = self._read(rank, cache, self.table_slots[span.request, : span.seq_len])
                rows = slice(span.query_start, span.query_start + span.query_len)
                sums[rank, rows] = np.cumsum(seen)[span.seq_len - span.query_len :]
        return sums

    def _store(self, cache: int, values: Words) -> None:
        """Write the K/V of each rank's rows, [P, W]; padding rows hold garbage."""
        for rank, view in enumerate(self.views):
            values[rank, view.is_padding] = GARBAGE
        if self._gathers:
            for rank, view in enumerate(self.views):
                self._write(rank, cache, view.expanded_slots, values.reshape(-1))
        else:
            for rank, view in enumerate(self.views):
                self._write(rank, cache, view.local_slots, values[rank])

    @property
    def _gathers(self) -> bool:
        all_replicated = all(num_rows == self.batch.num_tokens for num_rows in self.partition.per_rank)
        return self.always_gather or not all_replicated

    def _write(self, rank: int, cache: int, slots: Ids, values: Words) -> None:
        written = slots >= 0
        slots, values = slots[written], values[written]
        assert len(set(slots.tolist())) == len(slots), "a slot is written twice at once"
        assert (slots >= self.block_size).all(), "a slot of block 0 is written"
        self.kv[rank, cache, slots] = values
        self.is_stale[rank, cache, slots] = False

    def _read(self, rank: int, cache: int, slots: Ids) -> Words:
        assert not self.is_stale[rank, cache, slots].any(), "K/V is read that was given up and not rewritten"
        words: Words = self.kv[rank, cache, slots]
        return words

    def _restore(self, local_rows: Words) -> Words:
        return local_rows.reshape(-1)[self.partition.restore]

    def _shift_ids(self, last_rows: Ids, next_ids: Ids) -> Ids:
        """Return for each row the token behind it, [T]; rows of rejected drafts get some token."""
        shifted = np.roll(self.batch.input_ids, -1)
        shifted[last_rows] = next_ids
        return shifted

    def _run_first_pass(self, forward: Forward, shifted_ids: Ids, is_sharded: bool) -> None:
        if is_sharded:
            ids = shifted_ids[self.partition.gather].reshape(len(self.kv), -1)
            positions = np.stack([view.positions for view in self.views])
            self._store(DRAFT, mix(forward.local_sums[1] + self.draft_embed[ids, positions]))
            return
        values = mix(forward.sums[1] + self.draft_embed[shifted_ids, self.batch.positions])
        for rank in self.ranks:
            self._write(rank, DRAFT, self.batch.slots, values)

    def _read_draft_states(self, owners: Ids, rows: Ids, is_whole: Sequence[bool]) -> Words:
        states = np.zeros(len(rows), dtype=np.uint64)
        for request, (rank, row) in enumerate(zip(owners, rows, strict=True)):
            if is_whole[request]:
                states[request] = self._read(rank, DRAFT, self.table_slots[request, : row + 1]).sum()
        return states

    def _write_chain_rows(self, rows: Ids, values: Words, max_model_len: int) -> None:
        inside = np.flatnonzero(rows < max_model_len)
        for rank in self.ranks:
            self._write(rank, DRAFT, self.table_slots[inside, rows[inside]], values[inside])

    def _guess(self, second_sums: Words, states: Words) -> Ids:
        is_wrong = mix(states) >> np.uint64(56) < self.error_rate
        return np.mod(self._next_ids(second_sums) + is_wrong, len(self.embed))

    def _next_ids(self, second_sums: Words) -> Ids:
        ids: Ids = self.next_token[second_sums % np.uint64(NUM_STATES)]
        return ids

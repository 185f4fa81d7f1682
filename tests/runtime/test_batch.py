"""The global batch and the view each rank has of it: positions, slots, logit rows, spans."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pcp_compiler.plan.partition import Partition, partition_batch
from pcp_compiler.runtime.batch import PAD_SLOT, Batch, LocalView, RequestRows, SpanRow, build_batch, local_view

BLOCK_SIZE = 4
MAX_BLOCKS = 8


def rows_of(
    computed: int, num_rows: int, *, prefill: bool = False, logits: int = 1, first_block: int = 1
) -> RequestRows:
    """Return rows of a request whose token ids are its positions + 100 and whose blocks are numbered on."""
    num_blocks = -(-(computed + num_rows) // BLOCK_SIZE)
    token_ids = range(100 + computed, 100 + computed + num_rows)
    return RequestRows(token_ids, computed, prefill, logits, range(first_block, first_block + num_blocks))


def batch_of(*rows: RequestRows) -> Batch:
    """Return the batch of these requests."""
    return build_batch(rows, BLOCK_SIZE, MAX_BLOCKS)


def lay_out(batch: Batch, pcp_size: int, *, shard_decode: bool = False, width: int | None = None) -> Partition:
    """Return the partition that belongs to the batch."""
    return partition_batch(
        batch.query_lens, batch.is_prefilling, pcp_size=pcp_size, shard_decode=shard_decode, width=width
    )


def views_of(batch: Batch, partition: Partition) -> list[LocalView]:
    """Return the views of all ranks."""
    return [local_view(batch, partition, rank) for rank in range(len(partition.per_rank))]


def write(cache: NDArray[np.int64], slots: NDArray[np.int64], values: NDArray[np.int64]) -> None:
    """Write rows to slots as the cache kernels do: negative slots are skipped."""
    cache[slots[slots >= 0]] = values[slots >= 0]


def test_a_mixed_batch_counts_positions_slots_and_logits_per_request() -> None:
    batch = batch_of(rows_of(5, 3, logits=3, first_block=1), rows_of(2, 4, prefill=True, first_block=3))
    assert batch.query_start.tolist() == [0, 3, 7]
    assert batch.input_ids.tolist() == [105, 106, 107, 102, 103, 104, 105]
    assert batch.positions.tolist() == [5, 6, 7, 2, 3, 4, 5]
    assert batch.seq_lens.tolist() == [8, 6]
    assert batch.slots.tolist() == [9, 10, 11, 14, 15, 16, 17]  # blocks 1, 2 and 3, 4
    assert batch.logit_rows.tolist() == [0, 1, 2, 6] and batch.logit_start.tolist() == [0, 3, 4]
    assert batch.block_tables[:, :3].tolist() == [[1, 2, 0], [3, 4, 0]] and batch.block_tables.shape == (2, MAX_BLOCKS)


def test_a_row_without_a_block_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="no KV block"):
        batch_of(RequestRows([1, 2, 3, 4, 5], 0, True, 1, [1]))


@pytest.mark.parametrize(
    ("rows", "phase"),
    [
        ([rows_of(0, 9, prefill=True)], "prefill"),
        ([rows_of(0, 1, prefill=True)], "prefill"),
        ([rows_of(0, 4, prefill=True), rows_of(7, 4, logits=4)], "mixed"),
        ([rows_of(7, 1), rows_of(9, 1)], "decode"),
        ([rows_of(7, 1), rows_of(9, 4, logits=4)], "verify"),
        ([rows_of(7, 1), rows_of(3, 0, prefill=True, logits=0)], "decode"),
    ],
)
def test_the_phase_comes_from_the_requests_and_not_from_their_counts(rows: list[RequestRows], phase: str) -> None:
    assert batch_of(*rows).phase == phase


def test_local_rows_are_the_owned_ones_and_padding_is_neutral() -> None:
    batch = batch_of(rows_of(2, 7, prefill=True))  # zigzag on 2 ranks: rows 0 1 6 and 2 3 4 5
    left, right = views_of(batch, lay_out(batch, 2))
    assert left.input_ids.tolist() == [102, 103, 108, 0] and left.positions.tolist() == [2, 3, 8, 0]
    assert left.is_padding.tolist() == [False, False, False, True] and not right.is_padding.any()
    assert left.local_slots.tolist() == [6, 7, 12, PAD_SLOT]
    assert left.expanded_slots.tolist() == [6, 7, 12, PAD_SLOT, 8, 9, 10, 11]
    assert (left.expanded_slots == right.expanded_slots).all()


def test_the_length_of_a_span_is_the_position_of_its_own_last_row() -> None:
    batch = batch_of(rows_of(2, 7, prefill=True))
    left, right = views_of(batch, lay_out(batch, 2))
    assert left.spans == (SpanRow(0, 0, 2, 4), SpanRow(0, 2, 1, 9))
    assert right.spans == (SpanRow(0, 0, 2, 6), SpanRow(0, 2, 2, 8))


def test_a_replicated_row_has_one_writer_after_a_gather_and_is_written_by_all_without_one() -> None:
    batch = batch_of(rows_of(5, 2, logits=2))
    first, second = views_of(batch, lay_out(batch, 2, width=3))
    assert first.expanded_slots.tolist() == [9, 10, PAD_SLOT, PAD_SLOT, PAD_SLOT, PAD_SLOT]
    assert first.local_slots.tolist() == second.local_slots.tolist() == [9, 10, PAD_SLOT]


@pytest.mark.parametrize("width", [None, 3])
def test_an_idle_rank_has_a_view_of_padding_only(width: int | None) -> None:
    batch = batch_of(rows_of(5, 1))
    _, idle = views_of(batch, lay_out(batch, 2, shard_decode=True, width=width))
    assert idle.spans == () and idle.is_padding.all() and len(idle.input_ids) == (width or 1)
    assert not idle.input_ids.any() and (idle.local_slots == PAD_SLOT).all()
    assert idle.expanded_slots.tolist().count(9) == 1


def test_a_batch_without_rows_has_views_of_padding_only() -> None:
    batch = batch_of(rows_of(5, 0, logits=0))
    for view in views_of(batch, lay_out(batch, 2, width=2)):
        assert view.is_padding.tolist() == [True, True] and (view.expanded_slots == PAD_SLOT).all()


def test_the_view_of_another_batch_is_a_bug() -> None:
    batch = batch_of(rows_of(5, 2, logits=2))
    with pytest.raises(AssertionError, match="another batch"):
        local_view(batch, lay_out(batch_of(rows_of(0, 9, prefill=True)), 2), 0)


def test_b06_a_padding_row_leaves_the_last_slot_of_the_cache_alone() -> None:
    batch = batch_of(rows_of(0, 3, prefill=True))
    [view] = views_of(batch, lay_out(batch, 1, width=4))
    cache = np.zeros(2 * BLOCK_SIZE, dtype=np.int64)
    cache[-1] = 777
    write(cache, view.expanded_slots, view.input_ids)
    assert view.expanded_slots.tolist() == [4, 5, 6, PAD_SLOT]
    assert cache.tolist() == [0, 0, 0, 0, 100, 101, 102, 777]


def test_b09_a_shorter_chunk_in_the_same_buffer_keeps_no_slot_of_the_longer_one() -> None:
    width = 6
    slots = np.empty(2 * width, dtype=np.int64)  # captured once, filled in each step
    cache = np.zeros(5 * BLOCK_SIZE, dtype=np.int64)
    for computed, num_rows in ((0, 10), (10, 6)):
        batch = batch_of(rows_of(computed, num_rows, prefill=True))
        partition = lay_out(batch, 2, width=width)
        before = cache.copy()
        slots[:] = local_view(batch, partition, rank=1).expanded_slots
        write(cache, slots, np.concatenate([view.input_ids for view in views_of(batch, partition)]))
        assert (slots >= 0).sum() == num_rows
        changed = np.flatnonzero(cache != before).tolist()
        assert changed == list(range(BLOCK_SIZE + computed, BLOCK_SIZE + computed + num_rows))
    assert cache[BLOCK_SIZE:].tolist() == list(range(100, 116))


@pytest.mark.parametrize("shard_decode", [False, True])
def test_b42_ragged_verify_rows_of_1_3_and_2_keep_positions_slots_and_logits(shard_decode: bool) -> None:
    batch = batch_of(
        rows_of(3, 1, first_block=1), rows_of(6, 3, logits=3, first_block=2), rows_of(4, 2, logits=2, first_block=5)
    )
    assert batch.positions.tolist() == [3, 6, 7, 8, 4, 5]
    assert batch.slots.tolist() == [7, 14, 15, 16, 24, 25]
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 4, 5] and batch.logit_start.tolist() == [0, 1, 4, 6]
    partition = lay_out(batch, 2, shard_decode=shard_decode)
    views = views_of(batch, partition)
    expanded = views[0].expanded_slots
    assert sorted(expanded[expanded >= 0]) == sorted(batch.slots)
    assert expanded[partition.restore].tolist() == batch.slots.tolist()
    lengths = [(span.request, span.query_len, span.seq_len) for view in views for span in view.spans]
    once = [(0, 1, 4), (2, 2, 6), (1, 3, 9)] if shard_decode else [(0, 1, 4), (1, 3, 9), (2, 2, 6)]
    assert lengths == (once if shard_decode else once * 2)


@pytest.mark.parametrize("prefill", [False, True])
def test_b44_a_batch_with_one_class_only_and_a_row_without_tokens_samples_no_idle_request(prefill: bool) -> None:
    batch = batch_of(rows_of(3, 0, prefill=prefill, logits=0), rows_of(2, 2, prefill=prefill), rows_of(7, 0, logits=0))
    assert batch.logit_rows.tolist() == [1] and batch.logit_start.tolist() == [0, 0, 1, 1]
    assert batch.seq_lens.tolist() == [3, 4, 7]
    for view in views_of(batch, lay_out(batch, 2)):
        assert {span.request for span in view.spans} <= {1}


def test_b83_logit_rows_of_0_2_0_and_3_drafts_start_at_cumulative_counts() -> None:
    batch = batch_of(*(rows_of(4, 1 + k, logits=1 + k, first_block=1 + 3 * i) for i, k in enumerate([0, 2, 0, 3])))
    assert batch.logit_start.tolist() == [0, 1, 4, 5, 9]
    assert batch.logit_rows.tolist() == list(range(9))
    assert batch.positions[batch.logit_rows].tolist() == [4, 4, 5, 6, 4, 4, 5, 6, 7]

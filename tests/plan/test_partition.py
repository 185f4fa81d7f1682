"""Layout of a batch over the PCP ranks: known layouts, the laws of any layout, and public faults as scenarios."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pcp_compiler.errors import ConfigError
from pcp_compiler.plan.partition import Partition, Span, partition_batch, zigzag_chunks

VECTORS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("partition_vectors.json").read_text())
HUGE = 10**12
no_deadline = settings(deadline=None)  # examples take milliseconds, unless the machine is busy


@dataclass(frozen=True)
class Batch:
    """Arguments of one `partition_batch` call."""

    query_lens: list[int]
    is_prefilling: list[bool]
    pcp_size: int
    shard_decode: bool = False
    min_tokens_to_shard: int = 0
    kv_sharded: bool = False
    spare_rows: int = 0

    def partition(self) -> Partition:
        """Lay the batch out, with a forced width if `spare_rows` asks for one."""
        natural = self._partition(None)
        return self._partition(natural.width + self.spare_rows) if self.spare_rows else natural

    def _partition(self, width: int | None) -> Partition:
        return partition_batch(
            self.query_lens,
            self.is_prefilling,
            pcp_size=self.pcp_size,
            shard_decode=self.shard_decode,
            min_tokens_to_shard=self.min_tokens_to_shard,
            kv_sharded=self.kv_sharded,
            width=width,
        )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Mixed batches of 0 to 6 requests of 0 to 200 tokens on 1 to 8 ranks."""
    lengths = st.one_of(st.integers(0, 20), st.integers(0, 200))
    query_lens = draw(st.lists(lengths, max_size=6))
    kv_sharded = draw(st.booleans())
    return Batch(
        query_lens=query_lens,
        is_prefilling=draw(st.lists(st.booleans(), min_size=len(query_lens), max_size=len(query_lens))),
        pcp_size=draw(st.integers(1, 8)),
        shard_decode=not kv_sharded and draw(st.booleans()),
        min_tokens_to_shard=draw(st.sampled_from([0, 0, 2, 16, 50])),
        kv_sharded=kv_sharded,
        spare_rows=draw(st.sampled_from([0, 0, 1, 13])),
    )


def one_prefill(num_tokens: int, pcp_size: int, **options: Any) -> Partition:
    """Partition a batch of a single prefill."""
    return Batch([num_tokens], [True], pcp_size, **options).partition()


def real_rows(partition: Partition, rank: int) -> NDArray[np.int64]:
    """Return the tokens of one rank without its padding."""
    return partition.local_rows(rank)[: partition.per_rank[rank]]


def restore_through_ranks(partition: Partition, x: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cut x by each rank's rows, overwrite the padding with a huge value, collect and restore."""
    blocks = [x[partition.local_rows(rank)] for rank in range(len(partition.per_rank))]
    for block, num_rows in zip(blocks, partition.per_rank, strict=True):
        block[num_rows:] = HUGE
    return np.concatenate(blocks)[partition.restore]


def requests_of(partition: Partition, rank: int) -> list[int]:
    """Return the request of each span of one rank."""
    return [span.request for span in partition.spans[rank]]


def causal_work(partition: Partition) -> list[int]:
    """Return each rank's attention work for one causal prefill: row t reads t + 1 keys."""
    return [int((real_rows(partition, rank) + 1).sum()) for rank in range(len(partition.per_rank))]


# --- known layouts


LAYOUTS: list[tuple[Batch, str, str, str, str]] = [
    (Batch([7], [True], 2), "3 4", "0 1 4 5 6 7 2", "0 1 6 0 2 3 4 5", "11101111"),
    (Batch([3], [True], 2), "1 2", "0 2 3", "0 0 1 2", "1011"),
    (Batch([1], [True], 2), "1 0", "0", "0 0", "10"),
    (Batch([8], [True], 2), "4 4", "0 1 4 5 6 7 2 3", "0 1 6 7 2 3 4 5", "11111111"),
    (Batch([2], [False], 4, shard_decode=True), "2 0 0 0", "0 1", "0 1 0 0 0 0 0 0", "11000000"),
    (Batch([9], [True], 4), "2 2 2 3", "0 1 3 4 6 7 9 10 11", "0 1 0 2 3 0 4 5 0 6 7 8", "110110110111"),
    (Batch([5], [True], 4), "1 1 1 2", "0 2 4 6 7", "0 0 1 0 2 0 3 4", "10101011"),
    (
        Batch([3, 3, 3], [False, False, False], 2, shard_decode=True),
        "6 3",
        "0 1 2 6 7 8 3 4 5",
        "0 1 2 6 7 8 3 4 5 0 0 0",
        "111111111000",
    ),
    (
        Batch([3, 3, 7], [False, False, True], 2, shard_decode=True),
        "6 7",
        "0 1 2 7 8 9 3 4 10 11 12 13 5",
        "0 1 2 6 7 12 0 3 4 5 8 9 10 11",
        "11111101111111",
    ),
    (
        Batch([3, 3, 7], [False, False, True], 2, kv_sharded=True),
        "9 10",
        "0 1 2 3 4 5 6 7 16 17 18 19 8",
        "0 1 2 3 4 5 6 7 12 0 0 1 2 3 4 5 8 9 10 11",
        "1" * 9 + "0" * 7 + "1" * 4,
    ),
    (
        Batch([3, 3], [False, True], 2, kv_sharded=True),
        "6 6",
        "0 1 2 3 4 5",
        "0 1 2 3 4 5 0 1 2 3 4 5",
        "111111000000",
    ),
    (
        Batch([2, 9], [False, True], 2, shard_decode=True, spare_rows=2),
        "5 6",
        "0 1 2 3 4 8 9 10 11 12 13",
        "0 1 2 3 4 0 0 0 5 6 7 8 9 10 0 0",
        "1111100011111100",
    ),
]


@pytest.mark.parametrize(("batch", "per_rank", "restore", "gather", "mask"), LAYOUTS)
def test_a_small_batch_has_the_known_layout(batch: Batch, per_rank: str, restore: str, gather: str, mask: str) -> None:
    partition = batch.partition()
    assert " ".join(map(str, partition.per_rank)) == per_rank
    assert " ".join(map(str, partition.restore)) == restore
    assert " ".join(map(str, partition.gather)) == gather
    assert "".join(map(str, partition.write_mask.astype(int))) == mask


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_a_recorded_batch_has_the_recorded_layout(vector: dict[str, Any]) -> None:
    partition = partition_batch(
        vector["query_lens"],
        vector["is_prefilling"],
        pcp_size=vector["pcp_size"],
        shard_decode=vector["dcp_size"] == 1,
        kv_sharded=vector["dcp_size"] > 1,
        width=vector["forced_width"],
    )
    spans = [[[span.request, span.global_start, span.global_stop] for span in rank] for rank in partition.spans]
    assert list(partition.per_rank) == vector["per_rank"]
    assert partition.width == len(vector["gather"]) // vector["pcp_size"]
    assert partition.restore.tolist() == vector["restore"]
    assert partition.gather.tolist() == vector["gather"]
    assert partition.write_mask.tolist() == [bool(writes) for writes in vector["mask"]]
    assert spans == vector["segments"]


def test_the_recorded_batches_cover_both_kinds_of_kv_cache_and_forced_widths() -> None:
    assert len(VECTORS) == 120
    assert {vector["dcp_size"] > 1 for vector in VECTORS} == {True, False}
    assert any(vector["forced_width"] is not None for vector in VECTORS)


def test_chunk_ranges_of_a_short_prefill_end_in_empty_ones() -> None:
    assert zigzag_chunks(7, 2) == ((0, 2), (2, 4), (4, 6), (6, 7))
    assert zigzag_chunks(3, 2) == ((0, 1), (1, 2), (2, 3), (3, 3))
    assert zigzag_chunks(0, 1) == ((0, 0), (0, 0))


@no_deadline
@given(num_tokens=st.integers(0, 200), pcp_size=st.integers(1, 8))
def test_chunk_ranges_join_up_and_cover_the_prefill(num_tokens: int, pcp_size: int) -> None:
    chunks = zigzag_chunks(num_tokens, pcp_size)
    assert len(chunks) == 2 * pcp_size
    assert [row for start, stop in chunks for row in range(start, stop)] == list(range(num_tokens))
    assert max(stop - start for start, stop in chunks) == -(-num_tokens // (2 * pcp_size))


# --- laws of any layout


@no_deadline
@given(batches())
def test_every_token_has_one_writer_and_restores_to_itself(batch: Batch) -> None:
    partition = batch.partition()
    num_tokens = sum(batch.query_lens)
    tokens = np.arange(num_tokens)
    np.testing.assert_array_equal(partition.gather[partition.restore], tokens)
    assert len(set(partition.restore.tolist())) == num_tokens
    np.testing.assert_array_equal(np.sort(partition.gather[partition.write_mask]), tokens)
    np.testing.assert_array_equal(np.sort(partition.restore), np.flatnonzero(partition.write_mask))


@no_deadline
@given(batches())
def test_arrays_have_the_promised_shapes_and_types(batch: Batch) -> None:
    partition = batch.partition()
    assert partition.width == max(partition.per_rank) + batch.spare_rows
    assert len(partition.per_rank) == len(partition.spans) == batch.pcp_size
    assert {partition.local_rows(rank).shape for rank in range(batch.pcp_size)} == {(partition.width,)}
    assert partition.restore.shape == (sum(batch.query_lens),)
    assert partition.gather.shape == partition.write_mask.shape == (batch.pcp_size * partition.width,)
    assert [partition.restore.dtype.name, partition.gather.dtype.name] == ["int64", "int64"]
    assert partition.write_mask.dtype.name == "bool"


@no_deadline
@given(batches())
def test_spans_tile_the_real_rows_of_a_rank_and_the_rest_is_padding(batch: Batch) -> None:
    partition = batch.partition()
    first_token = np.cumsum([0, *batch.query_lens])
    for rank, spans in enumerate(partition.spans):
        rows = [row for span in spans for row in range(span.global_start, span.global_stop)]
        assert real_rows(partition, rank).tolist() == rows
        assert not partition.local_rows(rank)[len(rows) :].any()
        assert [span.local_start for span in spans] == np.cumsum([0, *(s.num_tokens for s in spans)])[:-1].tolist()
        for span in spans:
            assert first_token[span.request] <= span.global_start < span.global_stop <= first_token[span.request + 1]


@no_deadline
@given(batches())
def test_decodes_come_before_prefills_on_every_rank(batch: Batch) -> None:
    for spans in batch.partition().spans:
        keys = [(batch.is_prefilling[span.request], span.request, span.global_start) for span in spans]
        assert keys == sorted(keys)


@no_deadline
@given(batches())
def test_a_decode_is_never_cut(batch: Batch) -> None:
    for spans in batch.partition().spans:
        for span in spans:
            if not batch.is_prefilling[span.request]:
                assert span.num_tokens == batch.query_lens[span.request]


@no_deadline
@given(batches(), st.randoms(use_true_random=False))
def test_restoring_a_cut_batch_gives_the_batch_back(batch: Batch, random: Any) -> None:
    x = np.array([random.randrange(10**6) for _ in range(sum(batch.query_lens))], dtype=np.int64)
    if len(x):  # padding reads row 0, which an empty batch lacks
        np.testing.assert_array_equal(restore_through_ranks(batch.partition(), x), x)


@pytest.mark.parametrize("pcp_size", range(1, 9))
def test_b35_restoring_a_cut_prompt_gives_it_back_at_every_length(pcp_size: int) -> None:
    assert one_prefill(0, pcp_size).restore.shape == (0,)
    for num_tokens in range(1, 4 * 2 * pcp_size + 1):
        x = np.arange(num_tokens) * 7 + 3
        np.testing.assert_array_equal(restore_through_ranks(one_prefill(num_tokens, pcp_size), x), x)


@no_deadline
@given(batches())
def test_a_single_rank_keeps_global_order_if_decodes_come_first(batch: Batch) -> None:
    options: dict[str, Any] = {"shard_decode": batch.shard_decode, "kv_sharded": batch.kv_sharded}
    partition = partition_batch(batch.query_lens, sorted(batch.is_prefilling), pcp_size=1, **options)
    np.testing.assert_array_equal(partition.gather, np.arange(sum(batch.query_lens)))
    np.testing.assert_array_equal(partition.restore, partition.gather)
    assert partition.write_mask.all()


@no_deadline
@given(batches())
def test_rows_without_tokens_do_not_change_the_layout(batch: Batch) -> None:
    kept = [index for index, query_len in enumerate(batch.query_lens) if query_len > 0]
    without = Batch(
        [batch.query_lens[index] for index in kept],
        [batch.is_prefilling[index] for index in kept],
        batch.pcp_size,
        batch.shard_decode,
        batch.min_tokens_to_shard,
        batch.kv_sharded,
        batch.spare_rows,
    ).partition()
    partition = batch.partition()
    np.testing.assert_array_equal(partition.gather, without.gather)
    np.testing.assert_array_equal(partition.restore, without.restore)
    for rank in range(batch.pcp_size):
        assert requests_of(partition, rank) == [kept[request] for request in requests_of(without, rank)]


@no_deadline
@given(st.integers(1, 5000), st.integers(1, 8))
def test_causal_work_misses_the_even_share_only_by_the_rows_that_round_up(num_tokens: int, pcp_size: int) -> None:
    """Pad the prompt to 2P full chunks of c rows: rank r's two chunks then cost
    sum over j < c of (rc + j + 1) + ((2P - 1 - r)c + j + 1) = c(2Pc + 1), whatever r is.
    The real prompt lacks the rows from `num_tokens` to 2Pc, so ranks fall short of that by what those rows cost.
    """
    padded = 2 * pcp_size * -(-num_tokens // (2 * pcp_size))
    even_share = padded // (2 * pcp_size) * (padded + 1)
    shortfalls = [even_share - work for work in causal_work(one_prefill(num_tokens, pcp_size))]
    assert min(shortfalls) >= 0
    assert sum(shortfalls) == sum(range(num_tokens + 1, padded + 1))


def test_the_slowest_rank_of_a_128k_prompt_on_8_ranks_is_within_a_thousandth_of_the_mean() -> None:
    for num_tokens in (131072, 131072 + 1, 131072 - 1):
        work = causal_work(one_prefill(num_tokens, 8))
        assert max(work) * 8 <= sum(work) * 1.001


@no_deadline
@given(batches())
def test_the_same_batch_given_as_arrays_has_the_same_layout(batch: Batch) -> None:
    options: dict[str, Any] = {"pcp_size": batch.pcp_size, "shard_decode": batch.shard_decode}
    from_lists = partition_batch(batch.query_lens, batch.is_prefilling, **options)
    arrays = np.array(batch.query_lens, dtype=np.int32), np.array(batch.is_prefilling, dtype=np.bool_)
    from_arrays = partition_batch(*arrays, **options)
    assert from_arrays.spans == from_lists.spans
    np.testing.assert_array_equal(from_arrays.gather, from_lists.gather)


# --- the three placements


def test_a_replicated_decode_is_on_every_rank_and_written_by_rank_0() -> None:
    partition = Batch([2, 1], [False, False], 3).partition()
    assert partition.per_rank == (3, 3, 3)
    assert partition.gather.tolist() == [0, 1, 2] * 3
    assert partition.restore.tolist() == [0, 1, 2]
    assert partition.write_mask.tolist() == [True] * 3 + [False] * 6


def test_a_short_prefill_is_replicated_beside_sharded_decodes_and_does_not_shift_their_owners() -> None:
    partition = Batch([1, 3, 1], [False, True, False], 2, shard_decode=True, min_tokens_to_shard=4).partition()
    assert partition.spans == (
        (Span(0, 0, 1, 0), Span(1, 1, 4, 1)),
        (Span(2, 4, 5, 0), Span(1, 1, 4, 1)),
    )
    assert partition.restore.tolist() == [0, 1, 2, 3, 4]
    assert partition.write_mask.tolist() == [True] * 5 + [False] * 3


def test_the_threshold_itself_is_long_enough_to_shard() -> None:
    assert one_prefill(4, 2, min_tokens_to_shard=4).per_rank == (2, 2)
    assert one_prefill(3, 2, min_tokens_to_shard=4).per_rank == (3, 3)


def test_the_threshold_leaves_decodes_alone() -> None:
    assert Batch([2, 2], [False, False], 2, shard_decode=True, min_tokens_to_shard=4).partition().per_rank == (2, 2)


# --- public faults as scenarios


@no_deadline
@given(pcp_size=st.integers(1, 8), num_tokens=st.integers(1, 200))
def test_b36_no_rank_is_empty_when_prefills_shorter_than_two_tokens_a_rank_are_replicated(
    pcp_size: int, num_tokens: int
) -> None:
    partition = one_prefill(num_tokens, pcp_size, min_tokens_to_shard=2 * pcp_size)
    assert min(partition.per_rank) > 0
    assert (partition.per_rank == (num_tokens,) * pcp_size) == (num_tokens < 2 * pcp_size or pcp_size == 1)


def test_b36_one_uncached_token_of_a_prompt_of_33_runs_on_all_four_ranks() -> None:
    partition = one_prefill(33 - 32, 4, min_tokens_to_shard=2 * 4)
    assert partition.per_rank == (1, 1, 1, 1)
    assert partition.write_mask.tolist() == [True, False, False, False]


def test_b36_a_fully_cached_prompt_leaves_all_ranks_equally_empty() -> None:
    partition = one_prefill(32 - 32, 4, min_tokens_to_shard=2 * 4)
    assert (partition.per_rank, partition.width, partition.spans) == ((0, 0, 0, 0), 0, ((), (), (), ()))
    assert len(partition.gather) == len(partition.restore) == len(partition.write_mask) == 0


@pytest.mark.parametrize("pcp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("threshold_per_rank", [0, 2])
def test_b37_prompts_around_two_chunks_a_rank_lose_no_token(pcp_size: int, threshold_per_rank: int) -> None:
    for num_tokens in range(1, 2 * pcp_size + 2):
        partition = one_prefill(num_tokens, pcp_size, min_tokens_to_shard=threshold_per_rank * pcp_size)
        written = np.sort(partition.gather[partition.write_mask])
        np.testing.assert_array_equal(written, np.arange(num_tokens))
        np.testing.assert_array_equal(partition.gather[partition.restore], np.arange(num_tokens))


def test_b38_the_last_tokens_of_packed_prompts_of_7_and_3_are_kept_and_padding_is_not_read() -> None:
    partition = Batch([7, 3], [True, True], 2, spare_rows=3).partition()
    assert (partition.per_rank, partition.width) == ((4, 6), 9)
    x = np.arange(10) + 100
    np.testing.assert_array_equal(restore_through_ranks(partition, x), x)
    assert sorted(token for rank in range(2) for token in real_rows(partition, rank).tolist()) == list(range(10))


def test_b39_a_two_token_prefill_reaches_both_ranks_when_the_kv_cache_is_sharded() -> None:
    assert one_prefill(2, 2, kv_sharded=True).per_rank == (2, 2)
    assert one_prefill(2, 2, kv_sharded=False).spans == ((Span(0, 0, 1, 0),), (Span(0, 1, 2, 0),))


@no_deadline
@given(batches(), st.booleans())
def test_b39_every_rank_has_rows_of_every_request_when_the_kv_cache_is_sharded(batch: Batch, spare: bool) -> None:
    partition = Batch(
        batch.query_lens, batch.is_prefilling, batch.pcp_size, kv_sharded=True, spare_rows=int(spare)
    ).partition()
    with_tokens = {request for request, query_len in enumerate(batch.query_lens) if query_len > 0}
    for rank in range(batch.pcp_size):
        assert set(requests_of(partition, rank)) == with_tokens


@pytest.mark.parametrize("shard_decode", [False, True])
def test_b42_ragged_verify_rows_of_1_3_and_2_keep_their_own_slots(shard_decode: bool) -> None:
    partition = Batch([1, 3, 2], [False, False, False], 2, shard_decode=shard_decode).partition()
    num_computed, slots_per_request = [5, 9, 2], 100  # request i has slots 100 i to 100 i + 99
    slots = [5, 109, 110, 111, 202, 203]
    written: dict[int, int] = {}
    for rank, spans in enumerate(partition.spans):
        for span in spans:
            base = rank * partition.width + span.local_start
            for offset in range(span.num_tokens):
                if partition.write_mask[base + offset]:
                    slot = span.request * slots_per_request + num_computed[span.request] + offset
                    written[slot] = int(partition.gather[base + offset])
    assert written == {slot: token for token, slot in enumerate(slots)}
    assert partition.per_rank == ((3, 3) if shard_decode else (6, 6))


def test_b43_a_last_prompt_piece_as_long_as_a_verify_row_is_still_a_prefill() -> None:
    partition = Batch([4, 4, 4], [False, True, False], 2, shard_decode=True).partition()
    assert partition.spans == (
        (Span(0, 0, 4, 0), Span(1, 4, 5, 4), Span(1, 7, 8, 5)),
        (Span(2, 8, 12, 0), Span(1, 5, 6, 4), Span(1, 6, 7, 5)),
    )


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_b43_the_flag_and_not_the_token_count_tells_a_prefill_from_a_decode(num_tokens: int) -> None:
    decode = Batch([num_tokens], [False], 4, shard_decode=True).partition()
    prefill = Batch([num_tokens], [True], 4, shard_decode=True).partition()
    assert decode.per_rank == (num_tokens, 0, 0, 0)
    assert prefill.per_rank == tuple(int(rank < num_tokens) for rank in range(4))


@pytest.mark.parametrize("shard_decode", [False, True])
@pytest.mark.parametrize(
    ("query_lens", "is_prefilling", "with_tokens"),
    [
        ([8, 9], [True, True], {0, 1}),
        ([2, 3], [False, False], {0, 1}),
        ([0, 2, 8], [False, False, True], {1, 2}),
        ([2, 0, 8], [False, True, True], {0, 2}),
        ([0, 0], [False, True], set()),
        ([], [], set()),
    ],
    ids=["no decodes", "no prefills", "idle decode", "idle prefill", "all idle", "no requests"],
)
def test_b44_an_empty_class_or_row_gives_no_rows_to_anyone(
    query_lens: list[int], is_prefilling: list[bool], with_tokens: set[int], shard_decode: bool
) -> None:
    partition = Batch(query_lens, is_prefilling, 2, shard_decode=shard_decode).partition()
    assert {request for rank in range(2) for request in requests_of(partition, rank)} == with_tokens
    assert partition.write_mask.sum() == len(partition.restore) == sum(query_lens)


def test_b44_an_idle_decode_does_not_take_its_turn_as_owner() -> None:
    partition = Batch([1, 0, 1], [False, False, False], 2, shard_decode=True).partition()
    assert [requests_of(partition, rank) for rank in range(2)] == [[0], [2]]


# --- refusals


@pytest.mark.parametrize("pcp_size", [0, -1, True, 2.0, "2", None])
def test_a_pcp_size_that_is_no_positive_integer_is_refused(pcp_size: Any) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.pcp_size is .*; give an integer >= 1"):
        partition_batch([4], [True], pcp_size=pcp_size, shard_decode=False)
    with pytest.raises(ConfigError, match=r"parallel\.pcp_size"):
        zigzag_chunks(4, pcp_size)


def test_lists_of_unequal_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="query_lens has 2 entries and is_prefilling 1"):
        partition_batch([4, 4], [True], pcp_size=2, shard_decode=False)


@pytest.mark.parametrize("query_len", [-1, 1.5, True])
def test_a_query_length_that_is_no_count_is_refused_by_its_index(query_len: Any) -> None:
    with pytest.raises(ConfigError, match=rf"query_lens\[1\] is {query_len}; give an integer >= 0"):
        partition_batch([4, query_len], [True, True], pcp_size=2, shard_decode=False)


def test_a_negative_threshold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.min_tokens_to_shard is -1"):
        partition_batch([4], [True], pcp_size=2, shard_decode=False, min_tokens_to_shard=-1)


def test_a_width_below_the_fullest_rank_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"width 3 is smaller than the 4 rows of rank 1 .*\(3, 4\).*>= 4"):
        partition_batch([7], [True], pcp_size=2, shard_decode=False, width=3)
    assert partition_batch([7], [True], pcp_size=2, shard_decode=False, width=4).width == 4


@pytest.mark.parametrize("width", [-1, 4.0, True])
def test_a_width_that_is_no_count_is_refused(width: Any) -> None:
    with pytest.raises(ConfigError, match=r"width is .*; give an integer >= 0"):
        partition_batch([1], [True], pcp_size=1, shard_decode=False, width=width)


def test_a_rank_outside_the_group_has_no_rows() -> None:
    partition = one_prefill(8, 2)
    for rank in (-1, 2):
        with pytest.raises(AssertionError, match=f"rank {rank} is not one of 2"):
            partition.local_rows(rank)

"""Capture sizes, context buckets, the grid of keys, and which key a batch replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcp_compiler.errors import ConfigError, InvariantError
from pcp_compiler.plan.buckets import default_context_buckets, default_sizes
from pcp_compiler.plan.captures import (
    CaptureKey,
    CaptureLimits,
    CaptureMode,
    CapturePhase,
    CapturePlan,
    plan_captures,
)
from pcp_compiler.plan.dispatch import (
    Dispatch,
    Dispatcher,
    LiveBatch,
    check_cover,
    context_bound,
    find_gaps,
    unreachable_keys,
)
from pcp_compiler.plan.k_schedule import KSchedule, build_schedule
from pcp_compiler.plan.partition import partition_batch

PHASES: tuple[CapturePhase, ...] = ("prefill", "mixed", "decode", "verify", "draft", "proposal")
"""Of a decoder with one MTP module; several have `window` in the place of `draft` and `proposal`."""
SIZES = [1, 2, 4, 8, 16, 24, 32]
"""Of the spec's vectors, with 8 requests and K = 3."""


def make_limits(num_requests: int = 8, k: int = 3, num_tokens: int = 64, max_len: int = 4096, **more: Any) -> Any:
    return CaptureLimits(num_requests, num_tokens, max_len, KSchedule((1,), (k,)), **more)


def plan(
    limits: CaptureLimits, phases: Sequence[CapturePhase] = PHASES, mode: CaptureMode = "full_and_piecewise",
    **options: Any,
) -> CapturePlan:  # fmt: skip
    return plan_captures(mode, phases, limits, **options)


def rows_of(made: CapturePlan, phase: CapturePhase) -> list[int]:
    return sorted({key.capture_size for key in made.keys if key.phase == phase})


def verify(query_lens: Sequence[int], context_len: int = 100) -> LiveBatch:
    return LiveBatch("verify", sum(query_lens), len(query_lens), max(query_lens), context_len)


# --- capture sizes ---------------------------------------------------------------------------------------------------


def test_default_sizes_are_dense_up_to_the_bound_and_grow_by_a_quarter_above_it() -> None:
    assert default_sizes(300, 512) == (1, 2, 4, *range(8, 256, 8), 256, 272, 288, 300)
    assert default_sizes(300, 64) == (1, 2, 4, *range(8, 64, 8), 64, 80, 96, 112, 128, 160, 192, 224, 256, 300)


@pytest.mark.parametrize(
    ("max_rows", "sizes"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (12, (1, 2, 4, 8, 12))]
)
def test_a_small_maximum_is_the_last_size_and_no_size_is_0(max_rows: int, sizes: tuple[int, ...]) -> None:
    assert default_sizes(max_rows, 512) == sizes


@given(st.integers(1, 5000), st.integers(1, 512))
def test_default_sizes_ascend_to_the_maximum_and_pad_at_most_a_fifth_of_large_batches(
    max_rows: int, dense_rows: int
) -> None:
    sizes = default_sizes(max_rows, dense_rows)
    assert sizes[-1] == max_rows and sizes[0] == 1 and list(sizes) == sorted(set(sizes))
    for size, following in pairwise(sizes):
        assert following - size <= 8 or 5 * (following - size) <= following


def test_the_exact_maximum_is_a_size_though_it_is_on_no_grid() -> None:
    made = plan(make_limits(num_requests=6, k=6))
    assert rows_of(made, "verify") == [7, 14, 21, 28, 35, 42]
    assert rows_of(made, "decode") == [1, 2, 4, 6]
    assert rows_of(plan(make_limits(num_requests=12)), "decode") == [1, 2, 4, 8, 12]


def test_verify_sizes_are_whole_requests() -> None:
    made = plan(make_limits(), sizes=SIZES)
    full = {(key.capture_size, key.num_requests, key.query_width) for key in made.keys if key.phase == "verify"}
    assert full == {(4, 1, 4), (8, 2, 4), (16, 4, 4), (24, 6, 4), (32, 8, 4)}
    assert rows_of(made, "prefill") == [*SIZES, 64]


def test_prefill_sizes_hold_a_long_prompts_rank_and_a_step_that_is_sharded_nowhere() -> None:
    made = plan(make_limits(num_tokens=1001, pcp_size=4), ["prefill", "mixed"], sizes=[8])
    assert rows_of(made, "prefill") == rows_of(made, "mixed") == [8, 252, 1001]
    assert all(not key.is_full for key in made.keys)


def test_lists_may_be_unsorted_and_have_duplicates_and_this_is_noted() -> None:
    made = plan(make_limits(), ["decode"], sizes=[8, 2, 2], context_buckets=[512, 4096, 512])
    assert rows_of(made, "decode") == [2, 8]
    assert {key.context_bucket for key in made.keys} == {512, 4096}
    assert made.notes == (
        "capture.sizes: [8, 2, 2] is read as [2, 8]",
        "capture.context_buckets: [512, 4096, 512] is read as [512, 4096]",
    )


def test_an_added_maximum_is_noted_with_the_batches_that_replay_it() -> None:
    made = plan(make_limits(), ["decode", "verify"], sizes=[4])
    assert made.notes == (
        "capture.sizes: decode batches of 5 to 8 rows replay a capture of 8, which is added",
        "capture.sizes: verify batches of 5 to 32 rows replay a capture of 32, which is added",
    )


@pytest.mark.parametrize("bad", [0, -4, 8.0, True, "8", None, 65])
def test_a_size_that_is_no_integer_in_range_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(make_limits(), sizes=[4, bad])
    assert str(caught.value) == (
        f"capture.sizes: got {bad!r} in {[4, bad]}; allowed: integers from 1 to 64 (limits.max_num_tokens 64); "
        "leave it out for the default list, [] is off"
    )


def test_the_limit_of_full_captures_names_the_requests() -> None:
    with pytest.raises(ConfigError, match=r"from 1 to 32 \(limits.max_num_requests 8: 8 requests of 4 rows\)"):
        plan(make_limits(), mode="full_decode", sizes=[33])


@pytest.mark.parametrize("bad", [0, -1, 2048.0, False, 4097])
def test_a_bucket_that_is_no_integer_in_range_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"^capture.context_buckets: got .* 1 to 4096 \(limits.max_model_len 4096\)"):
        plan(make_limits(), context_buckets=[bad])


@pytest.mark.parametrize("bad", ["4,8", 8, {4: 8}])
def test_what_is_no_list_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"^capture.sizes: got .*; allowed: a list of integers"):
        plan(make_limits(), sizes=bad)
    with pytest.raises(ConfigError, match=r"^capture.context_buckets: got .*; allowed: a list of integers"):
        plan(make_limits(), context_buckets=bad)


def test_lists_are_checked_also_when_nothing_is_captured() -> None:
    with pytest.raises(ConfigError, match=r"^capture.sizes: got 0"):
        plan(make_limits(), mode="none", sizes=[0])


def test_no_sizes_means_no_captures_and_is_said() -> None:
    made = plan(make_limits(), sizes=[])
    assert made.keys == () and made.notes == ("capture.sizes: [] captures nothing, every step runs eagerly",)


# --- context buckets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_model_len", "buckets"),
    [
        (100, (100,)),
        (2047, (2047,)),
        (2048, (2048,)),
        (2049, (2048, 2049)),
        (8192, (2048, 8192)),
        (131072, (2048, 8192, 32768, 131072)),
    ],
)
def test_default_buckets_end_with_the_whole_context(max_model_len: int, buckets: tuple[int, ...]) -> None:
    assert default_context_buckets(max_model_len) == buckets


def test_windows_are_bucket_edges() -> None:
    made = plan(make_limits(windows=(512, 4096, 9999)), ["decode"])
    assert {key.context_bucket for key in made.keys} == {512, 2048, 4096}
    assert made.notes == ("capture.context_buckets: sliding windows [512] are added",)


def test_an_empty_bucket_list_leaves_the_whole_context() -> None:
    made = plan(make_limits(windows=(512,)), ["decode"], context_buckets=[])
    assert {key.context_bucket for key in made.keys} == {4096}


def test_short_buckets_are_made_for_powers_of_two_and_the_largest_batch() -> None:
    made = plan(make_limits(num_requests=12), ["decode"], sizes=[1, 2, 4, 6, 8, 12])
    assert {key.num_requests for key in made.keys if key.context_bucket == 2048} == {1, 2, 4, 8, 12}
    assert {key.num_requests for key in made.keys if key.context_bucket == 4096} == {1, 2, 4, 6, 8, 12}


# --- the grid --------------------------------------------------------------------------------------------------------


def test_modes_capture_the_phases_they_name() -> None:
    def kinds(mode: CaptureMode, **more: Any) -> dict[str, bool]:
        return {key.phase: key.is_full for key in plan(make_limits(**more), mode=mode).keys}

    pieces = {"prefill": False, "mixed": False}
    full = {"decode": True, "verify": True, "draft": True, "proposal": True}
    assert kinds("none") == {}
    assert kinds("piecewise") == {**pieces, "decode": False, "verify": False}
    assert kinds("full_decode") == full
    assert kinds("full_and_piecewise") == {**pieces, **full}
    assert kinds("full_and_piecewise", shard_decode=True) == {**pieces, **full, "decode": False, "verify": False}


def test_sharded_decode_cannot_be_captured_whole_and_this_is_noted() -> None:
    made = plan(make_limits(shard_decode=True), mode="full_decode")
    assert {key.phase for key in made.keys} == {"draft", "proposal"}
    assert made.notes[0].startswith("capture.mode: full_decode captures no decode and no verify step")


def test_each_k_has_its_captures_up_to_the_last_batch_that_has_it() -> None:
    schedule = build_schedule([[1, 4, 3], [5, 8, 1]], num_speculative_tokens=3, max_num_requests=8)
    made = plan(replace(make_limits(), schedule=schedule), sizes=SIZES)
    largest: dict[tuple[str, int | None, int], int] = {}
    for key in made.keys:
        if key.is_full:
            program = key.phase, key.query_width, key.num_draft_tokens
            largest[program] = max(largest.get(program, 0), key.num_requests or 0)
    assert largest == {
        ("decode", 1, 0): 8, ("verify", 2, 0): 8, ("verify", 4, 0): 4, ("draft", 1, 1): 8, ("draft", 1, 3): 4,
        ("proposal", 2, 1): 8, ("proposal", 4, 3): 4,
    }  # fmt: skip


def test_without_drafts_nothing_is_verified_or_drafted() -> None:
    assert {key.phase for key in plan(make_limits(k=0)).keys} == {"prefill", "mixed", "decode", "proposal"}


def test_the_largest_capture_comes_first() -> None:
    sizes = [(key.capture_size, key.num_cells) for key in plan(make_limits()).keys]
    assert sizes == sorted(sizes, reverse=True)


def test_the_plan_is_described_by_phase() -> None:
    made = plan(make_limits(num_requests=2, num_tokens=5), ["mixed", "verify", "draft"], sizes=[1, 2, 4])
    assert made.describe() == (
        "mixed: 4 captures, rows [1, 2, 4, 5]",
        "draft (K = 3): 4 captures, rows [1, 2], context up to [2048, 4096]",
        "verify: 4 captures, rows [4, 8], context up to [2048, 4096]",
    )


def test_a_window_has_room_for_the_rows_of_the_step_before() -> None:
    limits = make_limits(k=3, num_rerun=2)
    keys = plan(limits, ["verify", "window"], "full_decode").keys
    widths = {phase: {key.query_width for key in keys if key.phase == phase} for phase in ("verify", "window")}
    assert widths == {"verify": {4}, "window": {6}}
    sharded = replace(limits, pcp_size=2, shard_decode=True)
    assert not plan(sharded, ["window"], "full_decode").keys
    assert not any(key.is_full for key in plan(sharded, ["window"]).keys)


# --- memory budget ---------------------------------------------------------------------------------------------------


def test_a_budget_keeps_the_largest_captures_then_small_ones_and_names_what_it_leaves_out() -> None:
    limits = make_limits(num_requests=8, max_len=2048)
    made = plan(
        limits, ["decode"], sizes=[1, 2, 4, 8], memory_mb=11, estimate_bytes=lambda key: key.capture_size * 2**20
    )
    assert [key.capture_size for key in made.keys] == [8, 2, 1] and made.num_bytes == 11 * 2**20
    assert [key.capture_size for key in made.pruned] == [4]
    assert made.notes == (
        "capture.memory_mb: 11 leaves out 1 of 4 captures: decode 4 rows, 4 requests of 1, context 2048",
    )


@pytest.mark.parametrize("memory_mb", [0, 7])
def test_a_budget_below_the_largest_capture_is_refused(memory_mb: int) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(
            make_limits(max_len=2048), ["decode"], memory_mb=memory_mb,
            estimate_bytes=lambda key: key.capture_size * 2**20 - 1,
        )  # fmt: skip
    assert str(caught.value) == (
        f"capture.memory_mb: got {memory_mb}, and the largest capture (decode 8 rows, 8 requests of 1, context 2048) "
        "needs about 8 MiB; allowed: integers >= 8; raise it, lower limits.max_num_requests or "
        "limits.max_num_tokens, or set capture.mode to none"
    )


def test_a_pruned_bucket_is_covered_by_the_whole_context() -> None:
    made = plan(make_limits(), ["decode"], sizes=[8], memory_mb=1, estimate_bytes=lambda key: 2**20)
    assert [key.context_bucket for key in made.keys] == [4096]
    assert Dispatcher(made.keys).find(LiveBatch("decode", 1, 1, 1, 10)).key == made.keys[0]


# --- dispatch --------------------------------------------------------------------------------------------------------


def test_kind_is_filtered_before_the_smallest_cover_is_picked() -> None:
    made = plan(make_limits(k=2, num_tokens=24), sizes=[1, 2, 4, 8, 16, 24], context_buckets=[])
    key = Dispatcher(made.keys).find(verify([3, 3, 3, 3])).key
    assert key == CaptureKey("verify", 18, 6, 3, 4096)


@pytest.mark.parametrize("num_tokens", [3, 4, 5])
def test_the_end_of_a_prompt_never_replays_a_verify_capture(num_tokens: int) -> None:
    dispatcher = Dispatcher(plan(make_limits()).keys)
    key = dispatcher.find(LiveBatch("prefill", num_tokens, 1, num_tokens, 16 + num_tokens)).key
    assert key is not None and key.phase == "prefill"


def test_a_prompt_of_one_token_never_replays_a_decode_capture() -> None:
    dispatcher = Dispatcher(plan(make_limits(k=0), mode="full_decode").keys)
    assert dispatcher.find(LiveBatch("prefill", 1, 1, 1, 1)) == Dispatch(
        LiveBatch("prefill", 1, 1, 1, 1), None, "no prefill capture"
    )


@pytest.mark.parametrize(
    ("context_len", "bucket"),
    [(1, 512), (512, 512), (513, 2048), (2048, 2048), (2049, 8192), (8193, 131072), (131072, 131072)],
)
def test_the_smallest_bucket_is_inclusive_and_the_whole_context_is_above_all(context_len: int, bucket: int) -> None:
    limits = make_limits(max_len=131072)
    made = plan(limits, ["verify"], context_buckets=[512, 2048, 8192])
    key = Dispatcher(made.keys).find(verify([4], context_len)).key
    assert key == CaptureKey("verify", 4, 1, 4, bucket)


def test_drafts_at_a_bucket_border_count() -> None:
    made = plan(make_limits(), ["verify"])
    for committed in range(2048 - 4, 2049):
        bound = context_bound(np.array([100, committed + 4]), max_model_len=4096)
        key = Dispatcher(made.keys).find(verify([4, 4], bound)).key
        assert key is not None and key.context_bucket == (2048 if committed + 4 <= 2048 else 4096)


def test_a_chain_looks_ahead_but_not_behind_the_last_position() -> None:
    assert context_bound([7, 30], max_model_len=64, num_ahead=2) == 32
    assert context_bound([7, 63], max_model_len=64, num_ahead=2) == 64


def test_a_batch_takes_the_bucket_of_its_longest_request_even_if_it_is_padded_more() -> None:
    made = plan(make_limits(num_requests=32, k=0, max_len=131072), ["decode"], sizes=[16, 24, 32])
    dispatcher = Dispatcher(made.keys)
    assert dispatcher.find(LiveBatch("decode", 17, 17, 1, 1000)).key == CaptureKey("decode", 32, 32, 1, 2048)
    assert dispatcher.find(LiveBatch("decode", 17, 17, 1, 99999)).key == CaptureKey("decode", 24, 24, 1, 131072)


def test_what_no_capture_covers_has_a_reason_that_does_not_change_with_the_batch() -> None:
    dispatcher = Dispatcher([CaptureKey("verify", 8, 2, 4, 64), CaptureKey("verify", 16, 4, 4, 32)])
    reasons = {
        dispatcher.find(verify([4] * num_requests, context_len)).reason
        for num_requests, context_len in [(5, 10), (6, 20), (2, 65), (4, 33), (1, 10)]
    }
    assert reasons == {
        "more than any verify capture has: requests, rows",
        "more than any verify capture has: context",
        "no one verify capture has enough of all: context, requests, rows",
        "",
    }
    assert dispatcher.find(verify([2, 5])).reason == "more than any verify capture has: context, rows per request"
    assert dispatcher.find(LiveBatch("draft", 1, 1, 1, 10, 3)).reason == "no draft (K = 3) capture"


def test_a_chain_of_another_k_is_no_cover() -> None:
    dispatcher = Dispatcher(plan(make_limits(k=3)).keys)
    assert dispatcher.find(LiveBatch("draft", 1, 1, 1, 10, 2)).reason == "no draft (K = 2) capture"


@pytest.mark.parametrize(
    ("change", "gap"),
    [
        ({"phase": "decode"}, "phase"),
        ({"num_rows": 9}, "rows"),
        ({"num_requests": 3}, "requests"),
        ({"query_width": 5}, "rows per request"),
        ({"context_len": 65}, "context"),
        ({"num_draft_tokens": 1}, "draft tokens"),
    ],
)
def test_a_capture_without_room_is_not_replayed(change: dict[str, Any], gap: str) -> None:
    key = CaptureKey("verify", 8, 2, 4, 64)
    live = LiveBatch("verify", 8, 2, 4, 64)
    check_cover(key, live)
    with pytest.raises(InvariantError, match=f"does not cover .*: {gap}$"):
        check_cover(key, replace(live, **change))


def test_padding_is_counted_in_rows() -> None:
    dispatcher = Dispatcher([CaptureKey("verify", 16, 4, 4, 64)])
    found = dispatcher.find(verify([4, 4, 4], 10))
    assert (found.num_pad_rows, found.pad_waste) == (4, 0.25)
    eager = dispatcher.find(verify([5], 10))
    assert (eager.num_pad_rows, eager.pad_waste) == (0, 0.0)


def test_keys_that_no_batch_reaches_are_found() -> None:
    shadowed = CaptureKey("decode", 8, 8, 1, 4096)  # 4 requests at most, and there is a capture of 4
    wide = CaptureKey("verify", 10, 2, 5, 4096)  # K = 3: no request has 5 rows, and there is a capture of 4
    other_k = CaptureKey("draft", 2, 2, 1, 4096, 2)
    narrow = CaptureKey("verify", 4, 4, 1, 4096)  # a batch of one row each is a decode
    good = [
        CaptureKey("decode", 4, 4, 1, 4096),
        CaptureKey("verify", 16, 4, 4, 4096),
        CaptureKey("verify", 8, 2, 4, 64),
    ]
    found = unreachable_keys([shadowed, wide, other_k, narrow, *good], make_limits(num_requests=4))
    assert set(found) == {shadowed, other_k, narrow}
    assert unreachable_keys([wide, CaptureKey("verify", 8, 2, 4, 4096)], make_limits(num_requests=2)) == (wide,)


# --- all ranks pick the same key: vectors T1 and T2 of the spec ------------------------------------------------------


def dispatch_on_each_rank(num_requests: int, *, shard_decode: bool) -> list[CaptureKey | None]:
    """Verify 3 drafts of each request on 2 ranks; each rank builds its own dispatcher and its own batch."""
    limits = make_limits(pcp_size=2, shard_decode=shard_decode)
    keys = []
    for _ in range(2):
        partition = partition_batch([4] * num_requests, [False] * num_requests, pcp_size=2, shard_decode=shard_decode)
        live = LiveBatch("verify", partition.width, num_requests, 4, 100)
        keys.append(Dispatcher(plan(limits, sizes=[1, 2, 4, 8, 16, 24, 32], context_buckets=[]).keys).find(live).key)
    return keys


@pytest.mark.parametrize(("num_requests", "rows"), [(1, 4), (2, 4), (3, 8), (8, 16)])
def test_sharded_decodes_replay_pieces_on_all_ranks_also_on_one_without_rows(num_requests: int, rows: int) -> None:
    """T2: with one request rank 1 has no rows; T1: local rows are never compared with the global request count."""
    assert dispatch_on_each_rank(num_requests, shard_decode=True) == [CaptureKey("verify", rows)] * 2


@pytest.mark.parametrize(("num_requests", "rows"), [(1, 4), (2, 8), (3, 16), (5, 24), (7, 32)])
def test_replicated_decodes_replay_full_captures_on_all_ranks(num_requests: int, rows: int) -> None:
    key = CaptureKey("verify", rows, rows // 4, 4, 4096)
    assert dispatch_on_each_rank(num_requests, shard_decode=False) == [key] * 2


# --- laws ------------------------------------------------------------------------------------------------------------


@st.composite
def limits_and_options(draw: st.DrawFn) -> tuple[CaptureLimits, dict[str, Any]]:
    num_requests, num_tokens = draw(st.integers(1, 12)), draw(st.integers(1, 80))
    ends = sorted(draw(st.sets(st.integers(1, num_requests), max_size=3)) | {num_requests})
    entries = [[lo + 1, hi, draw(st.integers(0, 5))] for lo, hi in zip([0, *ends[:-1]], ends, strict=True)]
    limits = CaptureLimits(
        num_requests, num_tokens, max_model_len=draw(st.integers(1, 9000)),
        schedule=build_schedule(entries, num_speculative_tokens=5, max_num_requests=num_requests),
        windows=tuple(draw(st.sets(st.integers(1, 9000), max_size=2))), pcp_size=draw(st.integers(1, 4)),
        shard_decode=draw(st.booleans()),
    )  # fmt: skip
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["context_buckets"] = draw(st.lists(st.integers(1, limits.max_model_len), max_size=3))
    if draw(st.booleans()):
        options["sizes"] = draw(st.lists(st.integers(1, num_tokens), min_size=1, max_size=5))
    return limits, options


@st.composite
def lives(draw: st.DrawFn, limits: CaptureLimits, phase: CapturePhase) -> LiveBatch | None:
    """Return a batch that a scheduler could make, None if the phase has none."""
    context_len = draw(st.integers(1, limits.max_model_len))
    if phase in ("prefill", "mixed"):
        rows = draw(st.integers(1, limits.max_num_tokens))
        return LiveBatch(phase, rows, draw(st.integers(1, limits.max_num_requests)), rows, context_len)
    batch_size = draw(st.integers(1, limits.max_num_requests))  # that made the drafts; some may have finished since
    k = limits.schedule.lookup(batch_size)
    num_requests = draw(st.integers(1, min(batch_size, limits.max_num_tokens)))
    if phase == "draft":
        return LiveBatch(phase, num_requests, num_requests, 1, context_len, k) if k else None
    lens, rows_left = [1] * num_requests, limits.max_num_tokens - num_requests
    for request in range(num_requests if phase != "decode" else 0):
        extra = draw(st.integers(0, min(k, rows_left)))
        lens[request] += extra
        rows_left -= extra
    if phase == "verify" and max(lens) == 1:
        return None
    rows = sum(lens)
    if limits.shard_decode and phase != "proposal":
        rows = partition_batch(lens, [False] * num_requests, pcp_size=limits.pcp_size, shard_decode=True).width
    return LiveBatch(phase, rows, num_requests, max(lens), context_len, k if phase == "proposal" else 0)


MODES: tuple[CaptureMode, ...] = ("none", "piecewise", "full_decode", "full_and_piecewise")


@given(limits_and_options(), st.sampled_from(MODES), st.data())
def test_every_batch_of_a_captured_phase_replays_its_smallest_cover(
    drawn: tuple[CaptureLimits, dict[str, Any]], mode: CaptureMode, data: st.DataObject
) -> None:
    limits, options = drawn
    if mode == "full_decode":
        options.pop("sizes", None)  # drawn up to limits that only pieces have
    made = plan(limits, mode=mode, **options)
    phase = data.draw(st.sampled_from(PHASES))
    live = data.draw(lives(limits, phase))
    if live is None:
        return
    found = Dispatcher(made.keys).find(live)
    covers = [key for key in made.keys if not find_gaps(key, live)]
    assert (found.key is None) == (not covers) == bool(found.reason)
    if covers:
        assert found.key == min(covers, key=lambda key: key.size_order)
        assert 0 <= found.pad_waste < 1
    assert covers or phase not in {key.phase for key in made.keys}


@given(limits_and_options(), st.sampled_from(MODES))
def test_every_planned_key_is_unique_well_formed_and_reachable_if_steps_have_rows_for_all(
    drawn: tuple[CaptureLimits, dict[str, Any]], mode: CaptureMode
) -> None:
    limits, options = drawn
    if mode == "full_decode":
        options.pop("sizes", None)
    keys = plan(limits, mode=mode, **options).keys
    assert len(set(keys)) == len(keys)
    for key in keys:
        assert key.capture_size >= 1
        if key.is_full:
            assert key.num_requests is not None and key.query_width is not None
            assert key.capture_size == key.num_requests * key.query_width
    reported = unreachable_keys(keys, limits)
    widest = 1 + max(limits.schedule.distinct(limits.max_num_requests))
    if limits.max_num_tokens >= limits.max_num_requests * widest:
        assert reported == ()
    # else not all requests can have all their rows at once, and a K may have captures that another K's make useless
    assert all(key.is_full and key.phase in ("verify", "proposal") for key in reported)


@given(limits_and_options(), st.integers(1, 40))
def test_a_budget_is_kept_and_everything_is_either_captured_or_named(
    drawn: tuple[CaptureLimits, dict[str, Any]], memory_mb: int
) -> None:
    limits, options = drawn
    free = plan(limits, **options)

    def estimate(key: CaptureKey) -> int:
        return key.capture_size * 2**17

    if max(map(estimate, free.keys)) > memory_mb * 2**20:
        with pytest.raises(ConfigError, match=r"^capture.memory_mb"):
            plan(limits, **options, memory_mb=memory_mb, estimate_bytes=estimate)
        return
    made = plan(limits, **options, memory_mb=memory_mb, estimate_bytes=estimate)
    assert made.num_bytes == sum(map(estimate, made.keys)) <= memory_mb * 2**20
    assert sorted(map(str, (*made.keys, *made.pruned))) == sorted(map(str, free.keys))
    assert all(str(key) in made.notes[-1] for key in made.pruned)

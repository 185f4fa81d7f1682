"""Draft length by batch size: the rules for gaps and the tail, the notes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcp_compiler.errors import ConfigError
from pcp_compiler.plan.k_schedule import KSchedule, build_schedule


def build(entries: Any, num_speculative_tokens: int = 3, max_num_requests: int = 10) -> KSchedule:
    return build_schedule(entries, num_speculative_tokens=num_speculative_tokens, max_num_requests=max_num_requests)


def table(schedule: KSchedule, max_num_requests: int) -> list[int]:
    return [schedule.lookup(num_requests) for num_requests in range(1, max_num_requests + 1)]


def test_gaps_and_the_tail_keep_the_k_before_them() -> None:
    schedule = build([[1, 2, 3], [5, 8, 1]])
    assert table(schedule, 10) == [3, 3, 3, 3, 1, 1, 1, 1, 1, 1]
    assert schedule.notes == (
        "draft.k_schedule: batches of 3 to 4 requests are as those of [1, 2, 3]",
        "draft.k_schedule: batches of 9 to 10 requests are as those of [5, 8, 1]",
    )


def test_neighbouring_entries_that_cover_the_batch_leave_nothing_to_note() -> None:
    schedule = build([[1, 2, 3], [3, 5, 2], [6, 10, 1]])
    assert table(schedule, 10) == [3, 3, 2, 2, 2, 1, 1, 1, 1, 1]
    assert schedule.notes == ()


def test_entries_may_come_in_any_order() -> None:
    assert build([[6, 10, 1], [1, 5, 2]]) == build([[1, 5, 2], [6, 10, 1]])


def test_k_0_turns_drafting_off_for_large_batches() -> None:
    schedule = build([[1, 4, 3], [5, 10, 0]])
    assert table(schedule, 6) == [3, 3, 3, 3, 0, 0]
    assert schedule.distinct(10) == (0, 3)


def test_a_k_above_the_limit_is_lowered_and_noted() -> None:
    schedule = build([[1, 4, 7], [5, 10, 2]])
    assert table(schedule, 5) == [3, 3, 3, 3, 2]
    assert schedule.notes == ("draft.k_schedule: [1, 4, 7] is lowered to K = 3, draft.num_speculative_tokens",)


def test_an_entry_that_no_batch_can_reach_is_noted_and_needs_no_graph() -> None:
    schedule = build([[1, 4, 3], [5, 10, 2], [11, 32, 1]])
    assert schedule.distinct(10) == (2, 3)
    assert schedule.notes == ("draft.k_schedule: [11, 32, 1] is never used: limits.max_num_requests is 10",)


def test_without_entries_every_batch_has_the_one_k() -> None:
    schedule = build([])
    assert table(schedule, 10) == [3] * 10
    assert schedule.notes == ()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=5))
def test_lookup_equals_a_table_filled_in_by_hand(pieces: list[tuple[int, int, int]]) -> None:
    entries: list[list[int]] = []
    start = 1
    for gap, length, k in pieces:
        lo = start + (gap if entries else 0)
        entries.append([lo, lo + length - 1, k])
        start = lo + length
    expected, current = [], 0
    for num_requests in range(1, start + 5):
        for lo, hi, k in entries:
            current = min(k, 4) if lo <= num_requests <= hi else current
        expected.append(current)
    schedule = build(entries, num_speculative_tokens=4, max_num_requests=start + 4)
    assert table(schedule, start + 4) == expected
    assert set(schedule.distinct(start + 4)) == set(expected)


@pytest.mark.parametrize("entries", ["[[1, 2, 3]]", 3, None, {"1": 3}])
def test_what_is_not_a_list_is_refused(entries: Any) -> None:
    with pytest.raises(ConfigError, match=r"draft\.k_schedule is .*; give a list of \[lo, hi, K\]"):
        build(entries)


@pytest.mark.parametrize("entry", [[5, 8], [5, 8, 1, 1], [5, 8, True], [5, 8, 1.0], ["5", 8, 1], 5, "581"])
def test_an_entry_that_is_not_three_integers_is_refused_by_its_index(entry: Any) -> None:
    with pytest.raises(ConfigError, match=r"draft\.k_schedule\[1\] is .*; give three integers"):
        build([[1, 4, 3], entry])


@pytest.mark.parametrize("entry", [[0, 8, 1], [-1, 8, 1], [8, 5, 1], [5, 8, -1]])
def test_an_entry_out_of_range_is_refused_by_its_index(entry: Any) -> None:
    with pytest.raises(ConfigError, match=r"draft\.k_schedule\[1\] is .*; give 1 <= lo <= hi and K >= 0"):
        build([[1, 4, 3], entry])


def test_two_entries_for_one_batch_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="two entries for batch size 4"):
        build([[4, 8, 1], [1, 4, 3]])


def test_a_schedule_without_a_batch_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"starts at batch size 2; give an entry \[1, hi, K\]"):
        build([[2, 8, 1]])

"""Acceptance numbers, and the report about drafts that are almost never accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcp_compiler.runtime.metrics import (
    CHAIN_CAUSES,
    LOW_RATE,
    MIN_SAMPLES,
    PAIRING_CAUSES,
    AcceptanceStats,
    explain_low_acceptance,
)

rounds_of_drafts = st.lists(st.integers(0, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), max_size=30)


def stats_of(*rounds: tuple[int, int], times: int = 1) -> AcceptanceStats:
    stats = AcceptanceStats()
    for num_draft_tokens, num_accepted in rounds * times:
        stats.add_round(num_draft_tokens, num_accepted)
    return stats


def test_two_rounds_that_accept_3_and_1_of_3() -> None:
    stats = stats_of((3, 3), (3, 1))
    assert stats.acceptance_rate == 4 / 6
    assert stats.acceptance_length == 3.0
    assert stats.per_position == (1.0, 0.5, 0.5)
    assert stats.per_position_given_earlier == (1.0, 0.5, 1.0)


def test_a_round_without_drafts_counts_nothing() -> None:
    assert stats_of((0, 0), (2, 1), (0, 0)) == stats_of((2, 1))


def test_without_rounds_the_numbers_are_those_of_plain_decoding() -> None:
    stats = AcceptanceStats()
    assert (stats.acceptance_rate, stats.acceptance_length) == (0.0, 1.0)
    assert stats.per_position == stats.per_position_given_earlier == ()


def test_a_shorter_round_is_not_counted_as_a_try_at_the_positions_it_lacks() -> None:
    stats = stats_of((1, 1), (3, 1), (3, 2))
    assert stats.per_position == (1.0, 1 / 3, 0.0)
    assert stats.per_position_given_earlier == (1.0, 1 / 2, 0.0)


@given(rounds_of_drafts)
def test_the_numbers_follow_from_the_rounds(rounds: list[tuple[int, int]]) -> None:
    stats = stats_of(*rounds)
    drafted = [(k, accepted) for k, accepted in rounds if k]
    assert stats.num_rounds == len(drafted)
    assert stats.num_accepted == sum(accepted for _, accepted in drafted) == sum(stats.num_accepted_at)
    assert stats.acceptance_length == pytest.approx(1 + sum(stats.per_position))
    assert list(stats.per_position) == sorted(stats.per_position, reverse=True)
    for position in range(max((k for k, _ in drafted), default=0)):
        tried = [accepted for k, accepted in drafted if k > position and accepted >= position]
        assert stats.num_tried_at[position] == len(tried)
        assert stats.num_accepted_at[position] == sum(accepted > position for accepted in tried)


@given(rounds_of_drafts, rounds_of_drafts)
def test_adding_two_counts_is_counting_all_rounds(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    total = stats_of(*left)
    total.add(stats_of(*right))
    assert total == stats_of(*left, *right)


def test_more_accepted_than_drafted_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="3 of 2 drafts accepted"):
        AcceptanceStats().add_round(2, 3)


# --- the report


def test_first_drafts_that_always_fail_point_to_the_pairing() -> None:
    report = explain_low_acceptance(stats_of((3, 0), times=MIN_SAMPLES))
    assert report is not None
    assert f"Draft 1 of a round is accepted in 0.0% of {MIN_SAMPLES} cases" in report
    assert "rate 0.0%, length 1.00" in report
    assert all(cause in report for cause in PAIRING_CAUSES)
    assert not any(cause in report for cause in CHAIN_CAUSES)
    assert "the target as its own drafter" in report


def test_a_second_draft_that_always_fails_after_a_good_first_points_to_the_chain() -> None:
    report = explain_low_acceptance(stats_of((3, 1), times=MIN_SAMPLES))
    assert report is not None
    assert report.startswith(f"Draft 2 of a round is accepted in 0.0% of {MIN_SAMPLES} cases")
    assert all(cause in report for cause in CHAIN_CAUSES)
    assert not any(cause in report for cause in PAIRING_CAUSES)


def test_too_few_drafts_are_not_judged() -> None:
    assert explain_low_acceptance(AcceptanceStats()) is None
    assert explain_low_acceptance(stats_of((3, 0), times=MIN_SAMPLES - 1)) is None
    assert explain_low_acceptance(stats_of(*[(3, 1)] * (MIN_SAMPLES - 1), *[(1, 1)] * 100)) is None


def test_rare_but_real_acceptance_is_not_reported() -> None:
    num_rounds = 1000
    at_limit = round(LOW_RATE * num_rounds)
    assert explain_low_acceptance(stats_of(*[(1, 1)] * at_limit, *[(1, 0)] * (num_rounds - at_limit))) is None
    report = explain_low_acceptance(stats_of(*[(1, 1)] * (at_limit - 1), *[(1, 0)] * (num_rounds - at_limit + 1)))
    assert report is not None and "4.9% of 1000 cases" in report

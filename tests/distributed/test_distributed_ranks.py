"""Ranks in several processes: the same results as virtual ones, and one clear error on every rank when one fails."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import scenarios
from tests.distributed.run_ranks import Ended, run_ranks
from tests.distributed.scenarios import LENGTHS, ODD, SLOW_S, STEP_S, WORLD_SIZE, Failure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
QUICK_S = 10.0
"""Far below the time-outs of these tests: the error was told, not waited for. Compiling is part of it."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each scenario gave on each rank."""
    folder = tmp_path_factory.mktemp("dumps") / "not" / "there yet"
    return run_ranks(scenarios.run_all, WORLD_SIZE, str(folder), limit_s=200)


def results(outcomes: list[dict[str, Any]], scenario: Any) -> list[Any]:
    """Return each rank's outcome of a scenario."""
    return [outcome[scenario.__name__] for outcome in outcomes]


def check_failure(outcomes: list[dict[str, Any]], scenario: Any, *words: str, own_error: str | None = None) -> None:
    """Check that every rank raised one and the same message with these words, soon, and that the next call worked.

    Args:
        own_error: type of the error with which the odd rank failed by itself; None: it raised what the others did.
    """
    failures: list[Failure] = results(outcomes, scenario)
    assert all(failure.recovered for failure in failures)
    told = [failure for rank, failure in enumerate(failures) if own_error is None or rank != ODD]
    assert len({failure.message for failure in told}) == 1, "ranks have different messages"
    for word in words:
        assert word in told[0].message
    assert max(failure.seconds for failure in failures) < QUICK_S
    if own_error is not None:
        assert failures[ODD].kind == own_error
        assert f"rank {ODD} failed: {own_error}: " in told[0].message
        assert {failure.kind for failure in told} == {"RankError"}


# --- right results ---------------------------------------------------------------------------------------------------


def test_distributed_ranks_equal_virtual_ranks_bit_for_bit_and_eager(outcomes: list[dict[str, Any]]) -> None:
    for rank, (to_eager, to_virtual, ours, theirs) in enumerate(results(outcomes, scenarios.equality)):
        assert max(to_eager) <= 1e-12
        assert max(to_virtual) == 0.0
        assert {record.rank for record in ours} == {rank}
        assert {record.rank for record in theirs} == {None}
        for record, virtual in zip(ours, theirs, strict=True):
            assert record.rows_per_rank == virtual.rows_per_rank
            assert record.collectives == virtual.collectives
        assert sorted(record.num_tokens for record in ours) == sorted(LENGTHS)


def test_a_rank_without_rows_joins_the_collectives(outcomes: list[dict[str, Any]]) -> None:
    for _, _, records, _ in results(outcomes, scenarios.equality):
        (record,) = (record for record in records if record.num_tokens == 2)
        assert record.rows_per_rank == (1, 1, 0, 0)
        assert len(record.collectives) == 2


def test_bfloat16_rows_and_sums_travel_bit_for_bit(outcomes: list[dict[str, Any]]) -> None:
    assert results(outcomes, scenarios.low_precision) == [[True, True]] * WORLD_SIZE


def test_short_prompts_run_whole_on_every_rank_without_collectives(outcomes: list[dict[str, Any]]) -> None:
    for records, _ in results(outcomes, scenarios.short_prompts):
        assert [record.rows_per_rank for record in records] == [(7,) * WORLD_SIZE, (3,) * WORLD_SIZE]
        assert all(record.collectives == () for record in records)


def test_short_prompts_are_compared_too(outcomes: list[dict[str, Any]]) -> None:
    failures = [failure for _, failure in results(outcomes, scenarios.short_prompts)]
    assert len({failure.message for failure in failures}) == 1
    assert (
        "input_ids: int64[1, 7] on cpu on rank 0, rank 2, rank 3; int64[1, 6] on cpu on rank 1" in failures[0].message
    )
    assert all(failure.recovered for failure in failures)


def test_a_process_group_or_mesh_given_as_option_runs_its_ranks_only(outcomes: list[dict[str, Any]]) -> None:
    assert results(outcomes, scenarios.own_groups) == [
        [(2, 0), (2, 0), (2, 0)],
        [(2, 1), (2, 0), (2, 1)],
        [(2, 0), (2, 1), (2, 0)],
        [(2, 1), (2, 1), (2, 1)],
    ]


def test_ranks_that_start_together_dump_into_one_new_folder(outcomes: list[dict[str, Any]]) -> None:
    for files in results(outcomes, scenarios.dumps):
        assert files == [f"rank_{rank}" for rank in range(WORLD_SIZE)]


# --- ranks differ ----------------------------------------------------------------------------------------------------


def test_another_batch_on_one_rank_is_found_in_the_first_call(outcomes: list[dict[str, Any]]) -> None:
    check_failure(outcomes, scenarios.another_batch, "ranks differ in their token ids", "rank 0, rank 2, rank 3; ")


def test_another_batch_on_one_rank_is_found_in_every_call_under_check_inputs(outcomes: list[dict[str, Any]]) -> None:
    check_failure(outcomes, scenarios.another_batch_later, "ranks differ in their token ids", "on rank 1")


def test_another_length_on_one_rank_is_found_in_every_call(outcomes: list[dict[str, Any]]) -> None:
    check_failure(
        outcomes, scenarios.another_shape,
        "ranks differ in their shapes; give every rank the same batch",
        "input_ids: int64[1, 20] on cpu on rank 0, rank 2, rank 3; int64[1, 21] on cpu on rank 1",
    )  # fmt: skip


def test_another_weight_on_one_rank_is_named(outcomes: list[dict[str, Any]]) -> None:
    check_failure(
        outcomes, scenarios.another_weight, "ranks differ in their parameters", "head_weight: float64[61, 16]"
    )


def test_another_config_on_one_rank_is_named(outcomes: list[dict[str, Any]]) -> None:
    check_failure(
        outcomes, scenarios.another_config,
        "ranks differ in their config", "parallel.min_tokens_to_shard: 6 on rank 0, rank 2, rank 3; 5 on rank 1",
    )  # fmt: skip


def test_a_pcp_size_that_does_not_fit_the_group_is_told_to_all(outcomes: list[dict[str, Any]]) -> None:
    check_failure(
        outcomes, scenarios.another_size,
        "parallel.pcp_size is 3, the process group has 4 ranks; allowed: equal", own_error="ConfigError",
    )  # fmt: skip


def test_another_schedule_on_one_rank_is_found_before_a_collective_runs(outcomes: list[dict[str, Any]]) -> None:
    check_failure(
        outcomes, scenarios.another_schedule,
        "ranks differ in their collectives; compile the same model on every rank",
        "1: unshard unshard_default on rank 0, rank 2, rank 3; unshard unshard_default_1 on rank 1",
    )  # fmt: skip


# --- ranks fail ------------------------------------------------------------------------------------------------------


def test_a_rank_that_raises_while_compiling_is_named_on_all(outcomes: list[dict[str, Any]]) -> None:
    check_failure(outcomes, scenarios.failure_while_compiling, "is in training mode", own_error="UnsupportedGraphError")


def test_a_rank_that_raises_before_it_meets_the_others_is_named_on_all(outcomes: list[dict[str, Any]]) -> None:
    check_failure(outcomes, scenarios.failure_before_collectives, "the input is refused here", own_error="CallError")


def test_a_rank_that_raises_between_collectives_is_named_on_all(outcomes: list[dict[str, Any]]) -> None:
    check_failure(outcomes, scenarios.failure_between_collectives, "out of memory here", own_error="MemoryError")


def test_a_rank_that_raises_after_the_last_collective_does_not_spoil_the_next_call(
    outcomes: list[dict[str, Any]],
) -> None:
    found = results(outcomes, scenarios.failure_after_collectives)
    assert found[ODD] == ("MemoryError", True)
    for outcome, recovered in found:
        assert outcome in ("result", "RankError", "MemoryError")
        assert recovered


def test_a_failed_call_leaves_nothing_in_the_callers_own_group(outcomes: list[dict[str, Any]]) -> None:
    assert results(outcomes, scenarios.failure_beside_own_collectives) == [0.0 + 1 + 2 + 3] * WORLD_SIZE


def test_two_calls_at_once_are_refused(outcomes: list[dict[str, Any]]) -> None:
    for message in results(outcomes, scenarios.call_inside_call):
        assert message.startswith("two threads call distributed ranks at once; allowed: one at a time")


# --- ranks lag or end ------------------------------------------------------------------------------------------------


def test_a_rank_that_comes_too_late_to_a_call_is_named_on_all(outcomes: list[dict[str, Any]]) -> None:
    check_failure(
        outcomes, scenarios.lag_before_call,
        f"waited {STEP_S:g} s (parallel.timeout_s.step) for rank 1 (outside any call)",
    )  # fmt: skip
    for rank, failure in enumerate(results(outcomes, scenarios.lag_before_call)):
        assert (failure.seconds >= SLOW_S) == (rank == ODD), "the others wait for the time-out, not for the late rank"


def test_a_rank_that_comes_too_late_to_a_collective_is_named_on_all(outcomes: list[dict[str, Any]]) -> None:
    check_failure(
        outcomes, scenarios.lag_between_collectives,
        "collective 2 (unshard", f"waited {STEP_S:g} s (parallel.timeout_s.step) for rank 1 (in call",
        "collective 1 (unshard",
    )  # fmt: skip


def test_the_start_time_out_stands_still_while_a_rank_compiles(outcomes: list[dict[str, Any]]) -> None:
    assert SLOW_S > STEP_S
    assert results(outcomes, scenarios.slow_compile) == [True] * WORLD_SIZE


def test_a_killed_rank_and_one_that_ended_are_named_soon() -> None:
    found = run_ranks(scenarios.killed_or_gone, WORLD_SIZE, limit_s=60, may_end=True)
    assert isinstance(found[1], Ended) and found[1].exit_code == -9
    message, seconds = found[0]
    assert "rank 1 is gone: no sign of life for 3 s (killed, stopped or cut off); it was last in call 1, " in message
    assert seconds < 15
    assert found[3] == ("ended", 0.0)
    message, seconds = found[2]
    assert message == "call 1: pcp rank 1 (rank 3 of the job) is gone: its process has ended"
    assert seconds < QUICK_S


# --- the helper itself -----------------------------------------------------------------------------------------------


def test_run_ranks_shows_the_traceback_of_a_process_and_its_end() -> None:
    with pytest.raises(AssertionError, match=r"raised:\n(.|\n)*ZeroDivisionError"):
        run_ranks(divide_by_rank, 1, limit_s=30)


def divide_by_rank(rank: int) -> float:
    return 1 / rank

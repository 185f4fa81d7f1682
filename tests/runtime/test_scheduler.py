"""Continuous batching: who runs, with how many rows and blocks, and what results do to a request."""

from __future__ import annotations

from typing import Any

import pytest

from pcp_compiler.errors import CallError, ConfigError
from pcp_compiler.runtime.kv_blocks import BlockPool
from pcp_compiler.runtime.request import Request, RequestStatus
from pcp_compiler.runtime.sampling import SamplingParams
from pcp_compiler.runtime.scheduler import RequestOutput, Scheduler, SchedulerLimits, Step

EOS = 7


def scheduler_of(*, num_blocks: int = 33, block_size: int = 4, **limits: Any) -> Scheduler:
    """Return a scheduler with room for what a test does not limit; K drafts look K positions ahead."""
    limits.setdefault("num_lookahead", limits.get("num_draft_tokens", 0))
    values = {"max_model_len": 64, "max_num_requests": 8, "max_num_tokens": 64, **limits}
    return Scheduler(SchedulerLimits(**values), BlockPool(num_blocks, block_size))


def params_of(max_new_tokens: int = 8, *stop_token_ids: int) -> SamplingParams:
    """Return greedy options."""
    return SamplingParams(max_new_tokens, stop_token_ids=stop_token_ids)


def submit(scheduler: Scheduler, *prompt_lens: int, max_new_tokens: int = 8, first_id: int = 100) -> list[Request]:
    """Submit prompts of these lengths, all of different tokens."""
    prompts = [[first_id * (index + 1) + i for i in range(length)] for index, length in enumerate(prompt_lens)]
    return [scheduler.submit(prompt, params_of(max_new_tokens)) for prompt in prompts]


def run(scheduler: Scheduler, sampled: list[list[int]] | None = None, drafts: list[list[int]] | None = None) -> Step:
    """Run one step; by default each request that samples gets one token, 1."""
    step = scheduler.schedule()
    assert step is not None
    scheduler.complete(step, sampled or [[1] if rows.is_sampled else [] for rows in step.rows], drafts)
    return step


def lens_of(step: Step) -> list[int]:
    """Return the rows of each request."""
    return [rows.query_len for rows in step.rows]


def test_a_prompt_runs_in_pieces_and_only_the_last_one_is_sampled() -> None:
    scheduler = scheduler_of(prefill_chunk=4)
    [request] = submit(scheduler, 9)
    steps = [run(scheduler) for _ in range(4)]
    assert [lens_of(step) for step in steps] == [[4], [4], [1], [1]]
    assert [step.rows[0].is_sampled for step in steps] == [False, False, True, True]
    assert [step.batch.phase for step in steps] == ["prefill", "prefill", "prefill", "decode"]
    assert [step.batch.positions.tolist() for step in steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [8], [9]]
    assert request.output_ids == [1, 1] and request.num_computed == 10


def test_decodes_get_their_rows_before_prompts_and_prompts_by_age() -> None:
    scheduler = scheduler_of(max_num_tokens=6)
    submit(scheduler, 2)
    run(scheduler)
    long, late = submit(scheduler, 8, 8, first_id=500)
    step = run(scheduler)
    assert [(rows.request.request_id, rows.query_len) for rows in step.rows] == [(0, 1), (long.request_id, 5)]
    assert late.status is RequestStatus.WAITING


def test_with_few_rows_every_decode_runs_before_anyone_gets_drafts() -> None:
    scheduler = scheduler_of(max_num_tokens=4, num_draft_tokens=3)
    submit(scheduler, 1, 1, 1)
    step = run(scheduler, drafts=[[5, 5, 5]] * 3)
    assert lens_of(step) == [1, 1, 1]
    assert lens_of(run(scheduler)) == [2, 1, 1]


def test_more_prompts_than_max_num_requests_queue_in_order_of_arrival() -> None:
    scheduler = scheduler_of(max_num_requests=2)
    requests = submit(scheduler, 3, 3, 3, 3, max_new_tokens=1)
    assert [rows.request for rows in run(scheduler).rows] == requests[:2]
    assert [rows.request for rows in run(scheduler).rows] == requests[2:]
    assert scheduler.schedule() is None and not scheduler.has_work


def test_verify_rows_are_the_last_token_and_the_drafts() -> None:
    scheduler = scheduler_of(num_draft_tokens=3)
    [request] = submit(scheduler, 5)
    run(scheduler, [[40]], [[41, 42, 43]])
    step = scheduler.schedule()
    assert step is not None and step.batch.phase == "verify"
    assert step.batch.input_ids.tolist() == [40, 41, 42, 43] and step.batch.positions.tolist() == [5, 6, 7, 8]
    [output] = scheduler.complete(step, [[41, 50]], [[51]])
    assert output == RequestOutput(request, (41, 50), 3, 1, None)
    assert request.num_computed == 7 and request.draft_ids == (51,)
    assert run(scheduler).batch.positions.tolist() == [7, 8]


def test_blocks_reach_over_the_look_ahead_but_not_past_max_model_len() -> None:
    scheduler = scheduler_of(num_draft_tokens=4, max_model_len=16)
    short, long = submit(scheduler, 4, 14)
    run(scheduler)
    assert len(short.block_table) == 2 and len(long.block_table) == 4


def test_preemption_takes_the_youngest_and_loses_no_token() -> None:
    scheduler = scheduler_of(num_blocks=5, prefix_cache=False)  # 4 usable blocks of 4 tokens
    old, young = submit(scheduler, 4, 4)
    run(scheduler, [[31], [41]])
    run(scheduler, [[32], [42]])
    for token_id in (33, 34, 35):
        run(scheduler, [[token_id], [token_id + 10]])
    step = run(scheduler, [[36]])  # position 8 of the older needs a third block
    assert [rows.request for rows in step.rows] == [old]
    assert young.status is RequestStatus.WAITING and young.num_preemptions == 1 and not young.block_table
    assert young.output_ids == [41, 42, 43, 44, 45] and young.prefill_len == 9
    old.cancel()
    step = run(scheduler, [[46]])
    assert step.batch.input_ids.tolist() == young.token_ids[:9] and step.batch.phase == "prefill"
    assert young.output_ids == [41, 42, 43, 44, 45, 46]


def test_a_preempted_request_comes_back_before_one_that_never_ran() -> None:
    scheduler = scheduler_of(num_blocks=5, max_num_requests=2, prefix_cache=False)
    old, young, new = submit(scheduler, 4, 4, 2, max_new_tokens=9)
    for _ in range(6):
        run(scheduler)
    assert list(scheduler.waiting) == [young, new] and scheduler.running == [old]


def test_a_request_that_lost_its_blocks_in_a_step_is_not_taken_back_in_it() -> None:
    scheduler = scheduler_of(num_blocks=4, block_size=1, max_num_tokens=1, prefix_cache=False, max_model_len=4)
    old, young = submit(scheduler, 2, 1, max_new_tokens=1)
    assert [rows.request for rows in run(scheduler).rows] == [old]  # one row of two
    assert [rows.request for rows in run(scheduler).rows] == [old]
    assert [rows.request for rows in run(scheduler).rows] == [young]
    assert scheduler.pool.num_free == 3


def test_a_repeated_prompt_takes_whole_blocks_from_the_cache_and_computes_at_least_one_token() -> None:
    scheduler = scheduler_of()
    prompt = list(range(100, 108))
    first = scheduler.submit(prompt, params_of(1))
    run(scheduler)
    second = scheduler.submit(prompt, params_of(1))
    step = run(scheduler)
    assert first.num_cached_tokens == 0 and second.num_cached_tokens == 4  # not 8: the last token gives the logits
    assert step.batch.positions.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(("other_tail", "num_cached"), [([8, 9], 8), ([9, 9], 4)])
def test_with_mtp_the_last_token_in_common_is_computed_again(other_tail: list[int], num_cached: int) -> None:
    scheduler = scheduler_of(num_draft_tokens=2, draft_shift=1)
    scheduler.submit([*range(100, 108), 8, 8], params_of(1))
    run(scheduler, drafts=[[]])
    other = scheduler.submit([*range(100, 108), *other_tail], params_of(1))
    run(scheduler, drafts=[[]])
    assert other.num_cached_tokens == num_cached


def test_blocks_that_the_drafter_has_not_written_are_not_shared() -> None:
    scheduler = scheduler_of(num_draft_tokens=2, draft_shift=1, prefill_chunk=4)
    prompt = list(range(100, 110))
    scheduler.submit(prompt, params_of(1))
    run(scheduler, drafts=[[]])
    run(scheduler, drafts=None)  # rows 4..7 are missing
    run(scheduler, drafts=[[]])
    second = scheduler.submit(prompt, params_of(1))
    run(scheduler, drafts=[[]])
    assert second.num_cached_tokens == 4


def test_output_is_cached_too() -> None:
    scheduler = scheduler_of()
    first = scheduler.submit(list(range(100, 106)), params_of(4))
    while scheduler.has_work:
        run(scheduler)
    second = scheduler.submit([*first.token_ids, 55], params_of(1))
    run(scheduler)
    assert second.num_cached_tokens == 8


def test_new_weights_drop_all_kv_and_the_prefix_cache_but_no_token() -> None:
    scheduler = scheduler_of()
    [request] = submit(scheduler, 9)
    run(scheduler)
    scheduler.drop_kv()
    assert scheduler.pool.num_free == scheduler.pool.num_usable
    step = run(scheduler)
    assert step.batch.positions.tolist() == list(range(10)) and request.num_cached_tokens == 0


def test_a_failed_request_finishes_alone_and_leaves_nothing_in_the_prefix_cache() -> None:
    scheduler = scheduler_of()
    bad, good = submit(scheduler, 9, 9)
    step = scheduler.schedule()
    assert step is not None
    outputs = scheduler.complete(step, [[], [1]])
    assert outputs[0].finish_reason == bad.finish_reason == "error" and outputs[0].token_ids == ()
    assert good.status is RequestStatus.RUNNING and good.output_ids == [1]
    again = scheduler.submit(bad.prompt_ids, params_of(1))
    run(scheduler)
    assert again.num_cached_tokens == 0


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_cancelled_request_gives_its_blocks_back_whatever_it_was_doing(num_steps: int) -> None:
    scheduler = scheduler_of(prefill_chunk=4)
    [request] = submit(scheduler, 7)
    for _ in range(num_steps):
        run(scheduler)
    assert request.cancel() and not request.cancel()
    assert request.finish_reason == "cancelled"
    assert scheduler.schedule() is None
    assert scheduler.pool.num_free == scheduler.pool.num_usable and not scheduler.has_work


def test_tokens_of_a_step_under_way_are_dropped_when_its_request_is_cancelled() -> None:
    scheduler = scheduler_of()
    cancelled, other = submit(scheduler, 3, 3)
    step = scheduler.schedule()
    assert step is not None
    cancelled.cancel()
    outputs = scheduler.complete(step, [[1], [1]])
    assert [output.token_ids for output in outputs] == [(), (1,)]
    assert scheduler.running == [other]


def test_a_cancel_from_a_callback_between_two_steps_loses_no_block() -> None:
    scheduler = scheduler_of(num_draft_tokens=2)
    first, second = submit(scheduler, 3, 3)
    run(scheduler, drafts=[[5, 5]] * 2)
    second.cancel()
    scheduler.release_finished()
    scheduler.release_finished()
    assert scheduler.running == [first]
    assert scheduler.pool.num_free == scheduler.pool.num_usable - len(first.block_table)


def test_after_an_interrupt_in_a_step_all_blocks_are_free_again() -> None:
    scheduler = scheduler_of(max_num_requests=2)
    submit(scheduler, 3, 9, 3)
    run(scheduler)
    scheduler.schedule()
    scheduler.cancel_all()
    assert scheduler.pool.num_free == scheduler.pool.num_usable and not scheduler.has_work
    submit(scheduler, 5)
    assert lens_of(run(scheduler)) == [5]


def test_a_request_without_new_tokens_finishes_without_a_step() -> None:
    scheduler = scheduler_of()
    request = scheduler.submit([1, 2], params_of(0))
    assert request.finish_reason == "length" and scheduler.schedule() is None


def test_a_stop_token_in_the_prompt_stops_nothing() -> None:
    scheduler = scheduler_of()
    request = scheduler.submit([EOS, EOS], params_of(2, EOS))
    run(scheduler)
    assert request.output_ids == [1] and not request.is_finished


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(CallError, match="prompt_ids is empty"):
        scheduler_of().submit([], params_of())


@pytest.mark.parametrize("num_tokens", [16, 17])
def test_a_prompt_that_leaves_no_room_is_refused(num_tokens: int) -> None:
    with pytest.raises(CallError, match=rf"has {num_tokens} tokens.*limits.max_model_len 16"):
        submit(scheduler_of(max_model_len=16), num_tokens)


def test_a_pool_that_cannot_hold_one_request_says_what_it_needs_and_has() -> None:
    scheduler = scheduler_of(num_blocks=4, num_draft_tokens=2)
    submit(scheduler, 6, max_new_tokens=5)  # 10 tokens and 2 ahead: 3 blocks
    with pytest.raises(ConfigError, match=r"needs 4 KV blocks of 4 tokens.*has 3; raise limits.kv_blocks to >= 5"):
        submit(scheduler, 6, max_new_tokens=6)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_model_len", 1, "limits.max_model_len is 1; give an integer >= 2"),
        ("max_num_requests", 0, "limits.max_num_requests is 0"),
        ("max_num_tokens", 0, "limits.max_num_tokens is 0"),
        ("prefill_chunk", 0, "limits.prefill_chunk is 0"),
        ("num_draft_tokens", -1, "draft.num_speculative_tokens is -1"),
    ],
)
def test_a_limit_below_its_lowest_value_is_refused(name: str, value: int, message: str) -> None:
    values: dict[str, Any] = {"max_model_len": 64, "max_num_requests": 8, "max_num_tokens": 64, name: value}
    with pytest.raises(ConfigError, match=message):
        SchedulerLimits(**values)


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 20])
def test_b43_a_prompt_or_its_last_piece_as_long_as_a_verify_row_group_is_a_prefill(num_tokens: int) -> None:
    scheduler = scheduler_of(prefill_chunk=16, num_draft_tokens=3)
    submit(scheduler, num_tokens)
    steps = [run(scheduler) for _ in range(-(-num_tokens // 16))]
    assert all(step.batch.phase == "prefill" for step in steps)
    assert [len(step.batch.logit_rows) for step in steps] == [0] * (len(steps) - 1) + [1]
    assert run(scheduler).batch.phase == "decode"


def test_b60_ten_cached_tokens_are_two_blocks_of_4_and_new_kv_may_start_inside_a_block() -> None:
    scheduler = scheduler_of(prefill_chunk=6)
    common = list(range(100, 110))
    scheduler.submit(common, params_of(1))
    run(scheduler)
    run(scheduler)
    second = scheduler.submit([*common, *range(200, 210)], params_of(1))
    steps = [run(scheduler), run(scheduler)]
    assert second.num_cached_tokens == 8
    assert [step.batch.positions.tolist() for step in steps] == [list(range(8, 14)), list(range(14, 20))]
    for step in steps:
        table = step.batch.block_tables[0].tolist()
        assert step.batch.slots.tolist() == [table[p // 4] * 4 + p % 4 for p in step.batch.positions]


def test_b80_rows_that_accept_0_1_and_3_drafts_go_on_at_their_own_positions() -> None:
    scheduler = scheduler_of(num_draft_tokens=3)
    submit(scheduler, 5, 2, 9)
    run(scheduler, drafts=[[2, 3, 4]] * 3)
    step = run(scheduler, [[9], [2, 9], [2, 3, 4, 9]], [[5], [6], [7]])
    assert step.batch.query_start.tolist() == [0, 4, 8, 12]
    step = run(scheduler)
    assert step.batch.positions.tolist() == [6, 7, 4, 5, 13, 14]
    assert step.batch.input_ids.tolist() == [9, 5, 9, 6, 9, 7]
    assert step.batch.seq_lens.tolist() == [8, 6, 15]


def test_b82_a_stop_token_inside_the_accepted_prefix_ends_tokens_kv_and_counts_there() -> None:
    scheduler = scheduler_of(num_draft_tokens=4, draft_shift=1)
    request = scheduler.submit([100, 101, 102], params_of(20, EOS))
    run(scheduler, [[103]], [[104, EOS, 105, 106]])
    step = scheduler.schedule()
    assert step is not None
    [output] = scheduler.complete(step, [[104, EOS, 105, 106, 107]], [[108]])
    assert output == RequestOutput(request, (104, EOS), 2, 2, "stop")
    assert request.output_ids == [103, 104, EOS] and request.num_computed == 5 and request.draft_ids == ()
    again = scheduler.submit([100, 101, 102, 103, 104, EOS, 105, 106, 107], params_of(1))
    run(scheduler)
    assert again.num_cached_tokens == 4  # nothing behind the stop token was offered


def test_b83_requests_with_0_2_0_and_3_drafts_keep_their_rows_apart() -> None:
    scheduler = scheduler_of(num_draft_tokens=3)
    submit(scheduler, 2, 3, 4, 5)
    run(scheduler, [[11], [12], [13], [14]], [[], [21, 22], [], [31, 32, 33]])
    step = scheduler.schedule()
    assert step is not None
    assert step.batch.input_ids.tolist() == [11, 12, 21, 22, 13, 14, 31, 32, 33]
    assert step.batch.logit_start.tolist() == [0, 1, 4, 5, 9]
    outputs = scheduler.complete(step, [[41], [21, 22, 42], [43], [31, 44]])
    assert [output.num_accepted for output in outputs] == [0, 2, 0, 1]
    assert run(scheduler).batch.positions.tolist() == [3, 6, 5, 7]


@pytest.mark.parametrize(("max_new_tokens", "num_steps"), [(20, 2), (1, 1)])
def test_b91_drafting_stops_at_the_end_of_the_context_and_decoding_goes_on(max_new_tokens: int, num_steps: int) -> None:
    scheduler = scheduler_of(max_model_len=32, num_blocks=9, num_draft_tokens=4)
    [request] = submit(scheduler, 30, max_new_tokens=max_new_tokens)
    steps = []
    while scheduler.has_work:
        steps.append(run(scheduler, drafts=[[5, 5, 5, 5]]))
        assert request.draft_ids == ()
    assert [step.batch.positions.max() for step in steps] == [29, 30][:num_steps]
    assert len(request.token_ids) == 30 + num_steps and request.finish_reason == "length"


def test_b91_k_is_clipped_per_request() -> None:
    scheduler = scheduler_of(max_model_len=32, num_blocks=20, num_draft_tokens=4)
    near, far = submit(scheduler, 28, 10)
    run(scheduler, drafts=[[5, 5, 5, 5]] * 2)
    assert len(near.draft_ids) == 2 and len(far.draft_ids) == 4
    step = run(scheduler, [[5, 5, 1], [5, 1]], [[5, 5, 5, 5]] * 2)
    assert lens_of(step) == [3, 5] and step.batch.positions.max() < 32
    assert near.finish_reason == "length" and len(near.token_ids) == 32

"""Every draft is what the drafter says from scratch: no chunk, shard, rejection or reuse leaves a wrong row behind."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from pcp_compiler.runtime import decoder as decoder_module
from pcp_compiler.runtime import judge as judge_module
from pcp_compiler.runtime.decoder import SpeculativeDecoder
from pcp_compiler.runtime.judge import Judgement
from pcp_compiler.runtime.layout import partition_step
from pcp_compiler.runtime.proposer import MTPProposer
from pcp_compiler.runtime.request import Request
from pcp_compiler.runtime.sampling import SamplingParams
from pcp_compiler.runtime.scheduler import Step
from tests.runtime.tiny import LENGTHS, VOCAB_SIZE, Tiny, make_prompt, record_steps, run_checked

PROMPTS = [make_prompt(length) for length in LENGTHS]


@pytest.mark.parametrize("draft", ["mtp", "mtp3", "model", "self"])
@pytest.mark.parametrize(("pcp_size", "mode"), [(1, "auto"), (4, "sharded"), (4, "replicated")])
def test_drafts_are_those_of_a_drafter_without_a_cache(tiny: Tiny, draft: str, pcp_size: int, mode: str) -> None:
    decoder = tiny.decoder(draft, pcp_size, mode=mode, limits={"prefill_chunk": 9})
    assert run_checked(tiny, decoder, draft, PROMPTS[:5], num_new=10) >= 30
    is_sharded = pcp_size > 1 and mode == "sharded"
    assert decoder.proposer is not None
    assert (decoder.proposer.models[0].counts.num_sharded > 0) == is_sharded
    assert (decoder.target.counts.num_sharded > 0) == (pcp_size > 1)
    if draft == "self":
        assert decoder.acceptance.acceptance_rate == 1.0
    else:
        assert 0 < decoder.acceptance.num_accepted < decoder.acceptance.num_draft_tokens


@pytest.mark.parametrize("draft", ["mtp", "mtp3", "model"])
def test_a_small_pool_preempts_and_leaves_no_wrong_row(tiny: Tiny, draft: str) -> None:
    decoder = tiny.decoder(draft, 2, limits={"kv_blocks": 22, "max_model_len": 60})
    requests = submit_all(decoder, PROMPTS[:5], num_new=12)
    finish(tiny, decoder, draft, requests)
    assert sum(request.num_preemptions for request in requests) > 0
    assert_greedy(tiny, requests)


@pytest.mark.parametrize("draft", ["mtp", "mtp3", "model"])
@pytest.mark.parametrize("num_common", [8, 9, 16, 17, 20])
def test_a_prefix_hit_gives_the_drafts_of_a_cold_cache(tiny: Tiny, draft: str, num_common: int) -> None:
    decoder = tiny.decoder(draft, 2)
    first = make_prompt(20)
    second = first[:num_common] + make_prompt(5, seed=9)
    for prompt in (first, second, first):
        requests = submit_all(decoder, [prompt], num_new=6)
        finish(tiny, decoder, draft, requests)
        assert_greedy(tiny, requests)
    assert requests[0].num_cached_tokens == 16


@pytest.mark.parametrize("draft", ["mtp", "mtp3", "model"])
def test_rows_of_steps_without_drafts_are_there_when_drafting_goes_on(tiny: Tiny, draft: str) -> None:
    decoder = tiny.decoder(draft, k_schedule=[[1, 2, 3], [3, 3, 0], [4, 8, 1]])
    requests = submit_all(decoder, PROMPTS[:4], num_new=6) + submit_all(decoder, [make_prompt(9)], num_new=18)
    finish(tiny, decoder, draft, requests)
    late = submit_all(decoder, PROMPTS[:2], num_new=4) + submit_all(decoder, [PROMPTS[3]], num_new=14)
    finish(tiny, decoder, draft, late)
    assert set(decoder.num_proposals) == {0, 1, 3}
    assert_greedy(tiny, requests + late)


@pytest.mark.parametrize("draft", ["mtp", "mtp3", "model"])
@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_decode_rows_with_an_owner_give_the_same_drafts(tiny: Tiny, draft: str, mode: str) -> None:
    decoder = tiny.decoder(
        draft, 4, mode=mode, parallel={"shard_decode": True}, limits={"prefill_chunk": 9}, kv="per_rank"
    )
    requests = submit_all(decoder, PROMPTS[:6], num_new=8)
    finish(tiny, decoder, draft, requests)
    assert_greedy(tiny, requests)
    assert decoder.target.counts.num_whole == 0, "a decode step ran on every rank"


def test_a_fully_accepted_round_leaves_one_row_to_catch_up(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny.decoder("self")
    sizes = record_first_passes(decoder, monkeypatch)
    run_checked(tiny, decoder, "self", [make_prompt(6)], num_new=13)
    assert sizes == [7, 2, 2, 2], "prompt and sampled token; then the last draft and the sampled token"


def test_a_rejection_leaves_only_the_sampled_token_to_read(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny.decoder("model")
    sizes = record_first_passes(decoder, monkeypatch)
    request = decoder.submit(make_prompt(6), SamplingParams(30))
    accepted = []
    while decoder.scheduler.has_work:
        num_tokens = len(request.token_ids)
        decoder.step()
        accepted.append(len(request.token_ids) - num_tokens - 1)
    rounds = [(a, size) for a, size in zip(accepted[1:-1], sizes[1:-1], strict=True)]
    assert {size for a, size in rounds if a < 3} == {1}
    assert {size for a, size in rounds if a == 3} <= {2}


@pytest.mark.parametrize("draft", ["mtp", "mtp3", "model"])
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_b77_after_any_two_numbers_of_accepted_drafts_the_next_drafts_are_right(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, draft: str, num_drafts: int
) -> None:
    counts = range(num_drafts + 1)
    wanted = [count for pair in product(counts, counts) for count in pair]
    decoder = tiny.decoder(draft, num_drafts=num_drafts)
    monkeypatch.setattr(decoder_module, "judge", judge_that_accepts(iter(wanted)))
    requests = submit_all(decoder, [make_prompt(5)], num_new=91)
    for accepted in (0, *wanted):  # the first step reads the prompt
        num_tokens = len(requests[0].token_ids)
        decoder.step()
        assert len(requests[0].token_ids) == num_tokens + accepted + 1
        assert tiny.check_drafts(draft, requests) == num_drafts


def judge_that_accepts(counts: Iterator[int]) -> Any:
    """Return a `judge` that accepts given numbers of drafts, whatever the target says of them."""

    def judge(step: Step, *args: Any, **options: Any) -> Judgement:
        found = judge_module.judge(step, *args, **options)
        for i, rows in enumerate(step.rows):
            if rows.num_drafts:
                count, end = next(counts), int(step.batch.query_start[i + 1])
                drafts = step.batch.input_ids[end - rows.num_drafts : end].tolist()
                other = (drafts[min(count, rows.num_drafts - 1)] + 1) % VOCAB_SIZE
                found.token_ids[i] = (*drafts[:count], other)
                found.last_rows[i] = end - 1 - rows.num_drafts + count
        return found

    return judge


def test_rows_that_accept_different_numbers_move_on_by_their_own(tiny: Tiny) -> None:
    decoder = tiny.decoder("mtp", 4)
    requests = submit_all(decoder, PROMPTS, num_new=14)
    steps = []
    while decoder.scheduler.has_work:
        before = [len(request.token_ids) for request in requests]
        decoder.step()
        steps.append({len(request.token_ids) - count for request, count in zip(requests, before, strict=True)})
        tiny.check_drafts("mtp", requests)
        for request in requests:
            if request.is_running and not request.is_prefilling:
                assert request.num_computed == len(request.token_ids) - 1
    assert any(len(step) > 2 for step in steps), "no step with rows that accepted 0, 1 and more"
    assert_greedy(tiny, requests)


def test_the_first_shifted_row_of_a_shard_reads_its_right_neighbour_on_another_rank(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built per shard, the last row of each span would read any other token."""
    decoder = tiny.decoder("mtp", 4, mode="sharded")
    prompt = make_prompt(23)
    finish(tiny, decoder, "mtp", submit_all(decoder, [prompt], num_new=5))
    decoder = tiny.decoder("mtp", 4, mode="sharded")
    monkeypatch.setattr(MTPProposer, "_next_ids", shift_each_span(decoder))
    with pytest.raises(AssertionError):
        finish(tiny, decoder, "mtp", submit_all(decoder, [prompt], num_new=5))


def shift_each_span(decoder: SpeculativeDecoder) -> Any:
    """Return a `_next_ids` that shifts within spans: the fault."""
    right = MTPProposer._next_ids

    def next_ids(self: MTPProposer, step: Step, sampled: Any) -> np.ndarray:
        shifted = right(self, step, sampled)
        partition = partition_step(step.batch, decoder.config.parallel)
        for spans in partition.spans if partition else ():
            for span in spans:
                if span.global_stop < step.batch.num_tokens:
                    shifted[span.global_stop - 1] = 0
        return shifted

    return next_ids


@pytest.mark.parametrize("draft", ["mtp", "mtp3", "model"])
def test_drafter_rows_after_chunks_equal_those_of_one_prefill(tiny: Tiny, draft: str) -> None:
    prompt = make_prompt(39)
    caches = []
    for chunk in (None, 16):
        decoder = tiny.decoder(draft, limits={"prefill_chunk": chunk, "prefix_cache": False})
        request = decoder.submit(prompt, SamplingParams(5))
        while request.is_prefilling:
            decoder.step()
        slots = [request.block_table[p // 4] * 4 + p % 4 for p in range(len(prompt) - 2)]
        assert decoder.proposer is not None
        caches.append([cache[slots] for model in decoder.proposer.models for cache in model.caches[0].values()])
        request.cancel()
    for whole, chunked in zip(*caches, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-12)


def test_positions_after_a_rejection_count_what_was_kept(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny.decoder("mtp", 4)
    steps = record_steps(decoder, monkeypatch)
    request = decoder.submit(make_prompt(13), SamplingParams(20))
    while decoder.scheduler.has_work:
        num_tokens, num_drafts = len(request.token_ids), len(request.draft_ids)
        is_prompt = request.is_prefilling
        decoder.step()
        if not is_prompt:
            assert steps[-1][0].positions.tolist() == list(range(num_tokens - 1, num_tokens + num_drafts))
    assert decoder.acceptance.num_accepted < decoder.acceptance.num_draft_tokens


def submit_all(decoder: SpeculativeDecoder, prompts: list[list[int]], num_new: int) -> list[Request]:
    """Submit greedy requests."""
    return [decoder.submit(prompt, SamplingParams(num_new)) for prompt in prompts]


def finish(tiny: Tiny, decoder: SpeculativeDecoder, draft: str, requests: list[Request]) -> None:
    """Run all steps; check all drafts after each."""
    while decoder.scheduler.has_work:
        decoder.step()
        tiny.check_drafts(draft, requests)


def assert_greedy(tiny: Tiny, requests: list[Request]) -> None:
    """Compare finished requests with eager."""
    for request in requests:
        assert request.output_ids == tiny.greedy(request.prompt_ids, request.params.max_new_tokens)


def record_first_passes(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the rows of each first pass of a draft model."""
    sizes: list[int] = []
    proposer = decoder.proposer
    unread = proposer._unread_rows  # type: ignore[union-attr]

    def record(*args: Any) -> Any:
        batch = unread(*args)
        sizes.append(batch.num_tokens)
        return batch

    monkeypatch.setattr(proposer, "_unread_rows", record)
    return sizes

"""The public face of the decoder: what is exported, streamed, counted and said."""

from __future__ import annotations

import logging

import pytest
import torch

import pcp_compiler
from pcp_compiler.errors import CallError
from pcp_compiler.runtime.generation import Generation
from pcp_compiler.runtime.sampling import SamplingParams
from tests.runtime.tiny import LENGTHS, Tiny, make_prompt, make_target

PROMPTS = [make_prompt(length) for length in LENGTHS]


def test_the_package_exports_the_decoder() -> None:
    from pcp_compiler.runtime import decoder, generation, sampling

    assert pcp_compiler.SpeculativeDecoder is decoder.SpeculativeDecoder
    assert pcp_compiler.SamplingParams is sampling.SamplingParams
    assert pcp_compiler.Generation is generation.Generation
    assert {"SpeculativeDecoder", "SamplingParams", "Generation"} <= set(pcp_compiler.__all__)


def test_tokens_are_streamed_in_order_and_a_queue_serves_more_prompts_than_fit(tiny: Tiny) -> None:
    decoder = tiny.decoder("mtp", 2, limits={"max_num_requests": 3})
    streams: dict[int, list[int]] = {}
    most = 0

    def on_tokens(number: int, tokens: tuple[int, ...]) -> None:
        nonlocal most
        most = max(most, len(decoder.scheduler.running))
        assert tokens
        streams.setdefault(number, []).extend(tokens)

    generations = decoder.generate(PROMPTS, SamplingParams(6), on_tokens=on_tokens, progress=False)
    assert most == 3
    assert [streams[number] for number in range(len(PROMPTS))] == [generation.token_ids for generation in generations]
    assert [generation.token_ids for generation in generations] == [tiny.greedy(prompt, 6) for prompt in PROMPTS]


def test_submit_step_and_cancel_work_without_generate(tiny: Tiny) -> None:
    decoder = tiny.decoder("mtp")
    first = decoder.submit(PROMPTS[0], SamplingParams(7))
    events = decoder.step()
    assert [(event.request, len(event.token_ids), event.finish_reason) for event in events] == [(first, 1, None)]
    second = decoder.submit(PROMPTS[1], SamplingParams(5))
    with pytest.raises(CallError, match="request 1 is not finished"):
        Generation.of(second)
    seen = {first: list(events[0].token_ids), second: []}
    while decoder.scheduler.has_work:
        for event in decoder.step():
            seen[event.request] += event.token_ids
    assert seen[first] == tiny.greedy(PROMPTS[0], 7) == Generation.of(first).token_ids
    assert seen[second] == tiny.greedy(PROMPTS[1], 5)
    assert decoder.step() == []
    assert not decoder._proposals, "proposals of finished requests are kept"


def test_generate_leaves_requests_of_others_running(tiny: Tiny) -> None:
    decoder = tiny.decoder("mtp")
    other = decoder.submit(PROMPTS[1], SamplingParams(40))
    tiny_answer = tiny.greedy(PROMPTS[0], 3)
    assert decoder.generate([PROMPTS[0]], SamplingParams(3), progress=False)[0].token_ids == tiny_answer
    assert not other.is_finished and other.output_ids
    while decoder.scheduler.has_work:
        decoder.step()
    assert other.output_ids == tiny.greedy(PROMPTS[1], 40)


def test_the_progress_bar_can_be_shown(tiny: Tiny) -> None:
    decoder = tiny.decoder("mtp")
    assert decoder.generate([PROMPTS[0]], SamplingParams(3))[0].token_ids == tiny.greedy(PROMPTS[0], 3)


def test_stats_of_requests_add_up_to_those_of_the_decoder(tiny: Tiny) -> None:
    decoder = tiny.decoder("mtp")
    generations = decoder.generate(PROMPTS, SamplingParams(12), progress=False)
    total = sum(generation.stats.num_accepted for generation in generations)
    assert total == decoder.acceptance.num_accepted > 0
    for generation in generations:
        stats = generation.stats
        tokens_of_rounds = stats.num_rounds * stats.acceptance_length
        assert tokens_of_rounds <= len(generation.token_ids)
        assert 0 <= stats.acceptance_rate <= 1
        assert list(stats.per_position) == sorted(stats.per_position, reverse=True)


def test_near_ties_are_reported_with_position_and_margin(tiny: Tiny) -> None:
    with torch.no_grad():
        target = make_target(seed=4)
        head = target.lm_head.weight
        head[7] = head[3] * (1 + 1e-7)
    decoder = pcp_compiler.SpeculativeDecoder(target, {"limits": {"kv_blocks": 64}})
    (generation,) = decoder.generate([make_prompt(20, seed=3)], SamplingParams(30), progress=False)
    chosen = [20 + i for i, token in enumerate(generation.token_ids) if token in (3, 7)]
    assert [tie.position for tie in generation.ties] == chosen != []
    for tie in generation.ties:
        assert set(tie.token_ids) == {3, 7} and 0 <= tie.margin < 1e-4
        assert generation.token_ids[tie.position - 20] == tie.token_ids[0]


@pytest.mark.parametrize(("tie_margin", "temperature"), [(0.0, 0.0), (1e9, 1.0)])
def test_no_ties_when_switched_off_or_sampled(tiny: Tiny, tie_margin: float, temperature: float) -> None:
    decoder = tiny.decoder("mtp", tie_margin=tie_margin)
    params = SamplingParams(8, temperature=temperature, seed=1)
    assert decoder.generate([PROMPTS[1]], params, progress=False)[0].ties == ()


def test_ties_inside_accepted_drafts_have_their_own_positions(tiny: Tiny) -> None:
    decoder = tiny.decoder("self", tie_margin=1e9)
    params = SamplingParams(11, stop_token_ids=(tiny.greedy(PROMPTS[1], 11)[6],))
    (generation,) = decoder.generate([PROMPTS[1]], params, progress=False)
    start = len(PROMPTS[1])
    assert [tie.position for tie in generation.ties] == list(range(start, start + len(generation.token_ids)))
    assert [tie.token_ids[0] for tie in generation.ties] == generation.token_ids


def test_a_useless_drafter_is_reported_once_with_likely_causes(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    decoder = tiny.decoder("mtp")
    norm = tiny.drafters["mtp"].get_parameter("mtp.0.shared_head.norm.weight")
    saved = norm.clone()
    try:
        with torch.no_grad():
            norm.zero_()  # all logits are equal, so token 0 is always proposed
        with caplog.at_level(logging.WARNING):
            prompts = [prompt for prompt in PROMPTS if 0 not in tiny.greedy(prompt, 25)]
            assert len(prompts) >= 3
            decoder.generate(prompts, SamplingParams(25), progress=False)
            decoder.generate(prompts, SamplingParams(25), progress=False)
    finally:
        with torch.no_grad():
            norm.copy_(saved)
    reports = [record.getMessage() for record in caplog.records if "Likely causes" in record.getMessage()]
    assert len(reports) == 1
    assert "Draft 1 of a round is accepted in 0.0%" in reports[0]


def test_what_was_decided_is_logged_once(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pcp_compiler"):
        decoder = tiny.decoder("mtp", 4, limits={"kv_blocks": "auto", "max_num_requests": 4})
        tiny.check_greedy(decoder, [PROMPTS[0]], 3)
        tiny.check_greedy(decoder, [PROMPTS[0]], 3)
    blocks = [record.getMessage() for record in caplog.records if "limits.kv_blocks" in record.getMessage()]
    slot_bytes = 3 * 2 * 2 * 8 * 8  # layers of target and drafter, K and V, heads, width, float64
    assert blocks == [
        f"limits.kv_blocks: auto is 97 blocks of 4 tokens, {97 * 4 * slot_bytes / 2**20:.1f} MiB of target and drafter"
    ]
    modes = [record.getMessage() for record in caplog.records if record.getMessage().startswith("mode ")]
    assert modes == ["mode sharded: the backend runs PCP rank-local rows"]


def test_auto_takes_what_memory_allows(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from pcp_compiler.runtime import assembly

    monkeypatch.setattr(assembly, "_free_memory", lambda device: 4 * 4 * 768 * 30)
    decoder = tiny.decoder("mtp", limits={"kv_blocks": "auto"})
    assert decoder.pool.num_blocks == 30

"""Bad input, limits and faults: one clear message, and everything else goes on."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pcp_compiler.drafters.base import Capabilities, Drafter
from pcp_compiler.errors import CallError, ConfigError
from pcp_compiler.runtime.decoder import SpeculativeDecoder
from pcp_compiler.runtime.sampling import SamplingParams
from tests.runtime.tiny import LENGTHS, VOCAB_SIZE, Tiny, make_prompt, make_target, raising, save_mtp

PROMPTS = [make_prompt(length) for length in LENGTHS]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt_ids is empty"),
        ([1, VOCAB_SIZE], r"prompt_ids\[1\]: 11 is outside of the vocabulary; allowed: 0 to 10"),
        ([-1], r"prompt_ids\[0\]: -1 is outside"),
        ([1, 2.0], r"prompt_ids\[1\]: got 2.0; allowed: a flat sequence of integers"),
        ([[1, 2]], r"prompt_ids\[0\]: got \[1, 2\]"),
        (["a"], r"prompt_ids\[0\]: got 'a'"),
        ("a", r"prompt_ids: got 'a'; allowed: a flat sequence of integers"),
        (5, "prompt_ids: got 5; allowed"),
        (None, "prompt_ids: got None; allowed"),
        ({1: 2}, r"prompt_ids: got \{1: 2\}; allowed"),
        (torch.tensor(3), r"prompt_ids: got tensor\(3\); allowed"),
        ([1] * 30, "30 tokens, which leaves none of limits.max_model_len 30"),
        ([1] * 31, "31 tokens"),
    ],
)
def test_a_bad_prompt_is_refused_and_nothing_is_queued(tiny: Tiny, prompt: Any, message: str) -> None:
    decoder = tiny.decoder("mtp", limits={"max_model_len": 30})
    with pytest.raises(CallError, match=message):
        decoder.generate([make_prompt(5), prompt], SamplingParams(4), progress=False)
    assert not decoder.scheduler.has_work
    assert decoder.step() == []
    tiny.check_greedy(decoder, [make_prompt(5)], 4)


def test_prompts_may_be_tensors(tiny: Tiny) -> None:
    decoder = tiny.decoder("none")
    (generation,) = decoder.generate([torch.tensor(make_prompt(5))], SamplingParams(4), progress=False)  # type: ignore[list-item]
    assert generation.token_ids == tiny.greedy(make_prompt(5), 4)


def test_one_set_of_params_per_prompt_or_one_for_all(tiny: Tiny) -> None:
    decoder = tiny.decoder("none")
    with pytest.raises(CallError, match="params: got 1 for 2 prompts"):
        decoder.generate(PROMPTS[:2], [SamplingParams(1)])


@pytest.mark.parametrize("params", [None, 5, {"max_new_tokens": 3}, [SamplingParams(2), None]])
def test_params_that_are_none_are_refused_and_nothing_is_queued(tiny: Tiny, params: Any) -> None:
    decoder = tiny.decoder("none")
    with pytest.raises(CallError, match=r"params: got .*; allowed: SamplingParams"):
        decoder.generate(PROMPTS[:2], params, progress=False)
    with pytest.raises(CallError, match="params: got None; allowed: SamplingParams"):
        decoder.submit(PROMPTS[0], None)  # type: ignore[arg-type]
    assert not decoder.scheduler.has_work


def test_a_request_without_new_tokens_is_done_at_once(tiny: Tiny) -> None:
    decoder = tiny.decoder("mtp")
    (generation,) = decoder.generate([make_prompt(5)], SamplingParams(0), progress=False)
    assert generation.token_ids == [] and generation.finish_reason == "length"
    assert decoder.target.counts.num_whole == 0


def test_a_pool_that_is_too_small_for_one_request_says_how_many_blocks_it_needs(tiny: Tiny) -> None:
    decoder = tiny.decoder("mtp", limits={"kv_blocks": 6})
    with pytest.raises(
        ConfigError, match=r"needs 9 KV blocks of 4 tokens.*the pool has 5; raise limits.kv_blocks to >= 10"
    ):
        decoder.submit(make_prompt(23), SamplingParams(8))


def test_more_positions_than_the_target_has_are_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"limits\.max_model_len: got 97; the target has 96 positions"):
        tiny.decoder("none", limits={"max_model_len": 97})


# -- drafters that do not fit ------------------------------------------------------------------------------------------


class Pretender(Drafter):
    """A drafter that says something else of itself."""

    def __init__(self, drafter: Drafter, **changes: Any) -> None:
        super().__init__()
        self.inner = drafter
        self._capabilities = dataclasses.replace(drafter.capabilities, **changes)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def module_of_step(self, step: int) -> nn.Module:
        return self.inner.module_of_step(step)

    def compute_logits(self, hidden: torch.Tensor, step: int = 0) -> torch.Tensor:
        return self.inner.compute_logits(hidden, step)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "takes hidden states of width 48, and the target's have 32"),
        ({"vocab_size": 12}, "has logits for 12 ids, and the target has 11"),
        ({"mode": "sharded"}, "draft.mode: replicated was decided, and the drafter runs sharded only"),
        ({"method": "model"}, r'draft.method: got "mtp", and the drafter given is of method model'),
        ({"max_draft_tokens": 2}, "draft.num_speculative_tokens: got 3; the drafter proposes up to 2"),
        ({"row_form": "anchor_block"}, "rows of the form anchor_block are planned"),
    ],
)
def test_a_ready_drafter_that_does_not_fit_is_refused(tiny: Tiny, changes: dict[str, Any], message: str) -> None:
    drafter = Pretender(tiny.drafters["mtp"], **changes)
    config = {"draft": {"method": "mtp", "num_speculative_tokens": 3}, "limits": {"kv_blocks": 64}}
    with pytest.raises(ConfigError, match=message):
        SpeculativeDecoder(tiny.target, config, drafter, compile_cache=tiny.compile_cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48}, "hidden_size is 48 in the drafter and 32 in the target"),
        ({"vocab_size": 12}, "vocab_size is 12 in the drafter and 11 in the target"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "rope_theta is 500.0 in the drafter"),
    ],
)
def test_a_drafter_file_of_another_width_vocabulary_or_rope_base_is_refused(
    tiny: Tiny, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = save_mtp(tmp_path, make_target(**change))
    config = {"draft": {"method": "mtp", "model": str(folder)}, "limits": {"kv_blocks": 64}}
    with pytest.raises(ConfigError, match=message):
        SpeculativeDecoder(tiny.target, config)


def test_a_draft_model_with_other_ids_is_refused_or_padded(tiny: Tiny) -> None:
    model = make_target(seed=5, vocab_size=9, num_hidden_layers=1)
    draft = {"method": "model", "model": model, "num_speculative_tokens": 2}
    limits = {"kv_blocks": 128, "kv_block_size": 4}
    with pytest.raises(ConfigError, match="vocab_size is 9 in the drafter and 11 in the target"):
        SpeculativeDecoder(tiny.target, {"draft": draft, "limits": limits}, compile_cache=tiny.compile_cache)
    config = {"draft": {**draft, "vocab_mismatch": "pad"}, "limits": limits}
    decoder = SpeculativeDecoder(tiny.target, config, compile_cache=tiny.compile_cache)
    prompts = [[10, 9, 10], make_prompt(13)]
    assert 10 in prompts[0], "an id that the drafter cannot look up"
    tiny.check_greedy(decoder, prompts, 12)


# -- the ends of the context -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["mtp", "mtp3", "model"])
@pytest.mark.parametrize("pcp_size", [1, 4])
def test_drafting_stops_before_the_end_of_the_context_and_decoding_reaches_it(
    tiny: Tiny, draft: str, pcp_size: int
) -> None:
    decoder = tiny.decoder(draft, pcp_size, limits={"max_model_len": 32, "kv_blocks": 60})
    lengths = (31, 30, 29, 28, 27, 12)
    generations = decoder.generate([make_prompt(n) for n in lengths], SamplingParams(50), progress=False)
    for length, generation in zip(lengths, generations, strict=True):
        assert generation.token_ids == tiny.greedy(make_prompt(length), 32 - length)
        assert generation.finish_reason == "length"


@pytest.mark.parametrize("name", ["mtp", "model"])
def test_a_drafter_with_fewer_positions_stops_drafting_and_decoding_goes_on(tiny: Tiny, name: str) -> None:
    drafter = Pretender(tiny.drafters[name], max_positions=24)
    method = drafter.capabilities.method
    if name == "model":
        drafter.inner = tiny.drafters[name]
    config = {"draft": {"method": method, "num_speculative_tokens": 3}, "limits": {"kv_blocks": 64, "kv_block_size": 4}}
    decoder = SpeculativeDecoder(tiny.target, config, drafter, compile_cache=tiny.compile_cache)
    request = decoder.submit(make_prompt(20), SamplingParams(20))
    counts = {}
    while decoder.scheduler.has_work:
        decoder.step()
        counts[len(request.token_ids)] = len(request.draft_ids)
    assert request.output_ids == tiny.greedy(make_prompt(20), 20)
    assert counts[21] == 3
    assert all(count == 0 for length, count in counts.items() if length > 25)


# -- stop tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["none", "mtp", "self"])
def test_a_stop_token_inside_the_accepted_prefix_ends_the_request_there(tiny: Tiny, draft: str) -> None:
    prompt = make_prompt(13)
    answer = tiny.greedy(prompt, 24)
    decoder = tiny.decoder(draft)
    for token_id in set(answer):
        stop = answer.index(token_id) + 1
        params = SamplingParams(24, stop_token_ids=(token_id,))
        (generation,) = decoder.generate([prompt], params, progress=False)
        assert generation.token_ids == answer[:stop] and generation.finish_reason == "stop"
        stats = generation.stats
        assert stats.num_accepted <= stop - 1 and stats.num_accepted <= stats.num_draft_tokens
        if draft == "self":
            assert stats.acceptance_rate in (0.0, 1.0), "drafts behind the stop count as not proposed"
    assert decoder.pool.num_free == decoder.pool.num_usable


# -- cancelling and interrupts -----------------------------------------------------------------------------------------


def test_cancel_works_in_the_queue_in_a_prefill_in_a_decode_and_only_once(tiny: Tiny) -> None:
    decoder = tiny.decoder("mtp", 2, limits={"prefill_chunk": 8, "max_num_requests": 3})
    requests = [
        decoder.submit(prompt, SamplingParams(12)) for prompt in (PROMPTS[0], PROMPTS[3], PROMPTS[1], PROMPTS[4])
    ]
    decoder.step()
    decoder.step()
    decoding, prefilling, going_on, waiting = requests
    assert not decoding.is_prefilling and prefilling.is_prefilling and not waiting.is_running
    for request in (decoding, prefilling, waiting):
        assert decoder.cancel(request)
        assert not decoder.cancel(request)
        assert request.finish_reason == "cancelled" and not request.block_table
    while decoder.scheduler.has_work:
        assert all(event.request is going_on for event in decoder.step())
    assert going_on.output_ids == tiny.greedy(PROMPTS[1], 12)
    assert not decoder.cancel(going_on)
    assert decoder.pool.num_free == decoder.pool.num_usable


@pytest.mark.parametrize(
    ("draft", "place"),
    [("none", "target"), ("none", "callback"), ("mtp", "target"), ("mtp", "drafter"), ("mtp", "callback"),
     ("model", "drafter")],
)  # fmt: skip
def test_an_interrupt_leaves_block_counts_as_before(tiny: Tiny, draft: str, place: str) -> None:
    decoder = tiny.decoder(draft, 2, limits={"prefill_chunk": 9})
    bystander = decoder.submit(PROMPTS[3], SamplingParams(9))
    decoder.step()
    free_before = decoder.pool.num_free

    def stop(_number: int, _tokens: tuple[int, ...]) -> None:
        if place == "callback":
            raise KeyboardInterrupt

    model = decoder.target if place == "target" or decoder.proposer is None else decoder.proposer.models[0]
    name = "run_sharded" if place == "target" else "run_whole"
    if place == "callback":
        with pytest.raises(KeyboardInterrupt):
            decoder.generate(PROMPTS[:3], SamplingParams(12), on_tokens=stop, progress=False)
    else:
        with raising(model, name, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            decoder.generate(PROMPTS[:3], SamplingParams(12), progress=False)
    grown = len(bystander.block_table) - (decoder.pool.num_usable - free_before)
    assert decoder.pool.num_free == free_before - grown
    assert decoder.scheduler.running == [bystander]
    while decoder.scheduler.has_work:
        decoder.step()
    assert bystander.output_ids == tiny.greedy(PROMPTS[3], 9)
    tiny.check_greedy(decoder, PROMPTS[:3], 6)


@pytest.mark.parametrize("draft", ["mtp", "mtp3", "model"])
@pytest.mark.parametrize("place", ["target", "drafter"])
def test_a_step_that_raises_can_be_run_again(tiny: Tiny, draft: str, place: str) -> None:
    decoder = tiny.decoder(draft)
    requests = [decoder.submit(prompt, SamplingParams(9)) for prompt in PROMPTS[:3]]
    model = decoder.target if place == "target" else decoder.proposer.models[0]  # type: ignore[union-attr]
    for _ in range(30):
        before = [(list(r.token_ids), r.num_computed, r.draft_ids) for r in requests]
        if not decoder.scheduler.has_work:
            break
        with (
            raising(model, "run_whole", RuntimeError("out of memory")),
            pytest.raises(RuntimeError, match="out of memory"),
        ):
            decoder.step()
        assert before == [(list(r.token_ids), r.num_computed, r.draft_ids) for r in requests]
        decoder.step()
        tiny.check_drafts(draft, [request for request in requests if request.draft_ids])
    for prompt, request in zip(PROMPTS, requests, strict=False):
        assert request.output_ids == tiny.greedy(prompt, 9)


# -- weights and NaN ---------------------------------------------------------------------------------------------------


def in_place(model: Any) -> None:
    """Change a weight as an optimiser does."""
    model.model.layers[0].mlp.up_proj.weight.mul_(-1.0)


def new_data(model: Any) -> None:
    """Give a parameter other storage."""
    weight = model.model.layers[1].self_attn.v_proj.weight
    weight.data = weight.data.flip(0).clone()


def new_parameter(model: Any) -> None:
    """Put another parameter in the place of one."""
    norm = model.model.norm
    norm.weight = nn.Parameter(norm.weight.detach().flip(0).clone(), requires_grad=False)


def new_state(model: Any) -> None:
    """Load another checkpoint."""
    model.load_state_dict(make_target(seed=8).state_dict())


def test_weights_that_change_between_calls_drop_all_kv(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = Tiny(tmp_path)
    decoder = tiny.decoder("mtp", 2)
    prompt = make_prompt(23)
    outputs = [tiny.check_greedy(decoder, [prompt], 8)[0].token_ids]
    for change in (in_place, new_data, new_parameter, new_state):
        with torch.no_grad():
            change(tiny.target)
        tiny.forget_answers()
        request = decoder.submit(prompt, SamplingParams(8))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            while decoder.scheduler.has_work:
                decoder.step()
        assert request.output_ids == tiny.greedy(prompt, 8)
        assert request.output_ids != outputs[-1], f"{change.__name__} is too small to show"
        assert request.num_cached_tokens == 0
        outputs.append(request.output_ids)
        assert [record.message for record in caplog.records if "weights" in record.message] == [
            "the weights of target or drafter changed: all K/V and the prefix cache are dropped, requests go on"
        ]


def test_a_weight_of_another_type_is_refused(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path)
    decoder = tiny.decoder("none")
    nn.Module.float(tiny.target)
    decoder.submit(make_prompt(5), SamplingParams(2))
    with pytest.raises(CallError, match=r"weight model\.\S+: is .*float32.* and was .*float64.*build a new"):
        decoder.step()


def test_nan_logits_end_one_request_and_leave_the_others_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = Tiny(tmp_path)
    clean = [make_prompt(9, vocab_size=VOCAB_SIZE - 1), make_prompt(20, vocab_size=VOCAB_SIZE - 1)]
    answers = [tiny.greedy(prompt, 10) for prompt in clean]
    bad_id = next(i for i in range(VOCAB_SIZE) if all(i not in [*a, *p] for a, p in zip(answers, clean, strict=True)))
    tiny.target.model.embed_tokens.weight[bad_id] = float("nan")
    bad = [*make_prompt(14), bad_id, 1, 2]
    for pcp_size in (1, 4):
        decoder = tiny.decoder("mtp", pcp_size)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            good, broken, other = decoder.generate([clean[0], bad, clean[1]], SamplingParams(10), progress=False)
        assert (broken.token_ids, broken.finish_reason) == ([], "error")
        assert [good.token_ids, other.token_ids] == answers
        messages = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
        assert len(messages) == 1 and "request 1: the target's logits at position 16" in messages[0]
        again = decoder.submit(bad, SamplingParams(3))
        while decoder.scheduler.has_work:
            decoder.step()
        assert again.num_cached_tokens == 0, "its K/V is withdrawn from the prefix cache"
        assert decoder.generate([clean[1]], SamplingParams(10), progress=False)[0].token_ids == answers[1]

"""Greedy speculative output equals plain greedy of the eager model, on the path that was asked for."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from pcp_compiler.errors import InvariantError
from pcp_compiler.runtime.decoder import SpeculativeDecoder
from pcp_compiler.runtime.sampling import SamplingParams
from tests.runtime.tiny import LENGTHS, Tiny, make_prompt, record_steps

PROMPTS = [make_prompt(length) for length in LENGTHS]
SCHEDULE = [[1, 2, 3], [3, 5, 2], [6, 8, 1]]
NUM_NEW = (16, 4, 9, 16, 3, 12, 7, 5)
"""So that the number of running requests falls through every range of the schedule."""


@pytest.mark.parametrize("schedule", [[], SCHEDULE], ids=["k3", "schedule"])
@pytest.mark.parametrize(
    ("pcp_size", "mode"),
    [(1, "none"), (2, "none"), (4, "none"), (1, "replicated"), (2, "replicated"), (4, "replicated"), (2, "sharded"),
     (4, "sharded")],
)  # fmt: skip
def test_eight_unequal_prompts_in_chunks_give_plain_greedy(
    tiny: Tiny, pcp_size: int, mode: str, schedule: list[list[int]]
) -> None:
    has_drafter = mode != "none"
    options: dict[str, Any] = {"mode": mode, "k_schedule": schedule} if has_drafter else {}
    decoder = tiny.decoder("mtp" if has_drafter else "none", pcp_size, limits={"prefill_chunk": 9}, **options)
    params = [SamplingParams(count) for count in NUM_NEW]
    generations = decoder.generate(PROMPTS, params, progress=False)
    for prompt, generation, count in zip(PROMPTS, generations, NUM_NEW, strict=True):
        assert generation.token_ids == tiny.greedy(prompt, count)
    assert decoder.pool.num_free == decoder.pool.num_usable
    check_path(decoder, mode)
    if has_drafter:
        assert set(decoder.num_proposals) == ({1, 2, 3} if schedule else {3})
        assert 0 < decoder.acceptance.num_accepted < decoder.acceptance.num_draft_tokens


def check_path(decoder: SpeculativeDecoder, mode: str) -> None:
    """Prove which programs ran: prompts sharded, decodes whole, the drafter as its mode says."""
    pcp_size, counts = decoder.config.parallel.pcp_size, decoder.target.counts
    assert counts.num_whole > 0
    assert (counts.num_sharded > 0) == (pcp_size > 1)
    schedule = decoder.target.sharded.program.schedule if decoder.target.sharded else ()
    assert counts.num_collectives == counts.num_sharded * len(schedule)
    if pcp_size > 1:
        ops = Counter(op for _, op in schedule)
        has_hidden = mode == "replicated"
        assert ops["gather_start"] == 2, f"one gather of K and V per layer, not {ops}"
        assert ops["restore_rows"] == 1, f"logits of picked rows, not {ops}"
        assert ops["unshard"] == has_hidden, f"hidden states for a replicated drafter only, not {ops}"
        assert counts.num_rows < counts.num_global_rows, "each rank ran as many rows as one alone would"
    if decoder.proposer is None:
        return
    draft = decoder.proposer.models[0].counts
    assert draft.num_sharded == (counts.num_sharded if mode == "sharded" else 0)
    assert (draft.num_collectives > 0) == (mode == "sharded")


def test_acceptance_does_not_depend_on_ranks_or_mode(tiny: Tiny) -> None:
    seen = set()
    for pcp_size, mode in [(1, "auto"), (2, "sharded"), (4, "sharded"), (4, "replicated")]:
        decoder = tiny.decoder("mtp", pcp_size, mode=mode)
        tiny.check_greedy(decoder, PROMPTS, 8)
        stats = decoder.acceptance
        seen.add((stats.num_rounds, stats.num_draft_tokens, tuple(stats.num_accepted_at)))
    assert len(seen) == 1


def test_a_comparison_with_a_wrong_cache_fails(tiny: Tiny) -> None:
    """The greedy comparison is no tautology: it notices a slot that is off by one."""
    decoder = tiny.decoder("none")
    decoder.submit(PROMPTS[1], SamplingParams(8))
    decoder.step()
    for cache in decoder.target.caches[0].values():
        cache.copy_(cache.roll(1, 0))
    request = decoder.scheduler.running[0]
    while decoder.scheduler.has_work:
        decoder.step()
    assert request.output_ids != tiny.greedy(PROMPTS[1], 8)


def test_a_collective_that_is_left_out_is_noticed(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny.decoder("none", 2)
    lowered = decoder.target.sharded
    assert lowered is not None
    shorter = dataclasses.replace(lowered.program, schedule=lowered.program.schedule[1:])
    monkeypatch.setattr(decoder.target, "sharded", dataclasses.replace(lowered, program=shorter))
    decoder.submit(PROMPTS[1], SamplingParams(2))
    with pytest.raises(InvariantError, match="scheduled were"):
        decoder.step()


@pytest.mark.parametrize("pcp_size", [1, 4])
def test_owned_decode_rows_give_plain_greedy(tiny: Tiny, pcp_size: int) -> None:
    decoder = tiny.decoder("mtp", pcp_size, parallel={"shard_decode": True}, limits={"prefill_chunk": 9}, kv="per_rank")
    tiny.check_greedy(decoder, PROMPTS, 10)
    if pcp_size > 1:
        assert decoder.target.counts.num_whole == 0
        assert decoder.target.counts.num_sharded > 10


def test_one_token_prompts_run_whole_beside_sharded_ones(tiny: Tiny) -> None:
    decoder = tiny.decoder("mtp", 4, parallel={"min_tokens_to_shard": 24})
    tiny.check_greedy(decoder, [[3], [5], make_prompt(6)], 5)
    assert decoder.target.counts.num_sharded == 0
    tiny.check_greedy(decoder, [[3], make_prompt(31), make_prompt(23)], 5)
    assert decoder.target.counts.num_sharded == 1


def test_a_prompt_as_long_as_a_verification_is_a_prefill(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny.decoder("mtp", 2, num_drafts=3)
    steps = record_steps(decoder, monkeypatch)
    tiny.check_greedy(decoder, [make_prompt(4)], 9)
    phases = [batch.phase for batch, _ in steps]
    assert phases[0] == "prefill"
    assert set(phases[1:]) <= {"verify", "decode"} and "verify" in phases
    assert decoder.target.counts.num_sharded == 1, "the prompt of K + 1 tokens"


def test_mixed_steps_verify_and_prefill_at_once(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny.decoder("mtp", 4, limits={"prefill_chunk": 8})
    steps = record_steps(decoder, monkeypatch)
    first = decoder.submit(make_prompt(5), SamplingParams(20))
    decoder.step()
    second = decoder.submit(make_prompt(31), SamplingParams(6))
    while decoder.scheduler.has_work:
        decoder.step()
    assert sum(batch.phase == "mixed" for batch, _ in steps) >= 3
    assert first.output_ids == tiny.greedy(make_prompt(5), 20)
    assert second.output_ids == tiny.greedy(make_prompt(31), 6)


@pytest.mark.parametrize("kv_cache_dtype", ["fp32", "bf16", "fp16", "fp8_e4m3"])
def test_in_every_cache_type_speculation_equals_decoding_without(tiny: Tiny, kv_cache_dtype: str) -> None:
    """A smaller type changes what the target says, so the reference is a decoder with the same cache."""
    limits = {"kv_cache_dtype": kv_cache_dtype, "prefill_chunk": 9}
    outputs = []
    for draft, pcp_size in (("none", 1), ("mtp", 1), ("mtp", 4), ("model", 2)):
        decoder = tiny.decoder(draft, pcp_size, limits=limits)
        outputs.append([g.token_ids for g in decoder.generate(PROMPTS[:5], SamplingParams(10), progress=False)])
        (stored,) = {cache.dtype for caches in decoder.target.caches for cache in caches.values()}
        assert stored == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.get(
            kv_cache_dtype, torch.uint8
        )
    assert outputs[1:] == outputs[:1] * 3

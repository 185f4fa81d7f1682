"""Sampled output of the whole decoder is distributed as the target says, whatever the drafter proposes."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest
import torch

from pcp_compiler.runtime.decoder import SpeculativeDecoder
from pcp_compiler.runtime.generation import Generation
from pcp_compiler.runtime.sampling import SamplingParams
from tests.runtime.tiny import Tiny, make_prompt, make_target

VOCAB_SIZE, NUM_REQUESTS, NUM_NEW = 4, 600, 4
PROMPT = make_prompt(6, vocab_size=VOCAB_SIZE)
TEMPERATURE = 1.3
Tokens = tuple[int, ...]
Chances = dict[Tokens, float]


@torch.no_grad()
def exact_chances(target: torch.nn.Module) -> Chances:
    """Return the chance of each continuation of the prompt by `NUM_NEW` tokens, from the eager model."""
    chances: Chances = {(): 1.0}
    for _ in range(NUM_NEW):
        prefixes = list(chances)
        ids = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
        logits = target(input_ids=ids, use_cache=False).logits[:, -1] / TEMPERATURE
        rows = torch.softmax(logits, dim=-1).tolist()
        chances = {
            (*prefix, token): chances[prefix] * rows[i][token]
            for i, prefix in enumerate(prefixes)
            for token in range(VOCAB_SIZE)
        }
    return chances


def chi_square(found: Counter[Tokens], chances: Chances) -> float:
    """Return the statistic divided by its upper 1e-4 quantile (Wilson and Hilferty's approximation): above 1 is bad.

    Cells of fewer than five expected cases are put together.
    """
    expected = {cell: found.total() * chance for cell, chance in chances.items()}
    rare = [cell for cell, count in expected.items() if count < 5]
    cells = [(found[cell], count) for cell, count in expected.items() if cell not in rare]
    cells += [(sum(found[cell] for cell in rare), sum(expected[cell] for cell in rare))] if rare else []
    statistic = sum((seen - count) ** 2 / count for seen, count in cells)
    spread = 2 / (9 * (len(cells) - 1))
    return statistic / ((len(cells) - 1) * (1 - spread + 3.72 * math.sqrt(spread)) ** 3)


def count_tokens(generations: list[Generation], places: Tokens) -> Counter[Tokens]:
    """Count the tokens that stand together in some places of the outputs."""
    return Counter(tuple(generation.token_ids[place] for place in places) for generation in generations)


def marginal(chances: Chances, places: Tokens) -> Chances:
    """Return the chances of the tokens in some places."""
    result: Chances = dict.fromkeys(product(range(VOCAB_SIZE), repeat=len(places)), 0.0)
    for tokens, chance in chances.items():
        result[tuple(tokens[place] for place in places)] += chance
    return result


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("sampling", ["probabilistic", "greedy"])
def test_sampled_tokens_are_distributed_as_the_target_says(tiny: Tiny, verification: str, sampling: str) -> None:
    target = make_target(seed=1, vocab_size=VOCAB_SIZE, num_hidden_layers=1)
    draft = make_target(seed=2, vocab_size=VOCAB_SIZE, num_hidden_layers=1)
    config = {
        "parallel": {"pcp_size": 2, "min_tokens_to_shard": 2},
        "limits": {"kv_blocks": 1100, "kv_block_size": 16, "max_num_requests": 300, "max_num_tokens": 4000},
        "draft": {"method": "model", "model": draft, "num_speculative_tokens": 3, "sampling": sampling,
                  "verification": verification},
    }  # fmt: skip
    decoder = SpeculativeDecoder(target, config)
    params = [SamplingParams(NUM_NEW, temperature=TEMPERATURE, seed=seed) for seed in range(NUM_REQUESTS)]
    generations = decoder.generate([PROMPT] * NUM_REQUESTS, params, progress=False)
    chances = exact_chances(target)
    assert decoder.acceptance.num_accepted > 150
    assert decoder.acceptance.num_accepted < decoder.acceptance.num_draft_tokens - 150
    for places in [(1, 2), (2, 3), (1, 2, 3)]:
        assert chi_square(count_tokens(generations, places), marginal(chances, places)) < 1, places
    wrong: Counter[Tokens] = Counter(
        {(a, (b + 1) % VOCAB_SIZE): n for (a, b), n in count_tokens(generations, (1, 2)).items()}
    )
    assert chi_square(wrong, marginal(chances, (1, 2))) > 1, "the test cannot tell a wrong distribution"


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_on_any_number_of_ranks(tiny: Tiny) -> None:
    params = [SamplingParams(10, temperature=0.9, top_k=6, top_p=0.95, seed=seed) for seed in (3, 4, 5, 6)]
    prompts = [make_prompt(length) for length in (5, 23, 9, 14)]
    batches = []
    for pcp_size in (1, 4):
        decoder = tiny.decoder("model", pcp_size, sampling="probabilistic")
        together = [generation.token_ids for generation in decoder.generate(prompts, params, progress=False)]
        for prompt, option, tokens in zip(prompts, params, together, strict=True):
            assert decoder.generate([prompt], option, progress=False)[0].token_ids == tokens
        batches.append(together)
    assert batches[0] == batches[1]


def test_greedy_and_sampled_requests_share_a_step(tiny: Tiny) -> None:
    decoder = tiny.decoder("model", 2, sampling="probabilistic")
    prompts = [make_prompt(length) for length in (5, 23, 9)]
    params = [SamplingParams(8), SamplingParams(8, temperature=1.0, seed=1), SamplingParams(8)]
    generations = decoder.generate(prompts, params, progress=False)
    for i in (0, 2):
        assert generations[i].token_ids == tiny.greedy(prompts[i], 8)


def test_noise_on_other_ranks_logits_changes_nothing(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(10, temperature=1.0, seed=1)
    prompt = make_prompt(23)
    outputs = []
    for noise in (0.0, 1e-7, 1.0):
        decoder = tiny.decoder("mtp", 4, parallel={"shard_decode": True}, sampling="probabilistic")
        run = decoder.target.run_sharded

        def disturbed(inputs, index, run=run, noise=noise):  # type: ignore[no-untyped-def]
            results = run(inputs, index)
            return [
                results[0],
                *([hidden, logits + noise * torch.randn_like(logits)] for hidden, logits in results[1:]),
            ]

        monkeypatch.setattr(decoder.target, "run_sharded", disturbed)
        outputs.append(decoder.generate([prompt], params, progress=False)[0].token_ids)
        assert decoder.target.counts.num_sharded > 5
    assert outputs[0] == outputs[1] == outputs[2]

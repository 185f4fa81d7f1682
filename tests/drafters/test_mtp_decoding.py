"""Drafters of every family under the decoder: sharded and replicated, greedy output equals the eager target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pcp_compiler.runtime.decoder import SpeculativeDecoder
from pcp_compiler.runtime.sampling import SamplingParams


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4_moe_lite", "deepseek_v3"])
def test_greedy_speculation_is_plain_greedy_with_the_drafter_on_two_ranks(
    family: str, mode: str, make: Callable[..., Any]
) -> None:
    made = make(family)
    config = {
        "parallel": {"pcp_size": 2, "min_tokens_to_shard": 2}, "draft": made.draft(mode=mode),
        "limits": {"kv_blocks": 64, "kv_block_size": 4, "prefill_chunk": 8},
    }  # fmt: skip
    decoder = SpeculativeDecoder(made.target, config)
    prompts = [[number % 64 for number in range(first, first + length)] for first, length in ((3, 13), (40, 5))]
    generations = decoder.generate(prompts, SamplingParams(6), progress=False)
    for prompt, generation in zip(prompts, generations, strict=True):
        with torch.no_grad():
            logits = made.target(input_ids=torch.tensor([prompt + generation.token_ids]), use_cache=False).logits[0]
        assert generation.token_ids == logits.argmax(-1).tolist()[len(prompt) - 1 : -1]
    assert decoder.plan is not None and decoder.plan.mode == mode
    assert decoder.proposer is not None
    (model,) = decoder.proposer.models
    assert (model.counts.num_sharded > 0) == (mode == "sharded")
    assert decoder.acceptance.num_draft_tokens > 0

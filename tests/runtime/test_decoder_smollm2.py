"""The real model and its MTP drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pcp_compiler
import smollm2

MTP = Path(smollm2.__file__).parent / "drafters" / "smollm2-135m-mtp"
NUM_PROMPTS, NUM_NEW = 4, 16


@pytest.mark.slow
def test_smollm2_with_a_sharded_drafter_says_what_the_eager_model_says() -> None:
    model = smollm2.load_model()
    prompts = [smollm2.gsm8k_prompt(question) for question in smollm2.questions()[:NUM_PROMPTS]]
    expected = []
    for prompt in prompts:
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_NEW, do_sample=False)
        assert isinstance(out, torch.Tensor)
        expected.append(out[0, prompt.shape[1] :].tolist())
    decoder = pcp_compiler.SpeculativeDecoder(
        model,
        {
            "parallel": {"pcp_size": 4},
            "draft": {"method": "mtp", "model": str(MTP), "mode": "sharded"},
            "limits": {"kv_blocks": 64, "prefill_chunk": 64, "max_num_tokens": 256},
        },
    )
    params = pcp_compiler.SamplingParams(NUM_NEW)
    generations = decoder.generate([prompt[0].tolist() for prompt in prompts], params, progress=False)
    assert [generation.token_ids for generation in generations] == expected
    assert decoder.acceptance.acceptance_length > 2.0
    assert (
        decoder.target.counts.num_sharded > 0 and decoder.target.counts.num_rows < decoder.target.counts.num_global_rows
    )
    assert decoder.proposer is not None
    assert decoder.proposer.models[0].counts.num_sharded == decoder.target.counts.num_sharded

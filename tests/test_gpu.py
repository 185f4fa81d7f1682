"""The same programs on a GPU: equal to eager there, with index tensors, gathers and results on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import pcp_compiler

pytestmark = pytest.mark.gpu
VOCAB_SIZE = 97
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.bfloat16: 6e-2}
"""Allowed |logit difference|; logits are about 1. Rows run in matrices of another height, so other kernels may run, and
transformers computes rotary angles and norms in float32 whatever the model's type."""


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def make_llama(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model.to("cuda", dtype).eval()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pcp_size", [1, 2, 3, 8])
def test_sharded_prefill_on_a_gpu_equals_eager(pcp_size: int, dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_llama(dtype)
    compiled = pcp_compiler.compile(model, {"parallel": {"pcp_size": pcp_size, "min_tokens_to_shard": 0}})
    lengths = [2, 2 * pcp_size + 1, 64, 129, 1000]
    for num_tokens in lengths:
        input_ids = torch.randint(0, VOCAB_SIZE, (1, num_tokens), device="cuda")
        with torch.no_grad():
            expected = model(input_ids, use_cache=False).logits
        logits = compiled(input_ids, use_cache=False).logits
        assert logits.device.type == "cuda"
        assert (logits - expected).abs().max().item() <= TOLERANCE[dtype]
    records = pcp_compiler.assert_sharded(compiled, calls=len(lengths), pcp_size=pcp_size)
    if pcp_size > 1:
        assert all(record.width < record.num_tokens and record.collectives for record in records)

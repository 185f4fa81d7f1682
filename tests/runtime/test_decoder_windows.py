"""Models with sliding windows, soft caps and sinks under the decoder, against the eager model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pcp_compiler.errors import UnsupportedGraphError
from pcp_compiler.kv_ops import PAGED_ATTENTION
from pcp_compiler.runtime.decoder import SpeculativeDecoder
from pcp_compiler.runtime.sampling import SamplingParams

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "sliding_window": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {}, "gemma2": {"head_dim": 8},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
PROMPTS = [list(range(1, 20)), [5, 9, 2]]


def make_model(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("capture", ["none", "full_decode"])
@pytest.mark.parametrize("pcp_size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_cuts_prompts_and_decodes_as_the_eager_model_does(family: str, pcp_size: int, capture: str) -> None:
    model = make_model(family)
    config = {
        "parallel": {"pcp_size": pcp_size, "min_tokens_to_shard": 2},
        "capture": {"mode": capture, "executor": "replay"},
        "limits": {"kv_blocks": 64, "kv_block_size": 4, "prefill_chunk": 7, "max_num_requests": 2},
    }  # fmt: skip
    decoder = SpeculativeDecoder(model, config)
    made = decoder.generate(PROMPTS, SamplingParams(14), progress=False)
    for prompt, generation in zip(PROMPTS, made, strict=True):
        logits = model(torch.tensor([prompt + generation.token_ids]), use_cache=False).logits[0]
        assert generation.token_ids == logits.argmax(-1).tolist()[len(prompt) - 1 : -1]
    nodes = [n for n in decoder.target.whole.program.graph_module.graph.nodes if n.target is PAGED_ATTENTION]
    assert decoder.target.windows == (8,)
    assert {n.kwargs.get("window") for n in nodes} == ({8} if family == "mistral" else {8, None})
    if capture != "none":
        assert decoder.captures is not None and decoder.capture_stats().num_replays > 10
        assert {key.context_bucket for key in decoder.captures.keys} == {8, 96}


def test_a_layer_whose_window_is_not_that_of_its_mask_is_refused() -> None:
    model = make_model("mistral")
    model.model.layers[1].self_attn.forward = _without_window(model.model.layers[1].self_attn.forward)
    with pytest.raises(UnsupportedGraphError, match="attention of layer 1: its window is 5, and that of its mask 8"):
        SpeculativeDecoder(model, {"limits": {"kv_blocks": 64}})


def _without_window(forward: Any) -> Any:
    def other(*args: Any, **options: Any) -> Any:
        forward.__self__.config.sliding_window = 5
        try:
            return forward(*args, **options)
        finally:
            forward.__self__.config.sliding_window = 8

    return other

"""The model families of the support matrix: tiny transformers models with random weights, and their variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

import pcp_compiler.integrations.transformers  # noqa: F401 - registers the implementations "pcp_spec"

VOCAB_SIZE = 64
LONGEST = 160
"""Most tokens of a prompt; all families' windows are shorter, so that they matter."""
WINDOW = 8
_LAYERS = ("sliding_attention", "full_attention")
_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.1,  # the usual 0.02 gives logits so even that a wrong mask would hardly show
}
_LATENT: Mapping[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
CONFIGS: Mapping[str, Callable[[], Any]] = {
    "Llama": lambda: transformers.LlamaConfig(**_COMMON),
    "Qwen3": lambda: transformers.Qwen3Config(**_COMMON),
    "Gemma3": lambda: transformers.Gemma3TextConfig(**_COMMON, sliding_window=WINDOW, layer_types=list(_LAYERS)),
    "Gemma2": lambda: transformers.Gemma2Config(
        **_COMMON, sliding_window=WINDOW, layer_types=list(_LAYERS), attn_logit_softcapping=0.5
    ),
    "Mistral": lambda: transformers.MistralConfig(**_COMMON, sliding_window=WINDOW),
    "GPT-OSS": lambda: transformers.GptOssConfig(
        **_COMMON, sliding_window=WINDOW, layer_types=list(_LAYERS), num_local_experts=4, num_experts_per_tok=2
    ),
    "Mixtral": lambda: transformers.MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2),
    "Qwen3-MoE": lambda: transformers.Qwen3MoeConfig(
        **_COMMON, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
    ),
    "GLM-4-MoE-Lite": lambda: transformers.Glm4MoeLiteConfig(
        **{**_COMMON, **_LATENT}, mlp_layer_types=["dense", "sparse"]
    ),
    "DeepSeek-V3": lambda: transformers.DeepseekV3Config(
        **{**_COMMON, **_LATENT, "head_dim": 8}, first_k_dense_replace=1
    ),
    "Llama 4": lambda: transformers.Llama4TextConfig(
        **_COMMON, attention_chunk_size=WINDOW, num_local_experts=2, intermediate_size_mlp=48
    ),
}
DENSE = ("Llama", "Qwen3", "Gemma3", "Gemma2", "Mistral")
MOE = ("GPT-OSS", "Mixtral", "Qwen3-MoE", "GLM-4-MoE-Lite", "DeepSeek-V3")
FLOAT64, FLOAT32 = torch.float64, torch.float32


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to load one family, and how far its results may be from eager."""

    family: str
    attention: str
    dtype: torch.dtype = FLOAT64
    experts: str | None = None
    """experts_implementation; None for families without experts."""
    tolerance: float = 1e-6
    """Largest |difference| of logits over the largest |logit|; transformers computes norms, and the softmax of eager
    attention, in float32."""
    refusal: str | None = None
    """What the refusal says when this variant cannot be sharded; None: it must be equal."""

    @property
    def name(self) -> str:
        """All of it in one line."""
        dtype = str(self.dtype).removeprefix("torch.")
        return " ".join(filter(None, (self.family, self.attention, self.experts, dtype)))

    def model(self) -> nn.Module:
        """Return the model, always with the same weights."""
        return self._build(self.attention, self.experts)

    def reference(self) -> nn.Module:
        """Return the model with transformers' own attention and experts: no line of ours runs in it."""
        return self._build("eager", None if self.experts is None else "eager")

    def _build(self, attention: str, experts: str | None) -> nn.Module:
        torch.manual_seed(0)
        options = {} if experts is None else {"experts_implementation": experts}
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            CONFIGS[self.family](), attn_implementation=attention, **options
        )
        for parameter in model.parameters():  # biases, sinks: zeros would not show whether they are used
            if parameter.dim() <= 2 and not parameter.any():
                nn.init.normal_(parameter, std=0.5)
        return model.to(self.dtype).eval().requires_grad_(False)


def _experts(family: str, attention: str) -> tuple[Variant, ...]:
    """Return the ways in which the experts of a family can run."""
    return (
        Variant(family, attention, experts="batched_mm"),
        Variant(family, attention, FLOAT32, "grouped_mm", tolerance=1e-5),
        Variant(family, attention, experts="pcp_spec"),
    )


VARIANTS: tuple[Variant, ...] = (
    *(Variant(family, "pcp_spec") for family in DENSE),
    *(variant for family in MOE for variant in _experts(family, "pcp_spec")),
    *(Variant(family, "sdpa") for family in DENSE if family != "Gemma2"),  # transformers has no sdpa for soft caps
    *(variant for family in MOE if family != "GPT-OSS" for variant in _experts(family, "sdpa")[:2]),  # nor for sinks
    Variant("Llama", "pcp_spec", FLOAT32, tolerance=1e-5),
    Variant("Llama", "pcp_spec", torch.float16, tolerance=5e-3),
    Variant("Llama", "pcp_spec", torch.bfloat16, tolerance=4e-2),
    Variant("Llama", "eager", refusal="multiplies tokens by tokens"),
    Variant("Mixtral", "pcp_spec", experts="eager", refusal="asks for the value of a tensor"),
    Variant("Llama 4", "pcp_spec", experts="pcp_spec", refusal="fixes the number of tokens"),
)

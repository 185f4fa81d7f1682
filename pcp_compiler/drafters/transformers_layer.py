"""Layers of transformers inside a drafter: their attention calls become `pcp::attention` through its own registry."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pcp_compiler import ops
from pcp_compiler.drafters.checkpoint import CONFIG
from pcp_compiler.errors import ConfigError, UnsupportedGraphError

ATTENTION_NAME = "pcp_draft"
"""Our entry in transformers' registry of attention functions. There is none of that name among the mask functions, so
that models build no mask: rows are causal by their order."""

CLASS_PREFIXES = {"deepseek_v3": "DeepseekV3", "glm4_moe_lite": "Glm4MoeLite"}
_NOT_SERVED = ("sliding_window", "softcap", "s_aux", "position_bias")


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
           scaling: float | None = None, **kwargs: Any) -> tuple[Tensor, None]:  # fmt: skip
    """Run an attention call of transformers as `pcp::attention`: heads first in, [B, T, H, Dv] out.

    Raises:
        UnsupportedGraphError: a mask, a window, a soft cap, sinks, a bias, dropout, or attention that is not causal.
    """
    name = f"{type(module).__name__} of layer {module.layer_idx}"
    asked = [option for option in _NOT_SERVED if kwargs.get(option) is not None]
    asked += ["attention_mask"] * (attention_mask is not None) + ["dropout"] * bool(kwargs.get("dropout"))
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        asked.append("is_causal=False")
    if asked:
        raise UnsupportedGraphError(f"{name}: {', '.join(asked)} in a drafter; allowed: full causal attention")
    assert isinstance(module.layer_idx, int), name
    out = ops.ATTENTION(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), None, None, layer=module.layer_idx,
        kind="full", scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
    )  # fmt: skip
    return out, None


def register_attention() -> str:
    """Make `attend` known to transformers and return its name there; a second call changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attend)
    return ATTENTION_NAME


def build_layer(config: Mapping[str, Any], family: str, layer: int, experts: str | None) -> tuple[nn.Module, nn.Module]:
    """Return rotary embedding and decoder layer of a family, the layer without data (on the meta device).

    Args:
        config: the drafter's config.json. layer: number of the layer, behind the target's last one.
        experts: transformers' name of the way experts are run, as the target's config has it.
    Raises:
        ConfigError: transformers refuses the config. ImportError: transformers is not installed.
    """
    hf_config = _read_hf_config(config, family)
    hf_config._attn_implementation = register_attention()
    hf_config._experts_implementation = experts
    if hasattr(hf_config, "first_k_dense_replace"):
        hf_config.first_k_dense_replace = 0  # an MTP layer has experts, as the target's last layers do
    if hasattr(hf_config, "mlp_layer_types"):
        hf_config.mlp_layer_types = ["sparse"] * (layer + 1)
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    rotary = getattr(modeling, f"{CLASS_PREFIXES[family]}RotaryEmbedding")(hf_config)
    with torch.device("meta"):
        decoder_layer = getattr(modeling, f"{CLASS_PREFIXES[family]}DecoderLayer")(hf_config, layer)
    return rotary, decoder_layer


def _read_hf_config(config: Mapping[str, Any], family: str) -> Any:
    try:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise ImportError(f"{family} drafters need the extra `hf` ({error}): pip install 'pcp-compiler[hf]'") from error
    try:
        return CONFIG_MAPPING[family].from_dict({**config, "model_type": family})
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConfigError(f"draft.model: {CONFIG}: transformers refuses it: {error}") from None

"""Attention interface `pcp_spec` for transformers models.

    import pcp_compiler.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="pcp_spec")

Importing this module registers it. Models loaded with sdpa work without it; with it no mask is built at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from pcp_compiler import ops, torch_private
from pcp_compiler.errors import BypassError, UnsupportedGraphError


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface.

    Args:
        query: [B, Hq, T, D]. key: [B, Hkv, T, D]. value: [B, Hkv, T, Dv].
        attention_mask: None, or the caller's padding mask [B, T].
    Returns:
        [B, T, Hq, Dv] and no weights.
    Raises:
        UnsupportedGraphError: dropout, a sliding window, soft cap or sinks. BypassError: runs uncompiled below a
        compiled model.
    """
    if not torch.compiler.is_compiling() and torch_private.runs_untraced_under("pcp_spec"):
        raise BypassError(
            f"attention of {type(module).__name__} runs uncompiled inside a model compiled with pcp_spec: Dynamo left the "
            "compiled program; compile with fullgraph=True to see why"
        )
    layer = getattr(module, "layer_idx", None)
    for name in ("sliding_window", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise UnsupportedGraphError(f"attention of layer {layer}: {name} is not supported; allowed: full attention")
    if dropout:
        raise UnsupportedGraphError(f"attention of layer {layer}: dropout is {dropout}; call model.eval()")
    out = ops.ATTENTION(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
        attention_mask, None, layer=layer, kind="full" if attention_mask is None else "padded",
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
    )  # fmt: skip
    return out, None


def attention_mask(*_args: Any, attention_mask: Tensor | None = None, **_kwargs: Any) -> Tensor | None:
    """transformers' mask interface: no causal mask is built; a caller's padding mask reaches the attention as it is."""
    return attention_mask


AttentionInterface.register("pcp_spec", attention_forward)
AttentionMaskInterface.register("pcp_spec", attention_mask)

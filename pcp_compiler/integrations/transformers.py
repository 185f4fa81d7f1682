"""Attention interface `pcp_spec` for transformers models.

    import pcp_compiler.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="pcp_spec")

Importing this module registers it. Models loaded with sdpa work without it; with it a plain prompt builds no mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from pcp_compiler import ops, torch_private
from pcp_compiler.errors import BypassError, UnsupportedGraphError


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface.

    Args:
        query: [B, Hq, T, D]. key: [B, Hkv, S, D]. value: [B, Hkv, S, Dv]; S > T after a KV cache.
        attention_mask: None; the caller's padding flags [B, T]; or a whole mask, broadcastable to [B, Hq, T, S].
        is_causal: whether no mask means the causal one; None: as the module says.
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
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise UnsupportedGraphError(f"attention of layer {layer}: {name} is not supported; allowed: full attention")
    if dropout:
        raise UnsupportedGraphError(f"attention of layer {layer}: dropout is {dropout}; call model.eval()")
    kind = "padded" if attention_mask is not None and attention_mask.dim() == 2 else "masked"
    if attention_mask is None:
        kind = "full" if (getattr(module, "is_causal", True) if is_causal is None else is_causal) else "bidirectional"
    out = ops.ATTENTION(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attention_mask, None,
        layer=0 if layer is None else layer, kind=kind, scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
    )  # fmt: skip
    return out, None


def attention_mask(
    *, q_length: int, kv_length: int, attention_mask: Tensor | None = None, local_size: int | None = None,
    allow_is_causal_skip: bool = True, **options: Any,
) -> Tensor | None:  # fmt: skip
    """transformers' mask interface.

    Returns:
        None for the plain causal mask of a prompt, the caller's padding flags [B, T] as they are, and the whole mask
        [B, 1, T, S] whenever transformers asks for anything else: packed sequences, a window, a cache.
    """
    if allow_is_causal_skip and local_size is None and q_length == kv_length:
        return attention_mask
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, local_size=local_size,
        allow_is_causal_skip=False, **options,
    )  # fmt: skip


AttentionInterface.register("pcp_spec", attention_forward)
AttentionMaskInterface.register("pcp_spec", attention_mask)
ROWS = "pcp_spec_rows"
"""Attention without any mask: what a row sees is decided when the graph is lowered. For the runtime's own traces."""


def _rows_mask(**_options: Any) -> None:
    return None


AttentionInterface.register(ROWS, attention_forward)
AttentionMaskInterface.register(ROWS, _rows_mask)

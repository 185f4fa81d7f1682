"""Attention and experts `pcp_spec` for transformers models.

    import pcp_compiler.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(
        ..., attn_implementation="pcp_spec", experts_implementation="pcp_spec"
    )

Importing this module registers both. Models loaded with sdpa work without it; with it a plain prompt builds no mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import sdpa_mask

from pcp_compiler import ops, torch_private
from pcp_compiler.errors import BypassError, UnsupportedGraphError


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    row_window: int | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface.

    Args:
        query: [B, Hq, T, D]. key: [B, Hkv, S, D]. value: [B, Hkv, S, Dv]; S > T after a KV cache.
        attention_mask: None; the caller's padding flags [B, T]; or a whole mask, broadcastable to [B, Hq, T, S].
        is_causal: whether no mask means the causal one; None: as the module says.
        sliding_window: rows that the layer's mask lets a row see. row_window: the same where there is no mask at all,
            see `rows_attention_forward`. softcap: of the scores. s_aux: sinks [Hq].
    Returns:
        [B, T, Hq, Dv] and no weights.
    Raises:
        UnsupportedGraphError: dropout, a position bias, or a window without a mask that has it. BypassError: runs
        uncompiled below a compiled model.
    """
    if not torch.compiler.is_compiling() and torch_private.runs_untraced_under("pcp_spec"):
        raise BypassError(
            f"attention of {type(module).__name__} runs uncompiled inside a model compiled with pcp_spec: Dynamo left "
            "the compiled program; compile with fullgraph=True to see why"
        )
    layer = getattr(module, "layer_idx", None)
    if options.get("position_bias") is not None:
        raise UnsupportedGraphError(f"attention of layer {layer}: position_bias is not supported; allowed: None")
    if dropout:
        raise UnsupportedGraphError(f"attention of layer {layer}: dropout is {dropout}; call model.eval()")
    kind = "padded" if attention_mask is not None and attention_mask.dim() == 2 else "masked"
    if attention_mask is None:
        kind = "full" if (getattr(module, "is_causal", True) if is_causal is None else is_causal) else "bidirectional"
    if sliding_window is not None and kind != "masked":
        raise UnsupportedGraphError(
            f"attention of layer {layer}: sliding_window is {sliding_window}, and the model made no mask with that "
            "window; allowed: layers whose mask comes from create_sliding_window_causal_mask"
        )
    if row_window is not None:
        kind, sliding_window = "sliding_window", row_window
    out = ops.ATTENTION(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attention_mask, None,
        layer=0 if layer is None else layer, kind=kind, scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window, soft_cap=softcap, sinks=s_aux,
    )  # fmt: skip
    return out, None


def attention_mask(
    *, q_length: int, kv_length: int, attention_mask: Tensor | None = None, local_size: int | None = None,
    allow_is_causal_skip: bool = True, **options: Any,
) -> Tensor | None:  # fmt: skip
    """transformers' mask interface.

    Returns:
        None for the plain causal mask of a prompt, the caller's padding flags [B, T] as they are, and the whole mask
        [B, 1, T, S] whenever transformers asks for anything else: packed sequences, a cache, and a `local_size`, since
        that may be a sliding window or a chunk and only the values tell; canonicalize_attention reads them.
    """
    if allow_is_causal_skip and local_size is None and q_length == kv_length:
        return attention_mask
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, local_size=local_size,
        allow_is_causal_skip=False, **options,
    )  # fmt: skip


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts interface: a token's rows stay where they are, nothing is sorted by expert.

    What the module does between its two matrices (gate, clamps, norm) is traced as it is.

    Args:
        module: what transformers' `use_experts_implementation` made. hidden_states: [T, H].
        top_k_index, top_k_weights: [T, k].
    Returns:
        [T, H].
    Raises:
        UnsupportedGraphError: the module's experts are spread over processes.
    """
    if module._is_expert_parallel:
        raise UnsupportedGraphError("experts: expert parallelism is not supported; load the model without a tp_plan")
    num_tokens, top_k = top_k_index.shape
    expert_ids = top_k_index.reshape(-1)
    x = hidden_states.unsqueeze(1).expand(-1, top_k, -1).reshape(num_tokens * top_k, -1)
    out = _expert_linear(module, "gate_up_proj" if module.has_gate else "up_proj", x, expert_ids)
    out = module._apply_gate(out) if module.has_gate else module.act_fn(out)
    out = _expert_linear(module, "down_proj", out, expert_ids)
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    weighted: Tensor = out * top_k_weights.reshape(-1, 1)
    return weighted.view(num_tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)


def _expert_linear(module: Any, name: str, x: Tensor, expert_ids: Tensor) -> Tensor:
    """Apply one stacked linear of an experts module: x [S, I], expert_ids [S] -> [S, O]."""
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    out: Tensor = ops.EXPERTS(x, expert_ids, weight if module.is_transposed else weight.transpose(-2, -1), bias)
    return out


AttentionInterface.register("pcp_spec", attention_forward)
AttentionMaskInterface.register("pcp_spec", attention_mask)
ExpertsInterface.register("pcp_spec", experts_forward)
ROWS = "pcp_spec_rows"
"""Attention without any mask: what a row sees is decided when the graph is lowered. For the runtime's own traces."""


class RowWindow(int):
    """What stands for a local mask in the runtime's own traces: the rows that a row sees."""


def rows_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: RowWindow | None,
    sliding_window: int | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """`attention_forward` of the runtime's traces.

    Raises:
        UnsupportedGraphError: the layer says another window than its mask, or none, as layers with chunks do.
    """
    if sliding_window is None or attention_mask is None or sliding_window != attention_mask:
        if sliding_window is not None or attention_mask is not None:
            raise UnsupportedGraphError(
                f"attention of layer {getattr(module, 'layer_idx', None)}: its window is {sliding_window}, and that of "
                f"its mask {attention_mask}; allowed: the same, or none"
            )
        return attention_forward(module, query, key, value, None, **options)
    return attention_forward(module, query, key, value, None, row_window=sliding_window, **options)


def rows_mask(*, local_size: int | None = None, **_options: Any) -> RowWindow | None:
    """Return no mask; for a local one how many rows it lets a row see, which may be a window or a chunk."""
    return None if local_size is None else RowWindow(local_size)


AttentionInterface.register(ROWS, rows_attention_forward)
AttentionMaskInterface.register(ROWS, rows_mask)

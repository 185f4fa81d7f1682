"""A plain decoder layer of the Llama form, or of Qwen3's, which norms the heads of q and k; it calls `pcp::attention`.

Signatures and weight names are those of the layers in transformers, so that either can be used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pcp_compiler import ops
from pcp_compiler.drafters.checkpoint import CONFIG, read_choice, read_int, read_number, rope_bases
from pcp_compiler.errors import ConfigError

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rope types whose frequencies do not depend on the length of the sequence."""


class RMSNorm(nn.Module):
    """w * x / sqrt(mean(x^2) + eps), the division in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x [.., H] with rows of unit mean square, times the weight."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a plain decoder layer."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    attention_bias: bool
    mlp_bias: bool
    norms_heads: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any], family: str) -> LayerShape:
        """Return the sizes that a config of family `llama` or `qwen3` states.

        Raises:
            ConfigError: a size is missing or not an integer >= 1, heads cannot be grouped, or an activation or window
                that the layer does not have.
        """
        hidden, heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
        kv_heads = read_int(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ConfigError(f"{CONFIG}: num_key_value_heads: got {kv_heads}; allowed: a divisor of {heads}")
        read_choice(config, "hidden_act", ["silu"])
        read_choice(config, "use_sliding_window", [False])
        default_head_dim = 128 if family == "qwen3" else hidden // heads  # the defaults of transformers
        return cls(
            hidden, read_int(config, "intermediate_size"), heads, kv_heads,
            read_int(config, "head_dim", default_head_dim), read_number(config, "rms_norm_eps", 1e-6),
            read_choice(config, "attention_bias", [False, True]), read_choice(config, "mlp_bias", [False, True]),
            norms_heads=family == "qwen3",
        )  # fmt: skip


class RotaryEmbedding(nn.Module):
    """cos and sin of the half-split rotary embedding."""

    inv_freq: Tensor

    def __init__(self, config: Mapping[str, Any], head_dim: int) -> None:
        super().__init__()
        inv_freq, self.scale = rope_frequencies(config, head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [B, T, D] for positions [B, T], in the type of x."""
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.scale).to(x.dtype), (angles.sin() * self.scale).to(x.dtype)


def rope_frequencies(config: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Return the rotary frequencies [head_dim / 2], float32, and the factor on cos and sin.

    Raises:
        ConfigError: no rope base, or a rope type whose frequencies depend on the length.
    """
    rope_type = check_rope_type(config)
    bases = rope_bases(config)
    if not bases:
        raise ConfigError(f"{CONFIG}: rope_theta: missing; allowed: number > 0, here or in rope_parameters")
    base = next(iter(bases.values()))
    if rope_type == "default":
        return 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = {name: config[name] for name in ("hidden_size", "num_attention_heads", "max_position_embeddings")}
    rope = {"rope_theta": base, **(config.get("rope_parameters") or config.get("rope_scaling") or {})}
    inv_freq, scale = ROPE_INIT_FUNCTIONS[rope_type](
        LlamaConfig(**fields, head_dim=head_dim, rope_parameters=rope), torch.device("cpu")
    )
    return inv_freq.float(), float(scale)


def check_rope_type(config: Mapping[str, Any]) -> str:
    """Return the rope type that a config states.

    Raises:
        ConfigError: a type whose frequencies depend on the length of the sequence.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in STATIC_ROPE_TYPES:
        raise ConfigError(
            f"{CONFIG}: rope_parameters.rope_type: got {rope_type!r}; allowed: {', '.join(STATIC_ROPE_TYPES)}"
        )
    return str(rope_type)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads x [B, T, H, D] turned by angles [B, T, D]; a pair is half a head apart."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(2) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(2)


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads."""

    def __init__(self, shape: LayerShape, layer: int) -> None:
        super().__init__()
        self.shape, self.layer = shape, layer
        q_size, kv_size, bias = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.attention_bias
        self.q_proj = nn.Linear(shape.hidden, q_size, bias=bias)
        self.k_proj = nn.Linear(shape.hidden, kv_size, bias=bias)
        self.v_proj = nn.Linear(shape.hidden, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, shape.hidden, bias=bias)
        if shape.norms_heads:
            self.q_norm = RMSNorm(shape.head_dim, shape.eps)
            self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return what the rows x [B, T, H] read from each other, [B, T, H]."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.shape.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.shape.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        out = ops.ATTENTION(
            rotate(q, cos, sin), rotate(k, cos, sin), v, None, None, layer=self.layer, kind="full",
            scale=self.shape.head_dim**-0.5,
        )  # fmt: skip
        projected: Tensor = self.o_proj(out.flatten(-2))
        return projected


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map each row of x [.., H] on its own."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Norm, attention, residual; norm, MLP, residual."""

    def __init__(self, shape: LayerShape, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape, layer)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = GatedMLP(shape)

    def forward(self, x: Tensor, *, position_embeddings: tuple[Tensor, Tensor], attention_mask: None = None) -> Tensor:
        """Run the layer: x [B, T, H], cos and sin [B, T, D] -> [B, T, H]; attention is causal, no mask is taken."""
        x = x + self.self_attn(self.input_layernorm(x), *position_embeddings)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

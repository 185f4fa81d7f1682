"""A decoder in plain PyTorch, of no library: the oracle of the tests runs it in float64, un-compiled, in one process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a decoder; `num_heads` is a multiple of `num_kv_heads`."""

    vocab_size: int = 61
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    is_tied: bool = False

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.num_heads * self.head_dim


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., H] -> [.., H]."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Grouped-query causal attention with rotary positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        kv_size = config.num_kv_heads * config.head_dim
        self.q = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, H], cos and sin [T, D] -> [B, T, H]."""
        q, k, v = self._heads(self.q(x)), self._heads(self.k(x)), self._heads(self.v(x))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        merged: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return merged

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.config.head_dim).transpose(1, 2)


class Layer(nn.Module):
    """Attention and SwiGLU, each behind a norm and around a residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size)
        self.gate_up = nn.Linear(config.hidden_size, 4 * config.hidden_size, bias=False)
        self.down = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, H] -> [B, T, H]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


class Decoder(nn.Module):
    """input_ids [B, T] -> logits [B, T, V]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [B, T] int64 -> logits [B, T, V]."""
        x = self.embedding(input_ids)
        cos, sin = rotary_table(input_ids.shape[1], self.config.head_dim, x.dtype, x.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotary_table(num_tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles, each [T, D] with the halves of a head side by side."""
    positions = torch.arange(num_tokens, device=device, dtype=dtype)
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of a head by its angle: x [B, heads, T, D] -> the same shape."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def make_decoder(config: DecoderConfig | None = None, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Decoder:
    """Return a decoder with random weights, ready for inference."""
    torch.manual_seed(seed)
    return Decoder(config or DecoderConfig()).to(dtype).eval().requires_grad_(False)



"""Small decoders for the laws: the same forward with the variations that a pass could trip over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_IDS, HIDDEN, HEAD_DIM, MAX_LEN = 50, 32, 8, 128


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """What varies between the decoders."""

    num_heads: int = 4
    num_kv_heads: int = 4
    positions: str = "rope"
    """rope: rotated by arange(T); learned: the first T rows of a table are added."""
    num_logits_to_keep: int | None = None
    returns_kv: bool = False
    returns_tuples: bool = False


class RMSNorm(nn.Module):
    """As Llama's code has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        """Return x [.., HIDDEN] scaled to unit mean square."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Layer(nn.Module):
    """One pre-norm block with causal attention."""

    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        self.settings = settings
        self.norm, self.mlp_norm = RMSNorm(), nn.LayerNorm(HIDDEN)
        self.q = nn.Linear(HIDDEN, settings.num_heads * HEAD_DIM)
        self.k = nn.Linear(HIDDEN, settings.num_kv_heads * HEAD_DIM, bias=False)
        self.v = nn.Linear(HIDDEN, settings.num_kv_heads * HEAD_DIM, bias=False)
        self.o = nn.Linear(settings.num_heads * HEAD_DIM, HIDDEN, bias=False)
        self.up, self.gate, self.down = nn.Linear(HIDDEN, 48), nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [B, T, HIDDEN] -> the same shape, and this layer's K and V [B, Hkv, T, HEAD_DIM]."""
        batch, length, _ = x.shape
        normed = self.norm(x)
        q, k, v = (part(normed).view(batch, length, -1, HEAD_DIM).transpose(1, 2) for part in (self.q, self.k, self.v))
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        repeats = self.settings.num_heads // self.settings.num_kv_heads
        all_k, all_v = (repeat_heads(part, repeats) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, all_k, all_v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, -1))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed)), (k, v)


class Decoder(nn.Module):
    """A causal decoder without a cache."""

    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(NUM_IDS, HIDDEN)
        self.table = nn.Parameter(torch.randn(MAX_LEN, HIDDEN))
        self.register_buffer("frequencies", 10.0 ** -torch.arange(0, 1, 2 / HEAD_DIM))
        self.layers = nn.ModuleList(Layer(settings) for _ in range(2))
        self.norm, self.head = RMSNorm(), nn.Linear(HIDDEN, NUM_IDS, bias=False)

    def forward(self, input_ids: Tensor) -> Any:
        """input_ids [B, T] -> logits [B, T, NUM_IDS] (or of the last rows), in the structure of the settings."""
        x = self.embedding(input_ids)
        rope = None
        if self.settings.positions == "learned":
            x = x + self.table[: input_ids.shape[1]]
        else:
            angles = torch.arange(input_ids.shape[1])[:, None] * torch.cat([self.frequencies, self.frequencies])
            rope = angles.cos(), angles.sin()
        cache = []
        for layer in self.layers:
            x, kv = layer(x, rope)
            cache.append(kv)
        x = self.norm(x)
        if self.settings.num_logits_to_keep is not None:
            x = x[:, -self.settings.num_logits_to_keep :]
        logits = self.head(x)
        if self.settings.returns_kv:
            return {"logits": logits, "cache": cache}
        return (logits, (x, [logits.argmax(-1)])) if self.settings.returns_tuples else logits


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head: x [B, H, T, D], cos and sin [T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def repeat_heads(x: Tensor, repeats: int) -> Tensor:
    """x [B, Hkv, T, D] -> [B, Hkv * repeats, T, D], as models that do not rely on enable_gqa do."""
    batch, heads, length, size = x.shape
    if repeats == 1:
        return x
    return x[:, :, None].expand(batch, heads, repeats, length, size).reshape(batch, heads * repeats, length, size)


@dataclass(frozen=True, slots=True)
class Case:
    """A model for the laws and the batch it is called with."""

    build: Callable[[], nn.Module]
    batch: int = 1
    kwargs: tuple[tuple[str, object], ...] = ()

    def input_ids(self, num_tokens: int) -> Tensor:
        """Return the same random ids for the same length."""
        generator = torch.Generator().manual_seed(num_tokens)
        return torch.randint(0, NUM_IDS, (self.batch, num_tokens), generator=generator)


def _decoder(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: Decoder(DecoderSettings(**settings))


def _hf_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=NUM_IDS, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=MAX_LEN,
    )  # fmt: skip
    return LlamaForCausalLM(config)


CASES = {
    "llama": Case(_decoder()),
    "learned_positions": Case(_decoder(positions="learned")),
    "gqa_by_repeat": Case(_decoder(num_kv_heads=2)),
    "last_logits": Case(_decoder(num_logits_to_keep=1)),
    "returned_kv": Case(_decoder(num_kv_heads=2, returns_kv=True)),
    "batch_2": Case(_decoder(num_kv_heads=2), batch=2),
    "tuples_of_last_rows": Case(_decoder(num_logits_to_keep=1, returns_tuples=True)),
    "hf_llama": Case(_hf_llama, kwargs=(("use_cache", False),)),
    "hf_llama_last_logits": Case(_hf_llama, kwargs=(("use_cache", False), ("logits_to_keep", 1))),
}


def build(name: str) -> nn.Module:
    """Return a model of CASES in float64 and eval mode, with the same weights every time."""
    torch.manual_seed(0)
    return CASES[name].build().eval().double()

"""What tests of the backend share: options, tiny models, and the comparison that also proves the path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import pcp_compiler
from pcp_compiler.backends.compilation import CallRecord

VOCAB_SIZE = 61


def options(pcp_size: int = 2, *, min_tokens_to_shard: int | None = 0, **parallel: Any) -> dict[str, Any]:
    """Return backend options; every prompt of two tokens or more is sharded unless said otherwise."""
    if min_tokens_to_shard is not None:
        parallel["min_tokens_to_shard"] = min_tokens_to_shard
    return {"parallel": {"pcp_size": pcp_size, **parallel}}


def torch_compile(model: Any, pcp_size: int = 2, **arguments: Any) -> Any:
    """Return what a user gets from torch.compile with our backend, for any length."""
    return torch.compile(model, **{"backend": "pcp_spec", "dynamic": True, "options": options(pcp_size), **arguments})


def make_ids(num_tokens: int, *, batch: int = 1) -> Tensor:
    """Return random token ids [B, T], int64, other ones for every length."""
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(0, VOCAB_SIZE, (batch, num_tokens), generator=generator)


def make_llama(attention: str = "sdpa", *, num_layers: int = 1) -> LlamaForCausalLM:
    """Return a tiny Llama in float32, always with the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class TokenModel(nn.Module):
    """An embedding, the function under test, and a linear layer, in float64: input_ids [B, T] -> [B, T, 16]."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB_SIZE, 16)
        self.linear = nn.Linear(16, 16)
        self.function = function
        self.double().eval().requires_grad_(False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Apply the function to the embedded tokens [B, T, 16]."""
        out: Tensor = self.linear(self.function(self.embedding(input_ids)))
        return out


def sharded_lengths(pcp_size: int) -> list[int]:
    """Return prompt lengths around the places where a partition changes its form, and two ordinary ones."""
    around = {1, 2, pcp_size - 1, pcp_size, 2 * pcp_size - 1, 2 * pcp_size, 2 * pcp_size + 1, 64, 129}
    return sorted(around - {0})


@torch.no_grad()
def check_equal(
    compiled: Any, model: Any, lengths: Iterable[int], pcp_size: int, *, replicated: int = 0, atol: float = 1e-12,
    select: Callable[[Any], Sequence[Tensor]] = lambda out: [out],
) -> list[CallRecord]:  # fmt: skip
    """Compare a model that was not called before with eager, and prove that its program ran sharded.

    Args:
        replicated: how many of the lengths are too short to shard. select: the tensors of a result.
    Returns:
        Records of the calls, in order.
    """
    wanted = list(lengths)
    for num_tokens in wanted:
        ids = make_ids(num_tokens)
        for got, expected in zip(select(compiled(ids)), select(model(ids)), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=atol, msg=lambda text, n=num_tokens: f"T={n}: {text}")
    records = pcp_compiler.assert_sharded(compiled, calls=len(wanted), pcp_size=pcp_size, replicated=replicated)
    assert sorted(record.num_tokens for record in records) == sorted(wanted)
    return records

"""What tests of model families share: one trace, lowered and run on virtual ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

import pcp_compiler
from pcp_compiler import ops
from pcp_compiler.backends.compilation import CallRecord, Compilation
from pcp_compiler.pass_api import calls
from pcp_compiler.trace import trace_module

NUM_IDS, HEADS, HEAD_DIM = 32, 4, 8
WIDTH = HEADS * HEAD_DIM


class Tokens(nn.Module):
    """An embedding and what a subclass does with it, in float64: input_ids [B, T] -> [B, T, ..]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(NUM_IDS, WIDTH)
        self.double().eval().requires_grad_(False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embed, and call `mix` on [B, T, WIDTH]."""
        return self.mix(self.embedding(input_ids))

    def mix(self, x: Tensor) -> Tensor:
        """x [B, T, WIDTH] -> [B, T, ..]."""
        raise NotImplementedError


def heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [B, T, 4, 8], and k and v [B, T, 2, 8], cut from x [B, T, WIDTH]."""
    q = x.unflatten(-1, (HEADS, HEAD_DIM))
    return q, q[:, :, :2] * 2, q[:, :, 2:] - 1


def make_ids(num_tokens: int, batch: int = 1) -> Tensor:
    """Return token ids [B, T], int64, other ones for every length."""
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(0, NUM_IDS, (batch, num_tokens), generator=generator)


def compile_for(model: nn.Module, pcp_size: int, batch: int = 1, **parallel: Any) -> Lowered:
    """Return a model traced at 9 tokens and lowered for P ranks that share every prompt of two tokens or more."""
    return Lowered(model, pcp_size, batch, parallel)


class Lowered:
    """A model's program."""

    def __init__(self, model: nn.Module, pcp_size: int, batch: int, parallel: dict[str, Any]) -> None:
        self.kwargs = {"use_cache": False} if hasattr(model, "config") else {}
        config = pcp_compiler.load_config({"parallel": {"pcp_size": pcp_size, "min_tokens_to_shard": 0, **parallel}})
        self.traced = trace_module(model, (make_ids(9, batch),), self.kwargs)
        self.compilation = Compilation(config, self.traced.trace)
        self.model = model

    @property
    def graph_module(self) -> fx.GraphModule:
        """The graph that the ranks run."""
        return self.compilation.lowered.program.graph_module

    def attentions(self) -> list[tuple[str, int | None]]:
        """Return kind and window of every attention, in order."""
        found = [node.kwargs for node in calls(self.graph_module, ops.ATTENTION)]
        return [(str(kwargs["kind"]), kwargs.get("window")) for kwargs in found]  # type: ignore[misc]

    def run(self, ids: Tensor) -> tuple[Tensor, CallRecord]:
        """Return the result, or its logits, and what the ranks did for it."""
        out = self.traced.rebuild(self.compilation.run(self.traced.flat_inputs((ids,), self.kwargs)))
        return getattr(out, "logits", out), self.compilation.calls[-1]

    def check(self, ids: Tensor, reference: nn.Module | None = None, tolerance: float = 1e-12) -> CallRecord:
        """Compare one call with eager (of another model, if given) and prove that the ranks shared its rows."""
        got, record = self.run(ids)
        with torch.no_grad():
            out = (reference or self.model)(ids, **self.kwargs)
        torch.testing.assert_close(got, getattr(out, "logits", out), rtol=0, atol=tolerance)
        assert record.is_sharded and record.width < ids.shape[1]
        assert sum(record.rows_per_rank) == ids.shape[1]
        assert 0 < len(record.collectives) == len(self.compilation.lowered.program.schedule)
        return record


def plain_attention(x: Tensor, seen: Tensor, *, soft_cap: float | None = None, sinks: Tensor | None = None) -> Tensor:
    """Return attention of `heads(x)` written out: seen [T, T] says which keys a row sees; result [B, T, 4, 8]."""
    q, k, v = (part.transpose(1, 2) for part in heads(x))
    k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
    scores = q @ k.transpose(2, 3) * HEAD_DIM**-0.5
    if soft_cap is not None:
        scores = (scores / soft_cap).tanh() * soft_cap
    weights = scores.masked_fill(~seen, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks[:, None, None].exp()
    out: Tensor = (weights / total @ v).transpose(1, 2)
    return out


def band(num_tokens: int, window: int | None = None) -> Tensor:
    """Return the causal mask [T, T], with a window that counts the row itself."""
    behind = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    return (behind >= 0) & (behind < (window or num_tokens))

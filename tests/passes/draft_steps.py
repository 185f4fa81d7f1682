"""A drafter's step of a few layers, and its phases, for the passes that make a proposal of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pcp_compiler.config import load_config
from pcp_compiler.pass_api import DraftChain, PassContext, Phase, RowMetadata
from pcp_compiler.trace import ModuleTrace, trace_module

NUM_IDS, HIDDEN, NUM_HEADS, MAX_MODEL_LEN, BLOCK_SIZE = 11, 8, 2, 32, 4


class Layer(nn.Module):
    """Attention with keys that know their position, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [1, T, H], positions [1, T] -> [1, T, H]."""
        turned = self.qkv(x + (positions[..., None] * 0.5).sin())
        q, k, v = (part.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for part in turned.chunk(3, dim=-1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Step(nn.Module):
    """A step with the signature of `runtime.rows.DraftRows`."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(NUM_IDS, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = nn.Linear(HIDDEN, NUM_IDS, bias=False)
        self.training = False

    def forward(self, next_ids: Tensor, hidden: Tensor, positions: Tensor, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        """next_ids, positions [1, T], hidden [1, T, H], logit_rows [L] -> [L, H] and [L, V]."""
        x = self.embedding(next_ids) + hidden.relu()
        for layer in self.layers:
            x = layer(x, positions)
        picked = x[0].index_select(0, logit_rows)
        return picked, self.head(picked)


def trace_step(step: nn.Module) -> ModuleTrace:
    """Trace a step for any number of rows."""
    ids = torch.zeros(1, 7, dtype=torch.int64)
    example = (ids, torch.zeros(1, 7, HIDDEN), ids.clone(), torch.zeros(3, dtype=torch.int64))
    return trace_module(
        step, example, tokens={"next_ids": 1, "hidden": 1, "positions": 1}, other_sizes={"logit_rows": 0}
    )


def step_phase() -> Phase:
    """Return the phase of one step, a row per request."""
    return Phase("step", is_sharded=False, block_size=BLOCK_SIZE, rows=RowMetadata("positions", MAX_MODEL_LEN))


def chain_phase(num_draft_tokens: int = 3, *, is_greedy: bool = True) -> Phase:
    """Return the phase of a whole proposal."""
    chain = DraftChain(num_draft_tokens, is_greedy, "next_ids", "hidden", "logit_rows")
    rows = RowMetadata("positions", MAX_MODEL_LEN)
    return Phase("chain", is_sharded=False, block_size=BLOCK_SIZE, rows=rows, chain=chain)


def context(traced: ModuleTrace, phase: Phase) -> PassContext:
    """Return a fresh context for the passes."""
    return PassContext(load_config({}), traced.trace.seeds, phase=phase)

"""Whole proposals as programs: draw, step, draw, ... in one graph; a program for each K, over the drafter's caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcp_compiler.kv_ops import ADVANCE_METADATA, BUILD_METADATA
from pcp_compiler.pass_api import DraftChain, Phase, RowMetadata, calls
from pcp_compiler.passes.attach_kv import BLOCK_TABLES
from pcp_compiler.passes.unroll_draft import KEYS, LOGITS, TEMPERATURE
from pcp_compiler.pipeline import Lowered
from pcp_compiler.plan.dispatch import LiveBatch, context_bound
from pcp_compiler.runtime.cached_model import CachedModel
from pcp_compiler.runtime.captures import CapturedProgram
from pcp_compiler.runtime.layout import host_tensor, to_tensor
from pcp_compiler.runtime.sampling import SamplingRows, draft_keys


@dataclass(slots=True)
class MetadataCounts:
    """How often attention metadata was made for proposals so far."""

    num_proposals: int = 0
    first_builds: int = 0
    """Of first passes; 0 where the target's metadata serves the drafter too."""
    builds: int = 0
    """Of chains."""
    advances: int = 0
    """Of chains."""


@dataclass(frozen=True, slots=True, eq=False)
class ChainStart:
    """Where the chains of R requests start."""

    logits: Tensor
    """For the first draft token, [R, V]."""
    hidden: Tensor
    """That these logits were made of, [R, H]."""
    positions: NDArray[np.int64]
    """Of the token sampled last, which the first step's row reads next to `hidden`, [R]."""
    seq_lens: NDArray[np.int64]
    """Positions of each request in this batch, rejected drafts included, [R]: no start is above."""
    block_tables: NDArray[np.int32]
    """[R, max_blocks]."""


def chain_bound(seq_lens: NDArray[np.int64], num_draft_tokens: int, max_model_len: int) -> int:
    """Return L, the positions of a request that the last step of a chain may read.

    From this batch's lengths alone, which no rejection can raise: it is reached by a request that accepted all drafts
    and got the bonus token. Its first step runs at position seq_len, its last at seq_len + K - 2.
    """
    return context_bound(seq_lens, max_model_len=max_model_len, num_ahead=num_draft_tokens - 1)


class DraftChains:
    """The chain programs of a drafter's step.

    Args:
        model: runs a step with the signature of `rows.DraftRows`.
    """

    def __init__(self, model: CachedModel, *, is_greedy: bool, max_model_len: int) -> None:
        self.lowered: dict[int, Lowered] = {}
        """By K."""
        self.counts = MetadataCounts()
        self._num_calls: dict[int, tuple[int, int]] = {}  # builds and advances of a proposal, by K
        self._model = model
        self._is_greedy = is_greedy
        self._max_model_len = max_model_len

    def lower(self, num_draft_tokens: int) -> Lowered:
        """Return the program of K >= 1 draft tokens, made at its first use."""
        if num_draft_tokens not in self.lowered:
            phase = Phase(
                f"{self._model.name}, chain of {num_draft_tokens}", is_sharded=False, block_size=self._model.block_size,
                has_few_rows=True, rows=RowMetadata("positions", self._max_model_len),
                chain=DraftChain(
                    num_draft_tokens, self._is_greedy, token_input="next_ids", hidden_input="hidden",
                    row_input="logit_rows",
                ),
            )  # fmt: skip
            self.lowered[num_draft_tokens] = lowered = self._model.lower(phase)
            self._num_calls[num_draft_tokens] = (
                len(list(calls(lowered.program.graph_module, BUILD_METADATA))),
                len(list(calls(lowered.program.graph_module, ADVANCE_METADATA))),
            )
        return self.lowered[num_draft_tokens]

    def captured(self) -> list[CapturedProgram]:
        """Return the programs made so far as ones that may be captured."""
        return [
            self._model.may_capture(
                lowered.program, ("draft",), name=f"{self._model.name} chain, K = {count}", num_draft_tokens=count
            )
            for count, lowered in self.lowered.items()
        ]

    def run(self, num_draft_tokens: int, start: ChainStart, options: SamplingRows) -> tuple[Tensor, Tensor | None]:
        """Return draft tokens [R, K] and, unless drafts are greedy, the distributions they came from, [R, K, V]."""
        lowered = self.lower(num_draft_tokens)
        bound = chain_bound(start.seq_lens, num_draft_tokens, self._max_model_len)
        ids, *probs = self._model.run_whole(
            self._inputs(num_draft_tokens, start, options), self._index(num_draft_tokens, start, bound),
            lowered.program,
            LiveBatch("draft", len(start.positions), len(start.positions), 1, bound, num_draft_tokens),
        )  # fmt: skip
        self.count(num_draft_tokens)
        return ids, probs[0] if probs else None

    def count(self, num_draft_tokens: int) -> None:
        """Count one run of a chain."""
        num_builds, num_advances = self._num_calls[num_draft_tokens]
        self.counts.num_proposals += 1
        self.counts.builds += num_builds
        self.counts.advances += num_advances

    def _inputs(self, num_draft_tokens: int, start: ChainStart, options: SamplingRows) -> Mapping[str, Tensor]:
        inputs = {LOGITS: start.logits, "hidden": start.hidden[None], "positions": host_tensor(start.positions)[None]}
        if not self._is_greedy:
            positions = to_tensor(start.positions, start.logits.device)
            steps = torch.arange(num_draft_tokens, device=positions.device)[:, None]
            inputs |= {TEMPERATURE: options.temperature, KEYS: draft_keys(options.seeds, positions, steps)}
        return inputs

    def _index(self, num_draft_tokens: int, start: ChainStart, bound: int) -> Mapping[str, Tensor]:
        num_requests = len(start.positions)
        ends = np.minimum(start.positions + num_draft_tokens - 1, self._max_model_len)
        assert ends.max() <= bound, "a chain starts behind the positions of its batch"
        last_blocks = start.block_tables[np.arange(num_requests), np.maximum(ends - 1, 0) // self._model.block_size]
        assert num_draft_tokens == 1 or (last_blocks > 0).all(), "a position of the chain has no KV block"
        num_blocks = -(-bound // self._model.block_size)
        return {BLOCK_TABLES: host_tensor(start.block_tables[:, :num_blocks])}

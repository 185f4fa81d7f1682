"""Proposals of an MTP drafter: a first pass over the step's rows, then a chain of single rows per request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pcp_compiler.config import Config
from pcp_compiler.drafters.base import Drafter
from pcp_compiler.plan.draft import DraftPlan
from pcp_compiler.runtime.batch import Batch
from pcp_compiler.runtime.cached_model import CachedModel, CompileCache
from pcp_compiler.runtime.captures import CapturedProgram
from pcp_compiler.runtime.draft_chain import ChainStart, DraftChains
from pcp_compiler.runtime.layout import StepIndex, host_tensor
from pcp_compiler.runtime.rows import DraftRows
from pcp_compiler.runtime.sampling import SamplingParams, SamplingRows
from pcp_compiler.runtime.scheduler import Step

DRAFT_TOKEN_INPUTS = ("next_ids", "hidden", "positions")


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of one request, and what its proposer keeps until the request's next step."""

    token_ids: tuple[int, ...] = ()
    probs: Tensor | None = None
    """Distributions that sampled drafts came from, [k, V]."""
    num_rows: int = 0
    """Rows of the drafter's K/V that need not be run again if every draft is accepted; 0 where that is not counted."""
    hidden: Tensor | None = None
    """The target's hidden states of rows from `num_rows` on, for rows that are run again."""

    def take(self, num_drafts: int) -> Proposal:
        """Return the proposal with its first drafts only."""
        probs = None if self.probs is None else self.probs[:num_drafts]
        return Proposal(self.token_ids[:num_drafts], probs, self.num_rows, self.hidden)


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """What the target made of a step; R requests."""

    hidden: list[Tensor]
    """Hidden states [1, W, H] of each rank, or [1, T, H] of all rows as the only entry."""
    token_ids: list[tuple[int, ...]]
    """Accepted drafts and the token after them, of each request; none while its prompt goes on, or if it failed."""
    last_rows: np.ndarray
    """Row of each request's last token that counts, [R]."""
    index: StepIndex
    """The target's own index inputs of the step."""

    @property
    def going_on(self) -> np.ndarray:
        """Requests that emitted, [R']."""
        return np.array([i for i, tokens in enumerate(self.token_ids) if tokens], dtype=np.int64)


class Proposer(ABC):
    """Makes drafts for the next step of every request, and keeps the drafter's K/V up to date.

    Args:
        plan: how the drafter runs. max_model_len: positions of a request.
        compile_cache: where the drafter may have been compiled before.
    """

    needs_global_hidden: bool
    """Whether hidden states of all rows are read; otherwise rank-local ones, or none, are."""
    num_lookahead: int
    """See `SchedulerLimits`."""
    draft_shift: int
    """See `SchedulerLimits`."""
    num_rerun = 0
    """Rows of the step before that the first passes of a step run again, at most, of each request."""

    def __init__(
        self, drafter: Drafter, plan: DraftPlan, config: Config, max_model_len: int, compile_cache: CompileCache
    ) -> None:
        self.mode = plan.mode
        self.max_model_len = max_model_len
        self._config = config
        self._parallel = plan.draft_config.parallel
        self._is_greedy = config.draft.sampling == "greedy"
        self._max_positions = drafter.capabilities.max_positions
        self._device = next(drafter.parameters()).device
        self.models = self._build_models(drafter, plan, compile_cache)

    @abstractmethod
    def _build_models(self, drafter: Drafter, plan: DraftPlan, compile_cache: CompileCache) -> Sequence[CachedModel]:
        """Return the compiled modules of the drafter."""

    def prepare(self, draft_lengths: Sequence[int]) -> None:  # noqa: B027 - not every proposer has programs for each K
        """Make the programs for these K before the first step."""

    def captured(self) -> list[CapturedProgram]:
        """Return the programs that may be captured, and say so to their models."""
        return [
            model.may_capture(model.few_rows.program, ("decode", "verify"), name=model.name, logit_rows="requests")
            for model in self.models
        ]

    @abstractmethod
    def propose(
        self, step: Step, sampled: Sampled, num_draft_tokens: int, previous: Sequence[Proposal | None]
    ) -> list[Proposal]:
        """Return a proposal per request of the step; requests that did not emit get one without drafts.

        Args:
            num_draft_tokens: K of this step, 0: only the drafter's K/V is kept up to date.
            previous: each request's proposal of its step before, None if it had none.
        """

    def _collect(
        self, proposals: list[Proposal], positions: np.ndarray, going_on: np.ndarray, drafts: Sequence[Sequence[int]],
        probs: Sequence[Tensor] = (),
    ) -> list[Proposal]:  # fmt: skip
        """Return the proposals with drafts for the requests that go on.

        Args:
            positions: of the row that made each request's first draft, [R]. drafts: [R', K]. probs: [R', V] of each
                draft step; none for greedy drafts.
        """
        filled = list(proposals)
        for column, i in enumerate(going_on):
            kept = torch.stack([p[column] for p in probs]) if probs else None
            made = Proposal(tuple(drafts[column]), kept, filled[i].num_rows, filled[i].hidden)
            limit = self._max_positions
            filled[i] = made if limit is None else made.take(max(0, limit - int(positions[i])))
        return filled

    def _params(self, step: Step, going_on: np.ndarray) -> list[SamplingParams]:
        params = [step.rows[i].request.params for i in going_on]
        if self._is_greedy:
            return [SamplingParams(p.max_new_tokens, seed=p.seed) for p in params]
        return params


class ChainProposer(Proposer):
    """A proposer that runs one module in a first pass over many rows, and then in a chain of one row per request."""

    def __init__(
        self, drafter: Drafter, plan: DraftPlan, config: Config, max_model_len: int, compile_cache: CompileCache
    ) -> None:
        super().__init__(drafter, plan, config, max_model_len, compile_cache)
        self.num_lookahead = config.draft.num_speculative_tokens
        (self.model,) = self.models
        self.chains = DraftChains(self.model, is_greedy=self._is_greedy, max_model_len=max_model_len)

    def prepare(self, draft_lengths: Sequence[int]) -> None:
        """See `Proposer`."""
        for num_draft_tokens in draft_lengths:
            if num_draft_tokens:
                self.chains.lower(num_draft_tokens)

    def captured(self) -> list[CapturedProgram]:
        """See `Proposer`; each chain is one too."""
        return super().captured() + self.chains.captured()

    def _chain(
        self, step: Step, batch: Batch, going_on: np.ndarray, last_rows: np.ndarray, recycled: Tensor, logits: Tensor,
        num_draft_tokens: int,
    ) -> tuple[list[list[int]], list[Tensor]]:  # fmt: skip
        """Return draft tokens [R', K] and their distributions, [R', V] per draft step."""
        options = SamplingRows.from_params(self._params(step, going_on), self._device)
        start = ChainStart(
            logits, recycled, batch.positions[last_rows[going_on]] + 1, batch.seq_lens[going_on],
            batch.block_tables[going_on],
        )  # fmt: skip
        tokens, probs = self.chains.run(num_draft_tokens, start, options)
        return tokens.tolist(), [] if probs is None else list(probs.unbind(1))


class MTPProposer(ChainProposer):
    """Runs one MTP module. `plan.mode` sharded: the first pass takes each rank's rows as the target left them, with the
    target's index inputs; replicated: every rank runs all rows from restored hidden states, with index inputs of its
    own."""

    draft_shift = 1  # a row reads the token behind it

    def __init__(
        self, drafter: Drafter, plan: DraftPlan, config: Config, max_model_len: int, compile_cache: CompileCache
    ) -> None:
        super().__init__(drafter, plan, config, max_model_len, compile_cache)
        self.needs_global_hidden = plan.mode == "replicated"

    def _build_models(self, drafter: Drafter, plan: DraftPlan, compile_cache: CompileCache) -> Sequence[CachedModel]:
        model = CachedModel(
            DraftRows(drafter, 0), example_rows(drafter), DRAFT_TOKEN_INPUTS, plan.draft_config, name="draft",
            compile_cache=compile_cache, local_input="hidden",
        )  # fmt: skip
        return (model,)

    def propose(
        self, step: Step, sampled: Sampled, num_draft_tokens: int, previous: Sequence[Proposal | None]
    ) -> list[Proposal]:
        """See `Proposer`."""
        batch, going_on, last_rows = step.batch, sampled.going_on, sampled.last_rows
        inputs = {
            "next_ids": host_tensor(self._next_ids(step, sampled.token_ids))[None],
            "positions": host_tensor(batch.positions)[None],
            "logit_rows": host_tensor(last_rows[going_on]),
        }
        recycled, logits = self._first_pass(batch, inputs, sampled)
        proposals = [Proposal()] * len(step.rows)
        if not len(going_on) or num_draft_tokens == 0:
            return proposals
        tokens, probs = self._chain(step, batch, going_on, last_rows, recycled, logits, num_draft_tokens)
        return self._collect(proposals, batch.positions[last_rows], going_on, tokens, probs)

    def count_round(self, num_draft_tokens: int) -> None:
        """Count a first pass, and a chain unless K is 0, that ran as part of a captured round."""
        self.model.counts.num_whole += 1 + (num_draft_tokens > 0)
        self.chains.counts.first_builds += self.mode == "replicated"
        if num_draft_tokens:
            self.chains.count(num_draft_tokens)

    def collect_round(
        self, step: Step, token_ids: list[tuple[int, ...]], last_rows: np.ndarray, drafts: Sequence[Sequence[int]]
    ) -> list[Proposal]:
        """Return the proposals of a captured round: of requests that emitted, the others get none.

        Args:
            token_ids, last_rows: see `Sampled`. drafts: [R, K].
        """
        going_on = np.array([i for i, tokens in enumerate(token_ids) if tokens], dtype=np.int64)
        positions = step.batch.positions[last_rows]
        return self._collect([Proposal()] * len(step.rows), positions, going_on, [drafts[i] for i in going_on])

    def _next_ids(self, step: Step, sampled: list[tuple[int, ...]]) -> np.ndarray:
        """Return for each row the token at the next position, [T]; rows behind the last that counts keep any token.

        Built for the whole batch before it is cut: the right neighbour of a shard's last row is on another rank.
        """
        batch = step.batch
        shifted = np.append(batch.input_ids[1:], 0)
        for i, rows in enumerate(step.rows):
            stop = batch.query_start[i + 1]
            if not rows.is_sampled:
                shifted[stop - 1] = rows.request.token_ids[rows.request.num_computed + rows.query_len]
            elif sampled[i]:
                first = stop - 1 - rows.num_drafts
                shifted[first : first + len(sampled[i])] = sampled[i]
        return shifted

    def _first_pass(self, batch: Batch, inputs: dict[str, Tensor], sampled: Sampled) -> tuple[Tensor, Tensor]:
        if self.mode == "sharded" and sampled.index.partition is not None:
            results = self.model.run_sharded([{**inputs, "hidden": rows} for rows in sampled.hidden], sampled.index)[0]
            return results[0], results[1]
        index = sampled.index
        if self.mode == "replicated":
            index = self.model.plan_step(batch, self.max_model_len)
            self.chains.counts.first_builds += 1
        results = self.model.run_whole({**inputs, "hidden": sampled.hidden[0]}, index.whole, live=index.live)
        return results[0], results[1]


def example_rows(drafter: Drafter) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a call of a drafter's rows for tracing: next_ids, hidden, positions, logit_rows."""
    weight = next(drafter.parameters())
    ids = torch.zeros(1, 7, dtype=torch.int64, device=weight.device)
    width = drafter.capabilities.hidden_size if drafter.capabilities.needs_hidden else 0
    hidden = torch.zeros(1, 7, width, dtype=weight.dtype, device=weight.device)
    return ids, hidden, ids.clone(), torch.zeros(3, dtype=torch.int64, device=weight.device)

"""Proposals of an MTP drafter: a first pass over the step's rows, then a chain of single rows per request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pcp_compiler.config import Config
from pcp_compiler.drafters.base import Drafter
from pcp_compiler.passes.attach_kv import BLOCK_TABLES, SLOTS, SPANS
from pcp_compiler.plan.draft import DraftPlan
from pcp_compiler.runtime.batch import PAD_SLOT, Batch, slots_at
from pcp_compiler.runtime.cached_model import CachedModel, KvPlacement, StepIndex, spans_tensor
from pcp_compiler.runtime.rows import DraftRows
from pcp_compiler.runtime.sampling import SamplingParams, SamplingRows, sample_draft
from pcp_compiler.runtime.scheduler import Step
from pcp_compiler.trace import trace_module


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of one request and, when they were sampled, the distributions they came from, [k, V]."""

    token_ids: tuple[int, ...] = ()
    probs: Tensor | None = None


class MTPProposer:
    """Runs MTP modules. `plan.mode` sharded: the first pass takes each rank's rows as the target left them;
    replicated: every rank runs all rows from restored hidden states."""

    def __init__(
        self, drafter: Drafter, plan: DraftPlan, config: Config, *, num_slots: int, dtype: torch.dtype | None,
        kv: KvPlacement, max_model_len: int,
    ) -> None:  # fmt: skip
        self.mode = plan.mode
        self._config = config
        self._max_model_len = max_model_len
        self._is_greedy = config.draft.sampling == "greedy"
        rows = DraftRows(drafter, 0)
        weight = next(drafter.parameters())
        ids = torch.zeros(1, 7, dtype=torch.int64, device=weight.device)
        width = drafter.module_of_step(0).form.hidden  # type: ignore[union-attr]
        hidden = torch.zeros(1, 7, int(width), dtype=weight.dtype, device=weight.device)  # type: ignore[arg-type]
        traced = trace_module(
            rows, (ids, hidden, ids.clone(), torch.zeros(3, dtype=torch.int64, device=weight.device)),
            tokens={"next_ids": 1, "hidden": 1, "positions": 1}, other_sizes={"logit_rows": 0},
        )  # fmt: skip
        self.model = CachedModel(
            traced, plan.draft_config, name="draft", num_slots=num_slots, dtype=dtype,
            kv=kv if plan.draft_config.parallel.pcp_size > 1 else "shared", local_input="hidden",
        )  # fmt: skip
        self._device = weight.device

    def propose(
        self, step: Step, index: StepIndex, hidden: list[Tensor], sampled: list[tuple[int, ...]],
        last_rows: np.ndarray, num_draft_tokens: int,
    ) -> list[Proposal]:  # fmt: skip
        """Return a proposal per request of the step; requests that did not emit get none.

        Args:
            hidden: of each rank, or one entry when all ranks ran all rows. last_rows: [R], row of each request's last
                token that counts. num_draft_tokens: K of this step, 0: only the drafter's KV is kept up to date.
        """
        batch = step.batch
        going_on = np.array([i for i, tokens in enumerate(sampled) if tokens], dtype=np.int64)
        inputs = {
            "next_ids": self._tensor(self._next_ids(step, sampled))[None],
            "positions": self._tensor(batch.positions)[None],
            "logit_rows": self._tensor(last_rows[going_on]),
        }
        recycled, logits = self._first_pass(inputs, index, hidden)
        proposals = [Proposal()] * len(step.rows)
        if not len(going_on) or num_draft_tokens == 0:
            return proposals
        tokens, probs = self._chain(step, batch, going_on, last_rows, recycled, logits, num_draft_tokens)
        for column, i in enumerate(going_on):
            kept = None if self._is_greedy else torch.stack([p[column] for p in probs])
            proposals[i] = Proposal(tuple(int(t[column]) for t in tokens), kept)
        return proposals

    def _next_ids(self, step: Step, sampled: list[tuple[int, ...]]) -> np.ndarray:
        """Return for each row the token at the next position, [T]; rows behind the last that counts keep any token.

        Built for the whole batch before it is cut: the right neighbour of a shard's last row is on another rank.
        """
        batch = step.batch
        shifted = np.append(batch.input_ids[1:], 0)
        for i, rows in enumerate(step.rows):
            start, stop = batch.query_start[i], batch.query_start[i + 1]
            if not rows.is_sampled:
                shifted[stop - 1] = rows.request.token_ids[rows.request.num_computed + rows.query_len]
            elif sampled[i]:
                first = stop - 1 - rows.num_drafts
                shifted[first : first + len(sampled[i])] = sampled[i]
        return shifted

    def _first_pass(
        self, inputs: dict[str, Tensor], index: StepIndex, hidden: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        if self.mode == "sharded" and index.partition is not None:
            results = self.model.run_sharded([{**inputs, "hidden": rows} for rows in hidden], index)[0]
        else:
            results = self.model.run_whole({**inputs, "hidden": hidden[0]}, index.whole)
        return results[0], results[1]

    def _chain(
        self, step: Step, batch: Batch, going_on: np.ndarray, last_rows: np.ndarray, recycled: Tensor, logits: Tensor,
        num_draft_tokens: int,
    ) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
        """Return draft tokens and their distributions, one [R'] and [R', V] per draft step."""
        options = SamplingRows.from_params(self._params(step, going_on), self._device)
        positions = batch.positions[last_rows[going_on]] + 1
        starts = self._tensor(positions)
        tokens, probs = [], []
        rows = self._tensor(np.arange(len(going_on)))
        for number in range(num_draft_tokens):
            token, chances = sample_draft(logits.float(), options, starts, number)
            tokens.append(token)
            probs.append(chances)
            if number + 1 == num_draft_tokens:
                break
            inputs = {"next_ids": token[None], "hidden": recycled[None], "positions": self._tensor(positions + number)[None],
                      "logit_rows": rows}  # fmt: skip
            recycled, logits = self.model.run_whole(inputs, self._chain_index(batch, going_on, positions + number))
        return tokens, probs

    def _chain_index(self, batch: Batch, going_on: np.ndarray, positions: np.ndarray) -> dict[str, Tensor]:
        """Return the index inputs of one chain step: a row per request, none stored past the longest request."""
        fits = positions < self._max_model_len
        clipped = np.minimum(positions, self._max_model_len - 1)
        tables = batch.block_tables[going_on]
        slots = np.full(len(positions), PAD_SLOT, dtype=np.int64)
        numbers = np.arange(len(positions))
        slots[fits] = slots_at(tables, numbers[fits], clipped[fits], self._config.limits.kv_block_size)
        return {
            SLOTS: self._tensor(slots),
            BLOCK_TABLES: self._tensor(tables),
            SPANS: spans_tensor((i, i, 1, int(position) + 1) for i, position in enumerate(clipped)),
        }

    def _params(self, step: Step, going_on: np.ndarray) -> list[SamplingParams]:
        params = [step.rows[i].request.params for i in going_on]
        if self._is_greedy:
            return [SamplingParams(p.max_new_tokens, seed=p.seed) for p in params]
        return params

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

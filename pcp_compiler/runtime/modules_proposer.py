"""Proposals of several MTP modules: module m drafts token m, and each has key and value rows of its own.

Row p of module m reads the token at p + 1 + m and what module m - 1 made of row p. Near the end of what is known that
token is a draft, so the row is run again in the next step, when it is known; with M modules these are at most M - 1
rows, for which the target's hidden states are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pcp_compiler.config import Config
from pcp_compiler.drafters.base import Drafter
from pcp_compiler.plan.draft import DraftPlan
from pcp_compiler.runtime.batch import Batch, RequestRows, build_batch
from pcp_compiler.runtime.cached_model import CachedModel, CompileCache
from pcp_compiler.runtime.captures import CapturedProgram
from pcp_compiler.runtime.layout import StepIndex, host_tensor, to_tensor
from pcp_compiler.runtime.proposer import DRAFT_TOKEN_INPUTS, Proposal, Proposer, Sampled, example_rows
from pcp_compiler.runtime.rows import DraftModuleRows
from pcp_compiler.runtime.sampling import SamplingRows, sample_draft
from pcp_compiler.runtime.scheduler import Step


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """The rows that the modules run in a step; R requests, T' rows."""

    batch: Batch
    known: list[list[int]]
    """Tokens of each request, the sampled ones included, [R]."""
    hidden: Tensor
    """The target's hidden states, [1, T', H]."""


class ModulesProposer(Proposer):
    """Runs M MTP modules one after the other over the same rows. `plan.mode` sharded: each rank runs its own rows of a
    prompt, cut from restored hidden states."""

    def __init__(
        self, drafter: Drafter, plan: DraftPlan, config: Config, max_model_len: int, compile_cache: CompileCache
    ) -> None:
        count = drafter.capabilities.max_draft_tokens
        assert count is not None
        self.draft_shift = self._num_modules = count
        self.num_rerun = count - 1
        super().__init__(drafter, plan, config, max_model_len, compile_cache)
        self.num_lookahead = 0
        self.needs_global_hidden = True

    def _build_models(self, drafter: Drafter, plan: DraftPlan, compile_cache: CompileCache) -> Sequence[CachedModel]:
        return tuple(
            CachedModel(
                DraftModuleRows(drafter, number), example_rows(drafter), DRAFT_TOKEN_INPUTS, plan.draft_config,
                name=f"draft module {number}", compile_cache=compile_cache, local_input="hidden" if number else None,
                local_output=0,
            )
            for number in range(self._num_modules)
        )  # fmt: skip

    def propose(
        self, step: Step, sampled: Sampled, num_draft_tokens: int, previous: Sequence[Proposal | None]
    ) -> list[Proposal]:
        """See `Proposer`."""
        window = self._window(step, sampled, previous)
        proposals = [self._keep(window, i) for i in range(len(step.rows))]
        if not window.batch.num_tokens:
            return proposals
        going_on = sampled.going_on
        tokens, probs = self._run_modules(step, window, going_on)
        drafts = torch.stack(tokens, 1).tolist() if tokens else []
        filled = self._collect(proposals, window.batch.seq_lens - 1, going_on, drafts, probs)
        return [proposal.take(num_draft_tokens) for proposal in filled]

    def captured(self) -> list[CapturedProgram]:
        """See `Proposer`."""
        return [
            model.may_capture(model.few_rows.program, ("window",), name=model.name, logit_rows="requests")
            for model in self.models
        ]

    def _window(self, step: Step, sampled: Sampled, previous: Sequence[Proposal | None]) -> _Window:
        """Return this step's rows that count, led by those whose later tokens are known only now."""
        found, known, hidden = [], [], []
        batch = step.batch
        for i, rows in enumerate(step.rows):
            first_row, start = int(batch.query_start[i]), int(batch.computed[i])
            num_rows = int(sampled.last_rows[i]) + 1 - first_row
            if rows.is_sampled and not sampled.token_ids[i]:
                num_rows = 0  # the request failed
            parts = [sampled.hidden[0][0, first_row : first_row + num_rows]]
            before, stop = previous[i], start + num_rows
            is_next = before is not None and before.hidden is not None and before.num_rows + len(before.hidden) == start
            if num_rows and is_next:
                assert before is not None and before.hidden is not None
                start = before.num_rows
                parts.insert(0, before.hidden)
            known.append([*rows.request.token_ids, *sampled.token_ids[i]])
            hidden += parts
            found.append(
                RequestRows(known[i][start:stop], start, rows.request.is_prefilling, bool(sampled.token_ids[i]),
                            rows.request.block_table)
            )  # fmt: skip
        own = build_batch(found, self._config.limits.kv_block_size, batch.block_tables.shape[1])
        return _Window(own, known, torch.cat(hidden)[None])

    def _keep(self, window: _Window, request: int) -> Proposal:
        """Return what the next step needs: how many rows are final, and hidden states of the others."""
        batch = window.batch
        stop = int(batch.seq_lens[request])
        num_final = min(stop, max(len(window.known[request]) - self._num_modules, int(batch.computed[request])))
        end = int(batch.query_start[request + 1])
        return Proposal(num_rows=num_final, hidden=window.hidden[0, end - (stop - num_final) : end].clone())

    def _run_modules(self, step: Step, window: _Window, going_on: np.ndarray) -> tuple[list[Tensor], list[Tensor]]:
        """Return draft tokens and their distributions, one [R'] and [R', V] per module."""
        batch = window.batch
        index = self.models[0].plan_step(batch, self.max_model_len, is_window=True)
        hidden = [window.hidden] * (1 if index.partition is None else self._parallel.pcp_size)
        options = SamplingRows.from_params(self._params(step, going_on), self._device) if len(going_on) else None
        starts = to_tensor(batch.seq_lens[going_on], self._device)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for number, model in enumerate(self.models):
            inputs = {
                "next_ids": host_tensor(_shifted_ids(window, number, going_on, tokens))[None],
                "positions": host_tensor(batch.positions)[None],
                "logit_rows": host_tensor(batch.logit_rows),
            }
            hidden, logits = _run(model, inputs, hidden, index)
            if options is not None:
                token, chances = sample_draft(logits.float(), options, starts, number)
                tokens.append(token)
                probs += [] if self._is_greedy else [chances]
        return tokens, probs


def _run(
    model: CachedModel, inputs: dict[str, Tensor], hidden: list[Tensor], index: StepIndex
) -> tuple[list[Tensor], Tensor]:
    """Return the hidden states that a module made, of each rank, and its logits."""
    if index.partition is None:
        out, logits = model.run_whole({**inputs, "hidden": hidden[0]}, index.whole, live=index.live)
        return [out], logits
    results = model.run_sharded([{**inputs, "hidden": rows} for rows in hidden], index)
    return [out for out, _ in results], results[0][1]


def _shifted_ids(window: _Window, number: int, going_on: np.ndarray, drafts: list[Tensor]) -> np.ndarray:
    """Return for each row the token that module `number` reads, [T']: known, drafted, or for now any."""
    batch = window.batch
    made = np.stack([token.cpu().numpy() for token in drafts], axis=1) if drafts else np.empty((len(going_on), 0), int)
    drafts_of = dict(zip(going_on.tolist(), made.tolist(), strict=True))
    ids = np.zeros(batch.num_tokens, dtype=np.int64)
    for i, known in enumerate(window.known):
        rows = slice(batch.query_start[i], batch.query_start[i + 1])
        tokens = [*known, *drafts_of.get(i, [])]
        read = tokens[batch.computed[i] + 1 + number : batch.seq_lens[i] + 1 + number]
        ids[rows] = read + [0] * (batch.query_lens[i] - len(read))
    return ids

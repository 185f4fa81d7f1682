"""Proposals of an independent draft model: it reads tokens, so its rows are not the target's.

The drafter's K/V lies in the slots of the target's. After a round it has rows up to the last token it read itself; what
is missing is the token sampled last and, if every draft was accepted, the last draft, which was sampled but never read.
"""

from __future__ import annotations

from collections.abc import Sequence

from pcp_compiler.config import Config
from pcp_compiler.drafters.base import Drafter
from pcp_compiler.plan.draft import DraftPlan
from pcp_compiler.runtime.batch import Batch, RequestRows, build_batch
from pcp_compiler.runtime.cached_model import CachedModel, CompileCache
from pcp_compiler.runtime.layout import host_tensor
from pcp_compiler.runtime.proposer import DRAFT_TOKEN_INPUTS, ChainProposer, Proposal, Sampled, example_rows
from pcp_compiler.runtime.rows import DraftModelRows
from pcp_compiler.runtime.scheduler import Step


class ModelProposer(ChainProposer):
    """Runs a draft model: a first pass over the rows it has not read, then the chain. `plan.mode` says
    whether prompts are spread over the ranks in the first pass."""

    draft_shift = 0

    def __init__(
        self, drafter: Drafter, plan: DraftPlan, config: Config, max_model_len: int, compile_cache: CompileCache
    ) -> None:
        super().__init__(drafter, plan, config, max_model_len, compile_cache)
        self.num_lookahead = max(1, self.num_lookahead)  # the sampled token has a row even when nothing is drafted
        self.needs_global_hidden = False
        self._nothing = next(drafter.parameters()).new_empty(1, 1, 0)

    def _build_models(self, drafter: Drafter, plan: DraftPlan, compile_cache: CompileCache) -> Sequence[CachedModel]:
        model = CachedModel(
            DraftModelRows(drafter), example_rows(drafter), DRAFT_TOKEN_INPUTS, plan.draft_config, name="draft model",
            compile_cache=compile_cache,
        )  # fmt: skip
        return (model,)

    def propose(
        self, step: Step, sampled: Sampled, num_draft_tokens: int, previous: Sequence[Proposal | None]
    ) -> list[Proposal]:
        """See `Proposer`."""
        batch = self._unread_rows(step, sampled, previous)
        going_on, last_rows = sampled.going_on, batch.query_start[1:] - 1
        ends = batch.seq_lens
        num_written = max(0, num_draft_tokens - 1)  # the chain reads every draft but the last
        proposals = [Proposal(num_rows=int(end) + num_written) for end in ends]
        if not batch.num_tokens:
            return proposals
        inputs = {
            "next_ids": host_tensor(batch.input_ids)[None],
            "hidden": self._nothing.expand(1, batch.num_tokens, 0),
            "positions": host_tensor(batch.positions)[None],
            "logit_rows": host_tensor(batch.logit_rows),
        }
        index = self.model.plan_step(batch, self.max_model_len)
        self.chains.counts.first_builds += 1  # its rows are not the target's
        if index.partition is None:
            recycled, logits = self.model.run_whole(inputs, index.whole, live=index.live)
        else:
            recycled, logits = self.model.run_sharded([inputs] * self._parallel.pcp_size, index)[0]
        if not len(going_on) or num_draft_tokens == 0:
            return proposals
        tokens, probs = self._chain(step, batch, going_on, last_rows, recycled, logits, num_draft_tokens)
        return self._collect(proposals, ends - 1, going_on, tokens, probs)

    def _unread_rows(self, step: Step, sampled: Sampled, previous: Sequence[Proposal | None]) -> Batch:
        """Return the rows that the drafter has not read, up to the sampled token or the end of a piece of a prompt."""
        found = []
        for i, rows in enumerate(step.rows):
            start, emitted = int(step.batch.computed[i]), sampled.token_ids[i]
            known = [*rows.request.token_ids, *emitted]
            stop = len(known) if rows.is_sampled else start + rows.query_len
            before = previous[i]
            if before is not None and not rows.request.is_prefilling:
                start = min(before.num_rows, stop - 1)
            if rows.is_sampled and not emitted:
                stop = start  # the request failed
            ids = known[start:stop]
            found.append(RequestRows(ids, start, rows.request.is_prefilling, bool(emitted), rows.request.block_table))
        return build_batch(found, self._config.limits.kv_block_size, step.batch.block_tables.shape[1])

"""A whole round of greedy requests as one captured call: verify, judge, first pass of the drafter, draft chain.

Nothing of it waits for the host. What the judgement decides, how many drafts count and which token follows, reaches the
drafter on the device: next ids and the row of each request's last token that counts. The host reads tokens and drafts
once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pcp_compiler.passes.attach_kv import BLOCK_TABLES
from pcp_compiler.plan.captures import CaptureKey
from pcp_compiler.plan.dispatch import LiveBatch, context_bound
from pcp_compiler.runtime.batch import Batch
from pcp_compiler.runtime.cached_model import CachedModel
from pcp_compiler.runtime.captures import CapturedProgram, Captures
from pcp_compiler.runtime.judge import Judgement, judgement_of
from pcp_compiler.runtime.layout import StepIndex, host_tensor
from pcp_compiler.runtime.proposer import MTPProposer
from pcp_compiler.runtime.rejection import NO_TOKEN, RaggedRows, Verdict, verify
from pcp_compiler.runtime.sampling import SamplingRows
from pcp_compiler.runtime.scheduler import Step
from pcp_compiler.runtime.static_inputs import StaticForm, StaticInput, describe

DRAFT_IDS = "draft_ids"


@dataclass(frozen=True, slots=True, eq=False)
class RoundResult:
    """What a round gave."""

    verdict: Judgement
    drafts: list[list[int]]
    """K drafts for each request, [R]."""


class Rounds:
    """The captured rounds of a target and its MTP module, by K.

    Args:
        max_model_len: positions of a request. has_ties: whether close calls are looked for.
    """

    def __init__(self, target: CachedModel, proposer: MTPProposer, max_model_len: int, *, has_ties: bool) -> None:
        self._target = target
        self._proposer = proposer
        self._max_model_len = max_model_len
        self._has_ties = has_ties
        self._programs: dict[int, CapturedProgram] = {}

    def programs(self, keys: tuple[CaptureKey, ...]) -> list[CapturedProgram]:
        """Return the rounds that keys are for."""
        lengths = {key.num_draft_tokens for key in keys if key.phase == "proposal"}
        self._programs = {length: self._program(length) for length in lengths}
        return list(self._programs.values())

    def replay(
        self, captures: Captures, step: Step, index: StepIndex, num_draft_tokens: int, tie_margin: float
    ) -> RoundResult | None:
        """Replay a round; None: the step is none, or no capture covers it."""
        program = self._programs.get(num_draft_tokens)
        if program is None or not _is_round(step, index):
            return None
        key = captures.find(program.name, self._live(step.batch, num_draft_tokens))
        if key is None:
            return None
        table, *best = captures.replay(program, key, self._values(step.batch, index))
        self._proposer.count_round(num_draft_tokens)
        self._target.counts.num_whole += 1
        rows = table.tolist()  # the one wait for the device
        judged = [row[: len(row) - num_draft_tokens] for row in rows]
        margin = tie_margin if self._has_ties else 0.0
        return RoundResult(
            judgement_of(step, judged, (best[0], best[1]) if best else None, margin),
            [row[len(row) - num_draft_tokens :] for row in rows],
        )

    def _live(self, batch: Batch, num_draft_tokens: int) -> LiveBatch:
        num_ahead = max(0, num_draft_tokens - 1)
        context = context_bound(batch.seq_lens, max_model_len=self._max_model_len, num_ahead=num_ahead)
        width = int(batch.query_lens.max())
        return LiveBatch("proposal", batch.num_tokens, batch.num_requests, width, context, num_draft_tokens)

    def _values(self, batch: Batch, index: StepIndex) -> dict[str, Tensor]:
        is_first = np.zeros(batch.num_tokens, dtype=np.bool_)
        is_first[batch.query_start[:-1]] = True
        return {
            **index.whole,
            "input_ids": host_tensor(batch.input_ids)[None],
            "position_ids": host_tensor(batch.positions)[None],
            DRAFT_IDS: host_tensor(batch.input_ids[~is_first]),
        }

    def _program(self, num_draft_tokens: int) -> CapturedProgram:
        model = self._target
        form = describe(model.few_rows.program, model.num_weights, model.tokens)
        inputs = [entry for entry in form.inputs if entry.name != "logit_rows"]
        inputs.append(StaticInput(DRAFT_IDS, ("drafts",), torch.int64, inputs[0].device, NO_TOKEN))
        outputs: tuple[tuple[int | str, ...], ...] = (("requests",),)
        if self._has_ties:
            outputs += (("rows",), ("rows",))
        return CapturedProgram(
            f"round, K = {num_draft_tokens}", StaticForm(tuple(inputs), outputs, "rows"),
            lambda values: self._run(values, num_draft_tokens), ("proposal",), num_draft_tokens,
        )  # fmt: skip

    # -- what is captured ------------------------------------------------------------------------------------------

    def _run(self, values: Mapping[str, Tensor], num_draft_tokens: int) -> list[Tensor]:
        """Return for each request the tokens it emits, their number and its drafts, [R, M + 2 + K], and the two best
        logits and ids of each row if ties are looked for."""
        ids = values["input_ids"]
        all_rows = torch.arange(ids.shape[1], device=ids.device)
        hidden, logits = self._target.run_captured({**values, "logit_rows": all_rows})
        ragged, verdict = self._judge(values, logits)
        next_ids, last_rows = next_row_ids(ids, ragged, verdict)
        positions = values["position_ids"]
        first = {"next_ids": next_ids[None], "hidden": hidden, "positions": positions, "logit_rows": last_rows}
        model = self._proposer.model
        recycled, draft_logits = model.run_captured({**values, **first})
        columns = [verdict.num_emitted, verdict.token_ids]
        if num_draft_tokens:
            chain = {"logits": draft_logits, "hidden": recycled[None], "positions": positions[:, last_rows] + 1,
                     BLOCK_TABLES: values[BLOCK_TABLES]}  # fmt: skip
            columns += model.run_captured(chain, self._proposer.chains.lower(num_draft_tokens).program)[:1]
        table = torch.column_stack(columns)
        return [table, *logits.float().topk(2)] if self._has_ties else [table]

    def _judge(self, values: Mapping[str, Tensor], logits: Tensor) -> tuple[RaggedRows, Verdict]:
        """Judge greedily. A request that is padding gets one of the rows that are, so that it has one."""
        num_rows, spans = logits.shape[0], values["spans"]
        num_requests = spans.shape[0]
        ends = spans[:, 2].clamp(min=1).cumsum(0)
        ragged = RaggedRows(torch.nn.functional.pad(ends, (1, 0)), num_rows, num_rows // num_requests - 1)
        nothing = torch.zeros(num_requests, dtype=torch.int64, device=logits.device)
        options = SamplingRows(nothing.float(), None, None, nothing, np.ones(num_requests, dtype=np.bool_))
        return ragged, verify(logits, values[DRAFT_IDS], None, ragged, options, nothing)


def next_row_ids(input_ids: Tensor, rows: RaggedRows, verdict: Verdict) -> tuple[Tensor, Tensor]:
    """Return for each row the token at the next position [T], and the row of each request's last token that counts [R].

    Args:
        input_ids: [1, T]. rows: of the requests; every row belongs to its verdict.
    """
    first, num_drafts = rows.cu_rows[:-1], rows.cu_rows.diff() - 1
    if input_ids.is_cuda:
        from pcp_compiler.kernels.metadata import shift_ids

        requests = torch.arange(rows.num_requests, device=input_ids.device)
        return shift_ids(
            input_ids, rows.cu_rows, num_drafts, requests, requests, verdict.token_ids, verdict.num_emitted
        )
    num_rows = input_ids.shape[1]
    column = torch.arange(verdict.token_ids.shape[1])
    targets = torch.where(column < verdict.num_emitted[:, None], first[:, None] + column, num_rows)
    neighbours = torch.nn.functional.pad(input_ids[0, 1:], (0, 2))
    next_ids = neighbours.scatter(0, targets.flatten(), verdict.token_ids.flatten())[:num_rows]
    return next_ids, first + verdict.num_emitted.clamp(min=1) - 1


def _is_round(step: Step, index: StepIndex) -> bool:
    """Return whether all requests verify drafts or decode greedily, and all ranks run all rows."""
    if index.partition is not None or index.live.phase == "prefill" or not step.batch.query_lens.all():
        return False
    return all(rows.is_sampled and rows.request.params.is_greedy for rows in step.rows)

"""What a step's logits mean for its requests: which drafts are accepted, what comes next, where it was a close call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pcp_compiler.runtime.layout import to_tensor
from pcp_compiler.runtime.proposer import Proposal
from pcp_compiler.runtime.rejection import RaggedRows, Verification, verify
from pcp_compiler.runtime.request import Tie
from pcp_compiler.runtime.sampling import SamplingRows
from pcp_compiler.runtime.scheduler import Step


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """The outcome of a step for its R requests."""

    token_ids: list[tuple[int, ...]]
    """What each request emits: accepted drafts and a token more; nothing while its prompt goes on, or if it failed."""
    last_rows: np.ndarray
    """Row of each request's last token that counts, [R]."""
    failed: list[int] = field(default_factory=list)
    """Requests whose logits have no answer."""
    ties: dict[int, list[Tie]] = field(default_factory=dict)
    """Close calls of greedy requests."""


def judge(
    step: Step, logits: Tensor, proposals: Sequence[Proposal | None], *, verification: Verification, tie_margin: float
) -> Judgement:
    """Verify the drafts of a step.

    Args:
        logits: [L, V], of the batch's `logit_rows`. proposals: where the drafts came from, [R].
        tie_margin: a greedy choice is a tie if the best two logits are less than this apart; 0: none is.
    """
    batch, device = step.batch, logits.device
    chosen = [i for i, rows in enumerate(step.rows) if rows.is_sampled]
    if not chosen:
        return judgement_of(step, [], None, tie_margin)
    counts = np.diff(batch.logit_start)[chosen]
    rows = RaggedRows.from_counts(counts, device)
    ends = batch.query_start[np.array(chosen) + 1]
    draft_ids = [batch.input_ids[end - count + 1 : end] for end, count in zip(ends, counts, strict=True)]
    verdict = verify(
        logits, to_tensor(np.concatenate(draft_ids), device), _draft_probs(step, chosen, proposals), rows,
        SamplingRows.from_params([step.rows[i].request.params for i in chosen], device),
        to_tensor(batch.positions[ends - counts], device), verification=verification,
    )  # fmt: skip
    emitted = torch.column_stack([verdict.num_emitted, verdict.token_ids]).tolist()  # one wait for the device
    best = None
    if tie_margin and logits.shape[1] > 1 and any(step.rows[i].request.params.is_greedy for i in chosen):
        best = tuple(logits.topk(2))
    return judgement_of(step, emitted, best, tie_margin)


def judgement_of(
    step: Step, emitted: Sequence[Sequence[int]], best: tuple[Tensor, ...] | None, tie_margin: float
) -> Judgement:
    """Return what a verification gave each request.

    Args:
        emitted: for each request that is sampled, how many tokens it emits, and then these.
        best: the two largest logits of each row and their ids, [L, 2] each; None: no ties are looked for.
    """
    batch = step.batch
    chosen = [i for i, rows in enumerate(step.rows) if rows.is_sampled]
    counts = np.diff(batch.logit_start)[chosen]
    outcome = Judgement([() for _ in step.rows], batch.query_start[1:] - 1)
    firsts = batch.query_start[1:][chosen] - counts
    for (num_tokens, *tokens), i, first in zip(emitted, chosen, firsts.tolist(), strict=True):
        outcome.token_ids[i] = tuple(tokens[:num_tokens])
        outcome.last_rows[i] = first + max(num_tokens, 1) - 1
        if not num_tokens:
            outcome.failed.append(i)
    if best is not None and tie_margin:
        _find_ties(step, best, chosen, counts, outcome, tie_margin)
    return outcome


def _draft_probs(step: Step, chosen: list[int], proposals: Sequence[Proposal | None]) -> Tensor | None:
    """Return the distributions that the drafts of this step came from, [N - R, V]; None for greedy drafts."""
    found = []
    for i in chosen:
        proposal, num_drafts = proposals[i], step.rows[i].num_drafts
        if num_drafts:
            assert proposal is not None, "drafts without a proposal"
            if proposal.probs is None:
                return None
            found.append(proposal.probs[:num_drafts])
    return torch.cat(found) if found else None


def _find_ties(
    step: Step, best: tuple[Tensor, ...], chosen: list[int], counts: np.ndarray, outcome: Judgement, tie_margin: float
) -> None:
    values, indices = best
    margins, ids = (values[:, 0] - values[:, 1]).tolist(), indices.tolist()
    for first, i in zip(np.cumsum(counts) - counts, chosen, strict=True):
        request = step.rows[i].request
        if not request.params.is_greedy:
            continue
        for offset in range(len(outcome.token_ids[i])):
            at = int(first) + offset
            if margins[at] < tie_margin:
                tie = Tie(len(request.token_ids) + offset, (ids[at][0], ids[at][1]), margins[at])
                outcome.ties.setdefault(i, []).append(tie)

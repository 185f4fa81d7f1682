"""Which draft tokens of a round are accepted, and the token that follows them.

Notation for one request with K drafts d_0 .. d_(K-1): p_j is the distribution of the target's row j (temperature, top-k
and top-p applied) and q_j the one that d_j was drawn from. Row j judges d_j; row K has no draft. A greedy draft is a
point mass q_j. A greedy request takes drafts while they equal the argmax, then the argmax.

*Token* verification (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318): accept d_j while
`u_j < p_j(d_j) / q_j(d_j)`. After a accepted drafts the next token comes from `max(p_a - q_a, 0)`, normalised, or from
p_K if a = K. Token x then has the chance `min(p, q)(x) + sum(max(p - q, 0)) * max(p - q, 0)(x) / sum(...) = p(x)`.

*Block* verification (Sun et al., arXiv:2403.10444) accepts a longer prefix on average, also without changing the
distribution. Let

    s_0 = 1,    s_i = min(1, s_(i-1) * p_(i-1)(d_(i-1)) / q_(i-1)(d_(i-1)))
    r_i = sum over x of max(s_i * p_i(x) - q_i(x), 0)
    h_i = r_i / (r_i + 1 - s_i)  for 0 < i < K,    h_K = s_K

Accept the longest prefix i with `u_i < h_i`, or none; then draw from `max(s_i * p_i - q_i, 0)`, normalised, or p_K.
Why that is exact: P(a >= i | d_0 .. d_(i-1)) = s_i, by induction from i = K downwards. Given the first i drafts, a > i
has the chance `sum of q_i(x) * min(1, s_i p_i(x) / q_i(x)) = s_i - r_i`, and otherwise i is taken with chance h_i:
`s_i - r_i + (1 - s_i + r_i) * h_i = s_i`. So a = i has the chance r_i, and x follows the prefix with the chance
`max(s_i p_i - q_i, 0)(x)` as a new token plus `min(q_i, s_i p_i)(x)` as an accepted draft: together s_i * p_i(x), that
is p_i(x) for a prefix that is kept with s_i. K may depend on the drafts before, so drafts that end early are covered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcp_compiler.runtime.layout import to_tensor
from pcp_compiler.runtime.noise import Stream, draw_keys, draw_uniform
from pcp_compiler.runtime.sampling import SamplingRows
from pcp_compiler.sampling_ops import filter_logits, probabilities, sample

NO_TOKEN: Final = -1
"""Fills token tables after a request's last token; as a draft it says that there is none from there on."""

Verification = Literal["token", "block"]


@dataclass(frozen=True, slots=True, eq=False)
class RaggedRows:
    """Where the rows of R requests are among the N rows of a verification."""

    cu_rows: Tensor
    """[R + 1], int64, on the device: where the rows of each request begin."""
    num_rows: int
    """N."""
    max_drafts: int
    """M, the largest number of drafts among the requests."""

    @classmethod
    def from_counts(cls, counts: NDArray[np.int64], device: torch.device | str = "cpu") -> RaggedRows:
        """Return the table of requests with these numbers of rows, [R], at least one each."""
        assert (counts > 0).all(), "a request without a row in the verification"
        cu_rows = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])
        return cls(to_tensor(cu_rows, torch.device(device)), int(cu_rows[-1]), int(counts.max(initial=1)) - 1)

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.cu_rows) - 1

    @property
    def num_drafts(self) -> int:
        """D = N - R, of all requests."""
        return self.num_rows - self.num_requests

    def spread(self, per_request: Tensor) -> Tensor:
        """Return the entry of each row's request, [N], from [R]."""
        return per_request.repeat_interleave(self.cu_rows.diff(), output_size=self.num_rows)


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """Outcome of one round for R requests; M is the largest number of drafts among them."""

    token_ids: Tensor
    """[R, M + 1], int64: the accepted drafts, the target's own token, then `NO_TOKEN`."""
    num_accepted: Tensor
    """[R], int64: accepted drafts."""
    num_emitted: Tensor
    """[R], int64: `num_accepted + 1`, or 0 for a failed request."""
    is_failed: Tensor
    """[R], bool: a row that decides, up to the first rejected draft, has NaN or +inf or allows no token; nothing is
    emitted. What the target makes of a draft that is rejected is of no concern."""


def verify(
    target_logits: Tensor,
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    rows: RaggedRows,
    options: SamplingRows,
    round_starts: Tensor,
    *,
    verification: Verification = "token",
) -> Verdict:
    """Judge the drafts of every request and choose the token after the accepted ones.

    Nothing here waits for the device: what runs depends on shapes and on which options the requests have. On a CUDA
    device it is the kernels of `kernels.sampling`; elsewhere their reference, which is this module.

    Args:
        target_logits: [N, V], one row per draft and one more for each request, request after request; any float type,
            read as float32.
        draft_ids: [D], int64, request after request. `NO_TOKEN` or another negative id ends the drafts of its request;
            an id >= V, of a drafter with another vocabulary, is never accepted.
        draft_probs: [D, V], the distributions the drafts were drawn from; None for greedy drafts. A row with NaN ends
            the drafts of its request, which costs speed and not exactness.
        rows: of the R requests.
        options: of the R requests.
        round_starts: [R], int64, position of each request's first row; part of the key of all its draws.
        verification: how sampled requests are judged; greedy ones know one way only.
    Returns:
        Verdict of R requests. A request's result depends on its own rows only.
    """
    assert len(target_logits) == rows.num_rows, f"the rows end at {rows.num_rows}, not at {len(target_logits)}"
    assert draft_ids.shape == (rows.num_drafts,), f"{draft_ids.shape} draft ids for {rows.num_drafts} drafts"
    assert draft_probs is None or draft_probs.shape == (rows.num_drafts, target_logits.shape[1])
    assert len(options.seeds) == len(round_starts) == rows.num_requests
    run = _verify_by_kernels if target_logits.is_cuda else _verify_by_torch
    return run(target_logits, draft_ids, draft_probs, rows, options, round_starts, verification=verification)


def _verify_by_kernels(
    target_logits: Tensor, draft_ids: Tensor, draft_probs: Tensor | None, rows: RaggedRows, options: SamplingRows,
    round_starts: Tensor, *, verification: Verification,
) -> Verdict:  # fmt: skip
    from pcp_compiler.kernels import sampling  # triton is not there on every machine without CUDA

    if options.has_filters:
        filters = (None if value is None else rows.spread(value) for value in (options.top_k, options.top_p))
        target_logits = filter_logits(target_logits, rows.spread(options.temperature), *filters)
    return Verdict(
        *sampling.judge_rows(
            target_logits, draft_ids, draft_probs, rows.cu_rows, rows.max_drafts, options.temperature, options.seeds,
            round_starts, verification=None if options.is_greedy.all() else verification,
        )
    )  # fmt: skip


def _verify_by_torch(
    target_logits: Tensor, draft_ids: Tensor, draft_probs: Tensor | None, ragged: RaggedRows, options: SamplingRows,
    round_starts: Tensor, *, verification: Verification,
) -> Verdict:  # fmt: skip
    logits = target_logits.float()
    rows, drafts = _index_tables(ragged)
    ids = torch.where(drafts >= 0, draft_ids[drafts], NO_TOKEN)
    best = logits.argmax(dim=-1)  # NaN counts as largest
    is_spoilt = ~logits.gather(1, best[:, None])[:, 0].isfinite()
    num_accepted, last_ids = _judge_greedy(best[rows], ids)
    if not options.is_greedy.all():
        target = _target_distributions(logits, ragged, options)[rows]
        proposal = _propose(ids, draft_probs, drafts)
        sampled = _judge_sampled(target, proposal, options.seeds, round_starts, verification)
        is_greedy = options.temperature == 0
        num_accepted = torch.where(is_greedy, num_accepted, sampled[0])
        last_ids = torch.where(is_greedy, last_ids, sampled[1])
    decides = torch.arange(rows.shape[1], device=rows.device) <= num_accepted[:, None]
    return _assemble(ids, num_accepted, last_ids, (is_spoilt[rows] & decides).any(dim=-1))


@dataclass(frozen=True, slots=True, eq=False)
class _Proposal:
    """Drafts of R requests, padded to M each."""

    ids: Tensor
    """[R, M], int64, `NO_TOKEN` from the end of the request's drafts on."""
    probs: Tensor | None
    """[R, M, V], or None for point masses at `ids`."""
    num_drafts: Tensor
    """[R], int64."""

    def chances(self) -> Tensor:
        """Return q_j(d_j), [R, M], float64; 1 where there is no draft or its id is outside of the vocabulary."""
        if self.probs is None:
            return torch.ones_like(self.ids, dtype=torch.float64)
        return _at_tokens(self.probs, self.ids, missing=1.0)

    def distribution(self, index: Tensor, vocab_size: int) -> Tensor:
        """Return q_index of each request, [R, V], float64; `index` [R] is below M."""
        if self.probs is not None:
            return self.probs[torch.arange(len(index), device=index.device), index].to(torch.float64)
        ids = self.ids.gather(1, index[:, None])
        empty = torch.zeros(len(index), vocab_size, dtype=torch.float64, device=index.device)
        is_token = (ids >= 0) & (ids < vocab_size)
        return empty.scatter(1, ids.clamp(0, vocab_size - 1), is_token.to(torch.float64))


def _index_tables(ragged: RaggedRows) -> tuple[Tensor, Tensor]:
    """Return the rows of each request [R, M + 1], its last one repeated, and its drafts [R, M], -1 repeated."""
    first, num_rows = ragged.cu_rows[:-1, None], ragged.cu_rows.diff()[:, None]
    request, column = (torch.arange(n, device=first.device) for n in (ragged.num_requests, ragged.max_drafts + 1))
    rows = first + torch.minimum(column, num_rows - 1)
    first_draft = first - request[:, None]  # each request before has one row more than drafts
    return rows, torch.where(column[:-1] < num_rows - 1, first_draft + column[:-1], -1)


def _judge_greedy(best: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the accepted drafts and the token after them, both [R], from the argmax of each row, [R, M + 1]."""
    num_accepted = _count_leading(ids == best[:, :-1])
    return num_accepted, best.gather(1, num_accepted[:, None])[:, 0]


def _judge_sampled(
    target: Tensor, proposal: _Proposal, seeds: Tensor, round_starts: Tensor, verification: Verification
) -> tuple[Tensor, Tensor]:
    """Return the accepted drafts and the token after them, both [R], by the distributions p, [R, M + 1, V]."""
    columns = torch.arange(proposal.ids.shape[1], device=target.device)
    accept_draws = draw_uniform(seeds[:, None], round_starts[:, None], round_starts[:, None] + columns, Stream.ACCEPT)
    accept = _accept_block if verification == "block" else _accept_tokens
    num_accepted, scale = accept(target, proposal, accept_draws)
    is_bonus = num_accepted == proposal.num_drafts
    residual_keys, bonus_keys = (
        draw_keys(seeds, round_starts, round_starts + num_accepted, stream)
        for stream in (Stream.RESIDUAL, Stream.BONUS)
    )
    weights = _last_weights(target, proposal, num_accepted, scale, is_bonus)
    return num_accepted, sample(weights, torch.where(is_bonus, bonus_keys, residual_keys))


def _accept_tokens(target: Tensor, proposal: _Proposal, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return accepted drafts [R] and the scale of p in their residual, [R], by token verification."""
    is_accepted = uniform * proposal.chances() < _at_tokens(target[:, :-1], proposal.ids, missing=0.0)
    num_accepted = _count_leading(is_accepted)
    return num_accepted, torch.ones_like(num_accepted, dtype=torch.float64)


def _accept_block(target: Tensor, proposal: _Proposal, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return accepted drafts [R] and the scale of p in their residual, [R], by block verification."""
    scales = _prefix_scales(_at_tokens(target[:, :-1], proposal.ids, missing=0.0), proposal.chances())
    num_accepted = torch.zeros_like(proposal.num_drafts)
    for length in range(1, target.shape[1]):
        chance = scales[:, length]
        if length < proposal.ids.shape[1]:
            stop_chance = _stop_chance(chance, target[:, length], proposal, length)
            chance = torch.where(proposal.num_drafts == length, chance, stop_chance)
        is_kept = (length <= proposal.num_drafts) & (uniform[:, length - 1] < chance)
        num_accepted = torch.where(is_kept, length, num_accepted)
    return num_accepted, scales.gather(1, num_accepted[:, None])[:, 0]


def _prefix_scales(target_chances: Tensor, draft_chances: Tensor) -> Tensor:
    """Return s_0 .. s_M of each request, [R, M + 1], from p_j(d_j) and q_j(d_j), both [R, M]."""
    scales = [torch.ones(len(draft_chances), dtype=torch.float64, device=draft_chances.device)]
    for p, q in zip(target_chances.unbind(1), draft_chances.unbind(1), strict=True):
        weight = scales[-1] * p
        scale = torch.where(weight < q, weight / q, 1.0)
        scales.append(torch.where(weight > 0, scale, 0.0))  # 0 / 0 too: what the target never says is not kept
    return torch.stack(scales, dim=1)


def _stop_chance(scale: Tensor, target: Tensor, proposal: _Proposal, length: int) -> Tensor:
    """Return h_length of each request, [R], from s_length [R] and p_length [R, V]."""
    index = torch.full_like(proposal.num_drafts, length)
    draft = proposal.distribution(index, target.shape[-1])
    rest = (scale[:, None] * target - draft).clamp(min=0).sum(dim=-1)
    total = rest + 1 - scale
    return torch.where(total == 0, 1.0, rest / total)  # p = q: a longer prefix is kept anyway; NaN keeps none


def _last_weights(target: Tensor, proposal: _Proposal, num_accepted: Tensor, scale: Tensor, is_bonus: Tensor) -> Tensor:
    """Return the weights, [R, V], of the token after the accepted drafts."""
    request = torch.arange(len(target), device=target.device)
    plain = target[request, num_accepted].to(torch.float64)
    if proposal.ids.shape[1] == 0:
        return plain
    draft = proposal.distribution(num_accepted.clamp(max=proposal.ids.shape[1] - 1), target.shape[-1])
    residual = (scale[:, None] * plain - draft).clamp(min=0)
    is_plain = is_bonus | (residual.sum(dim=-1) == 0)  # without a rest p = q: rounding alone rejected the draft
    return torch.where(is_plain[:, None], plain, residual)


def _target_distributions(logits: Tensor, rows: RaggedRows, options: SamplingRows) -> Tensor:
    """Return p of every row, [N, V], float32."""
    top_k, top_p = (None if value is None else rows.spread(value) for value in (options.top_k, options.top_p))
    return probabilities(logits, rows.spread(options.temperature), top_k, top_p)


def _propose(ids: Tensor, draft_probs: Tensor | None, drafts: Tensor) -> _Proposal:
    """Return the drafts of R requests up to the first that is missing or has no distribution."""
    probs = None if draft_probs is None else draft_probs[drafts]
    is_draft = ids >= 0
    if probs is not None:
        is_draft &= probs.sum(dim=-1).isfinite()
    num_drafts = _count_leading(is_draft)
    column = torch.arange(ids.shape[1], device=ids.device)
    return _Proposal(torch.where(column < num_drafts[:, None], ids, NO_TOKEN), probs, num_drafts)


def _at_tokens(probs: Tensor, ids: Tensor, *, missing: float) -> Tensor:
    """Return the chance of each token, [R, M], float64; `missing` for ids outside of the vocabulary."""
    vocab_size = probs.shape[-1]
    chances = probs.gather(-1, ids.clamp(0, vocab_size - 1)[..., None])[..., 0].to(torch.float64)
    return torch.where((ids >= 0) & (ids < vocab_size), chances, missing)


def _count_leading(flags: Tensor) -> Tensor:
    """Return how many flags are true before the first that is not, [R], from [R, M]."""
    return flags.to(torch.int64).cumprod(dim=1).sum(dim=1)


def _assemble(ids: Tensor, num_accepted: Tensor, last_ids: Tensor, is_failed: Tensor) -> Verdict:
    num_accepted = num_accepted.masked_fill(is_failed, 0)
    column = torch.arange(ids.shape[1] + 1, device=ids.device)
    padded = torch.nn.functional.pad(ids, (0, 1), value=NO_TOKEN)
    token_ids = torch.where(column < num_accepted[:, None], padded, NO_TOKEN)
    token_ids.scatter_(1, num_accepted[:, None], last_ids[:, None])
    token_ids.masked_fill_(is_failed[:, None], NO_TOKEN)
    return Verdict(token_ids, num_accepted, (num_accepted + 1).masked_fill(is_failed, 0), is_failed)

"""The distribution of what verification emits against the target's, by chi-square tests over many rounds.

Target and drafter are tables: the logits of the next token given the last one. Every request of a batch is one sample;
its draws are keyed by its own seed, so a test is as repeatable as any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from pcp_compiler.runtime import noise, rejection, sampling
from pcp_compiler.runtime.noise import Stream, draw_keys
from pcp_compiler.runtime.rejection import NO_TOKEN, RaggedRows, Verdict, Verification, verify
from pcp_compiler.runtime.sampling import SamplingParams, SamplingRows, sample_draft
from pcp_compiler.sampling_ops import probabilities

NUM_ROUNDS = 100_000
NUM_SIGMAS = 4.0
BOTH: list[Verification] = ["token", "block"]
PLAIN = SamplingParams(99, temperature=1.0, seed=0)
FILTERED = [
    replace(PLAIN, temperature=0.7),
    replace(PLAIN, top_k=3),
    replace(PLAIN, temperature=1.3, top_p=0.8),
    replace(PLAIN, temperature=0.9, top_k=5, top_p=0.9),
]
both = pytest.mark.parametrize("verification", BOTH)
one_or_three_drafts = pytest.mark.parametrize("num_drafts", [1, 3])
sampled_or_greedy_drafts = pytest.mark.parametrize("draft_is_greedy", [False, True], ids=["sampled", "greedy"])


def same_rows(num_requests: int, num_drafts: int) -> RaggedRows:
    """Rows of requests with the same number of drafts."""
    return RaggedRows.from_counts(np.full(num_requests, num_drafts + 1))


@dataclass(frozen=True)
class Game:
    """Target and drafter over a small vocabulary, and how they are run."""

    vocab_size: int
    num_drafts: int
    verification: Verification
    params: SamplingParams = PLAIN
    draft_is_greedy: bool = False

    def table(self, seed: int) -> Tensor:
        """Logits of the next token by the last token, [V, V]."""
        return torch.randn(self.vocab_size, self.vocab_size, generator=torch.Generator().manual_seed(seed)) * 1.2

    @property
    def target(self) -> Tensor:
        """Logits of the target, [V, V]."""
        return self.table(1)

    @property
    def drafter(self) -> Tensor:
        """Logits of the drafter, [V, V]: like the target's, with some noise."""
        return (self.table(1) + self.table(2)) / 1.5

    @property
    def target_probs(self) -> Tensor:
        """What a correct sampler draws from, [V, V], float64."""
        one = self.options(self.vocab_size)
        return probabilities(self.target, one.temperature, one.top_k, one.top_p).double()

    @property
    def draft_probs(self) -> Tensor:
        """What the drafts come from, [V, V], float64."""
        if self.draft_is_greedy:
            return torch.nn.functional.one_hot(self.drafter.argmax(-1), self.vocab_size).double()
        return probabilities(self.drafter, self.options(self.vocab_size).temperature).double()

    def options(self, num_requests: int) -> SamplingRows:
        """The same options for every request, seeds 0, 1, 2 and so on."""
        return replace(SamplingRows.from_params([self.params] * num_requests), seeds=torch.arange(num_requests))

    def play(self, last: Tensor, starts: Tensor) -> Verdict:
        """Draft and verify one round of every request after the tokens `last`, [R], at positions `starts`, [R]."""
        num_requests = len(last)
        options = self.options(num_requests)
        tokens, probs = [last], []
        for step in range(self.num_drafts):
            logits = self.drafter[tokens[-1]]
            ids, step_probs = sample_draft(logits, options, starts, step)
            tokens.append(logits.argmax(-1) if self.draft_is_greedy else ids)
            probs.append(step_probs)
        rows = torch.stack(tokens, dim=1)
        return verify(
            self.target[rows].flatten(0, 1),
            rows[:, 1:].flatten(),
            None if self.draft_is_greedy else torch.stack(probs, dim=1).flatten(0, 1),
            same_rows(num_requests, self.num_drafts),
            options,
            starts,
            verification=self.verification,
        )

    def play_first(self) -> Round:
        """Return the first round of many requests, whose last tokens before are all tokens in turn."""
        last, starts = torch.arange(NUM_ROUNDS) % self.vocab_size, torch.full((NUM_ROUNDS,), 5)
        return Round(self, self.play(last, starts), last, starts)


@dataclass(frozen=True)
class Round:
    """One round of every request."""

    game: Game
    verdict: Verdict
    last_before: Tensor
    starts: Tensor

    @property
    def last(self) -> Tensor:
        """The last token of each request after the round, [R]."""
        return self.verdict.token_ids.gather(1, self.verdict.num_accepted[:, None])[:, 0]

    def play_next(self) -> Round:
        """Return the round that follows."""
        starts = self.starts + self.verdict.num_emitted
        return Round(self.game, self.game.play(self.last, starts), self.last, starts)


def excess(counts: Tensor, chances: Tensor) -> float:
    """Return by how many standard deviations chi-square exceeds its mean; both [groups, cells], chances of a group.

    Cells with fewer than 5 expected are counted as one. The cube root makes chi-square almost normal (Wilson and
    Hilferty, 1931).
    """
    assert (counts[chances == 0] == 0).all(), "a token was emitted that the target never emits"
    expected = counts.sum(dim=1, keepdim=True) * chances
    is_cell = expected >= 5
    observed = torch.cat([counts[is_cell], counts[~is_cell].sum()[None]]).double()
    mean = torch.cat([expected[is_cell], expected[~is_cell].sum()[None]])
    observed, mean = observed[mean > 0], mean[mean > 0]
    degrees = len(mean) - int(is_cell.any(dim=1).sum())
    assert degrees > 0, "too few samples"
    chi2 = float(((observed - mean) ** 2 / mean).sum())
    variance = 2 / (9 * degrees)
    return (math.pow(chi2 / degrees, 1 / 3) - (1 - variance)) / math.sqrt(variance)


def excess_of_tokens(before: Tensor, tokens: Tensor, chances: Tensor) -> float:
    """Compare tokens, [R], with their chances after the tokens before, [V, V]."""
    vocab_size = len(chances)
    assert len(tokens) > 500, f"only {len(tokens)} samples"
    counts = torch.bincount(before * vocab_size + tokens, minlength=vocab_size**2)
    return excess(counts.reshape(vocab_size, vocab_size), chances)


def excess_of_sequences(before: Tensor, tokens: Tensor, chances: Tensor) -> float:
    """Compare whole sequences, [R, L], after the tokens before with the chances of a chain of single tokens, [V, V]."""
    vocab_size, length = len(chances), tokens.shape[1]
    joint = chances
    for _ in range(length - 1):
        joint = (joint.reshape(vocab_size, -1, vocab_size, 1) * chances).reshape(vocab_size, -1)
    index = before
    for column in range(length):
        index = index * vocab_size + tokens[:, column]
    return excess(torch.bincount(index, minlength=joint.numel()).reshape(joint.shape), joint)


def normalized(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=-1, keepdim=True)


# --- one round


@both
@one_or_three_drafts
@pytest.mark.parametrize(
    ("params", "draft_is_greedy"),
    [(PLAIN, False), (PLAIN, True), *[(params, False) for params in FILTERED], (FILTERED[-1], True)],
    ids=["plain", "plain, greedy drafts", "t", "top_k", "top_p", "all three", "all three, greedy drafts"],
)
def test_the_first_token_of_a_round_has_the_targets_distribution(
    verification: Verification, num_drafts: int, params: SamplingParams, draft_is_greedy: bool
) -> None:
    game = Game(8, num_drafts, verification, params, draft_is_greedy)
    first = game.play_first()
    assert excess_of_tokens(first.last_before, first.verdict.token_ids[:, 0], game.target_probs) < NUM_SIGMAS


@both
@one_or_three_drafts
@sampled_or_greedy_drafts
def test_the_tokens_of_a_round_continued_by_the_target_have_the_targets_joint_distribution(
    verification: Verification, num_drafts: int, draft_is_greedy: bool
) -> None:
    game = Game(4, num_drafts, verification, draft_is_greedy=draft_is_greedy)
    first = game.play_first()
    tokens, generator = first.verdict.token_ids.clone(), torch.Generator().manual_seed(3)
    for column in range(1, num_drafts + 1):
        fresh = torch.multinomial(game.target_probs[tokens[:, column - 1]], 1, generator=generator)[:, 0]
        tokens[:, column] = torch.where(tokens[:, column] == NO_TOKEN, fresh, tokens[:, column])
    assert excess_of_sequences(first.last_before, tokens, game.target_probs) < NUM_SIGMAS


@both
@one_or_three_drafts
@sampled_or_greedy_drafts
def test_the_token_after_a_rejection_at_the_first_draft_comes_from_the_residual(
    verification: Verification, num_drafts: int, draft_is_greedy: bool
) -> None:
    game = Game(8, num_drafts, verification, draft_is_greedy=draft_is_greedy)
    first = game.play_first()
    is_rejected = first.verdict.num_accepted == 0
    residual = normalized((game.target_probs - game.draft_probs).clamp(min=0))
    assert excess_of_tokens(first.last_before[is_rejected], first.last[is_rejected], residual) < NUM_SIGMAS


@both
@one_or_three_drafts
@sampled_or_greedy_drafts
def test_the_bonus_token_has_the_targets_distribution_after_the_last_draft(
    verification: Verification, num_drafts: int, draft_is_greedy: bool
) -> None:
    game = Game(8, num_drafts, verification, draft_is_greedy=draft_is_greedy)
    verdict = game.play_first().verdict
    ids = verdict.token_ids[verdict.num_accepted == num_drafts]
    assert excess_of_tokens(ids[:, num_drafts - 1], ids[:, num_drafts], game.target_probs) < NUM_SIGMAS


# --- the round after


@both
@pytest.mark.parametrize(
    ("num_drafts", "event"),
    [(1, "all accepted"), (1, "rejected at 1"), (3, "all accepted"), (3, "rejected at 1"), (3, "rejected later")],
)
def test_the_round_after_an_event_has_the_targets_distribution(
    verification: Verification, num_drafts: int, event: str
) -> None:
    game = Game(8, num_drafts, verification)
    first = game.play_first()
    then = first.play_next()
    num_accepted = first.verdict.num_accepted
    had_event = {
        "all accepted": num_accepted == num_drafts,
        "rejected at 1": num_accepted == 0,
        "rejected later": (num_accepted > 0) & (num_accepted < num_drafts),
    }[event]
    tokens = then.verdict.token_ids[had_event, 0]
    assert excess_of_tokens(then.last_before[had_event], tokens, game.target_probs) < NUM_SIGMAS


def chain_of_rounds(game: Game, length: int) -> tuple[Tensor, Tensor]:
    """Return the tokens before, [R], and the first `length` tokens, [R, length], of round after round."""
    current = game.play_first()
    before, first_start = current.last_before, int(current.starts[0])
    tokens = torch.full((NUM_ROUNDS, length + game.num_drafts + 1), NO_TOKEN)
    for index in range(length):
        columns = (current.starts - first_start)[:, None] + torch.arange(game.num_drafts + 1)
        is_new = (current.verdict.token_ids != NO_TOKEN) & (columns < length)
        tokens.scatter_(1, torch.where(is_new, columns, tokens.shape[1] - 1), current.verdict.token_ids)
        if index < length - 1:
            current = current.play_next()
    return before, tokens[:, :length]


@both
@sampled_or_greedy_drafts
def test_four_tokens_made_by_rounds_have_the_targets_joint_distribution(
    verification: Verification, draft_is_greedy: bool
) -> None:
    game = Game(4, 3, verification, draft_is_greedy=draft_is_greedy)
    assert excess_of_sequences(*chain_of_rounds(game, 4), game.target_probs) < NUM_SIGMAS


# --- these tests see the faults they are for


def test_b84_a_residual_drawn_with_the_drafts_noise_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    def reused(seeds: Tensor, round_starts: Tensor, positions: Tensor, stream: Stream) -> Tensor:
        return draw_keys(seeds, round_starts, positions, Stream.DRAFT if stream == Stream.RESIDUAL else stream)

    monkeypatch.setattr(rejection, "draw_keys", reused)
    first = Game(8, 1, "token").play_first()
    tokens = first.verdict.token_ids[:, 0]
    assert excess_of_tokens(first.last_before, tokens, first.game.target_probs) > 2 * NUM_SIGMAS


def test_block_verification_with_draws_keyed_by_position_alone_fails_the_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def keyed_by_position(seeds: Tensor, round_starts: Tensor, positions: Tensor, stream: Stream) -> Tensor:
        return draw_keys(seeds, torch.zeros_like(round_starts), positions, stream)

    game = Game(4, 3, "block")
    for module in (noise, rejection, sampling):
        monkeypatch.setattr(module, "draw_keys", keyed_by_position)
    assert excess_of_sequences(*chain_of_rounds(game, 4), game.target_probs) > 2 * NUM_SIGMAS


def test_b85_greedy_drafts_verified_as_if_sampled_fail_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    game = Game(8, 1, "token", draft_is_greedy=True)
    last, starts = torch.arange(NUM_ROUNDS) % 8, torch.full((NUM_ROUNDS,), 5)
    drafts = game.drafter[last].argmax(-1)
    rows = game.target[torch.stack([last, drafts], dim=1)].flatten(0, 1)
    wrong_probs = probabilities(game.drafter[last], torch.ones(NUM_ROUNDS))
    verdict = verify(rows, drafts, wrong_probs, same_rows(NUM_ROUNDS, 1), game.options(NUM_ROUNDS), starts)
    assert excess_of_tokens(last, verdict.token_ids[:, 0], game.target_probs) > 2 * NUM_SIGMAS


# --- how much is accepted


@both
def test_the_target_as_its_own_drafter_has_every_draft_accepted_in_every_round(verification: Verification) -> None:
    class Own(Game):
        @property
        def drafter(self) -> Tensor:
            return self.target

    first = Own(8, 3, verification).play_first()
    assert (first.verdict.num_accepted == 3).all()
    assert (first.play_next().verdict.num_accepted == 3).all()


@pytest.mark.parametrize("params", [PLAIN, *FILTERED], ids=["plain", "t", "top_k", "top_p", "all three"])
def test_block_verification_accepts_more_than_token_verification(params: SamplingParams) -> None:
    block, token = (Game(8, 3, mode, params).play_first().verdict.num_accepted.double() for mode in ("block", "token"))
    sigma = float((block - token).std()) / math.sqrt(NUM_ROUNDS)
    assert float((block - token).mean()) > NUM_SIGMAS * sigma


@pytest.mark.parametrize(("verification", "expected"), [("token", 10 / 9), ("block", 11 / 9)])
def test_two_coins_are_accepted_as_often_as_the_paper_on_block_verification_says(
    verification: Verification, expected: float
) -> None:
    p, q = torch.tensor([1 / 3, 2 / 3]), torch.tensor([2 / 3, 1 / 3])
    options = Game(2, 2, verification).options(NUM_ROUNDS)
    starts = torch.zeros(NUM_ROUNDS, dtype=torch.int64)
    steps = [sample_draft(q.log().expand(NUM_ROUNDS, 2), options, starts, step) for step in range(2)]
    verdict = verify(
        p.log().expand(3 * NUM_ROUNDS, 2),
        torch.stack([ids for ids, _ in steps], dim=1).flatten(),
        torch.stack([probs for _, probs in steps], dim=1).flatten(0, 1),
        same_rows(NUM_ROUNDS, 2),
        options,
        starts,
        verification=verification,
    )
    num_accepted = verdict.num_accepted.double()
    sigma = float(num_accepted.std()) / math.sqrt(NUM_ROUNDS)
    assert abs(float(num_accepted.mean()) - expected) < NUM_SIGMAS * sigma

"""Verification of drafts, case by case: greedy, sampled, mixed, ragged and degenerate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pcp_compiler.runtime.rejection import NO_TOKEN, RaggedRows, Verdict, Verification, verify
from pcp_compiler.runtime.sampling import SamplingParams, SamplingRows
from pcp_compiler.sampling_ops import probabilities

BOTH: list[Verification] = ["token", "block"]
VOCAB_SIZE = 6
GREEDY = SamplingParams(99, seed=1)
SAMPLED = SamplingParams(99, temperature=1.0, seed=1)


@dataclass
class Judged:
    """One request to verify: a row of logits for each draft and one more, the drafts, and what they came from."""

    logits: Tensor
    drafts: list[int] = field(default_factory=list)
    params: SamplingParams = GREEDY
    probs: Tensor | None = None
    start: int = 10


def judge(requests: list[Judged], verification: Verification = "token") -> Verdict:
    """Verify the requests as one batch."""
    num_rows = [len(request.logits) for request in requests]
    assert num_rows == [len(request.drafts) + 1 for request in requests]
    probs = [request.probs for request in requests if request.probs is not None]
    return verify(
        torch.cat([request.logits for request in requests]),
        torch.tensor([token for request in requests for token in request.drafts], dtype=torch.int64),
        torch.cat(probs) if probs else None,
        RaggedRows.from_counts(np.array(num_rows)),
        SamplingRows.from_params([request.params for request in requests]),
        torch.tensor([request.start for request in requests]),
        verification=verification,
    )


def outputs(verdict: Verdict) -> list[list[int]]:
    """The emitted tokens of each request, after a check that the counts agree with them."""
    tokens = [[token for token in row if token != NO_TOKEN] for row in verdict.token_ids.tolist()]
    assert [len(row) for row in tokens] == verdict.num_emitted.tolist()
    expected = torch.where(verdict.is_failed, 0, verdict.num_accepted + 1)
    assert verdict.num_emitted.tolist() == expected.tolist()
    return tokens


def peaks(*tokens: int) -> Tensor:
    """A row of logits for each token, with its largest there."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB_SIZE).float() * 3


def only(*tokens: int) -> Tensor:
    """A row of logits for each token that allows no other."""
    return torch.where(peaks(*tokens) > 0, 0.0, -math.inf)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- greedy


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [([1, 2, 3], [1, 2, 3, 4]), ([1, 2, 0], [1, 2, 3]), ([1, 0, 3], [1, 2]), ([0, 2, 3], [1]), ([5, 5, 5], [1])],
)
@pytest.mark.parametrize("verification", BOTH)
def test_greedy_drafts_are_taken_up_to_the_first_that_differs(
    drafts: list[int], expected: list[int], verification: Verification
) -> None:
    assert outputs(judge([Judged(peaks(1, 2, 3, 4), drafts)], verification)) == [expected]


def test_a_greedy_tie_goes_to_the_lowest_id_in_accepted_and_in_new_tokens() -> None:
    tied = torch.tensor([[0.0, 2, 2, 0, 0, 0]] * 2)
    assert outputs(judge([Judged(tied, [1])])) == [[1, 1]]
    assert outputs(judge([Judged(tied, [2])])) == [[1]]


def test_b83_rows_stay_with_their_request_when_draft_counts_differ() -> None:
    batch = [
        Judged(peaks(5)),
        Judged(peaks(1, 2, 3), [1, 2]),
        Judged(peaks(4)),
        Judged(peaks(0, 3, 1, 2), [0, 3, 5]),
    ]
    assert outputs(judge(batch)) == [[5], [1, 2, 3], [4], [0, 3, 1]]


@pytest.mark.parametrize("verification", BOTH)
def test_b83_a_sampled_request_among_unequal_draft_counts_is_judged_as_alone(verification: Verification) -> None:
    batch = [
        Judged(noise(1 + k, VOCAB_SIZE, seed=k), [k, 2, 1][:k], params, torch.rand(k, VOCAB_SIZE).softmax(-1), 7 + k)
        for k, params in zip(
            [0, 2, 0, 3, 1, 2],
            [SAMPLED, SAMPLED, GREEDY, replace(SAMPLED, top_k=3, seed=4), GREEDY, replace(SAMPLED, top_p=0.6)],
            strict=True,
        )
    ]
    together = outputs(judge(batch, verification))
    assert together == [outputs(judge([request], verification))[0] for request in batch]
    assert outputs(judge(batch[::-1], verification)) == together[::-1]


def test_a_batch_without_drafts_or_without_requests_is_allowed() -> None:
    assert outputs(judge([Judged(peaks(3)), Judged(only(2), params=SAMPLED)])) == [[3], [2]]
    empty = verify(
        torch.zeros(0, VOCAB_SIZE),
        torch.zeros(0, dtype=torch.int64),
        None,
        RaggedRows.from_counts(np.zeros(0, dtype=np.int64)),
        SamplingRows.from_params([]),
        torch.zeros(0, dtype=torch.int64),
    )
    assert empty.token_ids.shape == (0, 1) and empty.num_emitted.shape == (0,)


# --- greedy and sampled requests, greedy and sampled drafts


@pytest.mark.parametrize("verification", BOTH)
def test_b85_temperature_0_matches_the_argmax_whatever_the_draft_distribution_says(
    verification: Verification,
) -> None:
    # by the ratio test, p(1) / q(1) = 0.9 / 0.01 would always accept, and p(2) / q(2) often
    flat = torch.full((1, VOCAB_SIZE), 1 / VOCAB_SIZE)
    for seed in range(50):
        params = replace(GREEDY, seed=seed)
        batch = [
            Judged(peaks(1, 4), [1], params, flat),
            Judged(peaks(1, 4), [2], params, flat),
            Judged(only(3, 5), [3], replace(SAMPLED, seed=seed), flat),
        ]
        assert outputs(judge(batch, verification)) == [[1, 4], [1], [3, 5]]


@pytest.mark.parametrize("verification", BOTH)
def test_b85_a_greedy_draft_of_a_sampled_request_is_accepted_with_the_targets_own_chance(
    verification: Verification,
) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, 0.0]]).expand(2, VOCAB_SIZE)
    num_requests = 4000
    batch = [Judged(logits, [1], replace(SAMPLED, seed=seed)) for seed in range(num_requests)]
    verdict = judge(batch, verification)
    chance = float(logits[0].softmax(0)[1])
    rate = float(verdict.num_accepted.double().mean())
    assert abs(rate - chance) < 4 * math.sqrt(chance * (1 - chance) / num_requests)
    rejected = verdict.token_ids[verdict.num_accepted == 0, 0]
    assert len(rejected) > 0 and (rejected != 1).all()


# --- certain outcomes


@pytest.mark.parametrize("params", [SAMPLED, replace(SAMPLED, temperature=0.6), replace(SAMPLED, temperature=3.0)])
@pytest.mark.parametrize("verification", BOTH)
def test_the_target_as_its_own_drafter_has_every_draft_accepted(
    params: SamplingParams, verification: Verification
) -> None:
    num_requests, num_drafts = 2000, 5
    batch = []
    for seed in range(num_requests):
        logits = noise(num_drafts + 1, VOCAB_SIZE, seed=seed) * 2
        probs = probabilities(logits[:-1], torch.full((num_drafts,), params.temperature))
        drafts = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(seed))[:, 0]
        batch.append(Judged(logits, drafts.tolist(), replace(params, seed=seed), probs))
    assert judge(batch, verification).num_accepted.tolist() == [num_drafts] * num_requests


@pytest.mark.parametrize("verification", BOTH)
def test_the_greedy_target_as_its_own_drafter_has_every_draft_accepted(verification: Verification) -> None:
    logits = noise(5, VOCAB_SIZE)
    drafts = logits.argmax(-1).tolist()[:-1]
    assert outputs(judge([Judged(logits, drafts)], verification)) == [logits.argmax(-1).tolist()]


@pytest.mark.parametrize("verification", BOTH)
def test_one_hot_distributions_accept_what_agrees_and_replace_what_does_not(verification: Verification) -> None:
    probs = only(1, 2).softmax(-1)
    for seed in range(50):
        params = replace(SAMPLED, seed=seed)
        agreeing = Judged(only(1, 2, 3), [1, 2], params, probs)
        differing = Judged(only(1, 4, 3), [1, 2], params, probs)
        first = Judged(only(0, 2, 3), [1, 2], params, probs)
        assert outputs(judge([agreeing, differing, first], verification)) == [[1, 2, 3], [1, 4], [0]]


@pytest.mark.parametrize("verification", BOTH)
def test_a_draft_that_the_drafter_says_it_cannot_make_is_accepted_only_if_the_target_can(
    verification: Verification,
) -> None:
    probs = only(0).softmax(-1)
    for seed in range(50):
        params = replace(SAMPLED, seed=seed)
        batch = [Judged(peaks(1, 5), [1], params, probs), Judged(only(2, 5), [1], params, probs)]
        verdict = judge(batch, verification)
        assert verdict.num_accepted.tolist() == [1, 0]
        assert outputs(verdict)[1] == [2]


def test_a_residual_of_zero_falls_back_to_the_target() -> None:
    # q is above p everywhere, as rounding can make it by a little
    probs = torch.full((1, VOCAB_SIZE), 1.0)
    tokens = set()
    for seed in range(200):
        verdict = judge([Judged(only(2, 3).maximum(only(4, 5)), [4], replace(SAMPLED, seed=seed), probs)])
        if verdict.num_accepted.item() == 0:
            tokens.add(outputs(verdict)[0][0])
    assert tokens == {2, 4}


# --- drafts that are none


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("verification", BOTH)
@pytest.mark.parametrize("with_probs", [False, True])
def test_a_negative_draft_ends_the_drafts_of_its_request(
    params: SamplingParams, verification: Verification, with_probs: bool
) -> None:
    probs = torch.stack([only(1)[0].softmax(0), torch.full((VOCAB_SIZE,), 1.0), only(3)[0].softmax(0)])
    request = Judged(only(1, 2, 3, 4), [1, NO_TOKEN, 3], params, probs if with_probs else None)
    assert outputs(judge([request], verification)) == [[1, 2]]


@pytest.mark.parametrize("verification", BOTH)
def test_the_token_at_a_missing_draft_is_drawn_as_without_drafts(verification: Verification) -> None:
    logits = noise(3, VOCAB_SIZE)
    for seed in range(50):
        params = replace(SAMPLED, seed=seed)
        missing = Judged(logits, [NO_TOKEN, 2], params, torch.full((2, VOCAB_SIZE), 1 / VOCAB_SIZE))
        without = Judged(logits[:1], [], params)
        assert outputs(judge([missing], verification)) == outputs(judge([without], verification))


@pytest.mark.parametrize("verification", BOTH)
def test_a_draft_distribution_with_nan_ends_the_drafts_of_its_request(verification: Verification) -> None:
    probs = only(1, 2).softmax(-1)
    probs[1, 3] = math.nan
    assert outputs(judge([Judged(only(1, 2, 3), [1, 2], SAMPLED, probs)], verification)) == [[1, 2]]
    assert judge([Judged(only(1, 2, 3), [1, 2], SAMPLED, probs)], verification).num_accepted.tolist() == [1]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("verification", BOTH)
@pytest.mark.parametrize("token", [VOCAB_SIZE, VOCAB_SIZE + 100])
def test_b88_a_draft_outside_of_the_targets_vocabulary_is_never_accepted(
    params: SamplingParams, verification: Verification, token: int
) -> None:
    for probs in (None, torch.zeros(1, VOCAB_SIZE)):
        assert outputs(judge([Judged(only(5, 4), [token], params, probs)], verification)) == [[5]]


# --- failures


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("verification", BOTH)
@pytest.mark.parametrize("spoil", ["nan", "inf", "nothing allowed"])
@pytest.mark.parametrize("row", [0, 2])
def test_spoilt_logits_of_one_request_fail_it_and_leave_the_others_alone(
    params: SamplingParams, verification: Verification, spoil: str, row: int
) -> None:
    batch = [Judged(noise(3, VOCAB_SIZE, seed=n), [1, 2], replace(params, seed=n), None, n) for n in range(3)]
    batch[1].logits[:2] = only(1, 2)  # its drafts are accepted, so every row decides
    before = outputs(judge(batch, verification))
    if spoil == "nothing allowed":
        batch[1].logits[row] = -math.inf
    else:
        batch[1].logits[row, 3] = float(spoil)
    verdict = judge(batch, verification)
    assert verdict.is_failed.tolist() == [False, True, False]
    assert outputs(verdict) == [before[0], [], before[2]]
    assert verdict.num_accepted[1] == 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("verification", BOTH)
@pytest.mark.parametrize("spoil", [math.nan, math.inf, -math.inf])
def test_spoilt_logits_behind_a_rejected_draft_change_nothing(
    params: SamplingParams, verification: Verification, spoil: float
) -> None:
    logits = torch.cat([only(1, 4), noise(2, VOCAB_SIZE)])
    before = outputs(judge([Judged(logits.clone(), [1, 2, 3], params)], verification))
    logits[2:] = spoil
    verdict = judge([Judged(logits, [1, 2, 3], params)], verification)
    assert not verdict.is_failed.any()
    assert outputs(verdict) == before == [[1, 4]]


# --- randomness


@pytest.mark.parametrize("verification", BOTH)
def test_the_same_seed_gives_the_same_tokens_and_another_seed_or_round_does_not(verification: Verification) -> None:
    def tokens(seed: int, start: int) -> list[list[int]]:
        params = replace(SAMPLED, temperature=2.0)
        batch = [
            Judged(noise(4, VOCAB_SIZE), [1, 2, 3], replace(params, seed=seed + n), None, start) for n in range(20)
        ]
        return outputs(judge(batch, verification))

    torch.manual_seed(0)
    first = tokens(1000, 5)
    torch.manual_seed(1)
    assert tokens(1000, 5) == first
    assert tokens(2000, 5) != first
    assert tokens(1000, 6) != first


def test_1e_7_on_the_logits_changes_no_verdict_that_is_no_tie() -> None:
    batch = [Judged(noise(4, VOCAB_SIZE, seed=n), [1, 2, 3], replace(SAMPLED, seed=n)) for n in range(200)]
    before = outputs(judge(batch))
    for request in batch:
        request.logits = request.logits + 1e-7 * noise(4, VOCAB_SIZE, seed=99)
    assert outputs(judge(batch)) == before


# --- the worked example of block verification: p1, q1, p2, q2 and drafts 0, 1


def block_example(num_requests: int) -> Verdict:
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.2, 0.2], [0.2, 0.3, 0.5]]).log()
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.5, 0.2]])
    batch = [Judged(logits, [0, 1], replace(SAMPLED, seed=seed), probs) for seed in range(num_requests)]
    return judge(batch, "block")


def test_block_verification_keeps_prefixes_with_the_chances_of_the_worked_example() -> None:
    num_requests = 20_000
    lengths = torch.bincount(block_example(num_requests).num_accepted, minlength=3).double() / num_requests
    s_1, s_2 = 5 / 7, 5 / 7 * 0.4
    r_1 = s_1 * 0.6 - 0.3  # only token 0 has s_1 * p2 above q2
    h_1 = r_1 / (r_1 + 1 - s_1)
    assert h_1 == pytest.approx(0.310, abs=5e-4)
    expected = torch.tensor([(1 - s_2) * (1 - h_1), (1 - s_2) * h_1, s_2], dtype=torch.float64)
    torch.testing.assert_close(lengths, expected, atol=4 * 0.5 / math.sqrt(num_requests), rtol=0)


def test_block_verification_draws_from_the_scaled_residual() -> None:
    verdict = block_example(5000)
    after_none = verdict.token_ids[verdict.num_accepted == 0, 0]
    after_one = verdict.token_ids[verdict.num_accepted == 1, 1]
    assert set(after_none.tolist()) == {1, 2}  # max(p1 - q1, 0) is 0, 0.1, 0.1
    assert abs(float((after_none == 1).double().mean()) - 0.5) < 4 * 0.5 / math.sqrt(len(after_none))
    assert set(after_one.tolist()) == {0}


# --- misuse


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": RaggedRows.from_counts(np.array([1]))}, "the rows end at 1, not at 2"),
        ({"draft_ids": torch.zeros(2, dtype=torch.int64)}, "for 1 drafts"),
    ],
)
def test_row_tables_that_do_not_fit_are_our_own_fault(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "target_logits": torch.zeros(2, VOCAB_SIZE),
        "draft_ids": torch.zeros(1, dtype=torch.int64),
        "draft_probs": None,
        "rows": RaggedRows.from_counts(np.array([2])),
        "options": SamplingRows.from_params([GREEDY]),
        "round_starts": torch.zeros(1, dtype=torch.int64),
    }
    with pytest.raises(AssertionError, match=message):
        verify(**{**arguments, **change})


def test_a_request_without_a_row_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="a request without a row"):
        RaggedRows.from_counts(np.array([1, 0, 2]))

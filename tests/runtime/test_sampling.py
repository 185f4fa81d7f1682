"""Sampling options: what is refused, the distribution they make of logits, and draws from it."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcp_compiler.errors import ConfigError
from pcp_compiler.runtime.noise import Stream, draw_keys
from pcp_compiler.runtime.sampling import MAX_SEED, SamplingParams, SamplingRows, sample_draft
from pcp_compiler.sampling_ops import filter_logits, probabilities, row_argmax, sample

# --- parameters


def test_defaults_are_greedy_over_all_tokens() -> None:
    params = SamplingParams(16)
    assert params == SamplingParams(16, temperature=0.0, top_k=0, top_p=1.0, seed=None, stop_token_ids=())
    assert params.is_greedy
    with pytest.raises(FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        *[("max_new_tokens", value, "an integer >= 0") for value in (-1, True, 1.0, None, "3")],
        *[("top_k", value, "an integer >= 0") for value in (-1, False, 2.0, None)],
        *[
            ("temperature", value, r"a number from 0 up to 3\.4e\+38")
            for value in (math.nan, -0.1, math.inf, -math.inf, 1e39, True, "1", None)
        ],
        *[
            ("top_p", value, "a number above 0 and up to 1")
            for value in (0, 0.0, -0.5, 1.0001, math.nan, math.inf, True, None)
        ],
        *[("seed", value, f"an integer from 0 to {MAX_SEED}") for value in (-1, 2**63, 1.5, True, "7", math.nan)],
        ("stop_token_ids", 3, "a tuple of token ids"),
        ("stop_token_ids", "12", "a tuple of token ids"),
        ("stop_token_ids", (2, 5, 2), r"each id once, not \[2\] several times"),
    ],
)
def test_a_field_out_of_range_is_refused_by_name_and_value(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError, match=rf"SamplingParams\.{field} is .*{allowed}") as error:
        SamplingParams(**{"max_new_tokens": 4, field: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("stop_token", [-1, True, 2.0, None])
def test_a_stop_token_that_is_no_id_is_refused_by_its_index(stop_token: Any) -> None:
    with pytest.raises(ConfigError, match=r"SamplingParams\.stop_token_ids\[1\] is .*; give an integer >= 0"):
        SamplingParams(4, stop_token_ids=(7, stop_token))


def test_the_ends_of_every_range_are_allowed() -> None:
    SamplingParams(0, temperature=0, top_k=0, top_p=1, seed=0)
    SamplingParams(10**9, temperature=3e38, top_k=10**9, top_p=1e-300, seed=MAX_SEED)
    SamplingParams(np.int64(3), temperature=np.float32(0.5), seed=np.int64(3))  # type: ignore[arg-type]


def test_a_list_of_stop_tokens_becomes_a_tuple() -> None:
    params = SamplingParams(4, stop_token_ids=[3, 1])  # type: ignore[arg-type]
    assert params.stop_token_ids == (3, 1)
    assert hash(params) == hash(SamplingParams(4, stop_token_ids=(3, 1)))


def test_a_missing_seed_is_drawn_anew_and_a_given_one_kept() -> None:
    drawn = {SamplingParams(4).with_seed().seed for _ in range(8)}
    assert len(drawn) == 8 and None not in drawn
    assert SamplingParams(4, seed=0).with_seed().seed == 0


def test_rows_keep_only_the_filters_that_someone_asked_for() -> None:
    plain = SamplingRows.from_params([SamplingParams(1, seed=3), SamplingParams(1, temperature=0.5, seed=4)])
    assert plain.top_k is None and plain.top_p is None
    assert plain.is_greedy.tolist() == [True, False]
    mixed = SamplingRows.from_params([SamplingParams(1, top_k=2, seed=3), SamplingParams(1, top_p=0.5, seed=4)])
    assert mixed.top_k is not None and mixed.top_p is not None
    assert (mixed.top_k.tolist(), mixed.top_p.tolist()) == ([2, 0], [1.0, 0.5])
    assert mixed.seeds.tolist() == [3, 4]
    assert [rows.has_filters for rows in (plain, mixed)] == [False, True]


# --- distributions


def reference(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """One row in plain Python: scale, keep the k largest with their ties, keep the fewest that reach top_p."""
    if temperature == 0:
        return [float(token == logits.index(max(logits))) for token in range(len(logits))]
    scaled = [(logit - max(logits)) / temperature for logit in logits]
    kth = sorted(scaled, reverse=True)[min(top_k or len(scaled), len(scaled)) - 1]
    weights = [math.exp(value) if value >= kth else 0.0 for value in scaled]
    mass, kept = 0.0, set()
    for token in sorted(range(len(scaled)), key=lambda token: -scaled[token]):
        if top_p < 1 and mass >= top_p - 1e-12:
            break
        kept.add(token)
        mass += weights[token] / sum(weights)
    weights = [weight if token in kept else 0.0 for token, weight in enumerate(weights)]
    return [weight / sum(weights) for weight in weights]


def distribution(logits: Any, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    row = torch.as_tensor(logits)[None]
    options = torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64)
    return probabilities(row, *options)[0]


# multiples of 1/4 give exact ties; 0.3 and so on are no partial sum of such a row
row_options = st.tuples(
    st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=6, max_size=6),
    st.sampled_from([0.0, 0.25, 0.7, 1.0, 3.0]),
    st.integers(0, 8),
    st.sampled_from([1.0, 0.31, 0.57, 0.83, 0.973, 1e-9]),
)


@settings(deadline=None)
@given(st.lists(row_options, min_size=1, max_size=6))
def test_each_row_has_the_distribution_of_its_own_options(rows: list[tuple[list[float], float, int, float]]) -> None:
    logits, temperature, top_k, top_p = zip(*rows, strict=True)
    got = probabilities(
        torch.tensor(logits), torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p).double()
    )
    assert got.dtype == torch.float32
    expected = torch.tensor([reference(*row) for row in rows])
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_top_k_comes_before_top_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # of the two left, 4/7 and 3/7, the first alone reaches 0.5; of all four it does not
    assert distribution(logits, top_k=2, top_p=0.5).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert (distribution(logits, top_p=0.5) > 0).tolist() == [True, True, False, False]


def test_the_smallest_top_p_keeps_one_token() -> None:
    assert distribution([0.0, 2.0, 1.0], top_p=1e-300).tolist() == [0.0, 1.0, 0.0]


def test_a_row_without_filters_is_the_same_bits_beside_one_that_has_some() -> None:
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    alone = probabilities(logits[:1], torch.tensor([0.8]))
    beside = probabilities(
        logits, torch.tensor([0.8, 0.8]), torch.tensor([0, 5]), torch.tensor([1.0, 0.5], dtype=torch.float64)
    )
    assert torch.equal(alone[0], beside[0])


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-3])
def test_a_tiny_temperature_is_a_point_mass_and_not_nan(temperature: float) -> None:
    assert distribution([1e4, -1e4, 9.9e3], temperature).tolist() == [1.0, 0.0, 0.0]


def test_a_huge_temperature_is_uniform_over_the_allowed_tokens() -> None:
    got = distribution([5.0, -math.inf, -5.0], 3e38)
    torch.testing.assert_close(got, torch.tensor([0.5, 0.0, 0.5]))


def test_a_greedy_tie_goes_to_the_lowest_id() -> None:
    assert distribution([1.0, 3.0, 3.0], 0.0).tolist() == [0.0, 1.0, 0.0]


def test_nan_in_one_row_leaves_the_others_alone() -> None:
    logits = torch.tensor([[1.0, 2.0], [math.nan, 1.0], [3.0, 0.0]])
    options = (torch.ones(3), torch.tensor([1, 1, 0]), torch.tensor([1.0, 0.5, 0.9]).double())
    got = probabilities(logits, *options)
    assert torch.equal(got[[0, 2]], probabilities(logits[[0, 2]], *(option[[0, 2]] for option in options)))
    assert not got[1].isfinite().all()


@settings(deadline=None)
@given(st.lists(row_options, min_size=1, max_size=6))
def test_filtered_logits_have_the_distribution_of_the_filters(
    rows: list[tuple[list[float], float, int, float]],
) -> None:
    logits, temperature, top_k, top_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    filtered = filter_logits(logits, temperature, top_k, top_p.double())
    expected = probabilities(logits, temperature, top_k, top_p.double())
    assert torch.equal(probabilities(filtered, temperature), expected)
    assert torch.equal(filtered.argmax(-1), logits.argmax(-1))
    assert torch.equal(filtered[filtered > -math.inf], logits[filtered > -math.inf])


def test_filters_leave_rows_without_an_answer_as_they_are() -> None:
    logits = torch.tensor([[math.nan, 1.0, 2.0], [math.inf, 0.0, -math.inf], [-math.inf] * 3])
    filtered = filter_logits(logits, torch.ones(3), torch.tensor([1, 1, 1]), torch.full((3,), 0.5).double())
    assert filtered[0].isnan().any() and filtered[1, 0] == math.inf and (filtered[2] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_float_type_give_float32(dtype: torch.dtype) -> None:
    got = distribution(torch.tensor([1.0, 2.0, 0.5], dtype=dtype))
    torch.testing.assert_close(got, torch.tensor([1.0, 2.0, 0.5]).softmax(0))


# --- draws


def keys(num_draws: int) -> Tensor:
    return draw_keys(torch.arange(num_draws), torch.tensor(0), torch.tensor(0), Stream.DRAFT)


def test_tokens_are_drawn_in_proportion_to_their_weights() -> None:
    weights = torch.tensor([1.0, 0.0, 4.0, 0.5, 2.0, 1e-3, 0.5], dtype=torch.float64)
    num_draws = 100_000
    counts = torch.bincount(sample(weights.expand(num_draws, -1), keys(num_draws)), minlength=7)
    expected = num_draws * weights / weights.sum()
    assert counts[1] == 0
    chi2 = float(((counts - expected) ** 2 / expected)[expected > 0].sum())
    assert chi2 < 20.5  # 5 degrees of freedom: 1 in 1000


def test_a_token_of_weight_0_is_never_drawn() -> None:
    weights = torch.tensor([0.0, 1e-30, 0.0, math.nan, 0.0])
    assert (sample(weights.expand(1000, 5), keys(1000)) == 1).all()
    for nothing in (0.0, math.nan):
        assert (sample(torch.full((9, 5), nothing), keys(9)) == 0).all()


def test_weights_need_not_add_up_to_one() -> None:
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).expand(1000, 3)
    assert torch.equal(sample(weights, keys(1000)), sample(weights / 8, keys(1000)))


def test_a_draw_from_a_part_of_the_vocabulary_is_the_winner_among_its_tokens() -> None:
    weights = torch.rand(500, 40, generator=torch.Generator().manual_seed(0))
    drawn = sample(weights, keys(500))
    is_even = torch.arange(40) % 2 == 0
    among_even = sample(torch.where(is_even, weights, 0.0), keys(500))
    assert torch.equal(drawn[drawn % 2 == 0], among_even[drawn % 2 == 0])


def test_a_draft_comes_with_the_distribution_it_was_drawn_from() -> None:
    num_requests = 20_000
    logits = torch.tensor([0.5, -1.0, 1.0, 0.0])
    one = SamplingRows.from_params([SamplingParams(1, temperature=0.7, top_k=1, seed=0)])
    options = SamplingRows(one.temperature.expand(num_requests), None, None, torch.arange(num_requests), one.is_greedy)
    starts = torch.full((num_requests,), 9)
    ids, probs = sample_draft(logits.expand(num_requests, 4), options, starts, step=1)
    torch.testing.assert_close(probs[0], (logits / 0.7).softmax(0))  # top-k is left to the verification
    shares = torch.bincount(ids, minlength=4) / num_requests
    torch.testing.assert_close(shares, probs[0], atol=4 * 0.5 / math.sqrt(num_requests), rtol=0)


def test_the_argmax_of_a_row_is_the_lowest_id_of_a_tie_and_nan_is_largest() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [math.inf, math.nan, 0.0], [-math.inf] * 3])
    assert row_argmax(logits).tolist() == torch.ops.pcp.row_argmax(logits).tolist() == [1, 1, 0]


def test_a_greedy_draft_is_the_argmax_with_a_point_mass() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(1))
    options = SamplingRows.from_params([SamplingParams(1, seed=seed) for seed in range(5)])
    ids, probs = sample_draft(logits, options, torch.arange(5), step=0)
    assert torch.equal(ids, logits.argmax(-1))
    assert torch.equal(probs, torch.nn.functional.one_hot(ids, 11).float())

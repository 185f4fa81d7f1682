"""Sampling kernels against `sampling_ops` and `runtime.rejection`: same tokens, same verdicts, close distributions.

Float32 distributions differ by rounding, so a draw could differ where two tokens arrive within 1e-6 of each other. Each
run draws the same examples; none of them is such a close call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcp_compiler import sampling_ops
from pcp_compiler.kernels import sampling as kernels
from pcp_compiler.runtime.noise import Stream, draw_keys
from pcp_compiler.runtime.rejection import (
    NO_TOKEN,
    RaggedRows,
    Verdict,
    Verification,
    _verify_by_kernels,
    _verify_by_torch,
)
from pcp_compiler.runtime.sampling import SamplingParams, SamplingRows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of numpy, about NaN and unused columns
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOTH: list[Verification] = ["token", "block"]
FIELDS = ("token_ids", "num_accepted", "num_emitted", "is_failed")
vocab_sizes = st.sampled_from([1, 2, 7, 8, 9, 30])
few = settings(deadline=None, max_examples=25, derandomize=True)


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Cut rows of a few tokens into several tiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "TILE_SIZE", 8)
        yield


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def keys(num_draws: int, seed: int = 0) -> Tensor:
    return draw_keys(torch.arange(num_draws), torch.tensor(seed), torch.tensor(0), Stream.DRAFT)


# --- argmax


@few
@given(
    st.integers(0, 5), vocab_sizes, st.integers(0, 99),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)  # fmt: skip
def test_the_argmax_is_that_of_torch_for_ties_infinities_and_nan(
    num_rows: int, vocab_size: int, seed: int, dtype: torch.dtype
) -> None:
    generator = np.random.default_rng(seed)
    values = [-math.inf, -2.0, -0.0, 0.0, 1.0, 1.0, 2.0, math.inf, math.nan]
    chances = [0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.06, 0.02, 0.02]
    logits = torch.tensor(generator.choice(values, size=(num_rows, vocab_size), p=chances), dtype=dtype)
    assert torch.equal(kernels.row_argmax(logits.to(DEVICE)).cpu(), logits.argmax(-1))


@pytest.mark.parametrize("view", ["rows apart", "transposed", "one row for all"])
def test_rows_may_have_any_strides(view: str) -> None:
    logits = {
        "rows apart": randn(6, 40, seed=0)[::2, 3:30],
        "transposed": randn(27, 3, seed=0).t(),
        "one row for all": randn(27, seed=0).expand(3, 27),
    }[view].to(DEVICE)
    assert torch.equal(kernels.row_argmax(logits), logits.argmax(-1))
    temperatures = torch.ones((), device=DEVICE).expand(3)
    _, probs = kernels.sample_rows(logits, temperatures, keys(3).to(DEVICE))
    torch.testing.assert_close(probs, logits.softmax(-1))


def test_a_vocabulary_of_several_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TILE_SIZE", 4096)
    logits = randn(2, 9001, seed=1) * 4
    logits[:, [5000, 9000]] = logits.max() + 1
    drawn, probs = kernels.sample_rows(logits.to(DEVICE), torch.tensor([0.0, 1.0]).to(DEVICE), keys(2).to(DEVICE))
    expected = sampling_ops.probabilities(logits, torch.tensor([0.0, 1.0]))
    assert kernels.row_argmax(logits.to(DEVICE)).tolist() == [5000, 5000]
    assert torch.equal(drawn.cpu(), sampling_ops.sample(expected, keys(2)))
    torch.testing.assert_close(probs.cpu(), expected)


# --- draws


@few
@given(
    st.integers(0, 5), vocab_sizes, st.integers(0, 99),
    st.lists(st.sampled_from([0.0, 1e-45, 0.3, 1.0, 3e38]), min_size=5),
)  # fmt: skip
def test_draws_and_their_distributions_are_those_of_the_reference(
    num_rows: int, vocab_size: int, seed: int, chosen: list[float]
) -> None:
    logits, temperatures = randn(num_rows, vocab_size, seed=seed) * 3, torch.tensor(chosen[:num_rows])
    logits[:, vocab_size // 2 : vocab_size - 1] = -math.inf
    drawn, probs = kernels.sample_rows(*(x.to(DEVICE) for x in (logits, temperatures, keys(num_rows, seed))))
    expected = sampling_ops.probabilities(logits, temperatures)
    exact = (logits.double() / temperatures.double().clamp(min=1e-45)[:, None]).softmax(-1)
    exact = torch.where((temperatures == 0)[:, None], expected.double(), exact)
    assert drawn.dtype == torch.int64 and probs.dtype == torch.float32
    assert torch.equal(drawn.cpu(), sampling_ops.sample(expected, keys(num_rows, seed)))
    if num_rows:
        error, torch_error = ((got.cpu().double() - exact).abs().max() for got in (probs, expected))
        assert error <= 2 * torch_error + torch.finfo(torch.float32).eps


@pytest.mark.parametrize("spoil", [math.nan, math.inf, -math.inf])
def test_a_row_without_an_answer_still_gets_a_token_of_the_vocabulary(spoil: float) -> None:
    logits = torch.full((3, 20), spoil, device=DEVICE)
    logits[1] = 0.0
    drawn, probs = kernels.sample_rows(logits, torch.ones(3, device=DEVICE), keys(3).to(DEVICE))
    assert ((drawn >= 0) & (drawn < 20)).all()
    assert probs[[0, 2]].isnan().all() and torch.equal(probs[1].cpu(), torch.full((20,), 0.05))


def test_sampled_tokens_have_their_chances() -> None:
    num_draws, logits = 200, torch.tensor([1.0, -math.inf, 0.0, 0.5, 2.0, -1.0])
    temperatures = torch.full((num_draws,), 0.9)
    drawn, probs = kernels.sample_rows(
        logits.expand(num_draws, -1).to(DEVICE), temperatures.to(DEVICE), keys(num_draws).to(DEVICE)
    )
    counts, expected = torch.bincount(drawn.cpu(), minlength=6), num_draws * probs[0].cpu().double()
    assert counts[1] == 0
    assert float(((counts - expected) ** 2 / expected)[expected > 0].sum()) < 18.5  # 4 degrees of freedom: 1 in 1000


# --- verdicts


def draw_batch(generator: np.random.Generator, options: list[SamplingParams], vocab_size: int) -> dict[str, Any]:
    """Return arguments of `verify` for drafts that are often accepted, with faults here and there."""
    rows = RaggedRows.from_counts(generator.integers(1, 6, size=len(options)), DEVICE)
    logits = torch.tensor(generator.normal(size=(rows.num_rows, vocab_size)) * 2, dtype=torch.float32)
    drafts = torch.cat([
        torch.arange(start, end - 1)
        for start, end in zip(rows.cu_rows.tolist()[:-1], rows.cu_rows.tolist()[1:], strict=True)
    ]) if rows.num_requests else torch.zeros(0, dtype=torch.int64)  # fmt: skip
    noise = torch.tensor(generator.normal(size=(rows.num_drafts, vocab_size)), dtype=torch.float32)
    probs = (logits[drafts] + noise * generator.choice([0.0, 0.4])).softmax(-1)
    ids = torch.where(
        torch.tensor(generator.random(rows.num_drafts) < 0.7), logits[drafts].argmax(-1), noise.argmax(-1)
    )
    if rows.num_drafts:
        faults = generator.random(4) < 0.15
        draft = int(generator.integers(rows.num_drafts))
        ids[draft] = NO_TOKEN if faults[0] else vocab_size if faults[1] else ids[draft]
        probs[draft, 0] = math.nan if faults[2] else probs[draft, 0]
        logits[drafts[draft], -1] = generator.choice([math.nan, math.inf, -math.inf]) if faults[3] else 0.5
    return {
        "target_logits": logits.to(DEVICE), "draft_ids": ids.to(DEVICE),
        "draft_probs": probs.to(DEVICE) if generator.random() < 0.7 else None, "rows": rows,
        "options": SamplingRows.from_params(options, DEVICE),
        "round_starts": torch.tensor(generator.integers(0, 5000, size=len(options)), device=DEVICE),
    }  # fmt: skip


def verdicts(batch: dict[str, Any], verification: Verification) -> tuple[Verdict, Verdict]:
    """Return what the kernels and the reference say."""
    return (
        _verify_by_kernels(*batch.values(), verification=verification),
        _verify_by_torch(*batch.values(), verification=verification),
    )  # fmt: skip


def assert_same(got: Verdict, expected: Verdict) -> None:
    for field in FIELDS:
        left, right = getattr(got, field), getattr(expected, field)
        assert left.dtype == right.dtype and torch.equal(left, right), f"{field}: {left} is not {right}"


params = st.builds(
    SamplingParams,
    st.just(9),
    temperature=st.sampled_from([0.0, 1e-30, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 0, 2]),
    top_p=st.sampled_from([1.0, 1.0, 1.0, 0.6]),
    seed=st.integers(0, 2**63 - 1),
)


@pytest.mark.parametrize("verification", BOTH)
@settings(few, max_examples=40)
@given(st.lists(params, max_size=3), vocab_sizes, st.integers(0, 2**32))
def test_verdicts_are_those_of_the_reference(
    verification: Verification, options: list[SamplingParams], vocab_size: int, seed: int
) -> None:
    assert_same(*verdicts(draw_batch(np.random.default_rng(seed), options, vocab_size), verification))


@few
@given(st.integers(0, 4), vocab_sizes, st.integers(0, 2**32))
def test_verdicts_on_greedy_requests_are_exactly_those_of_the_reference(
    num_requests: int, vocab_size: int, seed: int
) -> None:
    options = [SamplingParams(9, seed=1)] * num_requests
    batch = draw_batch(np.random.default_rng(seed), options, vocab_size)
    batch["target_logits"] = batch["target_logits"].round()  # ties
    assert_same(*verdicts(batch, "token"))


@pytest.mark.parametrize("verification", BOTH)
def test_a_request_is_judged_with_others_as_alone(verification: Verification) -> None:
    temperatures = [0.8, 0.0, 1.5, 1.0]
    options = [SamplingParams(9, temperature=t, seed=seed) for seed, t in enumerate(temperatures)]
    batch = draw_batch(np.random.default_rng(5), options, 30)
    together = _verify_by_kernels(*batch.values(), verification=verification)
    bounds = batch["rows"].cu_rows.tolist()
    for i, option in enumerate(options):
        rows, drafts = slice(bounds[i], bounds[i + 1]), slice(bounds[i] - i, bounds[i + 1] - i - 1)
        alone = _verify_by_kernels(
            batch["target_logits"][rows], batch["draft_ids"][drafts],
            None if batch["draft_probs"] is None else batch["draft_probs"][drafts],
            RaggedRows.from_counts(np.array([bounds[i + 1] - bounds[i]]), DEVICE),
            SamplingRows.from_params([option], DEVICE), batch["round_starts"][i : i + 1], verification=verification,
        )  # fmt: skip
        width = alone.token_ids.shape[1]
        assert torch.equal(together.token_ids[i, :width], alone.token_ids[0])
        assert (together.token_ids[i, width:] == NO_TOKEN).all()


@pytest.mark.parametrize("verification", BOTH)
def test_the_target_as_its_own_drafter_has_every_draft_accepted(verification: Verification) -> None:
    num_requests, num_drafts = 6, 3
    logits, temperatures = randn(num_requests * 4, 20, seed=3).to(DEVICE) * 2, torch.full((num_requests * 4,), 0.8)
    ids, probs = kernels.sample_rows(logits, temperatures.to(DEVICE), keys(num_requests * 4).to(DEVICE))
    is_judged = torch.arange(num_requests * 4, device=DEVICE) % 4 != 3
    verdict = _verify_by_kernels(
        logits, ids[is_judged], probs[is_judged], RaggedRows.from_counts(np.full(num_requests, 4), DEVICE),
        SamplingRows.from_params([SamplingParams(9, temperature=0.8, seed=n) for n in range(num_requests)], DEVICE),
        torch.zeros(num_requests, dtype=torch.int64, device=DEVICE), verification=verification,
    )  # fmt: skip
    assert (verdict.num_accepted == num_drafts).all()


@pytest.mark.parametrize("verification", BOTH)
def test_the_first_tokens_of_rounds_have_the_targets_distribution(verification: Verification) -> None:
    num_requests = 80
    target, drafter = torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), torch.tensor([0.2, 0.5, 0.1, 0.2]).log()
    options = SamplingRows.from_params([SamplingParams(9, temperature=1.0, seed=0)] * num_requests, DEVICE)
    options = replace(options, seeds=torch.arange(num_requests, device=DEVICE))
    starts = torch.zeros(num_requests, dtype=torch.int64, device=DEVICE)
    steps = [
        kernels.sample_rows(
            drafter.expand(num_requests, 4).to(DEVICE), options.temperature,
            draw_keys(options.seeds, starts, starts + step, Stream.DRAFT),
        )
        for step in range(2)
    ]  # fmt: skip
    verdict = _verify_by_kernels(
        target.expand(3 * num_requests, 4).to(DEVICE), torch.stack([ids for ids, _ in steps], 1).flatten(),
        torch.stack([probs for _, probs in steps], 1).flatten(0, 1),
        RaggedRows.from_counts(np.full(num_requests, 3), DEVICE), options, starts, verification=verification,
    )  # fmt: skip
    counts, expected = torch.bincount(verdict.token_ids[:, 0].cpu(), minlength=4), num_requests * target.exp()
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3  # 3 degrees of freedom: 1 in 1000
    assert 0 < verdict.num_accepted.double().mean() < 2

"""Sampling and verification on a CUDA device: the CPU's result, no waiting, and both inside a captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from pcp_compiler.runtime.noise import Stream, draw_uniform
from pcp_compiler.runtime.rejection import RaggedRows, Verdict, Verification, verify
from pcp_compiler.runtime.sampling import SamplingParams, SamplingRows, sample_draft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
both = pytest.mark.parametrize("verification", ["token", "block"])
VOCAB_SIZE = 50_000
PARAMS = [
    SamplingParams(9, seed=1),
    SamplingParams(9, temperature=0.8, seed=2),
    SamplingParams(9, temperature=1.2, top_k=50, seed=3),
    SamplingParams(9, temperature=1.0, top_p=0.9, seed=4),
] * 4
NUM_DRAFTS = [3, 0, 2, 1] * 4


def random_rows(num_rows: int, seed: int) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


class Batch(NamedTuple):
    """Arguments of `verify`."""

    target_logits: Tensor
    draft_ids: Tensor
    draft_probs: Tensor
    rows: RaggedRows
    options: SamplingRows
    round_starts: Tensor


def make_batch(device: str, params: Sequence[SamplingParams] = PARAMS) -> Batch:
    """Return drafts of which many are likely to be accepted, with a request that fails."""
    num_drafts = np.array(NUM_DRAFTS)
    ends = np.cumsum(num_drafts + 1)
    logits = random_rows(int(ends[-1]), seed=0)
    logits[7, 3] = float("nan")
    judged_rows = np.delete(np.arange(ends[-1]), ends - 1)
    probs = (logits[judged_rows] + random_rows(len(judged_rows), seed=1) / 4).softmax(-1).nan_to_num(1 / VOCAB_SIZE)
    return Batch(
        logits.to(device), probs.argmax(-1).to(device), probs.to(device),
        RaggedRows.from_counts(num_drafts + 1, device), SamplingRows.from_params(params, device),
        torch.arange(len(params), device=device),
    )  # fmt: skip


def fields(verdict: Verdict) -> list[Tensor]:
    """Return the parts of a verdict."""
    return [getattr(verdict, field) for field in ("token_ids", "num_accepted", "num_emitted", "is_failed")]


def test_the_hash_has_the_same_bits_on_both_devices() -> None:
    def drawn(device: str) -> Tensor:
        seeds, positions = torch.arange(1000, device=device)[:, None], torch.arange(50, device=device)
        return draw_uniform(seeds, seeds % 7, positions, Stream.RESIDUAL).cpu()

    assert torch.equal(drawn("cuda"), drawn("cpu"))


@both
def test_verdicts_are_the_same_on_both_devices(verification: Verification) -> None:
    on_gpu, on_cpu = (verify(*make_batch(device), verification=verification) for device in ("cuda", "cpu"))
    assert on_cpu.is_failed.sum() == 1 and (on_cpu.num_accepted > 0).any()
    for got, expected in zip(fields(on_gpu), fields(on_cpu), strict=True):
        assert torch.equal(got.cpu(), expected)


@both
@pytest.mark.parametrize("params", [PARAMS, PARAMS[:2] * 8, PARAMS[:1] * 16], ids=["filtered", "mixed", "greedy"])
def test_a_verification_never_waits_for_the_device(verification: Verification, params: list[SamplingParams]) -> None:
    batch = make_batch("cuda", params)
    verify(*batch, verification=verification)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        RaggedRows.from_counts(np.array(NUM_DRAFTS) + 1, "cuda")
        SamplingRows.from_params(params, "cuda")
        verify(*batch, verification=verification)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@both
@pytest.mark.parametrize("params", [PARAMS[:2] * 8, PARAMS[:1] * 16], ids=["mixed", "greedy"])
def test_a_verification_can_be_captured_and_replayed_with_other_values(
    verification: Verification, params: list[SamplingParams]
) -> None:
    batch = make_batch("cuda", params)
    verify(*batch, verification=verification)  # warm-up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = verify(*batch, verification=verification)
    for seed in (3, 4):
        batch.target_logits.copy_(random_rows(len(batch.target_logits), seed=seed))
        batch.round_starts.add_(5)
        graph.replay()
        for got, expected in zip(fields(replayed), fields(verify(*batch, verification=verification)), strict=True):
            assert torch.equal(got, expected)


def test_a_draft_step_can_be_captured_and_replayed_with_other_values() -> None:
    options = SamplingRows.from_params(PARAMS, "cuda")
    starts = torch.arange(len(PARAMS), device="cuda")
    logits = random_rows(len(PARAMS), seed=2).cuda()
    sample_draft(logits, options, starts, step=1)  # warm-up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, probs = sample_draft(logits, options, starts, step=1)
    for seed in (3, 4):
        logits.copy_(random_rows(len(PARAMS), seed=seed))
        starts.add_(5)
        graph.replay()
        expected_ids, expected_probs = sample_draft(logits, options, starts, step=1)
        assert torch.equal(ids, expected_ids) and torch.equal(probs, expected_probs)

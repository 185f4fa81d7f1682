"""Sampling and verification on a CUDA device: the CPU's result, and drafting inside a captured graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pcp_compiler.runtime.noise import Stream, draw_uniform
from pcp_compiler.runtime.rejection import Verdict, Verification, verify
from pcp_compiler.runtime.sampling import SamplingParams, SamplingRows, sample_draft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
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


def judge(device: str, verification: Verification) -> Verdict:
    """Verify drafts of which many are likely to be accepted."""
    num_drafts = np.array(NUM_DRAFTS)
    cu_rows = np.concatenate([[0], np.cumsum(num_drafts + 1)])
    logits = random_rows(int(cu_rows[-1]), seed=0)
    logits[7, 3] = float("nan")
    judged_rows = np.delete(np.arange(cu_rows[-1]), cu_rows[1:] - 1)
    probs = (logits[judged_rows] + random_rows(len(judged_rows), seed=1) / 4).softmax(-1).nan_to_num(1 / VOCAB_SIZE)
    return verify(
        logits.to(device),
        probs.argmax(-1).to(device),
        probs.to(device),
        cu_rows,
        SamplingRows.from_params(PARAMS, device),
        torch.arange(len(PARAMS), device=device),
        verification=verification,
    )


def test_the_hash_has_the_same_bits_on_both_devices() -> None:
    def drawn(device: str) -> Tensor:
        seeds, positions = torch.arange(1000, device=device)[:, None], torch.arange(50, device=device)
        return draw_uniform(seeds, seeds % 7, positions, Stream.RESIDUAL).cpu()

    assert torch.equal(drawn("cuda"), drawn("cpu"))


@pytest.mark.parametrize("verification", ["token", "block"])
def test_verdicts_are_the_same_on_both_devices(verification: Verification) -> None:
    on_gpu, on_cpu = judge("cuda", verification), judge("cpu", verification)
    assert on_cpu.is_failed.sum() == 1 and (on_cpu.num_accepted > 0).any()
    for field in ("token_ids", "num_accepted", "num_emitted", "is_failed"):
        assert torch.equal(getattr(on_gpu, field).cpu(), getattr(on_cpu, field)), field


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

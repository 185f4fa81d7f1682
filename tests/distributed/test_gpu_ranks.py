"""Distributed ranks on GPUs: staged through the host with gloo, on the device with NCCL."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import pcp_compiler
from pcp_compiler.errors import RankError
from pcp_compiler.ranks.distributed import RankGroups
from pcp_compiler.ranks.transport import Transport
from tests.backend.support import make_ids, options
from tests.distributed.run_ranks import run_ranks
from tests.distributed.scenarios import call_with, fail_after, make_model

pytestmark = pytest.mark.gpu


def on_gpu(rank: int, library: str) -> list[tuple[float, int, str]]:
    """Difference to eager, collectives, and the failure of a call that a following good call survives."""
    device = torch.device("cuda", rank if library == "nccl" else 0)
    torch.cuda.set_device(device)
    group = dist.new_group(backend=f"cpu:gloo,cuda:{library}", timeout=timedelta(seconds=60))
    model = make_model().to(device)
    compiled = pcp_compiler.compile(model, options(2, timeout_s={"start": 60, "step": 20}), group=group)
    found: list[tuple[float, int, str]] = []
    for num_tokens in (2, 33, 500):
        ids = make_ids(num_tokens).to(device)
        message = ""
        if found:
            try:
                call_with(compiled, fail_after(1), only=rank == 1, device=device)
            except (RankError, MemoryError) as fault:
                message = str(fault)
        difference = (compiled(ids) - model(ids)).abs().max().item()
        (entry,) = pcp_compiler.compilations(compiled)
        found.append((difference, len(entry.calls[-1].collectives), message))
    return found


def check(found: list[list[tuple[float, int, str]]]) -> None:
    for rank, outcomes in enumerate(found):
        for difference, num_collectives, message in outcomes:
            assert difference <= 1e-12
            assert num_collectives == 2
            assert message in ("", "out of memory here") if rank == 1 else "rank 1 failed" in message or not message
        assert [bool(message) for _, _, message in outcomes] == [False, True, True]


def test_gloo_ranks_stage_device_rows_through_the_host() -> None:
    check(run_ranks(on_gpu, 2, "gloo", limit_s=120))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants one GPU a rank")
def test_nccl_ranks_exchange_rows_on_the_device() -> None:
    check(run_ranks(on_gpu, 2, "nccl", limit_s=120))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.float8_e4m3fn], ids=str)
def test_nccl_carries_every_dtype_bit_for_bit(dtype: torch.dtype) -> None:
    transport = Transport("nccl", HashStore(), 0, 1, 30.0)
    rows = torch.randn(5, 7, device="cuda").to(dtype)
    transfers = [transport.start(rows.clone(), is_sum=is_sum) for is_sum in (False, True)]
    for transfer in transfers:
        transfer.finish()
        assert torch.equal(transfer.received.view(torch.uint8), rows.view(torch.uint8))
    torch.cuda.synchronize()
    assert all(transfer.is_done() for transfer in transfers)
    transport.close(transfers)


def test_a_group_with_nccl_uses_it_for_device_rows() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    try:
        group = RankGroups().find(pcp_compiler.load_config({"parallel.ranks": "distributed"}), None)
        assert group is not None
        assert group._transport(torch.device("cuda")).is_asynchronous
        assert not group._transport(torch.device("cpu")).is_asynchronous
    finally:
        dist.destroy_process_group()

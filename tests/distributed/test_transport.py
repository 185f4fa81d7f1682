"""Rows between processes, here between one process and itself, or two threads that are a rank each."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from pcp_compiler import torch_private
from pcp_compiler.ranks.transport import Transport

TIMEOUT_S = 30.0
DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int16, torch.bool]


@pytest.fixture
def transports() -> Iterator[list[Transport]]:
    """Two connected gloo ranks."""
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        yield list(pool.map(lambda rank: Transport("gloo", store, rank, 2, TIMEOUT_S), range(2)))


def exchange(transports: list[Transport], parts: list[Tensor], *, is_sum: bool) -> list[Tensor]:
    """Return what each rank receives."""
    transfers = [one.start(part, is_sum=is_sum) for one, part in zip(transports, parts, strict=True)]
    for transfer in transfers:
        transfer.finish()
        assert transfer.is_done()
    return [transfer.received for transfer in transfers]


def bits(x: Tensor) -> list[int]:
    values: list[int] = x.contiguous().view(-1).view(torch.uint8).tolist()
    return values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathered_rows_are_those_sent_bit_for_bit(transports: list[Transport], dtype: torch.dtype) -> None:
    parts = [(torch.randn(3, 5, generator=torch.Generator().manual_seed(rank)) * 9).to(dtype) for rank in range(2)]
    for received in exchange(transports, parts, is_sum=False):
        assert bits(received) == bits(torch.cat(parts))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_of_owned_rows_is_exact(transports: list[Transport], dtype: torch.dtype) -> None:
    rows = (torch.randn(4, 3, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    parts = [rows.clone(), rows.clone()]
    parts[0][2:], parts[1][:2] = 0, 0
    for received in exchange(transports, parts, is_sum=True):
        assert bits(received) == bits(rows)


def test_minus_zero_nan_and_infinity_survive_a_sum(transports: list[Transport]) -> None:
    rows = torch.tensor([[-0.0, float("nan"), float("-inf")]])
    for received in exchange(transports, [rows.clone(), torch.zeros(1, 3)], is_sum=True):
        assert bits(received) == bits(rows)


@pytest.mark.parametrize("is_sum", [False, True])
def test_nothing_to_send_needs_no_other_rank(transports: list[Transport], is_sum: bool) -> None:
    transfer = transports[0].start(torch.zeros(3, 0), is_sum=is_sum)
    assert transfer.is_done()
    transfer.finish()
    assert transfer.received.shape == (3 if is_sum else 6, 0)


def test_closing_ends_the_other_ranks_transfer(transports: list[Transport]) -> None:
    transfer = transports[0].start(torch.zeros(3, 2), is_sum=False)
    transports[1].close([])
    with pytest.raises(RuntimeError, match="by peer"):
        transfer.finish()


def test_a_backend_of_ours_is_not_in_torchs_registry_and_can_be_made_again() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        for epoch in range(2):
            store = torch_private.open_store(f"epoch {epoch}")
            backend = torch_private.new_backend("gloo", store, 0, 1, timedelta(seconds=TIMEOUT_S))
            received = torch.zeros(2)
            torch_private.all_gather(backend, received, torch.ones(2)).wait()
            assert received.tolist() == [1, 1]
        assert len(dist.distributed_c10d._world.pg_map) == 1
    finally:
        dist.destroy_process_group()


def test_stores_with_one_prefix_share_their_keys() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        torch_private.open_store("a").set("key", "value")
        assert torch_private.open_store("a").check(["key"])
        assert not torch_private.open_store("b").check(["key"])
    finally:
        dist.destroy_process_group()

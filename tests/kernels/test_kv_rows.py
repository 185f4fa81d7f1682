"""Kernels that move rows, against `kv_formats`, `ops` and copies by hand: all of it exact, bit by bit."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcp_compiler import ops
from pcp_compiler.kernels import kv_rows
from pcp_compiler.kv_formats import FP8, cache_shape, read_rows, write_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_SLOTS = 16
FORMATS = [
    (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float32, torch.float32),
    (torch.float64, torch.float64), (torch.float32, torch.bfloat16), (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16), (torch.float64, torch.bfloat16),
    (torch.bfloat16, FP8), (torch.float16, FP8), (torch.float32, FP8), (torch.float64, FP8),
]  # fmt: skip
"""Type of the rows, type of the cache."""
SIZES = {"num_heads": st.integers(1, 5), "k_width": st.integers(1, 40), "v_width": st.integers(1, 40)}


class Caches(NamedTuple):
    k: Tensor
    v: Tensor


def poisoned_cache(num_heads: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return a cache on the CPU, the spare row included, in which every number is NaN."""
    shape, stored = cache_shape((num_heads, width), dtype)
    cache = torch.empty(NUM_SLOTS + 1, *shape, dtype=stored)
    return cache.fill_(0xFF) if stored == torch.uint8 else cache.fill_(float("nan"))


def poisoned_caches(num_heads: int, k_width: int, v_width: int, dtype: torch.dtype) -> Caches:
    return Caches(poisoned_cache(num_heads, k_width, dtype), poisoned_cache(num_heads, v_width, dtype))


def draw_slots(num_rows: int, generator: torch.Generator) -> Tensor:
    """Return slots of which each is taken once at most, never 0, about a third -1."""
    slots = 1 + torch.randperm(NUM_SLOTS - 1, generator=generator)[:num_rows]
    return slots.masked_fill(torch.rand(num_rows, generator=generator) < 0.3, -1)


def expect_written(cache: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """Return a cache after the reference wrote the rows that have a slot."""
    expected = cache.clone()
    write_rows(expected, slots[slots >= 0].to(torch.int64), rows[slots >= 0])
    return expected


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Compare tensors as bytes."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(_as_bytes(actual), _as_bytes(expected))


def _as_bytes(x: Tensor) -> Tensor:
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.flatten()).view(torch.uint8)


def store_on_device(k: Tensor, v: Tensor, slots: Tensor, caches: Caches) -> Caches:
    """Return caches after the kernel wrote to copies of the given ones."""
    written = Caches(*(cache.to(DEVICE, copy=True) for cache in caches))
    kv_rows.store_kv(k.to(DEVICE), v.to(DEVICE), slots.to(DEVICE), *written)
    return written


@pytest.mark.parametrize("dtypes", FORMATS, ids=str)
@given(num_rows=st.integers(0, 9), **SIZES, exponent=st.integers(-12, 12), seed=st.integers(0, 2**31))
@settings(max_examples=12, deadline=None)
def test_a_cache_holds_the_bits_that_the_reference_writes(
    dtypes: tuple[torch.dtype, torch.dtype], num_rows: int, num_heads: int, k_width: int, v_width: int, exponent: int,
    seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    size = 2.0 ** min(exponent, 9)
    k, v = (
        (size * torch.randn(num_rows, num_heads, width, generator=generator, dtype=torch.float64)).to(dtypes[0])
        for width in (k_width, v_width)
    )
    slots = draw_slots(num_rows, generator)
    before = poisoned_caches(num_heads, k_width, v_width, dtypes[1])
    after = store_on_device(k, v, slots, before)
    for rows, cache, written in zip((k, v), before, after, strict=True):
        assert_same_bits(written, expect_written(cache, slots, rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_many_wide_heads_are_written_in_tiles(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 37, width, generator=generator) for width in (192, 128))
    before = poisoned_caches(37, 192, 128, dtype)
    slots = torch.tensor([7, 3], dtype=torch.int32)
    after = store_on_device(k, v, slots, before)
    for rows, cache, written in zip((k, v), before, after, strict=True):
        assert_same_bits(written, expect_written(cache, slots, rows))


def test_rows_and_caches_with_any_strides_are_written_without_a_copy() -> None:
    generator = torch.Generator().manual_seed(1)
    heads_first = torch.randn(3, 5, 2, 8, generator=generator, device="cpu").to(DEVICE)  # [H, N, K or V, D]
    k, v = heads_first[:, :, 0].transpose(0, 1), heads_first[:, :, 1].transpose(0, 1)
    slots = torch.tensor([[4, 0], [-1, 0], [6, 0], [1, 0], [9, 0]], device=DEVICE)[:, 0]
    both = torch.full((NUM_SLOTS + 1, 2, 3, 8), float("nan"), device=DEVICE)
    before = both.cpu().clone()
    kv_rows.store_kv(k, v, slots, both[:, 0], both[:, 1])
    for i, rows in enumerate((k, v)):
        assert_same_bits(both[:, i], expect_written(before[:, i], slots.cpu(), rows.cpu()))


def test_rows_of_padding_touch_neither_the_spare_row_nor_the_last_slot() -> None:
    k = torch.full((3, 2, 8), 5.0)
    before = poisoned_caches(2, 8, 8, torch.bfloat16)
    for written, cache in zip(store_on_device(k, k, torch.tensor([-1, -1, -7]), before), before, strict=True):
        assert_same_bits(written, cache)


@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), -float("inf")])
def test_a_spoilt_number_is_read_back_as_such_and_in_its_own_head_only(spoil: float) -> None:
    rows = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(2))
    rows[0, 1, 3] = spoil
    slots = torch.tensor([3, 4])
    before = poisoned_caches(2, 8, 8, FP8)
    after = store_on_device(rows, rows, slots, before)
    expected = read_rows(expect_written(before.k, slots, rows), slots, torch.float32)
    torch.testing.assert_close(read_rows(after.k.cpu(), slots, torch.float32), expected, rtol=0, atol=0, equal_nan=True)
    assert expected[0, 1, 3].isnan() and expected[0, 0].isfinite().all() and expected[1].isfinite().all()


@pytest.mark.parametrize("number", [0.0, 1e-43])
def test_rows_of_zeros_and_of_numbers_too_small_for_a_scale_have_scale_one_in_fp8(number: float) -> None:
    zeros = torch.full((1, 2, 8), number)
    after = store_on_device(zeros, zeros, torch.tensor([2]), poisoned_caches(2, 8, 8, FP8))
    assert after.k[2, :, 8:].cpu().contiguous().view(torch.float32).tolist() == [[1.0], [1.0]]
    assert not after.k[2, :, :8].any()


def test_every_float8_is_written_as_itself_and_halves_go_to_even() -> None:
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    between = (codes[:-1] + codes[1:]) / 2
    numbers = torch.cat([codes, between, -codes, -between])  # the largest is 448: the scale is 1
    rows = torch.nn.functional.pad(numbers, (0, 512 - len(numbers)))[None, None]
    before = poisoned_caches(1, 512, 512, FP8)
    after = store_on_device(rows, rows, torch.tensor([1]), before)
    assert_same_bits(after.k, expect_written(before.k, torch.tensor([1]), rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
@given(pcp_size=st.integers(1, 3), width=st.integers(0, 4), **SIZES, seed=st.integers(0, 2**31))
@settings(max_examples=12, deadline=None)
def test_gathered_rows_are_written_as_restored_ones_are(
    dtype: torch.dtype, pcp_size: int, width: int, num_heads: int, k_width: int, v_width: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_rows = pcp_size * width
    k, v = (torch.randn(1, num_heads, num_rows, d, generator=generator) for d in (k_width, v_width))
    slots = draw_slots(num_rows, generator)
    k[:, :, slots < 0], v[:, :, slots < 0] = float("nan"), float("nan")
    expanded = ops.pack_rows([k, v], [2, 2])
    before = poisoned_caches(num_heads, k_width, v_width, dtype)
    written = Caches(*(cache.to(DEVICE, copy=True) for cache in before))
    kv_rows.store_gathered_kv(expanded.to(DEVICE), slots.to(DEVICE), *written)
    for rows, cache, actual in zip((k, v), before, written, strict=True):
        assert_same_bits(actual, expect_written(cache, slots, rows[0].transpose(0, 1)))


def test_a_pack_of_another_width_is_no_pack_of_these_caches() -> None:
    caches = poisoned_caches(2, 8, 8, torch.float32)
    with pytest.raises(AssertionError, match="33 columns for 16"):
        kv_rows.store_gathered_kv(torch.zeros(1, 33), torch.tensor([1]), *caches)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
@given(
    pcp_size=st.integers(1, 3), width=st.integers(1, 4), num_columns=st.integers(1, 70),
    num_wanted=st.integers(0, 6), seed=st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_owned_rows_add_up_to_the_wanted_ones(
    dtype: torch.dtype, pcp_size: int, width: int, num_columns: int, num_wanted: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = (100 * torch.randn(pcp_size, width, 2 * num_columns, generator=generator)).to(dtype)[..., :num_columns]
    sources = torch.randint(pcp_size * width, (num_wanted,), generator=generator)
    total = torch.zeros(num_wanted, num_columns, dtype=dtype)
    for rank in range(pcp_size):
        index = torch.tensor(rank)
        owned = kv_rows.restore_rows(rows.to(DEVICE)[rank], sources.to(DEVICE), index.to(DEVICE))
        assert_same_bits(owned, ops.owned_rows(rows[rank], sources, index, 0))
        total += owned.cpu()
    assert torch.equal(total, rows.reshape(-1, num_columns)[sources])


def test_rows_of_other_ranks_and_of_nobody_are_zero_whatever_this_rank_holds() -> None:
    x = torch.full((2, 3), float("nan"), device=DEVICE)
    x[1] = 7.0
    sources = torch.tensor([5, -1, 0, -6, 3], device=DEVICE)
    owned = kv_rows.restore_rows(x, sources, torch.tensor(1, device=DEVICE))
    assert owned.tolist() == [[0.0] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3, [7.0] * 3]


def test_a_rank_without_rows_owns_nothing() -> None:
    owned = kv_rows.restore_rows(
        torch.empty(0, 3, device=DEVICE), torch.tensor([0, 4], device=DEVICE), torch.tensor(1, device=DEVICE)
    )
    assert not owned.any()


def test_a_write_is_one_launch_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *args, **kwargs: launches.append((grid, args))

    monkeypatch.setattr(kv_rows, "_store_kv_kernel", Counted())
    expanded = torch.zeros(6, 2 * (8 + 16))
    kv_rows.store_gathered_kv(expanded, torch.arange(6), *poisoned_caches(2, 8, 16, torch.float32))
    ((grid, (k, v, *_)),) = launches
    assert grid == (6, 1, 2)
    assert k.data_ptr() == expanded.data_ptr() and v.data_ptr() == expanded[:, 16:].data_ptr()


@pytest.mark.parametrize(
    ("shape", "dim"), [((4, 6), 0), ((1, 4, 6), 1), ((1, 1, 4, 2, 3), 2), ((1, 0, 6), 1), ((4,), 0)]
)
@pytest.mark.parametrize("is_dense", [True, False])
def test_a_contribution_of_wanted_rows_is_the_same_in_one_launch(
    shape: tuple[int, ...], dim: int, is_dense: bool
) -> None:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(4))
    x = x if is_dense else torch.stack([x, x], -1)[..., 0]
    num_rows = shape[dim]
    sources, rank = torch.tensor([9, num_rows, 1, 0, num_rows, 2 * num_rows - 1]), torch.tensor(1)
    if num_rows == 0:
        sources = torch.empty(0, dtype=torch.int64)
    owned = ops._owned_rows_cuda(x.to(DEVICE), sources.to(DEVICE), rank.to(DEVICE), dim)
    assert_same_bits(owned, ops.owned_rows(x, sources, rank, dim))

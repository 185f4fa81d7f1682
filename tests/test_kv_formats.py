"""How keys and values lie in a cache, in each type."""

from __future__ import annotations

import pytest
import torch

from pcp_compiler import kv_ops
from pcp_compiler.kv_formats import FP8, cache_shape, read_rows, row_width, write_rows

SLOTS = torch.tensor([5, 2, 9])
TOLERANCE = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11, FP8: 2**-4}
"""Relative error of one rounding; of fp8 for numbers that are no more than 2**9 below the largest of their row."""


def make_cache(dtype: torch.dtype, num_slots: int = 12) -> torch.Tensor:
    """Return a cache of 2 heads of width 8."""
    shape, stored = cache_shape((2, 8), dtype)
    return torch.zeros(num_slots, *shape, dtype=stored)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rows_are_read_as_they_were_written_up_to_one_rounding(dtype: torch.dtype) -> None:
    rows = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0)) + 3.0
    cache = make_cache(dtype)
    write_rows(cache, SLOTS, rows)
    assert row_width(cache) == 8
    torch.testing.assert_close(read_rows(cache, SLOTS, torch.float32), rows, rtol=TOLERANCE[dtype], atol=0)
    others = [slot for slot in range(12) if slot not in SLOTS]
    assert not cache[others].any()


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 1e4, 1e30])
def test_fp8_rows_of_any_size_keep_their_precision(size: float) -> None:
    rows = size * (torch.rand(3, 2, 8, generator=torch.Generator().manual_seed(1)) + 0.1)
    rows[1, 0] *= 1e3  # another scale in the same row
    cache = make_cache(FP8)
    write_rows(cache, SLOTS, rows)
    torch.testing.assert_close(read_rows(cache, SLOTS, torch.float32), rows, rtol=2**-4, atol=0)
    assert cache.dtype == torch.uint8 and cache.shape == (12, 2, 12)


def test_fp8_keeps_zero_and_the_largest_number_of_a_row_exactly() -> None:
    rows = torch.zeros(3, 2, 8)
    rows[1, 1, 3] = -448.0
    cache = make_cache(FP8)
    write_rows(cache, SLOTS, rows)
    assert torch.equal(read_rows(cache, SLOTS, torch.float32), rows)


def test_fp8_reads_numbers_too_small_for_a_scale_as_zeros() -> None:
    rows = torch.full((3, 2, 8), 1e-43)  # a 448th of it is less than half of the smallest float32
    cache = make_cache(FP8)
    write_rows(cache, SLOTS, rows)
    assert torch.equal(read_rows(cache, SLOTS, torch.float32), torch.zeros_like(rows))


def test_what_one_row_holds_does_not_depend_on_rows_written_with_it() -> None:
    rows = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(2))
    together, alone = make_cache(FP8), make_cache(FP8)
    write_rows(together, SLOTS, rows)
    for i in range(3):
        write_rows(alone, SLOTS[i : i + 1], rows[i : i + 1] if i else rows[:1])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("spoil", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [None, 3])
def test_a_spoilt_row_reaches_only_the_rows_that_see_it(spoil: float, window: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    k_cache, v_cache = (torch.randn(17, 2, 8, generator=generator) for _ in range(2))
    q = torch.randn(1, 8, 4, 8, generator=generator)
    spans, tables = torch.tensor([[0, 0, 8, 8]]), torch.tensor([[1, 3]], dtype=torch.int32)

    def attend() -> torch.Tensor:
        return kv_ops.paged_attention(
            q,
            torch.empty(0),
            k_cache,
            v_cache,
            spans,
            tables,
            block_size=4,
            layer=0,
            scale=0.3,
            window=window,
            backend="sdpa",
        )

    clean = attend()
    v_cache[4 + 2] = spoil  # position 2 of the request
    k_cache[4 + 2, 1] = spoil
    spoilt = attend()
    sees = [row >= 2 and (window is None or row < 2 + window) for row in range(8)]
    for row in range(8):
        if sees[row]:
            assert spoilt[0, row].isnan().all()
        else:
            assert torch.equal(spoilt[0, row], clean[0, row])

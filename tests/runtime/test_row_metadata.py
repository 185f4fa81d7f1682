"""Metadata of rows that are a request each, and attention with it, against positions and slots counted in Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pcp_compiler.kv_ops import (
    ADVANCE_METADATA,
    BUILD_METADATA,
    PAGED_ATTENTION,
    PAGED_ATTENTION_ROWS,
    STORE_KV,
)

BLOCK_SIZE, MAX_MODEL_LEN, MAX_BLOCKS = 4, 18, 5
SIZES = {"block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN}
TABLES = torch.tensor([[7, 2, 9, 4, 1], [3, 8, 5, 6, 10], [0, 0, 0, 0, 0]], dtype=torch.int32)


def slot_of(row: int, position: int) -> int:
    """Return where a position is stored; -1 for one that is not."""
    if position >= MAX_MODEL_LEN or row == 2:
        return -1
    return int(TABLES[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


def build(positions: list[int], bound: int = MAX_MODEL_LEN) -> tuple[Tensor, Tensor, Tensor]:
    """Return kv_slots, slots and kv_lens of rows 0, 1, ... at these positions."""
    rows = torch.tensor([positions])
    return BUILD_METADATA(rows, TABLES[: len(positions)], torch.arange(bound), **SIZES)  # type: ignore[no-any-return]


@pytest.mark.parametrize("start", range(MAX_MODEL_LEN + 3))
def test_metadata_says_where_each_position_is_stored_and_up_to_where_a_row_sees(start: int) -> None:
    positions = [start, max(0, start - 5), 0]
    kv_slots, slots, kv_lens = build(positions)
    for row in range(2):
        assert kv_slots[row].tolist() == [slot_of(row, position) for position in range(MAX_MODEL_LEN)]
    assert slots.tolist() == [slot_of(row, position) for row, position in enumerate(positions)]
    assert kv_lens.tolist() == [position + 1 for position in positions]


@pytest.mark.parametrize("start", range(MAX_MODEL_LEN + 3))
@pytest.mark.parametrize("by", [1, 2, 7])
def test_advanced_metadata_is_that_built_at_the_later_positions(start: int, by: int) -> None:
    kv_slots, _, kv_lens = build([start, max(0, start - 5), 0])
    advanced = ADVANCE_METADATA(kv_slots, kv_lens, by=by, max_model_len=MAX_MODEL_LEN)
    _, slots, lens = build([start + by, max(0, start - 5) + by, by])
    assert torch.equal(advanced[0], slots) and torch.equal(advanced[1], lens)


def test_a_chain_of_advances_crosses_blocks_and_stops_at_the_last_position() -> None:
    kv_slots, slots, kv_lens = build([1, 14])
    for position in range(2, 9):
        slots, kv_lens = ADVANCE_METADATA(kv_slots, kv_lens, by=1, max_model_len=MAX_MODEL_LEN)
        assert slots.tolist() == [slot_of(0, position), slot_of(1, position + 13)]
        assert kv_lens.tolist() == [position + 1, position + 14]
    assert slots[1] == -1


def test_a_row_at_or_behind_the_last_position_writes_nothing() -> None:
    _, slots, kv_lens = build([MAX_MODEL_LEN - 1, MAX_MODEL_LEN])
    assert slots.tolist() == [slot_of(0, MAX_MODEL_LEN - 1), -1]
    assert kv_lens.tolist() == [MAX_MODEL_LEN, MAX_MODEL_LEN + 1]


def test_a_bound_that_is_too_small_by_one_is_an_error_and_no_wrong_draft() -> None:
    kv_slots, slots, kv_lens = build([6, 2], bound=7)
    assert slots.tolist() == [slot_of(0, 6), slot_of(1, 2)]
    with pytest.raises(RuntimeError, match="out of bounds"):
        ADVANCE_METADATA(kv_slots, kv_lens, by=1, max_model_len=MAX_MODEL_LEN)
    with pytest.raises(RuntimeError, match="out of bounds"):
        build([7, 2], bound=7)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 3},
    {"soft_cap": 2.0},
    {"sinks": torch.tensor([0.3, -0.2, 1.0, 0.0])},
    {"window": 2, "soft_cap": 1.5, "sinks": torch.zeros(4)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_attention_of_rows_is_that_of_spans_whatever_lies_behind_what_a_row_sees(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    caches = [torch.randn(45, 2, width, generator=generator) for width in (8, 6)]
    q, k, v = (torch.randn(1, 2, heads, width, generator=generator) for heads, width in ((4, 8), (2, 8), (2, 6)))
    positions = [9, 2]
    kv_slots, slots, kv_lens = build(positions, bound=16)
    for row, position in enumerate(positions):
        for hidden in range(position, 16):
            for cache in caches:
                cache[slot_of(row, hidden)] = float("nan") if hidden % 2 else float("inf")
    stored = STORE_KV(k, v, slots, *caches, layer=0)
    assert all(cache[slots].isfinite().all() for cache in caches)
    out = PAGED_ATTENTION_ROWS(q, stored, *caches, kv_slots, kv_lens, layer=0, scale=0.3, **options)
    spans = torch.tensor([[row, row, 1, position + 1] for row, position in enumerate(positions)])
    expected = PAGED_ATTENTION(q, stored, *caches, spans, TABLES, block_size=BLOCK_SIZE, layer=0, scale=0.3, **options)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert out.isfinite().all()


def test_a_window_of_rows_cuts_what_spans_cut() -> None:
    generator = torch.Generator().manual_seed(1)
    caches = [torch.randn(45, 2, 8, generator=generator) for _ in range(2)]
    q = torch.randn(1, 1, 4, 8, generator=generator)
    kv_slots, _, kv_lens = build([9])
    plain, window = (
        PAGED_ATTENTION_ROWS(q, q.new_empty(0), *caches, kv_slots, kv_lens, layer=0, scale=0.3, window=size)
        for size in (None, 3)
    )
    assert not torch.allclose(plain, window)

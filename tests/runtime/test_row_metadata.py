"""Metadata of rows that are a request each, and attention with it, against positions and slots counted in Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pcp_compiler.kv_ops import ADVANCE_METADATA, BUILD_METADATA, PAGED_ATTENTION, STORE_KV

BLOCK_SIZE, MAX_MODEL_LEN, MAX_BLOCKS = 4, 18, 5
SIZES = {"block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN}
TABLES = torch.tensor([[7, 2, 9, 4, 1], [3, 8, 5, 6, 10], [0, 0, 0, 0, 0]], dtype=torch.int32)


def slot_of(row: int, position: int) -> int:
    """Return where a position is stored; -1 for one that is not."""
    if position >= MAX_MODEL_LEN or row == 2:
        return -1
    return int(TABLES[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


def span_of(row: int, position: int) -> list[int]:
    """Return the span of a row that is a request; row 2 is padding."""
    return [row, row, int(row != 2), min(position + 1, MAX_MODEL_LEN)]


def build(positions: list[int], num_blocks: int = MAX_BLOCKS) -> tuple[Tensor, Tensor]:
    """Return spans and slots of rows 0, 1, ... at these positions."""
    rows = torch.tensor([positions])
    return BUILD_METADATA(rows, TABLES[: len(positions), :num_blocks], **SIZES)  # type: ignore[no-any-return]


@pytest.mark.parametrize("start", range(MAX_MODEL_LEN + 3))
def test_metadata_says_where_each_row_is_stored_and_up_to_where_it_sees(start: int) -> None:
    positions = [start, max(0, start - 5), 0]
    spans, slots = build(positions)
    assert spans.tolist() == [span_of(row, position) for row, position in enumerate(positions)]
    assert slots.tolist() == [slot_of(row, position) for row, position in enumerate(positions)]


@pytest.mark.parametrize("start", range(MAX_MODEL_LEN + 3))
@pytest.mark.parametrize("by", [1, 2, 7])
def test_advanced_metadata_is_that_built_at_the_later_positions(start: int, by: int) -> None:
    spans, _ = build([start, max(0, start - 5), 0])
    advanced = ADVANCE_METADATA(spans, TABLES, by=by, **SIZES)
    expected = build([start + by, max(0, start - 5) + by, by])
    assert torch.equal(advanced[0], expected[0]) and torch.equal(advanced[1], expected[1])


def test_a_chain_of_advances_crosses_blocks_and_stops_at_the_last_position() -> None:
    spans, slots = build([1, 14])
    for position in range(2, 9):
        spans, slots = ADVANCE_METADATA(spans, TABLES[:2], by=1, **SIZES)
        assert slots.tolist() == [slot_of(0, position), slot_of(1, position + 13)]
        assert spans.tolist() == [span_of(0, position), span_of(1, position + 13)]
    assert slots[1] == -1


def test_block_tables_that_are_too_narrow_by_one_are_an_error_and_no_wrong_draft() -> None:
    spans, slots = build([7, 2], num_blocks=2)
    assert slots.tolist() == [slot_of(0, 7), slot_of(1, 2)]
    with pytest.raises(RuntimeError, match="out of bounds"):
        ADVANCE_METADATA(spans, TABLES[:2, :2], by=1, **SIZES)
    with pytest.raises(RuntimeError, match="out of bounds"):
        build([8, 2], num_blocks=2)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 3},
    {"soft_cap": 2.0},
    {"sinks": torch.tensor([0.3, -0.2, 1.0, 0.0])},
    {"window": 2, "soft_cap": 1.5, "sinks": torch.zeros(4)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_rows_at_once_attend_as_one_by_one_whatever_lies_behind_what_a_row_sees(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    caches = [torch.randn(45, 2, width, generator=generator) for width in (8, 6)]
    q, k, v = (torch.randn(1, 3, heads, width, generator=generator) for heads, width in ((4, 8), (2, 8), (2, 6)))
    positions = [9, 2, 0]
    spans, slots = build(positions)
    for row, position in enumerate(positions[:2]):
        for hidden in range(position, MAX_MODEL_LEN):
            for cache in caches:
                cache[slot_of(row, hidden)] = float("nan") if hidden % 2 else float("inf")
    stored = STORE_KV(k, v, slots, *caches, layer=0)
    assert all(cache[slots[:2]].isfinite().all() for cache in caches)
    at_once, one_by_one = (
        PAGED_ATTENTION(
            q, stored, *caches, spans, TABLES, block_size=BLOCK_SIZE, layer=0, scale=0.3, backend=name, **options
        )
        for name in ("sdpa_prefix", "sdpa")
    )
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-5, atol=1e-6)
    assert at_once.isfinite().all() and (at_once[0, 2] == 0).all()


def test_a_window_of_rows_cuts_what_spans_cut() -> None:
    generator = torch.Generator().manual_seed(1)
    caches = [torch.randn(45, 2, 8, generator=generator) for _ in range(2)]
    q = torch.randn(1, 1, 4, 8, generator=generator)
    spans, _ = build([9])
    plain, window = (
        PAGED_ATTENTION(
            q, q.new_empty(0), *caches, spans, TABLES, block_size=BLOCK_SIZE, layer=0, scale=0.3, window=size,
            backend="sdpa_prefix",
        )
        for size in (None, 3)
    )  # fmt: skip
    assert not torch.allclose(plain, window)

"""Kernels that make integers, against `kv_ops`, the host's own code and loops over rows: all of it exact."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcp_compiler import kv_ops
from pcp_compiler.kernels import metadata

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"block_size": 4, "max_model_len": 8}
GARBAGE = 2**40 + 7
"""Fills what nobody may look at."""


@dataclass(frozen=True, slots=True)
class RowCase:
    """Rows that are a request each."""

    positions: Tensor
    block_tables: Tensor
    block_size: int
    max_model_len: int

    @property
    def sizes(self) -> dict[str, int]:
        return {"block_size": self.block_size, "max_model_len": self.max_model_len}


@st.composite
def row_cases(draw: st.DrawFn, *, max_overrun: int = 3) -> RowCase:
    """Draw rows, some of them padding, some with a position that no request can have; tables end in zeros or -1."""
    block_size, max_blocks, num_rows = draw(st.integers(1, 7)), draw(st.integers(1, 6)), draw(st.integers(0, 9))
    max_model_len = draw(st.integers(1, block_size * max_blocks))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    positions = torch.randint(max_model_len + max_overrun, (num_rows,), generator=generator)
    # a wider tensor, so that the rows of the tables are strided
    wide = 1 + torch.randperm(max(num_rows, 1) * (max_blocks + 2), generator=generator).reshape(-1, max_blocks + 2)
    tables = wide.to(torch.int32)[:num_rows, :max_blocks]
    needed = positions.clamp(max=max_model_len - 1) // block_size + 1
    tables[torch.arange(max_blocks) >= needed[:, None]] = draw(st.sampled_from([0, -1]))
    is_padding = torch.rand(num_rows, generator=generator) < 0.25
    tables[is_padding] = 0
    positions[is_padding] = 0
    return RowCase(positions, tables, block_size, max_model_len)


@given(case=row_cases(), steps=st.integers(0, 4), by=st.integers(1, 3), narrow=st.booleans())
@settings(max_examples=80, deadline=None)
def test_metadata_is_that_of_the_reference_built_and_advanced(case: RowCase, steps: int, by: int, narrow: bool) -> None:
    tables = case.block_tables.to(DEVICE)
    positions = case.positions[None].to(torch.int32 if narrow else torch.int64)
    expected = kv_ops.build_metadata(case.positions[None], case.block_tables, **case.sizes)
    actual = metadata.build_metadata(positions.to(DEVICE), tables, **case.sizes)
    assert_same(actual, expected)
    for _ in range(steps):
        expected = kv_ops.advance_metadata(expected[0], case.block_tables, by=by, **case.sizes)
        before = actual[0].clone()
        advanced = metadata.advance_metadata(actual[0], tables, by=by, **case.sizes)
        assert torch.equal(actual[0], before)
        actual = advanced
        assert_same(actual, expected)


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Compare spans and slots with those of the reference."""
    for mine, reference in zip(actual, expected, strict=True):
        assert mine.dtype == torch.int64 and torch.equal(mine.cpu(), reference)


def test_padding_rows_have_no_row_in_their_span_and_stay_so() -> None:
    tables = torch.tensor([[2, 5], [0, 0], [3, 7], [-1, -1]], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([3, 2, -1, 0], device=DEVICE)
    spans, slots = metadata.build_metadata(positions, tables, **SIZES)
    assert spans.tolist() == [[0, 0, 1, 4], [1, 1, 0, 3], [2, 2, 0, 0], [3, 3, 0, 1]]
    assert slots.tolist() == [11, -1, -1, -1]
    spans, slots = metadata.advance_metadata(spans, tables, by=1, **SIZES)
    assert spans.tolist() == [[0, 0, 1, 5], [1, 1, 0, 4], [2, 2, 0, 1], [3, 3, 0, 2]]
    assert slots.tolist() == [20, -1, -1, -1]


def test_rows_beyond_the_longest_request_write_nothing_and_read_no_further() -> None:
    tables = torch.tensor([[2, 5], [6, 7]], dtype=torch.int32, device=DEVICE)
    spans, slots = metadata.build_metadata(torch.tensor([8, 7], device=DEVICE), tables, **SIZES)
    assert spans.tolist() == [[0, 0, 1, 8], [1, 1, 1, 8]] and slots.tolist() == [-1, 31]
    spans, slots = metadata.advance_metadata(spans, tables, by=1, **SIZES)
    assert spans.tolist() == [[0, 0, 1, 8], [1, 1, 1, 8]] and slots.tolist() == [-1, -1]


@pytest.mark.parametrize("num_rows", [1, 129])
def test_rows_of_more_than_one_tile_are_all_served(num_rows: int) -> None:
    tables = 1 + torch.arange(2 * num_rows, dtype=torch.int32).reshape(num_rows, 2)
    positions = torch.arange(num_rows)[None] % 6
    expected = kv_ops.build_metadata(positions, tables, **SIZES)
    actual = metadata.build_metadata(positions.to(DEVICE), tables.to(DEVICE), **SIZES)
    assert_same(actual, expected)
    assert_same(
        metadata.advance_metadata(actual[0], tables.to(DEVICE), by=1, **SIZES),
        kv_ops.advance_metadata(expected[0], tables, by=1, **SIZES),
    )


@pytest.mark.skipif(DEVICE.type == "cuda", reason="no kernel runs in a process after a device-side assertion")
def test_a_position_behind_the_block_tables_has_no_slot() -> None:
    tables = torch.tensor([[2, 9], [0, 9]], dtype=torch.int32)[:, :1]
    spans, slots = metadata.build_metadata(torch.tensor([3, 6]), tables, **SIZES)
    assert slots.tolist() == [11, -1]
    spans, slots = metadata.advance_metadata(spans, tables, by=1, **SIZES)
    assert slots.tolist() == [-1, -1]


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """A request of a step: a prompt that goes on (`next_prompt_id`), or one with a verdict."""

    num_rows: int
    num_drafts: int = 0
    num_emitted: int = 0
    next_prompt_id: int | None = None


def judged_requests() -> st.SearchStrategy[RoundRequest]:
    """Draw a decode, a verify round or the end of a prompt: some rows, drafts last, none or some tokens emitted."""
    return st.integers(0, 4).flatmap(
        lambda drafts: st.builds(
            RoundRequest, num_rows=st.integers(drafts + 1, drafts + 4), num_drafts=st.just(drafts),
            num_emitted=st.integers(0, drafts + 1),
        )
    )  # fmt: skip


def prompts_going_on() -> st.SearchStrategy[RoundRequest]:
    return st.builds(RoundRequest, num_rows=st.integers(0, 7), next_prompt_id=st.integers(0, 50_000))


class Round:
    """The tensors of a step, ids all different, and what the host's code makes of them."""

    def __init__(self, requests: list[RoundRequest], num_pads: int) -> None:
        lens = [request.num_rows for request in requests]
        self.requests = requests
        self.query_start = torch.tensor([0, *torch.tensor(lens, dtype=torch.int64).cumsum(0).tolist()])
        self.num_live = int(self.query_start[-1])
        self.input_ids = torch.cat([1000 + torch.arange(self.num_live), torch.full((num_pads,), GARBAGE)])
        judged = [request for request in requests if request.next_prompt_id is None]
        order = torch.randperm(len(judged), generator=torch.Generator().manual_seed(len(judged))).tolist()
        width = max((request.num_drafts for request in judged), default=0) + 1
        self.token_ids = torch.full((len(judged), width + 1), GARBAGE)[:, :width]
        self.num_emitted = torch.zeros(len(judged), dtype=torch.int64)
        verdict_rows = iter(order)
        self.verdict_rows = torch.tensor(
            [-1 if r.next_prompt_id is not None else next(verdict_rows) for r in requests], dtype=torch.int64
        )
        for request, row in zip(requests, self.verdict_rows.tolist(), strict=True):
            if row >= 0:
                self.num_emitted[row] = request.num_emitted
                self.token_ids[row, : request.num_emitted] = 10 * row + torch.arange(request.num_emitted)
        self.num_drafts = torch.tensor([r.num_drafts for r in requests], dtype=torch.int64)
        self.next_prompt_ids = torch.tensor(
            [GARBAGE if r.next_prompt_id is None else r.next_prompt_id for r in requests], dtype=torch.int64
        )

    def shift(self) -> tuple[Tensor, Tensor]:
        arguments = (
            self.input_ids[None], self.query_start, self.num_drafts, self.next_prompt_ids, self.verdict_rows,
            self.token_ids, self.num_emitted,
        )  # fmt: skip
        return metadata.shift_ids(*(x.to(DEVICE) for x in arguments))

    def expect(self) -> tuple[list[int], list[int]]:
        """Return shifted ids, as MTPProposer's host code makes them, and last rows, as the judge does."""
        num_pads = len(self.input_ids) - self.num_live
        shifted = [*self.input_ids[1 : self.num_live].tolist(), *[0] * (num_pads + (self.num_live > 0))]
        last_rows = []
        for request, stop, row in zip(self.requests, self.query_start[1:].tolist(), self.verdict_rows, strict=True):
            last_rows.append(stop - 1)
            if request.next_prompt_id is not None:
                if request.num_rows:
                    shifted[stop - 1] = request.next_prompt_id
                continue
            first = stop - 1 - request.num_drafts
            last_rows[-1] = first + max(request.num_emitted, 1) - 1
            shifted[first : first + request.num_emitted] = self.token_ids[row, : request.num_emitted].tolist()
        return shifted, last_rows


@given(
    requests=st.lists(st.one_of(judged_requests(), prompts_going_on()), max_size=9), num_pads=st.integers(0, 5)
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_ids_are_shifted_as_the_host_does(requests: list[RoundRequest], num_pads: int) -> None:
    step = Round(requests, num_pads)
    next_ids, last_rows = step.shift()
    assert (next_ids.tolist(), last_rows.tolist()) == step.expect()


@pytest.mark.parametrize("num_requests", [1, 2, 64, 65, 140])
def test_ids_are_shifted_across_tiles_of_rows_and_requests(num_requests: int) -> None:
    step = Round([RoundRequest(3, 2, i % 4) if i % 3 else RoundRequest(2, 0, 0, i) for i in range(num_requests)], 7)
    next_ids, last_rows = step.shift()
    assert (next_ids.tolist(), last_rows.tolist()) == step.expect()


def test_requests_of_padding_have_no_rows_and_change_none() -> None:
    step = Round([RoundRequest(3, 2, 1), RoundRequest(0, 0, 0, 9), RoundRequest(0, 0, 0, 9)], 2)
    next_ids, last_rows = step.shift()
    assert next_ids.tolist() == [0, 1002, 0, 0, 0] and last_rows.tolist() == [0, 2, 2]

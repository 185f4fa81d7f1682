"""Capability records: what each backend claims, and how a need picks one."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import get_args

import pytest

from pcp_compiler.config import BackendName, BackendPerKind
from pcp_compiler.plan.capabilities import (
    ATTENTION_KINDS,
    BACKENDS,
    SDPA,
    SDPA_PREFIX,
    AttentionNeeds,
    describe_gaps,
    find_backend,
    pick_backend,
)

KINDS = ("full", "sliding_window", "mla")


def test_the_config_takes_exactly_the_backends_and_kinds_that_have_records() -> None:
    assert {record.name for record in BACKENDS} == set(get_args(BackendName))
    assert set().union(*(record.kinds for record in BACKENDS)) == set(BackendPerKind.model_fields)
    assert set(BackendPerKind.model_fields) <= set(ATTENTION_KINDS)
    assert [find_backend(record.name) for record in BACKENDS] == list(BACKENDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pcp", "expected"), [(True, "sdpa"), (False, "sdpa_prefix")])
def test_zigzag_rows_get_the_reference_and_rows_at_the_end_of_a_request_get_sdpa_prefix(
    kind: str, pcp: bool, expected: str
) -> None:
    assert pick_backend(AttentionNeeds(kind, pcp=pcp, ragged_queries=True, paged=True)) == expected


@pytest.mark.parametrize(
    ("needs", "gaps"),
    [
        (AttentionNeeds("full"), ()),
        (AttentionNeeds("mla", ragged_queries=True, paged=True), ()),
        (AttentionNeeds("full", pcp=True), ("PCP rank-local rows",)),
        (AttentionNeeds("sparse_index", non_causal=True), ("kind sparse_index", "non-causal draft_blocks")),
    ],
)
def test_a_record_names_what_it_lacks_of_a_need(needs: AttentionNeeds, gaps: tuple[str, ...]) -> None:
    assert SDPA_PREFIX.find_gaps(needs) == gaps


def test_a_backend_that_needs_equal_rows_in_contiguous_memory_says_so() -> None:
    plain = replace(SDPA, ragged_queries=False, paged=False)
    assert plain.find_gaps(AttentionNeeds("full")) == ()
    gaps = plain.find_gaps(AttentionNeeds("full", ragged_queries=True, paged=True))
    assert gaps == ("query rows that differ by request", "paged K/V")


def test_no_backend_is_picked_where_all_have_gaps_and_each_says_which() -> None:
    needs = AttentionNeeds("sparse_index", pcp=True)
    assert pick_backend(needs) is None
    assert describe_gaps(needs) == (
        "sdpa_prefix has no kind sparse_index, no PCP rank-local rows; sdpa has no kind sparse_index"
    )


def test_a_backend_without_gaps_is_not_in_the_description() -> None:
    assert describe_gaps(AttentionNeeds("full", pcp=True)) == "sdpa_prefix has no PCP rank-local rows"
    assert describe_gaps(AttentionNeeds("full")) == ""


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        SDPA.paged = False  # type: ignore[misc]

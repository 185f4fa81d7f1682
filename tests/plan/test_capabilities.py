"""Capability records: what each backend claims, and how a need picks one."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from importlib.metadata import EntryPoint

import pytest

from pcp_compiler import config_sections
from pcp_compiler.config import load_config
from pcp_compiler.config_sections import BackendPerKind, attention_backend_names
from pcp_compiler.errors import ConfigError
from pcp_compiler.plan import capabilities
from pcp_compiler.plan.capabilities import (
    ATTENTION_KINDS,
    AttentionNeeds,
    describe_gaps,
    find_backend,
    find_record,
    load_records,
    pick_backend,
)

KINDS = ("full", "sliding_window", "mla")
SDPA, SDPA_PREFIX = (find_record(name, load_records()) for name in ("sdpa", "sdpa_prefix"))
REFERENCES = (SDPA_PREFIX, SDPA)


def test_the_config_takes_exactly_the_backends_and_kinds_that_have_records() -> None:
    records = load_records()
    assert tuple(record.name for record in records) == attention_backend_names()
    assert set().union(*(record.kinds for record in records)) == set(BackendPerKind.model_fields)
    assert set(BackendPerKind.model_fields) <= set(ATTENTION_KINDS)
    assert [find_backend(record.name).capabilities for record in records] == list(records)


def test_a_backend_of_another_package_joins_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", f"{__name__}:MINE", config_sections.ATTENTION_ENTRY_POINTS)
    for module in (config_sections, capabilities):
        monkeypatch.setattr(module, "entry_points", lambda group: [entry] if group == entry.group else [])
    with pytest.raises(ConfigError, match="yours"):
        load_config({"attention.backend": "yours"})
    assert load_config({"attention.backend": "mine"}).attention.backend == "mine"
    backend = replace(find_backend("sdpa"), capabilities=MINE)
    monkeypatch.setattr(EntryPoint, "load", lambda _entry: backend)
    capabilities.load_backends.cache_clear()
    try:
        assert find_backend("mine").capabilities is MINE
        assert pick_backend(AttentionNeeds("full", device="tpu"), load_records()) == "mine"
    finally:
        capabilities.load_backends.cache_clear()


MINE = replace(SDPA, name="mine", priorities={"tpu": 0})


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("sdpa", "mine:BACKEND", "this name is one of ours"),
        ("mine", "no_such_package:BACKEND", "cannot be loaded: ModuleNotFoundError"),
        ("mine", f"{__name__}:MINE", "got AttentionCapabilities"),
    ],
)
def test_a_faulty_entry_point_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str) -> None:
    entry = EntryPoint(name, value, config_sections.ATTENTION_ENTRY_POINTS)
    monkeypatch.setattr(capabilities, "entry_points", lambda group: [entry])
    capabilities.load_backends.cache_clear()
    try:
        with pytest.raises(ConfigError, match=rf"attention backend {name} \(entry point .*{reason}"):
            load_records()
    finally:
        capabilities.load_backends.cache_clear()


@pytest.mark.parametrize(
    ("needs", "gap"),
    [
        (AttentionNeeds("full", device="tpu"), "device tpu"),
        (AttentionNeeds("full", device="cuda", dtype="float32"), "dtype float32"),
        (AttentionNeeds("full", device="cuda", head_dims=(320, 320)), "heads of 320 numbers"),
        (AttentionNeeds("full", device="cuda", head_dims=(192, 128)), "values narrower than keys"),
        (AttentionNeeds("full", device="cuda", soft_cap=True), "soft caps"),
        (AttentionNeeds("full", device="cuda", sinks=True), "sinks"),
        (AttentionNeeds("full", device="cuda", capture=True), "captured graphs"),
    ],
)
def test_a_gap_has_words_for_each_need(needs: AttentionNeeds, gap: str) -> None:
    varlen = replace(find_record("varlen", load_records()), missing=None)
    assert varlen.find_gaps(needs) == (gap,)


def test_what_the_environment_lacks_is_a_gap() -> None:
    record = replace(SDPA, missing="torch 3 or newer")
    assert record.find_gaps(AttentionNeeds("full")) == ("what it needs: torch 3 or newer",)


def test_the_device_decides_what_automatic_tries_first() -> None:
    records = [replace(record, missing=None) for record in load_records()]
    needs = AttentionNeeds("full", dtype="bfloat16", head_dims=(64, 64), paged=True, pcp=True)
    assert pick_backend(needs, records) == "sdpa"
    assert pick_backend(replace(needs, device="cuda"), records) == "triton"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pcp", "expected"), [(True, "sdpa"), (False, "sdpa_prefix")])
def test_zigzag_rows_get_the_reference_and_rows_at_the_end_of_a_request_get_sdpa_prefix(
    kind: str, pcp: bool, expected: str
) -> None:
    assert pick_backend(AttentionNeeds(kind, pcp=pcp, ragged_queries=True, paged=True), REFERENCES) == expected


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
    assert pick_backend(needs, REFERENCES) is None
    assert describe_gaps(needs, REFERENCES) == (
        "sdpa_prefix has no kind sparse_index, no PCP rank-local rows; sdpa has no kind sparse_index"
    )


def test_a_backend_without_gaps_is_not_in_the_description() -> None:
    assert describe_gaps(AttentionNeeds("full", pcp=True), REFERENCES) == "sdpa_prefix has no PCP rank-local rows"
    assert describe_gaps(AttentionNeeds("full"), REFERENCES) == ""


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        SDPA.paged = False  # type: ignore[misc]

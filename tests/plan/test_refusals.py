"""The table of refusals: each row fires on its condition, with its knob, and not one step beside it."""

from __future__ import annotations

from typing import Any

import pytest

from pcp_compiler.config import load_config
from pcp_compiler.errors import ConfigError
from pcp_compiler.plan.draft import resolve_draft
from pcp_compiler.plan.refusals import REFUSALS, RefusalFacts, check_refusals, list_refusals

PCP = {"parallel.pcp_size": 2}
SHARDED = {**PCP, "draft.method": "mtp", "draft.mode": "sharded"}
Y = "sdpa_prefix"

# row, config and facts that meet its condition, start of the line, and neighbours that must not meet it
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, list[tuple[dict[str, Any], dict[str, Any]]]]] = [
    ("decode-context-parallel", {}, {"dcp_size": 2}, "parallel.dcp_size: got 2", [({}, {"dcp_size": 1})]),
    (
        "owned-decode-of-sharded-kv",
        {"parallel.shard_decode": True},
        {"kv_sharded": True},
        "parallel.shard_decode: got True with a KV cache that is sharded over the ranks",
        [({"parallel.shard_decode": True}, {}), ({}, {"kv_sharded": True})],
    ),
    (
        "sparse-index-under-pcp",
        PCP,
        {"target_kinds": ("full", "sparse_index")},
        "parallel.pcp_size: got 2 with a target that has sparse_index layers",
        [({}, {"target_kinds": ("sparse_index",)}), (PCP, {"target_kinds": ("full", "mla")}), (PCP, {})],
    ),
    (
        "target-kind-without-backend",
        {"attention.backend": "sdpa"},
        {"target_kinds": ("full", "sparse_index")},
        "attention.backend: got sdpa for the target's layers of kind sparse_index",
        [({}, {"target_kinds": ("full", "sliding_window", "mla")}), ({}, {})],
    ),
    (
        "target-backend-without-pcp",
        {**PCP, "attention.backend_per_kind.mla": Y},
        {"target_kinds": ("full", "mla")},
        "attention.backend_per_kind.mla: got sdpa_prefix with parallel.pcp_size = 2",
        [
            ({**PCP, "attention.backend_per_kind.mla": Y}, {"target_kinds": ("full",)}),
            ({**PCP, "attention.backend_per_kind.mla": Y}, {}),
            ({"attention.backend_per_kind.mla": Y}, {"target_kinds": ("mla",)}),
            ({**PCP, "attention.backend_per_kind.mla": "sdpa", "attention.backend": Y}, {"target_kinds": ("mla",)}),
            ({**PCP, "draft.method": "mtp", "draft.attention_backend": Y}, {"target_kinds": ("mla",)}),
            (PCP, {"target_kinds": ("full", "mla", "sliding_window")}),
        ],
    ),
    (
        "unknown-draft-method",
        {},
        {"drafter_method": "eagle3"},
        'draft.method: the drafter declares "eagle3"',
        [({}, {"drafter_method": method}) for method in ("mtp", "model", "dspark", None)],
    ),
    (
        "sharded-block-drafter",
        SHARDED,
        {"drafter_method": "dspark", "drafter_kind": "full"},
        'draft.mode: got "sharded" with a dspark drafter',
        [
            (SHARDED, {"drafter_method": "mtp"}),
            ({**SHARDED, "draft.mode": "auto"}, {"drafter_method": "dspark"}),
            ({**SHARDED, "draft.mode": "replicated"}, {"drafter_method": "dspark"}),
        ],
    ),
    (
        "sharded-drafter-without-pcp",
        {**SHARDED, "draft.backend_per_kind.full": Y},
        {"drafter_kind": "full"},
        'draft.mode: got "sharded" with draft.backend_per_kind.full = sdpa_prefix for kind full',
        [
            ({**SHARDED, "draft.backend_per_kind.full": Y}, {"drafter_kind": "mla"}),
            ({**SHARDED, "draft.backend_per_kind.full": Y}, {}),
            ({**SHARDED, "draft.backend_per_kind.full": Y, "draft.mode": "auto"}, {"drafter_kind": "full"}),
            ({**SHARDED, "draft.backend_per_kind.full": Y, "draft.method": "none"}, {"drafter_kind": "full"}),
            (SHARDED, {"drafter_kind": "full"}),
        ],
    ),
    (
        "full-capture-with-prefill",
        {},
        {"full_capture_phases": ("prefill", "mixed", "decode")},
        "capture.mode: got full captures of prefill and mixed batches",
        [({}, {"full_capture_phases": ("decode", "verify", "draft")})],
    ),
    (
        "adaptive-without-variable-length",
        {},
        {"adaptive_verification": True},
        "draft.adaptive_verification: got True without captures of variable length",
        [({}, {"adaptive_verification": True, "has_varlen_captures": True}), ({}, {"has_varlen_captures": False})],
    ),
]


def find_fired(options: dict[str, Any], facts: dict[str, Any]) -> dict[str, str]:
    """Return the findings of the rows that apply, by row name."""
    rows = list_refusals(load_config(options), RefusalFacts(**facts))
    return {row.name: row.found for row in rows if row.found is not None}


def test_every_row_has_a_case_and_a_name_of_its_own() -> None:
    assert [name for name, *_ in CASES] == [refusal.name for refusal in REFUSALS]
    assert len({refusal.name for refusal in REFUSALS}) == len(REFUSALS)


@pytest.mark.parametrize(("name", "options", "facts", "found"), [case[:4] for case in CASES])
def test_a_row_fires_on_its_condition_and_names_reason_and_knob(
    name: str, options: dict[str, Any], facts: dict[str, Any], found: str
) -> None:
    row = next(refusal for refusal in REFUSALS if refusal.name == name)
    with pytest.raises(ConfigError) as caught:
        check_refusals(load_config(options), RefusalFacts(**facts))
    assert f"{found}; {row.reason}; {row.knob}" in str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("name", "options", "facts"), [(case[0], *neighbour) for case in CASES for neighbour in case[4]]
)
def test_a_row_does_not_fire_beside_its_condition(name: str, options: dict[str, Any], facts: dict[str, Any]) -> None:
    assert name not in find_fired(options, facts)


def test_a_condition_fires_its_own_row_alone() -> None:
    fired = {name: set(find_fired(options, facts)) for name, options, facts, *_ in CASES}
    assert fired.pop("sparse-index-under-pcp") == {"sparse-index-under-pcp", "target-kind-without-backend"}
    assert all(rows == {name} for name, rows in fired.items())


def test_rows_that_hold_for_every_kind_fire_from_the_config_alone() -> None:
    assert find_fired({**PCP, "attention.backend": Y}, {}) == {
        "target-backend-without-pcp": "attention.backend: got sdpa_prefix with parallel.pcp_size = 2"
    }
    assert find_fired({**SHARDED, "draft.attention_backend": Y}, {}) == {
        "sharded-drafter-without-pcp": (
            'draft.mode: got "sharded" with draft.attention_backend = sdpa_prefix for kind full'
        )
    }


def test_nothing_is_refused_by_default() -> None:
    config = load_config(None)
    check_refusals(config, RefusalFacts())
    rows = list_refusals(config)
    assert [row.name for row in rows] == [refusal.name for refusal in REFUSALS]
    assert all(row.condition and row.reason and row.knob and row.found is None for row in rows)


def test_all_refusals_come_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        check_refusals(load_config(None), RefusalFacts(dcp_size=4, drafter_method="eagle"))
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == ["parallel.dcp_size", "draft.method"]


@pytest.mark.parametrize("kind", ["full", "sliding_window", "mla"])
@pytest.mark.parametrize("backend", ["auto", "sdpa", Y])
@pytest.mark.parametrize("mode", ["auto", "sharded", "replicated"])
@pytest.mark.parametrize("pcp_size", [1, 4])
def test_the_table_refuses_a_drafter_if_and_only_if_the_resolver_does(
    kind: str, backend: str, mode: str, pcp_size: int
) -> None:
    draft = {"method": "mtp", "mode": mode, "attention_backend": backend}
    config = load_config({"parallel.pcp_size": pcp_size, "draft": draft})
    facts = RefusalFacts(drafter_method="mtp", drafter_kind=kind)
    if mode == "sharded" and backend == Y:
        with pytest.raises(ConfigError, match=r"^draft\.mode: "):
            check_refusals(config, facts)
        with pytest.raises(ConfigError, match=r"^draft\.mode: "):
            resolve_draft(config, method="mtp", kind=kind)
    else:
        check_refusals(config, facts)
        plan = resolve_draft(config, method="mtp", kind=kind)
        assert backend in ("auto", plan.backend)
        assert mode in ("auto", plan.mode)

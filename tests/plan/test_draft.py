"""Draft mode resolver: the worked table, precedence of keys, refusals, and isolation of the drafter's config."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcp_compiler.config import Config, load_config
from pcp_compiler.errors import ConfigError
from pcp_compiler.plan.capabilities import find_record, load_records
from pcp_compiler.plan.draft import DraftPlan, choose_draft_backend, resolve_draft

X, Y = "sdpa", "sdpa_prefix"  # with and without PCP
SDPA, SDPA_PREFIX = (find_record(name, load_records()) for name in (X, Y))
BLOCK_BACKENDS = tuple(replace(record, non_causal=True) for record in (SDPA_PREFIX, SDPA))


def make_config(**keys: Any) -> Config:
    """Return a two-rank MTP config; `attention__backend` spells `attention.backend`."""
    options = {key.replace("__", "."): value for key, value in keys.items()}
    return load_config({"parallel.pcp_size": 2, "draft.method": "mtp", **options})


def resolve(config: Config, method: str = "mtp", kind: str = "mla") -> DraftPlan:
    return resolve_draft(config, method=method, kind=kind, backends=BLOCK_BACKENDS)


def refusal(config: Config, method: str = "mtp", kind: str = "mla") -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_draft(config, method=method, kind=kind, backends=(SDPA_PREFIX, SDPA))
    return str(caught.value)


# --- the mode --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "kind", "general", "per_kind", "backend", "mode"),
    [
        ("mtp", "mla", "auto", {}, X, "sharded"),
        ("mtp", "mla", Y, {}, Y, "replicated"),
        ("mtp", "mla", Y, {"mla_attention": X}, X, "sharded"),
        ("mtp", "full", Y, {"mla_attention": X}, Y, "replicated"),
        ("dspark", "full", "auto", {}, Y, "replicated"),
        ("dspark", "full", X, {}, X, "replicated"),
        ("dspark", "full", X, {"full_attention": Y}, Y, "replicated"),
    ],
)
def test_the_worked_table(
    method: str, kind: str, general: str, per_kind: dict[str, str], backend: str, mode: str
) -> None:
    config = make_config(draft__attention_backend=general, attention={"backend_per_kind": per_kind})
    plan = resolve(config, method, kind)
    assert (plan.mode, plan.backend, plan.kind) == (mode, backend, kind)


@pytest.mark.parametrize(
    ("mode", "pcp_size", "expected"),
    [
        ("auto", 1, ("replicated", Y)),
        ("auto", 2, ("sharded", X)),
        ("sharded", 1, ("sharded", X)),
        ("sharded", 4, ("sharded", X)),
        ("replicated", 1, ("replicated", Y)),
        ("replicated", 4, ("replicated", Y)),
    ],
)
def test_an_explicit_mode_is_kept_and_auto_shards_over_more_than_one_rank(
    mode: str, pcp_size: int, expected: tuple[str, str]
) -> None:
    plan = resolve(make_config(draft__mode=mode, parallel__pcp_size=pcp_size))
    assert (plan.mode, plan.backend) == expected


@pytest.mark.parametrize("method", ["mtp", "model"])
def test_replicated_is_legal_with_every_backend(method: str) -> None:
    for name in (X, Y):
        plan = resolve(make_config(draft__mode="replicated", draft__attention_backend=name), method)
        assert (plan.mode, plan.backend) == ("replicated", name)


def test_a_replicated_drafter_does_not_need_pcp_beside_a_sharded_target() -> None:
    config = make_config(draft__attention_backend=Y)
    plan = resolve(config)
    assert (plan.mode, plan.draft_config.parallel.pcp_size, config.parallel.pcp_size) == ("replicated", 1, 2)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pcp_size", [1, 2])
def test_sharded_with_a_backend_without_pcp_is_refused_by_its_key(pcp_size: int) -> None:
    config = make_config(draft__mode="sharded", draft__attention_backend=Y, parallel__pcp_size=pcp_size)
    assert refusal(config) == (
        'draft.mode: got "sharded", but sdpa_prefix has no PCP rank-local rows (draft.attention_backend); '
        "set draft.mode to auto or replicated"
    )


def test_sharded_dspark_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(make_config(draft__mode="sharded"), "dspark")
    assert str(caught.value) == (
        'draft.mode: got "sharded", but method dspark drafts from restored global rows; '
        "set draft.mode to auto or replicated"
    )


def test_a_drafter_no_backend_can_run_is_refused_with_the_reasons_of_both_modes() -> None:
    assert refusal(make_config(), kind="sparse_index") == (
        "draft.attention_backend: got auto, which cannot run a mtp drafter of kind sparse_index; "
        "sharded: sdpa_prefix has no kind sparse_index, no PCP rank-local rows; sdpa has no kind sparse_index "
        "(automatic choice); "
        "replicated: sdpa_prefix has no kind sparse_index; sdpa has no kind sparse_index (automatic choice); "
        "use another drafter"
    )


def test_a_named_backend_that_cannot_run_the_drafter_is_refused_with_one_that_can() -> None:
    backends = (replace(SDPA_PREFIX, kinds=frozenset(["full"])), SDPA)
    config = make_config(draft__attention_backend=Y)
    with pytest.raises(ConfigError) as caught:
        resolve_draft(config, method="mtp", kind="mla", backends=backends)
    message = str(caught.value)
    assert message.startswith("draft.attention_backend: got sdpa_prefix, which cannot run a mtp drafter of kind mla")
    assert "replicated: sdpa_prefix has no kind mla (draft.attention_backend)" in message
    assert message.endswith("; set draft.backend_per_kind.mla to sdpa")


# --- precedence ------------------------------------------------------------------------------------------------------


@given(
    own=st.sampled_from([None, X, Y]),
    shared=st.sampled_from([None, X, Y]),
    general=st.sampled_from(["auto", X, Y]),
    other=st.sampled_from([None, X, Y]),
    target=st.sampled_from(["auto", X, Y]),
)
def test_the_first_key_that_names_a_backend_wins_and_each_other_is_reported(
    own: str | None, shared: str | None, general: str, other: str | None, target: str
) -> None:
    config = make_config(
        draft={"backend_per_kind": {"mla": own, "full": other}, "attention_backend": general},
        attention={"backend": target, "backend_per_kind": {"mla": shared, "sliding_window": other}},
    )
    named = {
        "draft.backend_per_kind.mla": own,
        "attention.backend_per_kind.mla": shared,
        "draft.attention_backend": None if general == "auto" else general,
    }
    keys = [key for key, name in named.items() if name is not None]
    choice = choose_draft_backend(config, "mla")
    assert choice.name == (named[keys[0]] if keys else None)
    assert [sentence.partition(":")[0] for sentence in choice.overruled] == keys[1:]
    assert resolve(config).reasons[: len(choice.overruled)] == choice.overruled


def test_the_losing_keys_the_backend_and_the_mode_are_explained_in_that_order() -> None:
    config = make_config(draft__attention_backend=Y, attention={"backend_per_kind": {"mla": X}})
    assert resolve(config).reasons == (
        "draft.attention_backend: sdpa_prefix is not used, attention.backend_per_kind.mla: sdpa comes first",
        "backend sdpa: set by attention.backend_per_kind.mla, kind mla",
        "mode sharded: the backend runs PCP rank-local rows",
    )


@pytest.mark.parametrize(
    ("keys", "method", "reason"),
    [
        ({"draft__mode": "sharded"}, "mtp", "mode sharded: set by draft.mode"),
        ({"draft__mode": "replicated"}, "mtp", "mode replicated: set by draft.mode"),
        ({"parallel__pcp_size": 1}, "mtp", "mode replicated: parallel.pcp_size is 1, there is nothing to shard"),
        ({}, "dspark", "mode replicated: method dspark drafts from restored global rows"),
        (
            {"draft__attention_backend": Y},
            "mtp",
            "mode replicated: sdpa_prefix has no PCP rank-local rows (draft.attention_backend)",
        ),
    ],
)
def test_the_mode_comes_with_its_reason(keys: dict[str, Any], method: str, reason: str) -> None:
    assert resolve(make_config(**keys), method).reasons[-1] == reason


# --- isolation -------------------------------------------------------------------------------------------------------

FULL_TARGET = {
    "parallel": {"pcp_size": 4, "shard_decode": True, "min_tokens_to_shard": 16},
    "attention": {"backend": X, "backend_per_kind": {"full": X, "mla": Y}},
    "draft": {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "backend_per_kind": {"mla": Y, "full": X},
        "k_schedule": [[1, 2, 3]],
    },
    "limits": {"kv_blocks": 64, "kv_cache_dtype": "bf16"},
    "tokens": {"input_ids": 1},
}


@pytest.mark.parametrize("mode", ["sharded", "replicated", "auto"])
def test_the_targets_config_is_equal_before_and_after(mode: str) -> None:
    config = load_config({**FULL_TARGET, "draft.mode": mode})
    before, key, twin = config.model_dump(), config.key(), copy.deepcopy(config)
    plan = resolve(config, kind="full")
    assert config == twin
    assert (config.model_dump(), config.key()) == (before, key)
    assert plan.draft_config is not config
    assert plan.draft_config.parallel is not config.parallel


def test_a_replicated_drafter_sees_one_rank_and_only_its_own_backend() -> None:
    config = load_config(FULL_TARGET)
    plan = resolve(config, kind="mla")
    assert plan.mode == "replicated"
    expected = config.model_dump()
    expected["parallel"] |= {"pcp_size": 1, "shard_decode": False}
    expected["attention"] = {"backend": Y, "backend_per_kind": {"full": None, "sliding_window": None, "mla": None}}
    expected["draft"] |= {"backend_per_kind": expected["attention"]["backend_per_kind"], "attention_backend": Y}
    expected["draft"]["mode"] = "replicated"
    expected["tokens"] = {}
    assert plan.draft_config.model_dump() == expected


def test_a_sharded_drafter_keeps_the_ranks_of_the_target() -> None:
    config = load_config(FULL_TARGET)
    plan = resolve(config, kind="full")
    assert plan.mode == "sharded"
    assert plan.draft_config.parallel == config.parallel
    assert (plan.draft_config.attention.backend, plan.draft_config.attention.backend_per_kind.mla) == (X, None)


def test_resolving_the_drafters_config_again_changes_nothing() -> None:
    for mode, kind in (("sharded", "full"), ("replicated", "mla")):
        plan = resolve(load_config({**FULL_TARGET, "draft.mode": mode}), kind=kind)
        again = resolve(plan.draft_config, kind=kind)
        assert (again.mode, again.backend, again.draft_config) == (plan.mode, plan.backend, plan.draft_config)


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        resolve(make_config()).mode = "replicated"  # type: ignore[misc]

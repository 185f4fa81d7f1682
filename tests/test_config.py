"""Config: what is accepted, every refusal word for word, files, aliases, equality and cache keys."""

from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pcp_compiler.config import (
    COMPILER_KEYS,
    DECODER_KEYS,
    FILE_SUFFIXES,
    PLANNED_KEYS,
    VLLM_ALIASES,
    Config,
    check_used,
    load_config,
)
from pcp_compiler.config_sections import (
    AttentionConfig,
    BackendPerKind,
    DraftConfig,
    DumpConfig,
    LimitsConfig,
    ParallelConfig,
)
from pcp_compiler.errors import ConfigError

PARALLEL_KEYS = "pcp_size, ranks, min_tokens_to_shard, on_token_mixing, shard_decode, timeout_s"
LIMITS_KEYS = (
    "max_model_len, max_num_requests, max_num_tokens, kv_block_size, kv_blocks, kv_cache_dtype, prefill_chunk, "
    "prefix_cache"
)
ALLOWED_KEYS = (
    "parallel.pcp_size, parallel.ranks, parallel.min_tokens_to_shard, parallel.on_token_mixing, parallel.shard_decode, "
    "parallel.timeout_s.start, parallel.timeout_s.step, "
    "attention.backend, attention.backend_per_kind.full, attention.backend_per_kind.sliding_window, "
    "attention.backend_per_kind.mla, draft.method, draft.model, draft.num_speculative_tokens, draft.attention_backend, "
    "draft.mode, draft.sampling, draft.verification, draft.k_schedule, draft.vocab_mismatch, "
    "draft.backend_per_kind.full, draft.backend_per_kind.sliding_window, draft.backend_per_kind.mla, "
    "limits.max_model_len, limits.max_num_requests, limits.max_num_tokens, limits.kv_block_size, limits.kv_blocks, "
    "limits.kv_cache_dtype, limits.prefill_chunk, limits.prefix_cache, "
    "capture.mode, capture.executor, capture.sizes, capture.context_buckets, capture.splitting_ops, capture.memory_mb, "
    "check.mode, check.rtol, check.atol, check.rows, dump.dir, dump.level, tokens.<argument>, role, numerics, config"
)
SIZE = "integer >= 1"
CAPTURE_SIZES = "list of integers >= 1, [] for off, or None"
RANKS = "auto, virtual, distributed"
SECONDS = "seconds > 0"
MIN_TOKENS = "integer >= 0, or None for 2 * pcp_size"
FOLDER = "folder path (non-empty string), or None for off"
TOLERANCE = "number >= 0, or None by dtype"
DIM = "integer (token dim, may be negative)"
SWITCH = "true, false"
COUNT = "integer >= 0"
BACKEND = "auto, triton, varlen, sdpa_prefix, sdpa, flex"
KIND_BACKEND = "triton, varlen, sdpa_prefix, sdpa, flex, or None for not set"
CHECKPOINT = "path (non-empty string), or None for a ready drafter"
SCHEDULE = (
    "list of [low, high, K], integers with low <= high and K >= 0, the lowest range from 1, no overlap; [] for off"
)
NO_BACKENDS = {"full": None, "sliding_window": None, "mla": None}
BACKEND_KINDS = ("full", "sliding_window", "mla")
KV_BLOCKS = "auto, or integer >= 2 (kv_block 0 is reserved)"
DIMS = "mapping of argument name (non-empty string) to token dim (integer, may be negative)"

FULL: dict[str, Any] = {
    "parallel": {
        "pcp_size": 4,
        "ranks": "virtual",
        "min_tokens_to_shard": 0,
        "on_token_mixing": "gather",
        "shard_decode": True,
        "timeout_s": {"start": 30.0, "step": 5.5},
    },
    "attention": {
        "backend": "sdpa",
        "backend_per_kind": {"full": "sdpa", "sliding_window": None, "mla": "sdpa_prefix"},
    },
    "draft": {
        "method": "mtp",
        "model": "drafter",
        "num_speculative_tokens": 5,
        "attention_backend": "sdpa_prefix",
        "backend_per_kind": {"full": None, "sliding_window": "sdpa_prefix", "mla": "sdpa"},
        "mode": "replicated",
        "sampling": "probabilistic",
        "verification": "block",
        "k_schedule": [[1, 2, 3], [3, 5, 2], [6, 8, 1]],
        "vocab_mismatch": "pad",
    },
    "limits": {
        "max_model_len": 256,
        "max_num_requests": 8,
        "max_num_tokens": 64,
        "kv_block_size": 4,
        "kv_blocks": 65,
        "kv_cache_dtype": "fp8_e4m3",
        "prefill_chunk": 32,
        "prefix_cache": False,
    },
    "capture": {
        "mode": "full_and_piecewise",
        "executor": "replay",
        "sizes": [8, 1, 8],
        "context_buckets": [],
        "splitting_ops": ["aten.mm.default"],
        "memory_mb": 512,
    },
    "tokens": {"input_ids": -1, "x": 0},
    "check": {"mode": "inputs", "rtol": 0.5, "atol": 0.0, "rows": True},
    "dump": {"dir": "out", "level": "final"},
    "role": "target",
    "numerics": "fast",
}


def refusal(options: Any) -> str:
    """Return the message with which `options` are refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(options)
    return str(caught.value)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# --- values ----------------------------------------------------------------------------------------------------------


def test_no_options_give_the_documented_defaults() -> None:
    config = load_config(None)
    assert config.parallel == ParallelConfig(
        pcp_size=1, ranks="auto", min_tokens_to_shard=None, on_token_mixing="refuse", shard_decode=False
    )
    assert config.attention == AttentionConfig(backend="auto", backend_per_kind=BackendPerKind())
    assert BackendPerKind() == BackendPerKind(full=None, sliding_window=None, mla=None)
    assert config.draft == DraftConfig(
        method="none",
        model=None,
        num_speculative_tokens=3,
        attention_backend="auto",
        backend_per_kind=BackendPerKind(),
        mode="auto",
        sampling="greedy",
        verification="token",
        k_schedule=(),
        vocab_mismatch="refuse",
    )
    assert config.limits == LimitsConfig(
        max_model_len=None,
        max_num_requests=32,
        max_num_tokens=2048,
        kv_block_size=16,
        kv_blocks="auto",
        kv_cache_dtype="auto",
        prefill_chunk=None,
        prefix_cache=True,
    )
    assert config.dump == DumpConfig(dir=None, level="passes")
    assert dict(config.tokens) == {}
    assert config.role == "target"
    assert config.notes == ()
    assert load_config({}) == config == Config()


def test_every_working_key_reaches_the_config() -> None:
    config = load_config(FULL)
    assert config.model_dump() == FULL
    assert (config.parallel.pcp_size, config.tokens["input_ids"], config.dump.level) == (4, -1, "final")
    assert (config.draft.k_schedule, config.attention.backend_per_kind.mla) == (
        ((1, 2, 3), (3, 5, 2), (6, 8, 1)),
        "sdpa_prefix",
    )


def test_a_ready_config_is_returned_as_it_is() -> None:
    config = load_config(FULL)
    assert load_config(config) is config


@pytest.mark.parametrize(
    ("key", "value", "shown", "allowed"),
    [
        ("parallel.pcp_size", "4", '"4" (str)', SIZE),
        ("parallel.pcp_size", 4.0, "4.0 (float)", SIZE),
        ("parallel.pcp_size", True, "True (bool)", SIZE),
        ("parallel.pcp_size", 0, "0 (int)", SIZE),
        ("parallel.pcp_size", -2, "-2 (int)", SIZE),
        ("parallel.pcp_size", None, "None (NoneType)", SIZE),
        ("parallel.pcp_size", [4], "[4] (list)", SIZE),
        ("parallel.pcp_size", {"a": 1}, "{'a': 1} (dict)", SIZE),
        ("parallel.ranks", "gloo", '"gloo" (str)', RANKS),
        ("parallel.ranks", None, "None (NoneType)", RANKS),
        ("parallel.ranks", ["auto"], "['auto'] (list)", RANKS),
        ("parallel.timeout_s.step", 0, "0 (int)", SECONDS),
        ("parallel.timeout_s.step", True, "True (bool)", SECONDS),
        ("parallel.timeout_s.start", "60", '"60" (str)', SECONDS),
        ("parallel.timeout_s.start", float("inf"), "inf (float)", SECONDS),
        ("parallel.min_tokens_to_shard", -1, "-1 (int)", MIN_TOKENS),
        ("parallel.min_tokens_to_shard", False, "False (bool)", MIN_TOKENS),
        ("parallel.min_tokens_to_shard", 8.0, "8.0 (float)", MIN_TOKENS),
        ("parallel.min_tokens_to_shard", "auto", '"auto" (str)', MIN_TOKENS),
        ("parallel.on_token_mixing", True, "True (bool)", "refuse, gather"),
        ("parallel.on_token_mixing", "Gather", '"Gather" (str)', "refuse, gather"),
        ("check.mode", "input", '"input" (str)', "none, inputs, shadow"),
        ("check.rtol", -1, "-1 (int)", TOLERANCE),
        ("check.rtol", True, "True (bool)", TOLERANCE),
        ("check.atol", float("nan"), "nan (float)", TOLERANCE),
        ("check.rows", 1, "1 (int)", "True, False"),
        ("parallel.shard_decode", 1, "1 (int)", SWITCH),
        ("parallel.shard_decode", "true", '"true" (str)', SWITCH),
        ("capture.mode", "FULL", '"FULL" (str)', "none, piecewise, full_decode, full_and_piecewise"),
        ("capture.executor", "gpu", '"gpu" (str)', "auto, eager, replay, cuda_graph"),
        ("capture.sizes", [0], "[0] (list)", CAPTURE_SIZES),
        ("capture.sizes", [2, -1], "[2, -1] (list)", CAPTURE_SIZES),
        ("capture.sizes", [1.0], "[1.0] (list)", CAPTURE_SIZES),
        ("capture.sizes", [True], "[True] (list)", CAPTURE_SIZES),
        ("capture.sizes", 8, "8 (int)", CAPTURE_SIZES),
        ("capture.context_buckets", [0], "[0] (list)", "list of integers >= 1, [] for the whole context only, or None"),
        ("capture.splitting_ops", "aten.mm", '"aten.mm" (str)', "list of ops of the target, such as aten.mm.default"),
        ("capture.memory_mb", 0, "0 (int)", "integer >= 1, or None for no limit"),
        ("attention.backend", "flash", '"flash" (str)', BACKEND),
        ("attention.backend", None, "None (NoneType)", BACKEND),
        ("attention.backend_per_kind.full", "auto", '"auto" (str)', KIND_BACKEND),
        ("attention.backend_per_kind.mla", 1, "1 (int)", KIND_BACKEND),
        ("draft.method", "eagle", '"eagle" (str)', "none, mtp, model"),
        ("draft.method", None, "None (NoneType)", "none, mtp, model"),
        ("draft.model", "", '"" (str)', CHECKPOINT),
        ("draft.num_speculative_tokens", -1, "-1 (int)", COUNT),
        ("draft.num_speculative_tokens", True, "True (bool)", COUNT),
        ("draft.num_speculative_tokens", None, "None (NoneType)", COUNT),
        ("draft.attention_backend", "FLASH_ATTN", '"FLASH_ATTN" (str)', BACKEND),
        ("draft.backend_per_kind.sliding_window", "sdpa_", '"sdpa_" (str)', KIND_BACKEND),
        ("draft.mode", "shard", '"shard" (str)', "auto, sharded, replicated"),
        ("draft.sampling", "random", '"random" (str)', "greedy, probabilistic"),
        ("draft.verification", True, "True (bool)", "token, block"),
        ("draft.k_schedule", None, "None (NoneType)", SCHEDULE),
        ("draft.k_schedule", 3, "3 (int)", SCHEDULE),
        ("draft.k_schedule", "123", '"123" (str)', SCHEDULE),
        ("draft.k_schedule", [1, 2, 3], "[1, 2, 3] (list)", SCHEDULE),
        ("draft.k_schedule", [[1, 2]], "[[1, 2]] (list)", SCHEDULE),
        ("draft.k_schedule", [[1, 2, 3.0]], "[[1, 2, 3.0]] (list)", SCHEDULE),
        ("draft.k_schedule", [[1, 2, True]], "[[1, 2, True]] (list)", SCHEDULE),
        ("draft.k_schedule", [[1, 2, -1]], "[[1, 2, -1]] (list)", SCHEDULE),
        ("draft.k_schedule", [[2, 1, 3]], "[[2, 1, 3]] (list)", SCHEDULE),
        ("draft.k_schedule", [[0, 1, 3]], "[[0, 1, 3]] (list)", SCHEDULE),
        ("draft.k_schedule", [[2, 4, 3]], "[[2, 4, 3]] (list)", SCHEDULE),
        ("draft.k_schedule", [[1, 3, 3], [3, 4, 1]], "[[1, 3, 3], [3, 4, 1]] (list)", SCHEDULE),
        ("draft.vocab_mismatch", "cut", '"cut" (str)', "refuse, pad"),
        ("limits.max_model_len", 0, "0 (int)", "integer >= 1, or None for the model's own"),
        ("limits.max_num_requests", 0, "0 (int)", SIZE),
        ("limits.max_num_tokens", None, "None (NoneType)", SIZE),
        ("limits.kv_block_size", 16.0, "16.0 (float)", SIZE),
        ("limits.kv_blocks", 1, "1 (int)", KV_BLOCKS),
        ("limits.kv_blocks", True, "True (bool)", KV_BLOCKS),
        ("limits.kv_blocks", "all", '"all" (str)', KV_BLOCKS),
        ("limits.kv_blocks", None, "None (NoneType)", KV_BLOCKS),
        ("limits.kv_cache_dtype", "fp8", '"fp8" (str)', "auto, fp32, bf16, fp16, fp8_e4m3"),
        ("limits.prefill_chunk", 0, "0 (int)", "integer >= 1, or None for max_num_tokens"),
        ("limits.prefix_cache", "yes", '"yes" (str)', SWITCH),
        ("dump.dir", "", '"" (str)', FOLDER),
        ("dump.dir", 3, "3 (int)", FOLDER),
        ("dump.level", "all", '"all" (str)', "passes, final"),
        ("dump.level", 1, "1 (int)", "passes, final"),
        ("tokens.input_ids", "1", '"1" (str)', DIM),
        ("tokens.input_ids", True, "True (bool)", DIM),
        ("tokens.input_ids", 1.0, "1.0 (float)", DIM),
        ("tokens.input_ids", {"b": 1}, "{'b': 1} (dict)", DIM),
        ("role", "drafter", '"drafter" (str)', "target"),
        ("role", None, "None (NoneType)", "target"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused(key: str, value: Any, shown: str, allowed: str) -> None:
    group, _, name = key.rpartition(".")
    message = f"{key}: got {shown}; allowed: {allowed}"
    assert refusal({key: value}) == message
    assert refusal({group: {name: value}} if group else {name: value}) == message


@pytest.mark.parametrize(
    ("group", "value", "shown", "allowed"),
    [
        ("parallel", 4, "4 (int)", f"mapping with the keys {PARALLEL_KEYS}"),
        ("parallel", None, "None (NoneType)", f"mapping with the keys {PARALLEL_KEYS}"),
        ("parallel.timeout_s", 60, "60 (int)", "mapping with the keys start, step"),
        ("check", "inputs", '"inputs" (str)', "mapping with the keys mode, rtol, atol, rows"),
        ("attention", "sdpa", '"sdpa" (str)', "mapping with the keys backend, backend_per_kind"),
        ("attention.backend_per_kind", "x", '"x" (str)', "mapping with the keys full, sliding_window, mla"),
        ("draft.backend_per_kind", None, "None (NoneType)", "mapping with the keys full, sliding_window, mla"),
        ("limits", 3, "3 (int)", f"mapping with the keys {LIMITS_KEYS}"),
        ("dump", "out", '"out" (str)', "mapping with the keys dir, level"),
        ("tokens", ["x"], "['x'] (list)", DIMS),
        ("tokens", None, "None (NoneType)", DIMS),
        ("compilation_config", 3, "3 (int)", "mapping of vLLM keys"),
    ],
)
def test_a_group_that_is_not_a_mapping_is_refused(group: str, value: Any, shown: str, allowed: str) -> None:
    assert refusal({group: value}) == f"{group}: got {shown}; allowed: {allowed}"


def test_an_empty_argument_name_is_refused() -> None:
    assert refusal({"tokens": {"": 1}}) == f'tokens: got the name "" (str); allowed: {DIMS}'


@pytest.mark.parametrize(("options", "where"), [({"tokens": {1: 0}}, "tokens"), ({1: 0}, "config")])
def test_a_key_that_is_not_a_string_is_refused(options: Any, where: str) -> None:
    assert refusal(options) == f"{where}: got the key 1 (int); allowed: keys are strings"


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("draft.method", "dspark", "none, mtp, model"),
        ("role", "draft", "target"),
    ],
)
def test_a_planned_value_is_refused_as_planned(key: str, value: str, allowed: str) -> None:
    expected = f'{key}: got "{value}" (str), which is planned and does not work yet; allowed: {allowed}'
    assert refusal({key: value}) == expected


def test_all_faults_of_one_source_come_in_one_error() -> None:
    options = {"parallel": {"pcp_size": "4", "ranks": "x", "tp_size": 2}, "dump.level": 1, "zzz": 1}
    assert refusal(options).splitlines() == [
        "parallel.tp_size is planned and does not work yet; remove it",
        f"zzz is not a config key; allowed: {ALLOWED_KEYS}",
        'parallel.pcp_size: got "4" (str); allowed: integer >= 1',
        'parallel.ranks: got "x" (str); allowed: auto, virtual, distributed',
        "dump.level: got 1 (int); allowed: passes, final",
    ]


def test_a_long_value_is_shortened_in_the_message() -> None:
    assert len(refusal({"parallel.ranks": "x" * 10_000})) < 200
    assert len(refusal({"parallel.ranks": list(range(10_000))})) < 200


@pytest.mark.parametrize("options", [3, [("parallel.pcp_size", 2)], b"conf.yaml", True])
def test_options_of_an_unknown_kind_are_refused(options: Any) -> None:
    assert refusal(options).startswith("options: got ")
    assert refusal(options).endswith(f"({type(options).__name__}); allowed: mapping, path, Config or None")


# --- names -----------------------------------------------------------------------------------------------------------


def planned_form(key: str, value: Any) -> list[dict[str, Any]]:
    """Return `key` dotted and, where it has a group, nested."""
    group, _, name = key.rpartition(".")
    return [{key: value}, {group: {name: value}}] if group else [{key: value}]


@pytest.mark.parametrize("key", PLANNED_KEYS)
def test_a_planned_key_is_refused_by_name_whatever_its_value(key: str) -> None:
    values: list[Any] = [None, 3, {}, {"deep": {"er": 1}}]
    for value in values:
        for options in planned_form(key, value):
            assert refusal(options) == f"{key} is planned and does not work yet; remove it"


def test_every_key_of_the_public_contract_either_works_or_is_planned() -> None:
    working = {"parallel.pcp_size", "parallel.ranks", "parallel.min_tokens_to_shard", "parallel.on_token_mixing"}
    working |= {"parallel.timeout_s.start", "parallel.timeout_s.step"}
    working |= {"check.mode", "check.rtol", "check.atol", "check.rows"}
    working |= {"parallel.shard_decode", "dump.dir", "dump.level", "tokens", "role", "numerics", "attention.backend"}
    working |= {f"{group}.backend_per_kind.{kind}" for group in ("attention", "draft") for kind in BACKEND_KINDS}
    working |= {f"draft.{name}" for name in FULL["draft"] if name != "backend_per_kind"}
    working |= {f"{group}.{name}" for group in ("limits", "capture") for name in FULL[group]}
    assert {key.removesuffix(".<argument>") for key in ALLOWED_KEYS.split(", ")} == working | {"config"}
    assert not working & set(PLANNED_KEYS)
    assert len(set(PLANNED_KEYS)) == len(PLANNED_KEYS)
    assert set(VLLM_ALIASES.values()) <= working | set(PLANNED_KEYS)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("parallel.pcp_sise", "parallel.pcp_size"),
        ("parallel.pcp-size", "parallel.pcp_size"),
        ("pcp_size", "parallel.pcp_size"),
        ("ranks", "parallel.ranks"),
        ("paralel.ranks", "parallel.ranks"),
        ("paralel", "parallel"),
        ("dump.levels", "dump.level"),
        ("token", "tokens"),
        ("draft.metod", "draft.method"),
        ("parallel.shard_decod", "parallel.shard_decode"),
        ("draft.backend_per_kind.ful", "draft.backend_per_kind.full"),
        ("speculative_config.modell", "speculative_config.model"),
        ("max_num_seq", "max_num_seqs"),
        ("limit", "limits"),
        ("rol", "role"),
        ("cofig", "config"),
        ("prefill_context_paralel_size", "prefill_context_parallel_size"),
    ],
)
def test_an_unknown_key_names_the_nearest_key_and_all_that_are_allowed(key: str, nearest: str) -> None:
    expected = f"{key} is not a config key; did you mean {nearest}? allowed: {ALLOWED_KEYS}"
    assert refusal({key: 1}) == expected


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("draft.tap", "draft.taps"),
        ("parallel.tp_siz", "parallel.tp_size"),
    ],
)
def test_a_nearest_key_that_is_planned_says_so(key: str, nearest: str) -> None:
    assert f"did you mean {nearest} (planned, does not work yet)? allowed: {ALLOWED_KEYS}" in refusal({key: 1})


@pytest.mark.parametrize("key", ["zzz", "parallel.foo", "a.b.c", "notes", "_notes"])
def test_an_unknown_key_that_is_like_no_other_gets_no_guess(key: str) -> None:
    message = refusal({key: 1})
    assert message == f"{key} is not a config key; allowed: {ALLOWED_KEYS}"


@pytest.mark.parametrize(
    "options",
    [
        {"parallel.timeout_s.step": 5, "parallel.pcp_size": 2},
        {"parallel": {"pcp_size": 2, "timeout_s.step": 5}},
        {"parallel": {"pcp_size": 2, "timeout_s": {"step": 5}}},
        {"parallel": {"pcp_size": 2}, "parallel.timeout_s": {"step": 5}},
    ],
)
def test_a_group_inside_a_group_takes_nested_and_dotted_keys(options: dict[str, Any]) -> None:
    timeouts = load_config(options).parallel.timeout_s
    assert (timeouts.start, timeouts.step) == (600, 5)
    assert load_config(options).parallel.pcp_size == 2


def test_an_unknown_group_is_one_fault() -> None:
    assert refusal({"zzz": {"a": 1, "b": 2}}) == f"zzz is not a config key; allowed: {ALLOWED_KEYS}"


# --- mappings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"parallel": {"pcp_size": 4, "ranks": "virtual"}, "tokens": {"x": -1}},
        {"parallel.pcp_size": 4, "parallel.ranks": "virtual", "tokens.x": -1},
        {"parallel": {"pcp_size": 4}, "parallel.ranks": "virtual", "tokens.x": -1},
        {"parallel": {"pcp_size": 4, "ranks": "virtual"}, "parallel.pcp_size": 4, "tokens": {"x": -1}, "tokens.x": -1},
    ],
)
def test_nested_dotted_and_mixed_keys_mean_the_same(options: dict[str, Any]) -> None:
    expected = Config(parallel={"pcp_size": 4, "ranks": "virtual"}, tokens={"x": -1})
    assert load_config(options) == expected
    assert load_config(options).key() == expected.key()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"parallel": {"pcp_size": 4}, "parallel.pcp_size": 2},
            "parallel.pcp_size: got 4 (int) as parallel.pcp_size and 2 (int) as parallel.pcp_size; allowed: one value",
        ),
        (
            {"parallel": {"pcp_size": 1}, "parallel.pcp_size": True},
            "parallel.pcp_size: got 1 (int) as parallel.pcp_size and True (bool) as parallel.pcp_size; "
            "allowed: one value",
        ),
        (
            {"tokens": {"x": 0}, "tokens.x": 1},
            "tokens.x: got 0 (int) as tokens.x and 1 (int) as tokens.x; allowed: one value",
        ),
        (
            {"-pcp": 4, "parallel.pcp_size": 2},
            "parallel.pcp_size: got 4 (int) as -pcp and 2 (int) as parallel.pcp_size; allowed: one value",
        ),
        (
            {"pcp": 4, "prefill_context_parallel_size": 8},
            "parallel.pcp_size: got 4 (int) as pcp and 8 (int) as prefill_context_parallel_size; allowed: one value",
        ),
    ],
)
def test_one_key_with_two_values_is_refused(options: dict[str, Any], message: str) -> None:
    assert message in refusal(options).splitlines()


def test_a_group_value_beside_a_dotted_key_of_that_group_is_refused() -> None:
    assert refusal({"parallel": 4, "parallel.pcp_size": 2}).startswith("parallel: got 4 (int); allowed: mapping")


def test_argument_names_keep_dots_and_dashes() -> None:
    names = {"past.key": 0, "a-b": 1, "-pcp": 2, "parallel.pcp_size": 3}
    assert load_config({"tokens": names}).tokens == names


def test_loading_leaves_the_callers_mapping_alone(tmp_path: Path) -> None:
    path = write(tmp_path, "c.json", '{"parallel": {"pcp_size": 2}}')
    options = {"config": str(path), "parallel": {"ranks": "auto"}, "parallel.pcp_size": 4, "tokens": {"x": 1}}
    before = copy.deepcopy(options)
    load_config(options)
    assert options == before


# --- aliases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "value", "key"),
    [
        ("prefill_context_parallel_size", 4, "parallel.pcp_size"),
        ("prefill-context-parallel-size", 4, "parallel.pcp_size"),
        ("--prefill-context-parallel-size", 4, "parallel.pcp_size"),
        ("pcp", 4, "parallel.pcp_size"),
        ("-pcp", 4, "parallel.pcp_size"),
        ("debug_dump_path", "out", "dump.dir"),
        ("--compilation-config.debug_dump_path", "out", "dump.dir"),
        ("--attention-backend", "sdpa", "attention.backend"),
        ("attention_config.backend", "sdpa", "attention.backend"),
        ("--attention-config.backend_per_kind.full_attention", "sdpa", "attention.backend_per_kind.full"),
        (
            "attention_config.backend_per_kind.sliding_window",
            "sdpa",
            "attention.backend_per_kind.sliding_window",
        ),
        ("attention_config.backend_per_kind.mla_attention", "sdpa", "attention.backend_per_kind.mla"),
        ("attention.backend_per_kind.full_attention", "sdpa", "attention.backend_per_kind.full"),
        ("attention.backend_per_kind.mla_attention", "sdpa", "attention.backend_per_kind.mla"),
        ("--max-model-len", 64, "limits.max_model_len"),
        ("--max-num-seqs", 8, "limits.max_num_requests"),
        ("max_num_batched_tokens", 64, "limits.max_num_tokens"),
        ("block_size", 32, "limits.kv_block_size"),
        ("num_gpu_blocks_override", 9, "limits.kv_blocks"),
        ("kv_cache_dtype", "fp8_e4m3", "limits.kv_cache_dtype"),
        ("--enable-prefix-caching", False, "limits.prefix_cache"),
    ],
)
def test_a_vllm_spelling_is_read_and_noted(spelling: str, value: Any, key: str) -> None:
    config = load_config({spelling: value})
    assert config == load_config({key: value}) != Config()
    assert config.notes == (f"{spelling} is read as {key}",)


@pytest.mark.parametrize(
    ("spelling", "value", "key"),
    [
        ("num_speculative_tokens", 5, "draft.num_speculative_tokens"),
        ("num_speculative_tokens_per_batch_size", [[1, 8, 3]], "draft.k_schedule"),
        ("draft_sample_method", "probabilistic", "draft.sampling"),
        ("speculative_config.model", "m", "draft.model"),
        ("--speculative-config.attention_backend", "sdpa", "draft.attention_backend"),
        ("speculative_config.num_speculative_tokens", 5, "draft.num_speculative_tokens"),
        ("speculative_config.num_speculative_tokens_per_batch_size", [[1, 8, 3]], "draft.k_schedule"),
        ("speculative_config.draft_sample_method", "probabilistic", "draft.sampling"),
        ("draft.backend_per_kind.full_attention", "sdpa", "draft.backend_per_kind.full"),
        ("draft.backend_per_kind.mla_attention", "sdpa", "draft.backend_per_kind.mla"),
    ],
)
def test_a_vllm_spelling_of_a_draft_key_is_read_beside_a_method(spelling: str, value: Any, key: str) -> None:
    config = load_config({"speculative_config.method": "mtp", spelling: value})
    assert config == load_config({"draft.method": "mtp", key: value}) != load_config({"draft.method": "mtp"})
    assert config.notes == ("speculative_config.method is read as draft.method", f"{spelling} is read as {key}")


def test_a_whole_vllm_speculative_config_is_read_as_the_draft_group() -> None:
    options = {"--speculative-config": {"method": "mtp", "model": "m", "num_speculative_tokens": 4}}
    assert load_config(options).draft == DraftConfig(method="mtp", model="m", num_speculative_tokens=4)


def test_an_alias_may_stand_beside_our_key_with_the_same_value() -> None:
    config = load_config({"-pcp": 4, "parallel": {"pcp_size": 4}})
    assert config.parallel.pcp_size == 4
    assert config.notes == ("-pcp is read as parallel.pcp_size",)


def test_a_bad_value_of_an_alias_names_both_spellings() -> None:
    assert refusal({"--prefill-context-parallel-size": "4"}).splitlines() == [
        'parallel.pcp_size: got "4" (str); allowed: integer >= 1',
        "--prefill-context-parallel-size is read as parallel.pcp_size",
    ]


@pytest.mark.parametrize(
    ("options", "spelling", "key"),
    [
        ({"--compilation-config": {"cache_dir": "x"}}, "--compilation-config.cache_dir", "capture.cache_dir"),
        (
            {"--speculative-config": {"enable_adaptive_verification": True}},
            "--speculative-config.enable_adaptive_verification",
            "draft.adaptive_verification",
        ),
        ({"-dcp": 2}, "-dcp", "parallel.dcp_size"),
        ({"--tensor-parallel-size": 2}, "--tensor-parallel-size", "parallel.tp_size"),
    ],
)
def test_a_vllm_spelling_of_a_planned_key_is_refused_with_both_names(
    options: dict[str, Any], spelling: str, key: str
) -> None:
    assert refusal(options) == f"{key} (given as {spelling}) is planned and does not work yet; remove it"


@pytest.mark.parametrize("spelling", VLLM_ALIASES)
def test_every_alias_leads_to_its_key(spelling: str) -> None:
    key = VLLM_ALIASES[spelling]
    assert key in refusal({spelling: [None]})  # no key takes that


# --- files -----------------------------------------------------------------------------------------------------------

SAME_IN_EVERY_FORMAT = {
    "c.yaml": "parallel:\n  pcp_size: 4\n  ranks: virtual\ntokens: {x: -1}\ndump.level: final\n",
    "c.YML": "parallel: {pcp_size: 4, ranks: virtual}\ntokens.x: -1\ndump: {level: final}\n",
    "c.toml": '"dump.level" = "final"\n[parallel]\npcp_size = 4\nranks = "virtual"\n[tokens]\nx = -1\n',
    "c.json": '{"parallel": {"pcp_size": 4, "ranks": "virtual"}, "tokens": {"x": -1}, "dump": {"level": "final"}}',
    "bom.json": '\ufeff{"-pcp": 4, "parallel.ranks": "virtual", "tokens.x": -1, "dump.level": "final"}',
}


@pytest.mark.parametrize("name", SAME_IN_EVERY_FORMAT)
def test_yaml_toml_and_json_give_the_config_of_the_dict(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, name, SAME_IN_EVERY_FORMAT[name])
    expected = load_config({"parallel.pcp_size": 4, "parallel.ranks": "virtual", "tokens.x": -1, "dump.level": "final"})
    for options in (path, str(path), {"config": path}, {"config": str(path)}):
        assert load_config(options) == expected
        assert load_config(options).key() == expected.key()


def test_inline_keys_win_over_the_file_one_by_one(tmp_path: Path) -> None:
    path = write(tmp_path, "c.yaml", "parallel: {pcp_size: 2, ranks: virtual}\ntokens: {x: 0, y: 1}\npcp: 2\n")
    config = load_config(
        {"config": path, "parallel.pcp_size": 8, "tokens": {"x": -1}, "parallel": {"ranks": "virtual"}}
    )
    assert config == Config(parallel={"pcp_size": 8, "ranks": "virtual"}, tokens={"x": -1, "y": 1})
    assert config.notes == (
        "pcp is read as parallel.pcp_size",
        f"parallel.pcp_size: 8 (int) replaces 2 (int) of {path}",
        f"tokens.x: -1 (int) replaces 0 (int) of {path}",
    )


def test_an_inline_none_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "c.yaml", "parallel: {pcp_size: 2, min_tokens_to_shard: 64}\ndump: {dir: out}\n")
    config = load_config({"config": path, "parallel.min_tokens_to_shard": None, "dump.dir": None})
    assert config == Config(parallel={"pcp_size": 2})


def test_an_inline_alias_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "c.toml", "[parallel]\npcp_size = 2\n")
    config = load_config({"config": str(path), "-pcp": 4})
    assert config.parallel.pcp_size == 4
    assert config.notes == (
        "-pcp is read as parallel.pcp_size",
        f"parallel.pcp_size: 4 (int) replaces 2 (int) of {path}",
    )


def test_a_fault_of_the_file_is_not_hidden_by_an_inline_value(tmp_path: Path) -> None:
    path = write(tmp_path, "c.json", '{"parallel": {"pcp_size": "2", "ranks": 1}, "capture": {"cache_dir": "x"}}')
    message = refusal({"config": path, "parallel.pcp_size": 4})
    assert message.splitlines() == [
        f"{path}: capture.cache_dir is planned and does not work yet; remove it",
        'parallel.pcp_size: got "2" (str); allowed: integer >= 1',
        "parallel.ranks: got 1 (int); allowed: auto, virtual, distributed",
    ]


def test_a_fault_of_an_inline_value_does_not_blame_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "c.json", '{"parallel": {"pcp_size": 2}}')
    assert refusal({"config": path, "dump.level": 1}) == "dump.level: got 1 (int); allowed: passes, final"


@pytest.mark.parametrize("value", [3, None, {"parallel": {}}])
def test_a_config_key_that_is_not_a_path_is_refused(value: Any) -> None:
    message = refusal({"config": value})
    assert message.startswith("config: got ")
    assert message.endswith("allowed: path of a file ending in .yaml, .yml, .toml, .json")


def test_a_file_cannot_name_another_file(tmp_path: Path) -> None:
    path = write(tmp_path, "c.yaml", "config: other.yaml\n")
    assert refusal(path) == f'{path}: config: got "other.yaml" (str); allowed: a file cannot name another file'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("twice.yaml", "parallel:\n  pcp_size: 2\n  pcp_size: 4\n"),
        ("same.yaml", "parallel:\n  pcp_size: 2\n  'pcp_size': 2\n"),
        ("list.yaml", "tokens: {x: [{pcp_size: 1, pcp_size: 2}]}\n"),
        ("twice.json", '{"parallel": {"pcp_size": 2, "pcp_size": 4}}'),
    ],
)
def test_a_key_given_twice_in_a_file_is_refused(name: str, text: str, tmp_path: Path) -> None:
    path = write(tmp_path, name, text)
    assert refusal(path).startswith(f'{path}: cannot be read: key "pcp_size" is given twice')


def test_a_yaml_key_given_twice_names_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "c.yaml", "role: target\ndump: {}\nrole: target\n")
    assert refusal(path) == f'{path}: cannot be read: key "role" is given twice, again in line 3'


def test_a_toml_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "c.toml", "[parallel]\npcp_size = 2\npcp_size = 4\n")
    assert refusal(path).startswith(f"{path}: cannot be read: ")


def test_yaml_anchors_and_merges_work(tmp_path: Path) -> None:
    path = write(tmp_path, "c.yaml", "parallel: &p {pcp_size: 2}\ntokens: {<<: {x: 1, y: 2}, x: -1}\ndump: {}\n")
    assert load_config(path) == Config(parallel={"pcp_size": 2}, tokens={"x": -1, "y": 2})


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("c.yaml", "", "is empty; allowed: a mapping of config keys"),
        ("c.yaml", "# only a comment\n", "is empty; allowed: a mapping of config keys"),
        ("c.toml", "# only a comment\n", "is empty; allowed: a mapping of config keys"),
        ("c.json", "  \n", "is empty; allowed: a mapping of config keys"),
        ("c.json", "{}", "is empty; allowed: a mapping of config keys"),
        ("c.yaml", "[1, 2]\n", "got [1, 2] (list) at the top; allowed: a mapping of config keys"),
        ("c.yaml", "parallel\n", 'got "parallel" (str) at the top; allowed: a mapping of config keys'),
        ("c.json", "4", "got 4 (int) at the top; allowed: a mapping of config keys"),
        ("c.ini", "[parallel]\n", 'suffix ".ini" is not known; allowed: .yaml, .yml, .toml, .json'),
        ("c", "parallel: {}\n", 'suffix "" is not known; allowed: .yaml, .yml, .toml, .json'),
        ("c.yaml", "parallel:\n  pcp_size: yes\n", "parallel.pcp_size: got True (bool); allowed: integer >= 1"),
        ("c.yaml", "tokens:\n  on: 1\n", "tokens: got the key True (bool); allowed: keys are strings"),
        ("c.yaml", "parallel:\n", f"parallel: got None (NoneType); allowed: mapping with the keys {PARALLEL_KEYS}"),
    ],
)
def test_a_file_that_says_nothing_usable_is_refused_with_its_path(
    name: str, text: str, reason: str, tmp_path: Path
) -> None:
    path = write(tmp_path, name, text)
    assert refusal(path) == f"{path}: {reason}"
    assert refusal({"config": str(path)}) == f"{path}: {reason}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "parallel: {pcp_size: 4\n"),
        ("c.yaml", "a: 1\n---\nb: 2\n"),
        ("c.yaml", "? [a]\n: 1\n"),
        ("c.yaml", "role: !!python/object/apply:os.getcwd []\n"),
        ("c.toml", "parallel = \n"),
        ("c.json", '{"parallel": }'),
        ("c.json", '{"a":' * 200_000),
    ],
)
def test_a_file_that_cannot_be_parsed_is_refused_with_its_path(name: str, text: str, tmp_path: Path) -> None:
    path = write(tmp_path, name, text)
    assert refusal(path).startswith(f"{path}: cannot be read: ")


@pytest.mark.parametrize("suffix", FILE_SUFFIXES)
def test_a_file_that_is_not_text_is_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"c{suffix}"
    path.write_bytes(b"\xff\xfe\x00role")
    assert refusal(path).startswith(f"{path}: cannot be read: ")


def test_a_missing_file_is_refused_with_its_full_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal("nope.yaml") == f"nope.yaml: no such file (full path: {tmp_path / 'nope.yaml'})"


def test_text_that_is_no_path_at_all_is_a_missing_file() -> None:
    assert "no such file" in refusal("parallel:\n  pcp_size: 4\n" * 1000)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path}: is a folder; allowed: a file ending in .yaml, .yml, .toml, .json"


# --- combinations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"draft": {"num_speculative_tokens": 5, "mode": "sharded"}},
            "draft.method: not given beside draft.num_speculative_tokens, draft.mode; allowed: none, mtp, model",
        ),
        (
            {"draft.backend_per_kind.full": "sdpa"},
            "draft.method: not given beside draft.backend_per_kind; allowed: none, mtp, model",
        ),
        (
            {"draft": {"method": "mtp", "num_speculative_tokens": 8}, "limits.max_num_tokens": 8},
            "limits.max_num_tokens: got 8 (int); allowed: integer >= 9, the 1 + draft.num_speculative_tokens rows that "
            "verify one request",
        ),
        (
            {"limits": {"prefill_chunk": 65, "max_num_tokens": 64}},
            "limits.prefill_chunk: got 65 (int); allowed: integer from 1 to limits.max_num_tokens = 64",
        ),
        (
            {"limits": {"max_model_len": 65, "kv_block_size": 16, "kv_blocks": 5}},
            "limits.kv_blocks: got 5 (int); allowed: auto, or integer >= 6: the reserved kv_block and 5 of 16 tokens "
            "for one request of limits.max_model_len = 65",
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    assert refusal(options) == message


@pytest.mark.parametrize(
    "options",
    [
        {"draft": {"method": "none", "num_speculative_tokens": 5}},
        {"draft": {"method": "none", "num_speculative_tokens": 8}, "limits.max_num_tokens": 8},
        {"draft": {"method": "mtp", "num_speculative_tokens": 8}, "limits.max_num_tokens": 9},
        {"draft": {"method": "mtp", "num_speculative_tokens": 0}, "limits.max_num_tokens": 1},
        {"limits": {"prefill_chunk": 64, "max_num_tokens": 64}},
        {"limits": {"max_model_len": 65, "kv_blocks": 6}},
        {"limits": {"max_model_len": 64, "kv_blocks": 5}},
        {"limits": {"kv_blocks": 2}},
        {"draft": {}},
    ],
)
def test_values_at_the_edge_of_a_combination_are_accepted(options: dict[str, Any]) -> None:
    assert load_config(load_config(options).model_dump()) == load_config(options)


def test_all_conflicts_come_in_one_error() -> None:
    options = {"draft.model": "m", "limits": {"prefill_chunk": 65, "max_num_tokens": 64}}
    assert [line.partition(":")[0] for line in refusal(options).splitlines()] == [
        "draft.method",
        "limits.prefill_chunk",
    ]


def test_inline_keys_may_complete_or_mend_the_combination_of_a_file(tmp_path: Path) -> None:
    text = "draft: {num_speculative_tokens: 5}\nlimits: {prefill_chunk: 64, max_num_tokens: 32}\n"
    path = write(tmp_path, "c.yaml", text)
    config = load_config({"config": path, "draft.method": "mtp", "limits.max_num_tokens": 64})
    assert (config.draft.num_speculative_tokens, config.limits.prefill_chunk) == (5, 64)
    assert "draft.method: not given beside draft.num_speculative_tokens" in refusal(path)
    assert refusal({"config": path, "draft.method": "mtp"}).startswith("limits.prefill_chunk: got 64 (int)")


def test_one_kind_of_a_file_is_replaced_inline_and_the_others_stay(tmp_path: Path) -> None:
    path = write(tmp_path, "c.yaml", "attention: {backend_per_kind: {full: sdpa, mla: sdpa_prefix}}\n")
    config = load_config({"config": path, "attention.backend_per_kind.mla": "sdpa"})
    assert config.attention.backend_per_kind == BackendPerKind(full="sdpa", mla="sdpa")


def test_a_k_schedule_is_kept_sorted() -> None:
    schedule = [[3, 5, 2], [1, 2, 3]]
    config = load_config({"draft": {"method": "mtp", "k_schedule": schedule}})
    assert config.draft.k_schedule == ((1, 2, 3), (3, 5, 2))
    assert schedule == [[3, 5, 2], [1, 2, 3]]


# --- the object ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"ranks": "auto", "pcp_size": 1, "min_tokens_to_shard": 2}),
        ({"parallel.pcp_size": 4}, {"ranks": "auto", "pcp_size": 4, "min_tokens_to_shard": 8}),
        ({"parallel.min_tokens_to_shard": 0}, {"ranks": "auto", "pcp_size": 1, "min_tokens_to_shard": 0}),
    ],
)
def test_the_resolved_config_has_every_choice_decided(options: dict[str, Any], expected: dict[str, Any]) -> None:
    config = load_config({**options, "tokens.x": 1})
    resolved = config.resolved()
    assert resolved == {
        "parallel": {
            **expected,
            "on_token_mixing": "refuse",
            "shard_decode": False,
            "timeout_s": {"start": 600.0, "step": 60.0},
        },
        "attention": {"backend": "auto", "backend_per_kind": NO_BACKENDS},
        "draft": {
            "method": "none",
            "model": None,
            "num_speculative_tokens": 3,
            "attention_backend": "auto",
            "backend_per_kind": NO_BACKENDS,
            "mode": "auto",
            "sampling": "greedy",
            "verification": "token",
            "k_schedule": [],
            "vocab_mismatch": "refuse",
        },
        "limits": {
            "max_model_len": None,
            "max_num_requests": 32,
            "max_num_tokens": 2048,
            "kv_block_size": 16,
            "kv_blocks": "auto",
            "kv_cache_dtype": "auto",
            "prefill_chunk": 2048,
            "prefix_cache": True,
        },
        "capture": {
            "mode": "none",
            "executor": "auto",
            "sizes": None,
            "context_buckets": None,
            "splitting_ops": [],
            "memory_mb": None,
        },
        "tokens": {"x": 1},
        "check": {"mode": "none", "rtol": None, "atol": None, "rows": False},
        "dump": {"dir": None, "level": "passes"},
        "role": "target",
        "numerics": "exact",
    }
    assert config.parallel.min_tokens_to_shard_resolved == expected["min_tokens_to_shard"]
    assert json.loads(json.dumps(resolved)) == resolved


def test_the_resolved_config_loads_to_the_same_key() -> None:
    config = load_config({"parallel.pcp_size": 3, "tokens.x": 1})
    assert load_config(config.resolved()).key() == config.key()


def test_equal_values_are_equal_and_hash_equal_whatever_their_notes_and_order() -> None:
    left = load_config({"pcp": 4, "tokens": {"x": 1, "y": 2}})
    right = load_config({"tokens": {"y": 2, "x": 1}, "parallel": {"pcp_size": 4}})
    assert left.notes != right.notes
    assert left == right
    assert hash(left) == hash(right)
    assert left.key() == right.key()
    assert len({left, right}) == 1
    assert "notes" not in str(left.model_dump())


@pytest.mark.parametrize(
    "change",
    [
        {"parallel.pcp_size": 5},
        {"parallel.min_tokens_to_shard": 1},
        {"parallel.timeout_s.step": 6},
        {"check.mode": "none"},
        {"check.rtol": 0.25},
        {"check.atol": None},
        {"check.rows": False},
        {"parallel.on_token_mixing": "refuse"},
        {"tokens.x": 1},
        {"tokens.z": 0},
        {"dump.dir": None},
        {"dump.level": "passes"},
        {"parallel.shard_decode": False},
        {"attention.backend": "auto"},
        {"attention.backend_per_kind.full": None},
        {"draft.method": "model"},
        {"draft.num_speculative_tokens": 4},
        {"draft.backend_per_kind.mla": None},
        {"draft.k_schedule": []},
        {"limits.kv_blocks": "auto"},
        {"limits.prefix_cache": True},
    ],
)
def test_another_value_gives_another_config_and_key(change: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, "c.json", json.dumps(FULL))
    config, changed = load_config(path), load_config({"config": path, **change})
    assert config != changed
    assert config.key() != changed.key()


def test_a_decided_default_shares_the_key_of_its_explicit_value() -> None:
    explicit = {"parallel.min_tokens_to_shard": 2, "parallel.timeout_s.step": 60, "limits.prefill_chunk": 2048}
    assert load_config(explicit).key() == Config().key()


def test_the_key_is_the_same_in_another_process() -> None:
    code = "from pcp_compiler.config import load_config; print(load_config({'tokens': {'y': 1, 'x': 0}}).key())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == load_config({"tokens": {"x": 0, "y": 1}}).key()


def test_a_config_is_not_equal_to_its_dict() -> None:
    assert Config() != Config().model_dump()


def test_a_config_cannot_be_changed() -> None:
    config = load_config(FULL)
    for section, name in (
        (config, "role"),
        (config.parallel, "pcp_size"),
        (config.dump, "dir"),
        (config.attention.backend_per_kind, "full"),
        (config.draft, "k_schedule"),
        (config.limits, "kv_blocks"),
    ):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, 1)
    with pytest.raises(TypeError):
        config.tokens["x"] = 2  # type: ignore[index]
    assert config.model_dump() == FULL


def test_changing_the_dict_later_does_not_change_the_config() -> None:
    dims = {"x": 0}
    config = load_config({"tokens": dims})
    dims["x"] = 1
    assert config.tokens == {"x": 0}


def test_a_config_survives_pickle_and_deepcopy_with_its_notes() -> None:
    config = load_config({"-pcp": 4, "tokens.x": 1, "draft": {"method": "mtp", "k_schedule": [[1, 2, 3]]}})
    for twin in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert twin == config
        assert twin.notes == config.notes == ("-pcp is read as parallel.pcp_size",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": {"pcp_size": "4"}}, 'parallel.pcp_size: got "4" (str); allowed: integer >= 1'),
        ({"parallel": 3}, f"parallel: got 3 (int); allowed: mapping with the keys {PARALLEL_KEYS}"),
        ({"capture": {"cache_dir": "x"}}, "capture.cache_dir is planned and does not work yet; remove it"),
        ({"draft": {"method": "mtp", "taps": []}}, "draft.taps is planned and does not work yet; remove it"),
        (
            {"capture": {"executor": "replay", "sizes": [8]}},
            "capture.mode: not given beside capture.executor, capture.sizes; "
            "allowed: none, piecewise, full_decode, full_and_piecewise",
        ),
        ({"draft": {"mode": "auto"}}, "draft.method: not given beside draft.mode; allowed: none, mtp, model"),
        ({"parallel": {"tp_size": 2}}, "parallel.tp_size is planned and does not work yet; remove it"),
        ({"rol": "target"}, f"rol is not a config key; did you mean role? allowed: {ALLOWED_KEYS}"),
        ({"tokens": {1: 2}}, f"tokens: got the name 1 (int); allowed: {DIMS}"),
        (
            {"parallel.pcp_size": 4},
            "parallel.pcp_size: Config takes nested keys; dotted keys are read by load_config",
        ),
    ],
)
def test_the_constructor_refuses_with_the_same_words(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**options)
    assert str(caught.value) == message


def test_the_constructor_takes_ready_sections() -> None:
    config = Config(parallel=ParallelConfig(pcp_size=4), tokens=Config(tokens={"x": 1}).tokens)
    assert config == load_config({"parallel.pcp_size": 4, "tokens.x": 1})


def test_every_field_has_a_description() -> None:
    sections = (ParallelConfig, AttentionConfig, BackendPerKind, DraftConfig, LimitsConfig, DumpConfig)
    for model in (Config, *sections):
        assert all(field.description for field in model.model_fields.values())


names = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=8)
configs = st.builds(
    lambda size, least, mixing, tokens, folder, level, backends, schedule, kv_blocks: Config(
        parallel={"pcp_size": size, "min_tokens_to_shard": least, "on_token_mixing": mixing},
        tokens=tokens,
        dump={"dir": folder, "level": level},
        attention={"backend_per_kind": backends},
        draft={"method": "mtp", "backend_per_kind": backends, "k_schedule": schedule},
        limits={"kv_blocks": kv_blocks},
    ),
    st.integers(1, 10**6),
    st.none() | st.integers(0, 10**6),
    st.sampled_from(["refuse", "gather"]),
    st.dictionaries(names | st.sampled_from(["on", "1", "null", "<<", "=", "~"]), st.integers(-4, 4), max_size=3),
    st.none() | names | st.sampled_from(["1", "true", "2024-01-01"]),
    st.sampled_from(["passes", "final"]),
    st.dictionaries(st.sampled_from(BACKEND_KINDS), st.sampled_from(["sdpa", "sdpa_prefix", None])),
    st.sampled_from([[], [[1, 1, 0]], [[4, 6, 1], [1, 2, 3]]]),
    st.just("auto") | st.integers(2, 10**6),
)


@given(config=configs)
def test_the_yaml_text_loads_to_an_equal_config(config: Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write(tmp_path_factory.getbasetemp(), "round_trip.yaml", config.to_yaml())
    assert load_config(path) == config
    assert load_config(config.model_dump()) == config


def test_torch_compile_passes_options_through_and_a_refusal_reaches_the_user_as_itself() -> None:
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: Any, *, options: dict[str, Any]) -> Any:
        seen.append(load_config(options))
        return graph.forward

    x = torch.ones(2)
    compiled = torch.compile(lambda x: x + 1, backend=backend, options={"parallel.pcp_size": 4})
    assert torch.equal(compiled(x), x + 1)
    assert seen == [Config(parallel={"pcp_size": 4})]
    refused = torch.compile(lambda x: x + 2, backend=backend, options={"parallel.pcp_size": "4"})
    with pytest.raises(ConfigError, match=r'^parallel\.pcp_size: got "4" \(str\); allowed: integer >= 1'):
        refused(x)


@pytest.mark.parametrize(
    ("options", "keys", "message"),
    [
        ({"draft": {"method": "mtp"}}, DECODER_KEYS, "draft: got"),
        ({"limits.kv_block_size": 8}, DECODER_KEYS, "limits: got"),
        ({"parallel.shard_decode": True}, DECODER_KEYS, "parallel.shard_decode: got True, which a test does not use"),
        ({"dump.dir": "out"}, COMPILER_KEYS, "dump: got"),
        (
            {"parallel.ranks": "distributed"},
            COMPILER_KEYS,
            "parallel.ranks: got 'distributed', which a test does not use",
        ),
    ],
)
def test_a_key_that_is_not_used_is_refused(options: dict[str, Any], keys: tuple[str, ...], message: str) -> None:
    check_used(load_config({"parallel.pcp_size": 2, "parallel.ranks": "virtual"}), keys, "a test", "another")
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_used(load_config(options), keys, "a test", "another")

"""Config: what is accepted, every refusal word for word, files, aliases, equality and cache keys."""

from __future__ import annotations

import copy
import json
import pickle
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
    FILE_SUFFIXES,
    PLANNED_KEYS,
    VLLM_ALIASES,
    Config,
    DumpConfig,
    ParallelConfig,
    load_config,
)
from pcp_compiler.errors import ConfigError

PARALLEL_KEYS = "pcp_size, ranks, min_tokens_to_shard, on_token_mixing, timeout_s"
ALLOWED_KEYS = (
    "parallel.pcp_size, parallel.ranks, parallel.min_tokens_to_shard, parallel.on_token_mixing, "
    "parallel.timeout_s.start, parallel.timeout_s.step, check.mode, check.rtol, check.atol, check.rows, dump.dir, "
    "dump.level, tokens.<argument>, role, config"
)
SIZE = "integer >= 1"
RANKS = "auto, virtual, distributed"
SECONDS = "seconds > 0"
MIN_TOKENS = "integer >= 0, or None for 2 * pcp_size"
FOLDER = "folder path (non-empty string), or None for off"
TOLERANCE = "number >= 0, or None by dtype"
DIM = "integer (token dim, may be negative)"
DIMS = "mapping of argument name (non-empty string) to token dim (integer, may be negative)"

FULL: dict[str, Any] = {
    "parallel": {
        "pcp_size": 4,
        "ranks": "virtual",
        "min_tokens_to_shard": 0,
        "on_token_mixing": "gather",
        "timeout_s": {"start": 30.0, "step": 5.5},
    },
    "tokens": {"input_ids": -1, "x": 0},
    "check": {"mode": "inputs", "rtol": 0.5, "atol": 0.0, "rows": True},
    "dump": {"dir": "out", "level": "final"},
    "role": "target",
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
        pcp_size=1, ranks="auto", min_tokens_to_shard=None, on_token_mixing="refuse"
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


@pytest.mark.parametrize(("key", "value", "allowed"), [("role", "draft", "target")])
def test_a_planned_value_is_refused_as_planned(key: str, value: str, allowed: str) -> None:
    expected = f'{key}: got "{value}" (str), which is planned and does not work yet; allowed: {allowed}'
    assert refusal({key: value}) == expected


def test_all_faults_of_one_source_come_in_one_error() -> None:
    options = {"parallel": {"pcp_size": "4", "ranks": "x", "shard_decode": True}, "dump.level": 1, "zzz": 1}
    assert refusal(options).splitlines() == [
        "parallel.shard_decode is planned and does not work yet; remove it",
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


@pytest.mark.parametrize("group", ["attention", "draft", "capture", "limits"])
def test_a_planned_group_is_refused_by_name(group: str) -> None:
    values: list[Any] = [None, {}, "auto"]
    for value in values:
        assert refusal({group: value}) == f"{group} is planned and does not work yet; remove it"


def test_every_key_of_the_public_contract_either_works_or_is_planned() -> None:
    working = {"parallel.pcp_size", "parallel.ranks", "parallel.min_tokens_to_shard", "parallel.on_token_mixing"}
    working |= {"parallel.timeout_s.start", "parallel.timeout_s.step"}
    working |= {"check.mode", "check.rtol", "check.atol", "check.rows"}
    working |= {"dump.dir", "dump.level", "tokens", "role"}
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
        ("draft.metod", "draft.method"),
        ("parallel.shard_decod", "parallel.shard_decode"),
        ("cudagraph_mod", "cudagraph_mode"),
        ("captures", "capture"),
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
    ],
)
def test_a_vllm_spelling_is_read_and_noted(spelling: str, value: Any, key: str) -> None:
    config = load_config({spelling: value})
    assert config == load_config({key: value}) != Config()
    assert config.notes == (f"{spelling} is read as {key}",)


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
        ({"cudagraph_mode": "FULL"}, "cudagraph_mode", "capture.mode"),
        ({"-cc.cudagraph_mode": "NONE"}, "-cc.cudagraph_mode", "capture.mode"),
        ({"compilation_config": {"cudagraph_mode": 1}}, "compilation_config.cudagraph_mode", "capture.mode"),
        (
            {"--compilation-config": {"splitting_ops": []}},
            "--compilation-config.splitting_ops",
            "capture.splitting_ops",
        ),
        ({"splitting_ops": []}, "splitting_ops", "capture.splitting_ops"),
        ({"cudagraph_capture_sizes": [1, 2]}, "cudagraph_capture_sizes", "capture.sizes"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens", "draft.num_speculative_tokens"),
        (
            {"num_speculative_tokens_per_batch_size": [[1, 8, 3]]},
            "num_speculative_tokens_per_batch_size",
            "draft.k_schedule",
        ),
        ({"speculative_config": {"method": "mtp"}}, "speculative_config.method", "draft.method"),
        ({"--speculative-config": {"model": "m"}}, "--speculative-config.model", "draft.model"),
        ({"-dcp": 2}, "-dcp", "parallel.dcp_size"),
        ({"--tensor-parallel-size": 2}, "--tensor-parallel-size", "parallel.tp_size"),
        ({"max_num_seqs": 8}, "max_num_seqs", "limits.max_num_requests"),
    ],
)
def test_a_vllm_spelling_of_a_planned_key_is_refused_with_both_names(
    options: dict[str, Any], spelling: str, key: str
) -> None:
    assert refusal(options) == f"{key} (given as {spelling}) is planned and does not work yet; remove it"


@pytest.mark.parametrize("spelling", VLLM_ALIASES)
def test_every_alias_leads_to_its_key(spelling: str) -> None:
    key = VLLM_ALIASES[spelling]
    assert key in refusal({spelling: ["no key takes a list of this"]})


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
    path = write(tmp_path, "c.json", '{"parallel": {"pcp_size": "2", "ranks": 1}, "draft": {"method": "mtp"}}')
    message = refusal({"config": path, "parallel.pcp_size": 4})
    assert message.splitlines() == [
        f"{path}: draft.method is planned and does not work yet; remove it",
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
        "parallel": {**expected, "on_token_mixing": "refuse", "timeout_s": {"start": 600.0, "step": 60.0}},
        "tokens": {"x": 1},
        "check": {"mode": "none", "rtol": None, "atol": None, "rows": False},
        "dump": {"dir": None, "level": "passes"},
        "role": "target",
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
    ],
)
def test_another_value_gives_another_config_and_key(change: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, "c.json", json.dumps(FULL))
    config, changed = load_config(path), load_config({"config": path, **change})
    assert config != changed
    assert config.key() != changed.key()


def test_a_decided_default_shares_the_key_of_its_explicit_value() -> None:
    explicit = {"parallel.min_tokens_to_shard": 2, "parallel.timeout_s.step": 60}
    assert load_config(explicit).key() == Config().key()


def test_the_key_is_the_same_in_another_process() -> None:
    code = "from pcp_compiler.config import load_config; print(load_config({'tokens': {'y': 1, 'x': 0}}).key())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == load_config({"tokens": {"x": 0, "y": 1}}).key()


def test_a_config_is_not_equal_to_its_dict() -> None:
    assert Config() != Config().model_dump()


def test_a_config_cannot_be_changed() -> None:
    config = load_config(FULL)
    for section, name in ((config, "role"), (config.parallel, "pcp_size"), (config.dump, "dir")):
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
    config = load_config({"-pcp": 4, "tokens.x": 1})
    for twin in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert twin == config
        assert twin.notes == config.notes == ("-pcp is read as parallel.pcp_size",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": {"pcp_size": "4"}}, 'parallel.pcp_size: got "4" (str); allowed: integer >= 1'),
        ({"parallel": 3}, f"parallel: got 3 (int); allowed: mapping with the keys {PARALLEL_KEYS}"),
        ({"draft": {"method": "mtp"}}, "draft is planned and does not work yet; remove it"),
        ({"parallel": {"shard_decode": True}}, "parallel.shard_decode is planned and does not work yet; remove it"),
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
    for model in (Config, ParallelConfig, DumpConfig):
        assert all(field.description for field in model.model_fields.values())


names = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=8)
configs = st.builds(
    lambda size, least, mixing, tokens, folder, level: Config(
        parallel={"pcp_size": size, "min_tokens_to_shard": least, "on_token_mixing": mixing},
        tokens=tokens,
        dump={"dir": folder, "level": level},
    ),
    st.integers(1, 10**6),
    st.none() | st.integers(0, 10**6),
    st.sampled_from(["refuse", "gather"]),
    st.dictionaries(names | st.sampled_from(["on", "1", "null", "<<", "=", "~"]), st.integers(-4, 4), max_size=3),
    st.none() | names | st.sampled_from(["1", "true", "2024-01-01"]),
    st.sampled_from(["passes", "final"]),
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

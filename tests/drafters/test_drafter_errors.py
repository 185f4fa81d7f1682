"""A drafter that does not fit is refused with one line per fault: what was found, what is wanted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pcp_compiler.drafters.load import load_drafter
from pcp_compiler.errors import ConfigError

LAYER = "model.layers.2."


def refusal(target: nn.Module, draft: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_drafter(target, draft)
    return str(caught.value)


def refusal_of_tensors(made: Any) -> str:
    made.write()
    return refusal(made.target, made.draft())


def test_a_missing_tensor_is_named_with_the_shape_that_is_wanted(make: Callable[..., Any]) -> None:
    made = make()
    del made.tensors[f"{LAYER}eh_proj.weight"]
    assert refusal_of_tensors(made) == f"draft.model: {LAYER}eh_proj.weight: missing; wanted: shape [32, 64]"


@pytest.mark.parametrize("name", [f"{LAYER}mlp.gate_proj.weight_scale_inv", "model.layers.3.enorm.weight", "mtp.x"])
def test_an_unknown_tensor_is_named_with_its_shape(name: str, make: Callable[..., Any]) -> None:
    made = make()
    made.tensors[name] = torch.zeros(3, 5)
    assert refusal_of_tensors(made) == f"draft.model: {name}: not a tensor of this drafter; shape [3, 5] found"


def test_a_transposed_tensor_is_called_that(make: Callable[..., Any]) -> None:
    made = make()
    name = f"{LAYER}mlp.down_proj.weight"
    made.tensors[name] = made.tensors[name].T
    assert refusal_of_tensors(made) == f"draft.model: {name}: shape [48, 32] found (transposed), [32, 48] wanted"


def test_all_faults_of_a_file_are_in_one_message(make: Callable[..., Any]) -> None:
    made = make()
    made.tensors[f"{LAYER}enorm.weight"] = torch.zeros(31)
    made.tensors[f"{LAYER}hnorm.weight"] = torch.zeros(32, dtype=torch.int32)
    del made.tensors[f"{LAYER}shared_head.norm.weight"]
    assert sorted(refusal_of_tensors(made).splitlines()) == [
        f"draft.model: {LAYER}enorm.weight: shape [31] found, [32] wanted",
        f"draft.model: {LAYER}hnorm.weight: type I32 found; allowed: F64, F32, F16, BF16",
        f"draft.model: {LAYER}shared_head.norm.weight: missing; wanted: shape [32]",
    ]


def test_a_long_list_of_faults_is_cut_and_counted(make: Callable[..., Any]) -> None:
    made = make()
    made.tensors.clear()
    made.tensors.update({f"x.{number}": torch.zeros(1) for number in range(25)})
    lines = refusal_of_tensors(made).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "and 5 more"


def test_one_missing_expert_is_named(make: Callable[..., Any]) -> None:
    made = make("deepseek_v3")
    name = f"{LAYER}mlp.experts.3.up_proj.weight"
    del made.tensors[name]
    assert refusal_of_tensors(made) == f"draft.model: {name}: missing; wanted: shape [24, 32]"


@pytest.mark.parametrize("part", ["embed_tokens", "shared_head.head"])
def test_an_own_matrix_that_the_config_promises_has_to_be_there(part: str, make: Callable[..., Any]) -> None:
    made = make()
    made.config.update({"shares_target_embedding": False, "shares_target_lm_head": False})
    made.tensors.update({f"{LAYER}{name}.weight": torch.zeros(64, 32) for name in ("embed_tokens", "shared_head.head")})
    del made.tensors[f"{LAYER}{part}.weight"]
    assert refusal_of_tensors(made) == f"draft.model: {LAYER}{part}.weight: missing; wanted: shape [64, 32]"


@pytest.mark.parametrize(
    ("field", "drafter", "target"), [("hidden_size", 40, 32), ("vocab_size", 65, 64), ("num_hidden_layers", 3, 2)]
)
def test_a_size_that_does_not_fit_the_target_is_named_with_both_values(
    field: str, drafter: int, target: int, make: Callable[..., Any]
) -> None:
    made = make()
    made.config[field] = drafter
    wanted = f"config.json: {field} is {drafter} in the drafter and {target} in the target"
    assert wanted in refusal_of_tensors(made)


def test_each_thing_that_does_not_fit_has_its_line(make: Callable[..., Any]) -> None:
    made = make()
    made.config.update({"hidden_size": 40, "vocab_size": 65, "rope_theta": 10000.0})
    assert [line.split(" is ")[0] for line in refusal_of_tensors(made).splitlines()] == [
        "draft.model: config.json: hidden_size",
        "draft.model: config.json: vocab_size",
        "draft.model: config.json: rope_theta",
    ]


@pytest.mark.parametrize("field", ["rope_theta", "rope_parameters.rope_theta"])
def test_another_rope_base_is_named_with_the_field_that_states_it(field: str, make: Callable[..., Any]) -> None:
    made = make()
    if field == "rope_theta":
        made.config[field] = 10000
    else:
        made.config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000}
    wanted = f"config.json: {field} is 10000.0 in the drafter and 5000.0 in the target; allowed: equal values"
    assert refusal_of_tensors(made) == f"draft.model: {wanted}"


def test_a_drafter_of_another_family_is_refused_naming_both(make: Callable[..., Any]) -> None:
    made = make()
    made.config["model_type"] = "qwen3_mtp"
    assert "model_type: 'qwen3' in the drafter and 'llama' in the target" in refusal_of_tensors(made)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("model_type", "mamba", "llama, qwen3, deepseek_v3, glm4_moe_lite"),
        ("mtp_hidden_state", "pre_final_norm", "'post_final_norm'"),
        ("mtp_position", "next_token_index", "'hidden_state_index'"),
        ("mtp_concat_order", ["hidden_state", "embedding"], "['embedding', 'hidden_state']"),
        ("mtp_recycled_hidden_state", "none", "'post_shared_head_norm', 'pre_shared_head_norm'"),
        ("mtp_zero_embedding_at_position_zero", 1, "True, False"),
        ("num_nextn_predict_layers", 0, "integer >= 1"),
        ("num_nextn_predict_layers", True, "integer >= 1"),
        ("intermediate_size", "48", "integer >= 1"),
        ("num_key_value_heads", 3, "a divisor of 4"),
        ("hidden_act", "gelu", "'silu'"),
        ("use_sliding_window", True, "False"),
        ("rms_norm_eps", -1, "number > 0"),
        ("rope_theta", "10000", "number > 0"),
    ],
)
def test_a_field_of_the_config_that_we_cannot_follow_is_refused(
    field: str, value: object, allowed: str, make: Callable[..., Any]
) -> None:
    made = make()
    made.config[field] = value
    assert refusal_of_tensors(made).startswith(f"config.json: {field}: got {value!r}; allowed: {allowed}")


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_rotary_frequencies_that_depend_on_the_length_are_refused(family: str, make: Callable[..., Any]) -> None:
    made = make(family)
    made.config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5000.0}
    assert "rope_parameters.rope_type: got 'dynamic'; allowed: default, linear" in refusal_of_tensors(made)


def test_what_transformers_says_about_a_config_is_passed_on(make: Callable[..., Any]) -> None:
    made = make("deepseek_v3")
    made.config["kv_lora_rank"] = "ten"
    message = refusal_of_tensors(made)
    assert message.startswith("draft.model: config.json: transformers refuses it:")
    assert "kv_lora_rank" in message


def test_files_that_are_not_there_are_named(make: Callable[..., Any], tmp_path: Path) -> None:
    made = make()
    absent = str(tmp_path / "absent")
    assert f"{absent} is not a folder" in refusal(made.target, made.draft(model=absent))
    (tmp_path / "model.safetensors").unlink()
    assert f"{tmp_path / 'model.safetensors'} does not exist" in refusal(made.target, made.draft())
    (tmp_path / "config.json").unlink()
    assert f"{tmp_path / 'config.json'} does not exist" in refusal(made.target, made.draft())


def test_files_that_cannot_be_read_are_named(make: Callable[..., Any], tmp_path: Path) -> None:
    made = make()
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"{weights} cannot be read" in refusal(made.target, made.draft())
    (tmp_path / "config.json").write_text("[1]", encoding="utf-8")
    assert "config.json holds a list; allowed: a JSON object" in refusal(made.target, made.draft())
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert "config.json cannot be read" in refusal(made.target, made.draft())


def test_an_index_that_lies_is_found_out(make: Callable[..., Any], tmp_path: Path) -> None:
    made = make()
    save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"{LAYER}enorm.weight": "a.safetensors"}}), encoding="utf-8")
    assert f"{LAYER}enorm.weight: model.safetensors.index.json places it in" in refusal(made.target, made.draft())
    index.write_text(json.dumps({"weight_map": {f"{LAYER}enorm.weight": "b.safetensors"}}), encoding="utf-8")
    assert f"{tmp_path / 'b.safetensors'} does not exist" in refusal(made.target, made.draft())
    index.write_text(json.dumps({"weight_map": [1]}), encoding="utf-8")
    assert "weight_map: allowed: an object" in refusal(made.target, made.draft())


def test_an_unknown_method_is_refused_with_the_known_ones(make: Callable[..., Any]) -> None:
    assert refusal(make().target, {"method": "eagle"}) == "draft.method: got 'eagle'; allowed: none, mtp, model"


@pytest.mark.parametrize("method", [None, "none"])
def test_no_method_is_no_drafter(method: str | None, make: Callable[..., Any]) -> None:
    assert load_drafter(make().target, {"method": method}) is None


@pytest.mark.parametrize("method", ["mtp", "model"])
def test_a_method_without_a_model_is_refused(method: str, make: Callable[..., Any]) -> None:
    assert refusal(make().target, {"method": method, "model": None}).startswith("draft.model: got None; allowed: ")


def test_a_target_without_the_parts_a_drafter_needs_is_refused() -> None:
    message = refusal(nn.Linear(2, 2), {"method": "mtp", "model": "x"})
    assert message.startswith("target: Linear has no config, get_input_embeddings(), get_output_embeddings(); allowed:")

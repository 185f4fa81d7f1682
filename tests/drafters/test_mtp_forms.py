"""MTP checkpoints in DeepSeek's form for every family, against transformers' own MTP layer with the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pcp_compiler.drafters.load import load_drafter
from pcp_compiler.drafters.mtp import MTPDrafter
from pcp_compiler.errors import ConfigError

FAMILIES = ("llama", "qwen3", "deepseek_v3", "glm4_moe_lite")


@pytest.fixture(scope="module", autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def load(target: Any, draft: dict[str, object]) -> MTPDrafter:
    drafter = load_drafter(target, draft)
    assert isinstance(drafter, MTPDrafter)
    return drafter


def example_rows(num_rows: int = 7, first: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return next ids, hidden states and positions of two sequences; none is at position 0."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (2, num_rows), generator=generator)
    hidden = torch.randn(2, num_rows, 32, generator=generator)
    return ids, hidden, torch.arange(first, first + num_rows).repeat(2, 1)


def reference_rows(made: Any, module: int, ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
    """Return what transformers' MTP layer, which masks no embedding, makes of rows."""
    embedded = made.target.get_input_embeddings()(ids)
    angles = made.target.model.rotary_emb(embedded, positions)
    out: Tensor = made.references[module](embedded, hidden, angles, attention_mask=None, position_ids=None, cache=None)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_a_module_gives_what_transformers_own_mtp_layer_gives(
    family: str, make: Callable[..., Any], growing_kv: Any
) -> None:
    made = make(family)
    drafter = load(made.target, made.draft())
    rows = example_rows()
    with growing_kv:
        found = drafter(*rows)
    torch.testing.assert_close(found, reference_rows(made, 0, *rows), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(drafter.compute_logits(found), made.target.lm_head(found))
    assert growing_kv.num_calls == 1
    assert list(growing_kv.rows) == [2]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_at_a_time_with_kept_rows_gives_what_one_pass_gives(
    family: str, make: Callable[..., Any], growing_kv: Any
) -> None:
    made = make(family)
    drafter = load(made.target, made.draft())
    rows = example_rows(first=0)
    with growing_kv:
        steps = [drafter(*(x[:, i : i + 1] for x in rows)) for i in range(rows[0].shape[1])]
    torch.testing.assert_close(torch.cat(steps, dim=1), drafter(*rows), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_each_of_several_modules_has_its_own_weights_and_layer_number(
    family: str, make: Callable[..., Any], growing_kv: Any
) -> None:
    made = make(family, num_modules=2)
    drafter = load(made.target, made.draft(num_speculative_tokens=2))
    rows = example_rows()
    with growing_kv:
        for step in (0, 1):
            found = drafter(*rows, step=step)
            torch.testing.assert_close(found, reference_rows(made, step, *rows), rtol=2e-5, atol=2e-5)
    assert list(growing_kv.rows) == [2, 3]
    assert drafter.capabilities.max_draft_tokens == 2


def test_more_draft_tokens_than_modules_are_refused_with_the_limit(make: Callable[..., Any]) -> None:
    made = make(num_modules=2)
    with pytest.raises(ConfigError, match=r"draft\.num_speculative_tokens: got 3; .* 2 modules .* allowed: 0 to 2"):
        load_drafter(made.target, made.draft(num_speculative_tokens=3))


def test_one_module_serves_any_number_of_draft_tokens(make: Callable[..., Any]) -> None:
    made = make()
    drafter = load(made.target, made.draft(num_speculative_tokens=50))
    assert drafter.module_of_step(49) is drafter.module_of_step(0)


def test_embedding_and_head_of_the_file_replace_the_targets(make: Callable[..., Any]) -> None:
    made = make()
    own = {name: torch.randn(64, 32) for name in ("embed_tokens.weight", "shared_head.head.weight")}
    made.tensors.update({f"model.layers.2.{name}": value for name, value in own.items()})
    made.write()
    drafter = load(made.target, made.draft())
    module = drafter.module_of_step(0)
    hidden = torch.randn(3, 32)
    assert torch.equal(module.state_dict()["embed_tokens.weight"], own["embed_tokens.weight"])
    torch.testing.assert_close(drafter.compute_logits(hidden), hidden @ own["shared_head.head.weight"].T)
    assert drafter.capabilities.has_own_embedding
    assert drafter.capabilities.has_own_head
    assert made.target.get_input_embeddings() is not module.embed_tokens


def test_without_them_the_targets_embedding_and_head_are_used(make: Callable[..., Any]) -> None:
    made = make()
    drafter = load(made.target, made.draft())
    capabilities = drafter.capabilities
    assert drafter.module_of_step(0).embed_tokens is made.target.get_input_embeddings()
    assert not (capabilities.has_own_embedding or capabilities.has_own_head or capabilities.needs_taps)
    assert capabilities.needs_hidden
    assert capabilities.row_form == "next_token_and_hidden"
    assert capabilities.max_positions == 128


def test_the_modules_are_found_in_the_targets_own_sharded_checkpoint(make: Callable[..., Any]) -> None:
    made = make("deepseek_v3")
    (made.folder / "model.safetensors").unlink()
    target_tensors = {name: value.clone() for name, value in made.target.state_dict().items()}
    shards = {"a.safetensors": target_tensors, "b.safetensors": {n: v.contiguous() for n, v in made.tensors.items()}}
    for file, tensors in shards.items():
        save_file(tensors, made.folder / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = made.folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    made.target.name_or_path = str(made.folder)
    rows = example_rows()
    found = load(made.target, {"method": "mtp", "model": None})(*rows)
    torch.testing.assert_close(found, reference_rows(made, 0, *rows), rtol=2e-5, atol=2e-5)


def test_the_recycled_state_is_taken_before_the_norm_when_the_config_says_so(make: Callable[..., Any]) -> None:
    made = make()
    rows = example_rows()
    normed = load(made.target, made.draft())
    made.config["mtp_recycled_hidden_state"] = "pre_shared_head_norm"
    made.write()
    raw = load(made.target, made.draft())
    norm = raw.module_of_step(0).shared_head.norm
    assert not torch.allclose(raw(*rows), normed(*rows))
    torch.testing.assert_close(norm(raw(*rows)), normed(*rows))
    torch.testing.assert_close(raw.compute_logits(raw(*rows)), normed.compute_logits(normed(*rows)))


def test_position_zero_keeps_its_embedding_when_the_config_says_so(make: Callable[..., Any]) -> None:
    made = make()
    made.config["mtp_zero_embedding_at_position_zero"] = False
    made.write()
    rows = example_rows(first=0)
    torch.testing.assert_close(
        load(made.target, made.draft())(*rows), reference_rows(made, 0, *rows), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=lambda rope: str(rope["rope_type"]),
)  # fmt: skip
def test_scaled_rotary_embeddings_are_those_of_transformers(rope: dict[str, Any], make: Callable[..., Any]) -> None:
    made = make(rope_parameters={"rope_theta": 5000.0, **rope})
    rows = example_rows(first=60)
    found = load(made.target, made.draft())(*rows)
    torch.testing.assert_close(found, reference_rows(made, 0, *rows), rtol=2e-5, atol=2e-5)


def test_biases_are_loaded_and_used(make: Callable[..., Any]) -> None:
    made = make(attention_bias=True, mlp_bias=True)
    rows = example_rows()
    found = load(made.target, made.draft())(*rows)
    torch.testing.assert_close(found, reference_rows(made, 0, *rows), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_weights_take_the_type_of_the_target_and_the_rest_stays_wide(family: str, make: Callable[..., Any]) -> None:
    made = make(family)
    made.target.bfloat16()
    drafter = load(made.target, made.draft())
    ids, hidden, positions = example_rows()
    module = drafter.module_of_step(0)
    assert drafter(ids, hidden.bfloat16(), positions).dtype == torch.bfloat16
    assert module.eh_proj.weight.dtype == torch.bfloat16
    assert module.rotary.inv_freq.dtype == torch.float32
    router = [value.dtype for name, value in module.state_dict().items() if "mlp.gate." in name]
    assert router == [torch.float32] * (2 if family == "deepseek_v3" else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_loading_leaves_the_target_as_it_was(family: str, make: Callable[..., Any]) -> None:
    made = make(family)
    made.target.train()
    config, attention = made.target.config.to_dict(), made.target.config._attn_implementation
    weights = {name: (id(value), value.requires_grad) for name, value in made.target.named_parameters()}
    drafter = load(made.target, made.draft())
    assert not drafter.training
    assert all(module.training for module in made.target.modules())
    assert made.target.config.to_dict() == config
    assert made.target.config._attn_implementation == attention == "sdpa"
    assert {name: (id(value), value.requires_grad) for name, value in made.target.named_parameters()} == weights

"""An independent draft model: same results as the model it wraps, and what is done when vocabularies differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from pcp_compiler.drafters.load import load_drafter
from pcp_compiler.drafters.model import ModelDrafter
from pcp_compiler.errors import ConfigError, UnsupportedGraphError

IDS = torch.tensor([[3, 60, 7, 7, 21], [0, 1, 2, 3, 4]])
POSITIONS = torch.arange(5).repeat(2, 1)


@pytest.fixture(scope="module", autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def load(target: Any, model: object, **changes: object) -> ModelDrafter:
    drafter = load_drafter(target, {"method": "model", "model": model, **changes})
    assert isinstance(drafter, ModelDrafter)
    return drafter


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])
def test_logits_are_those_of_the_wrapped_model(family: str, build_target: Callable[..., Any], growing_kv: Any) -> None:
    model = build_target(family)
    drafter = load(build_target("llama"), model)
    with growing_kv:
        logits = drafter.compute_logits(drafter(IDS, POSITIONS))
    torch.testing.assert_close(logits, model(IDS, use_cache=False).logits, rtol=1e-4, atol=1e-4)
    assert growing_kv.num_calls == 2
    assert list(growing_kv.rows) == [0, 1]


def test_a_row_at_a_time_with_kept_rows_gives_what_one_pass_gives(
    build_target: Callable[..., Any], growing_kv: Any
) -> None:
    drafter = load(build_target("llama"), build_target("qwen3"))
    with growing_kv:
        steps = [drafter(IDS[:, i : i + 1], POSITIONS[:, i : i + 1]) for i in range(5)]
    torch.testing.assert_close(torch.cat(steps, dim=1), drafter(IDS, POSITIONS), rtol=1e-4, atol=1e-4)


def test_the_target_as_its_own_drafter_shares_every_weight_and_keeps_its_settings(
    build_target: Callable[..., Any],
) -> None:
    target = build_target("llama").train()
    drafter = load(target, target)
    shared = dict(drafter.model.named_parameters())
    assert all(shared[name] is value for name, value in target.named_parameters())
    assert target.config._attn_implementation == "sdpa"
    assert drafter.model.config._attn_implementation == "pcp_draft"
    assert target.training
    assert not any(module.training for module in drafter.modules())


def test_a_model_is_read_from_a_folder_in_the_targets_type(build_target: Callable[..., Any], tmp_path: Path) -> None:
    model = build_target("qwen3")
    model.save_pretrained(tmp_path)
    drafter = load(build_target("llama").bfloat16(), str(tmp_path))
    assert {value.dtype for value in drafter.model.parameters()} == {torch.bfloat16}
    assert drafter.capabilities.max_positions == 128
    assert drafter.capabilities.row_form == "token"


def test_a_folder_without_a_model_is_named(build_target: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"draft\.model: {tmp_path} cannot be loaded"):
        load(build_target("llama"), str(tmp_path))


@pytest.mark.parametrize("vocab_size", [60, 70])
def test_another_vocabulary_size_is_refused_with_both_sizes_and_the_knob(
    vocab_size: int, build_target: Callable[..., Any]
) -> None:
    sizes = f"vocab_size is {vocab_size} in the drafter and 64 in the target"
    with pytest.raises(ConfigError, match=rf'{sizes}; allowed: equal sizes, or draft\.vocab_mismatch="pad"'):
        load(build_target("llama"), build_target("qwen3", vocab_size=vocab_size))


def test_an_unknown_way_to_treat_a_mismatch_is_refused(build_target: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"draft\.vocab_mismatch: got 'cut'; allowed: refuse, pad"):
        load(build_target("llama"), build_target("qwen3"), vocab_mismatch="cut")


def test_tokens_only_the_target_has_get_no_probability_and_never_reach_the_embedding(
    build_target: Callable[..., Any],
) -> None:
    model = build_target("qwen3", vocab_size=50, pad_token_id=9)
    drafter = load(build_target("llama"), model, vocab_mismatch="pad")
    seen: list[Tensor] = []
    drafter.model.get_input_embeddings().register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    ids = torch.tensor([[3, 50, 49, 63, -1]])
    logits = drafter.compute_logits(drafter(ids, POSITIONS[:1]))
    assert seen[0].tolist() == [[3, 9, 49, 9, 9]]
    assert logits.shape == (1, 5, 64)
    assert torch.isneginf(logits[..., 50:]).all()
    expected = model(torch.tensor([[3, 9, 49, 9, 9]]), use_cache=False).logits
    torch.testing.assert_close(logits[..., :50], expected, rtol=1e-4, atol=1e-4)


def test_tokens_only_the_drafter_has_are_never_proposed(build_target: Callable[..., Any]) -> None:
    model = build_target("qwen3", vocab_size=70)
    drafter = load(build_target("llama"), model, vocab_mismatch="pad")
    logits = drafter.compute_logits(drafter(IDS, POSITIONS))
    torch.testing.assert_close(logits, model(IDS, use_cache=False).logits[..., :64], rtol=1e-4, atol=1e-4)


def write_tokenizer(folder: Path, vocabulary: object) -> None:
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 3, "content": "<end>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


@pytest.mark.parametrize("vocab_mismatch", ["refuse", "pad"])
def test_ids_that_mean_something_else_are_refused_whatever_the_sizes(
    vocab_mismatch: str, build_target: Callable[..., Any], tmp_path: Path
) -> None:
    target, model = build_target("llama"), build_target("qwen3")
    for name, owner, vocabulary in (("t", target, {"a": 0, "b": 1, "c": 2}), ("d", model, [["a", 0.0], ["x", -1.0]])):
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name, vocabulary)
        owner.name_or_path = str(tmp_path / name)
    with pytest.raises(ConfigError, match=r"1 token ids .* the first is 1: 'x' in the drafter and 'b' in the target"):
        load(target, model, vocab_mismatch=vocab_mismatch)
    write_tokenizer(tmp_path / "d", {"a": 0, "b": 1})
    assert load(target, model, vocab_mismatch=vocab_mismatch).vocab_size == 64


def test_a_sliding_window_in_the_draft_model_is_refused_not_ignored(build_target: Callable[..., Any]) -> None:
    config = AutoConfig.for_model(
        "mistral", hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, sliding_window=2,
    )  # fmt: skip
    drafter = load(build_target("llama"), AutoModelForCausalLM.from_config(config))  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedGraphError, match="MistralAttention of layer 0: sliding_window in a drafter"):
        drafter(IDS, POSITIONS)


def test_a_model_whose_attention_cannot_be_replaced_is_refused(build_target: Callable[..., Any]) -> None:
    class Own(nn.Module):
        config = AutoConfig.for_model("llama", vocab_size=64)

        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

        def get_input_embeddings(self) -> nn.Module:
            return self.embedding

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    with pytest.raises(ConfigError, match=r"draft\.model: Own does not let its attention be replaced"):
        load(build_target("llama"), Own())

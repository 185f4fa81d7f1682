"""A tiny Llama in float64 with drafters for it, and slow, plain ways to say what a decoder must give."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from pcp_compiler.drafters.base import Drafter
from pcp_compiler.drafters.load import load_drafter
from pcp_compiler.runtime.batch import Batch
from pcp_compiler.runtime.cached_model import CompileCache
from pcp_compiler.runtime.decoder import SpeculativeDecoder
from pcp_compiler.runtime.generation import Generation
from pcp_compiler.runtime.layout import StepIndex
from pcp_compiler.runtime.request import Request
from pcp_compiler.runtime.sampling import SamplingParams

VOCAB_SIZE = 11
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96, "tie_word_embeddings": False,
}  # fmt: skip
LENGTHS = (5, 23, 1, 40, 13, 4, 31, 8)
"""Prompts that run at once: shorter and longer than a chunk, one token, exactly K + 1 tokens for K = 3."""


def make_target(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Return a random model, always with the same weights for a seed."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))
    nn.Module.double(model).requires_grad_(False).train(False)
    for weight in model.parameters():
        nn.init.normal_(weight, mean=0.5 if weight.dim() == 1 else 0.0, std=0.25)
    return model


def save_mtp(folder: Path, target: LlamaForCausalLM, num_modules: int = 1, seed: int = 7) -> Path:
    """Write random MTP modules for a target in DeepSeek's form."""
    config = target.config
    hidden, inner = config.hidden_size, config.intermediate_size
    kv = hidden // config.num_attention_heads * SIZES["num_key_value_heads"]
    shapes = {
        "enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,), "shared_head.norm": (hidden,), "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for number in range(config.num_hidden_layers, config.num_hidden_layers + num_modules):
        for name, shape in shapes.items():
            mean = 0.5 if len(shape) == 1 else 0.0
            tensors[f"model.layers.{number}.{name}.weight"] = mean + 0.25 * torch.randn(shape, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "num_nextn_predict_layers": num_modules}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_prompt(num_tokens: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Return random token ids."""
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()


class Tiny:
    """The models of a test session, each traced once, and plain greedy answers."""

    def __init__(self, folder: Path) -> None:
        self.target = make_target()
        self.folders = {count: save_mtp(folder / f"mtp_{count}", self.target, count) for count in (1, 3)}
        self.drafters: dict[str, Drafter] = {
            "mtp": self.load("mtp", self.folders[1]),
            "mtp3": self.load("mtp", self.folders[3]),
            "model": self.load("model", make_target(seed=3, num_hidden_layers=1)),
            "self": self.load("model", self.target),
        }
        self.compile_cache = CompileCache()
        self._answers: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def load(self, method: str, model: object) -> Drafter:
        """Return a drafter for the target."""
        named = model if isinstance(model, nn.Module) else str(model)
        drafter = load_drafter(self.target, {"method": method, "model": named})
        assert drafter is not None
        return drafter

    def decoder(
        self, draft: str = "mtp", pcp_size: int = 1, *, mode: str = "auto", num_drafts: int = 3,
        limits: Mapping[str, Any] | None = None, parallel: Mapping[str, Any] | None = None, **options: Any,
    ) -> SpeculativeDecoder:  # fmt: skip
        """Return a decoder; `draft` is a name in `drafters` or "none". Other options are those of `config.draft`, and
        arguments of the decoder."""
        arguments = {name: options.pop(name) for name in ("kv", "tie_margin") if name in options}
        config: dict[str, Any] = {
            "parallel": {"pcp_size": pcp_size, "min_tokens_to_shard": 2, **(parallel or {})},
            "limits": {"kv_blocks": 128, "kv_block_size": 4, **(limits or {})},
        }
        drafter = self.drafters.get(draft)
        if drafter is not None:
            method = drafter.capabilities.method
            config["draft"] = {"method": method, "num_speculative_tokens": num_drafts, "mode": mode, **options}
        return SpeculativeDecoder(self.target, config, drafter, compile_cache=self.compile_cache, **arguments)

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], num_new: int) -> list[int]:
        """Return what the eager model says, token by token, without a cache."""
        key = tuple(prompt), num_new
        if key not in self._answers:
            ids = list(prompt)
            for _ in range(num_new):
                logits = self.target(input_ids=torch.tensor([ids]), use_cache=False).logits
                ids.append(int(logits[0, -1].argmax()))
            self._answers[key] = ids[len(prompt) :]
        return self._answers[key]

    def forget_answers(self) -> None:
        """Ask the eager model again, whose weights have changed."""
        self._answers.clear()

    def check_greedy(
        self, decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], num_new: int
    ) -> list[Generation]:
        """Generate, and compare with eager token by token; afterwards no KV block is in use."""
        generations = decoder.generate(prompts, SamplingParams(num_new), progress=False)
        for prompt, generation in zip(prompts, generations, strict=True):
            assert generation.token_ids == self.greedy(prompt, num_new), f"prompt of {len(prompt)} tokens"
            assert generation.finish_reason == "length"
        assert decoder.pool.num_free == decoder.pool.num_usable
        return generations

    @torch.no_grad()
    def drafts(self, name: str, token_ids: Sequence[int], num_drafts: int) -> list[int]:
        """Return the greedy drafts behind `token_ids`, computed from the start without caches, chunks or ranks."""
        drafter = self.drafters[name]
        ids = torch.tensor([list(token_ids)])
        if drafter.capabilities.row_form == "token":
            return _drafts_of_model(drafter, ids, num_drafts)
        hidden = self.target.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        if drafter.capabilities.max_draft_tokens is None:
            return _drafts_of_module(drafter, ids, hidden, num_drafts)
        return _drafts_of_modules(drafter, ids, hidden, num_drafts)

    def check_drafts(self, name: str, requests: Sequence[Request]) -> int:
        """Compare the drafts that unfinished requests have now with `drafts`; return how many there were."""
        count = 0
        for request in requests:
            if request.is_finished or not request.draft_ids:
                continue
            expected = self.drafts(name, request.token_ids, len(request.draft_ids))
            assert list(request.draft_ids) == expected, f"at {len(request.token_ids)} tokens"
            count += len(expected)
        return count


def _drafts_of_model(drafter: Drafter, ids: Tensor, num_drafts: int) -> list[int]:
    drafts: list[int] = []
    for _ in range(num_drafts):
        tokens = torch.cat([ids, torch.tensor([drafts], dtype=torch.int64)], dim=1)
        hidden = drafter(tokens, torch.arange(tokens.shape[1])[None])
        drafts.append(int(drafter.compute_logits(hidden[0, -1]).argmax()))
    return drafts


def _drafts_of_module(drafter: Drafter, ids: Tensor, hidden: Tensor, num_drafts: int) -> list[int]:
    """One module, fed with its own output."""
    next_ids, drafts = ids[:, 1:], []
    for step in range(num_drafts):
        out = drafter.module_of_step(step)(next_ids, hidden, torch.arange(next_ids.shape[1])[None])
        drafts.append(int(drafter.compute_logits(out[0, -1], step).argmax()))
        next_ids = torch.cat([next_ids, torch.tensor([[drafts[-1]]])], dim=1)
        hidden = torch.cat([hidden, out[:, -1:]], dim=1)
    return drafts


def _drafts_of_modules(drafter: Drafter, ids: Tensor, hidden: Tensor, num_drafts: int) -> list[int]:
    """Module m over all rows of module m - 1, each row reading one token further."""
    next_ids, drafts = ids[:, 1:], []
    for step in range(num_drafts):
        hidden = drafter.module_of_step(step)(next_ids, hidden, torch.arange(next_ids.shape[1])[None])
        drafts.append(int(drafter.compute_logits(hidden[0, -1], step).argmax()))
        next_ids = torch.cat([next_ids[:, 1:], torch.tensor([[drafts[-1]]])], dim=1)
    return drafts


def run_checked(
    tiny: Tiny, decoder: SpeculativeDecoder, name: str, prompts: Sequence[Sequence[int]], num_new: int
) -> int:
    """Generate step by step; after each step every draft must be what `Tiny.drafts` says. Return the drafts checked."""
    requests = [decoder.submit(prompt, SamplingParams(num_new)) for prompt in prompts]
    count = 0
    while decoder.scheduler.has_work:
        decoder.step()
        count += tiny.check_drafts(name, requests)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_ids == tiny.greedy(prompt, num_new)
    return count


def record_steps(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Batch, StepIndex]]:
    """Return a list that grows by the batch and the index inputs of each step of the target."""
    steps: list[tuple[Batch, StepIndex]] = []
    run = decoder._run_target

    def record(batch: Batch, index: StepIndex) -> Any:
        steps.append((batch, index))
        return run(batch, index)

    monkeypatch.setattr(decoder, "_run_target", record)
    return steps


@contextmanager
def raising(owner: Any, name: str, error: BaseException) -> Iterator[None]:
    """Let one call of a method raise."""
    original = getattr(owner, name)

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        setattr(owner, name, original)
        raise error

    setattr(owner, name, fail)
    try:
        yield
    finally:
        setattr(owner, name, original)

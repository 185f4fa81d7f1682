"""An independent draft model: any small causal language model of transformers that shares the target's vocabulary."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pcp_compiler.drafters.base import Capabilities, Drafter, TargetParts, find_target_parts
from pcp_compiler.drafters.transformers_layer import register_attention
from pcp_compiler.errors import ConfigError

VocabMismatch = Literal["refuse", "pad"]
VOCAB_MISMATCH: tuple[VocabMismatch, ...] = ("refuse", "pad")


class ModelDrafter(Drafter):
    """A causal language model that proposes tokens on its own, from token ids and positions.

    The model's modules are copied and its weights shared, so that the attention setting of a model given by the user
    (which may be the target itself) stays as it is.

    Args:
        model: a causal language model of transformers.
        target_vocab_size: ids the target can look up. vocab_mismatch: `pad` allows another size: tokens that only the
            drafter has are never proposed, tokens that only the target has get no probability and are read as the
            drafter's padding token.
    Raises:
        ConfigError: sizes differ and `vocab_mismatch` is `refuse`, or the model's attention cannot be replaced.
    """

    def __init__(self, model: nn.Module, target_vocab_size: int, vocab_mismatch: VocabMismatch = "refuse") -> None:
        super().__init__()
        parts = find_target_parts(model)
        if vocab_mismatch not in VOCAB_MISMATCH:
            raise ConfigError(f"draft.vocab_mismatch: got {vocab_mismatch!r}; allowed: {', '.join(VOCAB_MISMATCH)}")
        if parts.vocab_size != target_vocab_size and vocab_mismatch == "refuse":
            raise ConfigError(
                f"draft.model: vocab_size is {parts.vocab_size} in the drafter and {target_vocab_size} in the target; "
                'allowed: equal sizes, or draft.vocab_mismatch="pad" when the sizes differ by unused padding rows only'
            )
        self.target_vocab_size = target_vocab_size
        self.model = _with_our_attention(model)
        own = find_target_parts(self.model)
        self.vocab_size = own.vocab_size
        self.fallback_id = _fallback_id(own)
        self._capabilities = Capabilities(
            method="model", row_form="token", attention_kinds=("full",), has_own_embedding=True, has_own_head=True,
            hidden_size=own.embedding.embedding_dim, vocab_size=target_vocab_size,
            max_positions=getattr(own.config, "max_position_embeddings", None),
        )  # fmt: skip
        self.eval()

    @property
    def capabilities(self) -> Capabilities:
        """See `Drafter`."""
        return self._capabilities

    def module_of_step(self, step: int) -> ModelDrafter:
        """Return this module: every step runs the same one."""
        return self

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states of rows: ids of the target [B, T], positions [B, T] -> [B, T, H]."""
        if self.vocab_size < self.target_vocab_size:
            is_known = (input_ids >= 0) & (input_ids < self.vocab_size)
            input_ids = torch.where(is_known, input_ids, self.fallback_id)
        decoder = self.model.get_decoder()
        out: Tensor = decoder(input_ids=input_ids, position_ids=positions, use_cache=False).last_hidden_state
        return out

    def compute_logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Return logits over the target's vocabulary: hidden [.., H] -> [.., V]."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)[..., : self.target_vocab_size]
        missing = self.target_vocab_size - logits.shape[-1]
        if not missing:
            return logits
        return torch.cat([logits, logits.new_full((*logits.shape[:-1], missing), float("-inf"))], dim=-1)


def load_model(
    parts: TargetParts, model: str | Path | nn.Module, vocab_mismatch: VocabMismatch = "refuse"
) -> ModelDrafter:
    """Return a draft model: read from a folder or a hub name in the target's type, or one that is ready.

    Where both tokenizers lie in local folders (tokenizer.json), tokens of one id must be equal, whatever
    `vocab_mismatch` says; otherwise only the sizes are compared.

    Raises:
        ConfigError: vocabularies differ, or the model cannot be read. ImportError: transformers is missing.
    """
    if isinstance(model, nn.Module):
        ready, folder = model, find_target_parts(model).folder
    else:
        ready, folder = _read_model(str(model), parts.embedding.weight), Path(model)
    if parts.folder and folder and parts.folder != folder:
        check_same_tokens(read_vocabulary(parts.folder), read_vocabulary(folder))
    return ModelDrafter(ready, parts.vocab_size, vocab_mismatch)


def _read_model(name: str, like: Tensor) -> nn.Module:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ImportError(f"a draft model needs the extra `hf` ({error}): pip install 'pcp-compiler[hf]'") from error
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(name, dtype=like.dtype)
    except (OSError, ValueError) as error:
        raise ConfigError(f"draft.model: {name} cannot be loaded: {error}") from None
    return model.to(like.device)


def _with_our_attention(model: nn.Module) -> Any:
    """Return a copy of a model that shares its weights and calls `pcp::attention`."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"draft.model: {type(model).__name__} does not let its attention be replaced; allowed: a model of "
            "transformers that uses the attention interface"
        )
    weights = itertools.chain(model.parameters(), model.buffers())
    own: Any = copy.deepcopy(model, {id(weight): weight for weight in weights})
    own.set_attn_implementation(register_attention())
    return own


def _fallback_id(parts: TargetParts) -> int:
    """Return the id that stands for a token the drafter does not have."""
    candidate = getattr(parts.config, "pad_token_id", None)
    return candidate if isinstance(candidate, int) and 0 <= candidate < parts.vocab_size else 0


# ---------------------------------------------------------------------------------------------------------------------
# Do two vocabularies mean the same


def read_vocabulary(folder: Path) -> dict[int, str] | None:
    """Return id to token of the tokenizer in a folder; None when it has no tokenizer.json.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        tokens = data["model"]["vocab"]
        added = {entry["id"]: entry["content"] for entry in data.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"draft.model: {path} cannot be read: {error!r}") from None
    if isinstance(tokens, dict):  # token to id; Unigram models have a list of (token, score)
        return {number: token for token, number in tokens.items()} | added
    return {number: entry[0] for number, entry in enumerate(tokens)} | added


def check_same_tokens(target: Mapping[int, str] | None, draft: Mapping[int, str] | None) -> None:
    """Check that two vocabularies have the same token wherever both have one.

    Raises:
        ConfigError: names the first id that means something else.
    """
    if target is None or draft is None:
        return
    different = sorted(number for number in target.keys() & draft.keys() if target[number] != draft[number])
    if different:
        first = different[0]
        raise ConfigError(
            f"draft.model: {len(different)} token ids mean something else in the drafter, the first is {first}: "
            f"{draft[first]!r} in the drafter and {target[first]!r} in the target; allowed: one vocabulary"
        )

"""What the decoder knows about a drafter before it runs one, and what it knows about the target it is loaded for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from pcp_compiler.errors import ConfigError

RowForm = Literal["next_token_and_hidden", "token", "anchor_block"]
"""How the rows of a first pass come from the rows of the target's step, for the token t_i at position i:

- `next_token_and_hidden`: row i is (t_(i+1), the target's hidden state of i, position i). The last row of a request
  takes the token that was sampled for it, or the next prompt token when more of the prompt is to come.
- `token`: row i is (t_i, position i); the token sampled last gets a row of its own.
- `anchor_block`: one row per context position, made of taps, then a block of query rows led by the token sampled last.
"""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a drafter needs and offers; the mode resolver and the decoder read this and never the method's name."""

    method: str
    """`draft.method`, for messages."""
    row_form: RowForm
    attention_kinds: tuple[str, ...]
    """Kinds of the `pcp::attention` calls in the drafter."""
    has_own_embedding: bool
    """False: the drafter looks tokens up in the target's matrix."""
    has_own_head: bool
    """False: the drafter's logits come from the target's output matrix."""
    hidden_size: int
    """Width of the hidden states it takes from the target, or works with."""
    vocab_size: int
    """Ids that its logits cover."""
    mode: Literal["sharded", "replicated"] | None = None
    """The only `draft.mode` it can run in; None: both."""
    needs_hidden: bool = False
    """Whether rows take the target's hidden states, after its final norm."""
    taps: tuple[int, ...] = ()
    """Target layers whose outputs the drafter reads."""
    max_draft_tokens: int | None = None
    """Most tokens of one proposal; None: any number."""
    max_positions: int | None = None
    """Positions below this one can be drafted from; None: any position that the target serves."""

    @property
    def needs_taps(self) -> bool:
        """Whether the target has to return hidden states of inner layers."""
        return bool(self.taps)


class Drafter(nn.Module, ABC):
    """A model that proposes tokens. Each step runs one module over rows; its hidden states give logits."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this drafter needs and offers."""

    @abstractmethod
    def module_of_step(self, step: int) -> nn.Module:
        """Return the module that proposes token number `step` of a proposal, counted from 0."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Return logits over the target's vocabulary: hidden [.., H], as step `step` made it -> [.., V]."""


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a drafter takes from its target."""

    config: Any
    """Hugging Face config of the target's text model."""
    embedding: nn.Embedding
    head: nn.Module
    folder: Path | None
    """Where the target's checkpoint lies; None when it was not read from a local folder."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the target can look up."""
        return self.embedding.num_embeddings


def find_target_parts(target: nn.Module) -> TargetParts:
    """Return what a drafter takes from a Hugging Face causal language model.

    Raises:
        ConfigError: the model lacks a config, an embedding or an output matrix.
    """
    config = getattr(target, "config", None)
    embedding = _call_getter(target, "get_input_embeddings")
    head = _call_getter(target, "get_output_embeddings")
    found = {"config": config, "get_input_embeddings()": embedding, "get_output_embeddings()": head}
    missing = [name for name, part in found.items() if part is None]
    if missing:
        raise ConfigError(
            f"target: {type(target).__name__} has no {', '.join(missing)}; allowed: a causal language model with the "
            "interface of transformers"
        )
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Module) or config is None:
        raise ConfigError(f"target: embedding of type {type(embedding).__name__}; allowed: nn.Embedding")
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    name = str(getattr(target, "name_or_path", "") or "")
    return TargetParts(text_config, embedding, head, Path(name) if name and Path(name).is_dir() else None)


def _call_getter(target: nn.Module, name: str) -> object:
    getter = getattr(target, name, None)
    return getter() if callable(getter) else None

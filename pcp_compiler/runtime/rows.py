"""The modules that the runtime traces: a model as a function of rows, without a cache of its own.

Rows of all requests stand in one batch row; positions come from the batch. What a row sees is not the module's
business: its attention becomes paged attention when the graph is lowered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pcp_compiler.drafters.base import Drafter
from pcp_compiler.errors import UnsupportedGraphError


class TargetRows(nn.Module):
    """A Hugging Face causal language model as a function of rows."""

    def __init__(self, target: nn.Module) -> None:
        super().__init__()
        self.base: nn.Module = target.base_model  # type: ignore[assignment]
        self.head = target.get_output_embeddings()  # type: ignore[operator]
        self.training = False

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states after the final norm, and logits of some rows.

        Args:
            input_ids, position_ids: [1, T]. logit_rows: [L], rows that get logits.
        Returns:
            [1, T, H] and [L, V].
        """
        hidden = self.base(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return hidden, self.head(hidden[0].index_select(0, logit_rows))


class DraftRows(nn.Module):
    """A drafter module that turns (next token, hidden state) rows into hidden states."""

    def __init__(self, drafter: Drafter, step: int) -> None:
        super().__init__()
        self.drafter = drafter
        self.step = step
        self.training = False

    def forward(self, next_ids: Tensor, hidden: Tensor, positions: Tensor, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states and logits of some rows.

        Args:
            next_ids, positions: [1, T]. hidden: [1, T, H]. logit_rows: [L].
        Returns:
            [L, H] and [L, V].
        """
        out = self.drafter.module_of_step(self.step)(next_ids, hidden, positions)
        picked = out[0].index_select(0, logit_rows)
        return picked, self.drafter.compute_logits(picked, self.step)


class DraftModuleRows(nn.Module):
    """One of several drafter modules: all its rows go on to the next module."""

    def __init__(self, drafter: Drafter, step: int) -> None:
        super().__init__()
        self.module = drafter.module_of_step(step)
        self._drafter = (drafter,)  # no submodule: modules that share an embedding object cannot be traced together
        self.step = step
        self.training = False

    def forward(self, next_ids: Tensor, hidden: Tensor, positions: Tensor, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states of all rows and logits of some: arguments of `DraftRows` -> [1, T, H] and [L, V]."""
        out: Tensor = self.module(next_ids, hidden, positions)
        return out, self._drafter[0].compute_logits(out[0].index_select(0, logit_rows), self.step)


class DraftModelRows(nn.Module):
    """An independent draft model as a function of rows, with the signature of `DraftRows`: `hidden` is [1, T, 0]."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter
        self.training = False

    def forward(self, next_ids: Tensor, hidden: Tensor, positions: Tensor, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return nothing to carry on, [L, 0], and logits of some rows, [L, V]; row i reads token i."""
        picked = self.drafter.module_of_step(0)(next_ids, positions)[0].index_select(0, logit_rows)
        return picked[:, :0], self.drafter.compute_logits(picked)


@contextmanager
def attention_as_rows(target: Any) -> Iterator[None]:
    """Let a transformers model call `pcp::attention` without any mask while it is traced."""
    config = getattr(target, "config", None)
    if config is None or not hasattr(target, "set_attn_implementation"):
        raise UnsupportedGraphError(
            f"target: {type(target).__name__} is no model of transformers; allowed: a causal language model of it"
        )
    from pcp_compiler.integrations import transformers as integration

    before = config._attn_implementation
    target.set_attn_implementation(integration.ROWS)
    try:
        with torch.no_grad():
            yield
    finally:
        target.set_attn_implementation(before)

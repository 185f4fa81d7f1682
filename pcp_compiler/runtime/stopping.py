"""Where a request ends inside the tokens of a round, with counts that agree about it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal

FinishReason = Literal["stop", "length"]
STOP: Final[FinishReason] = "stop"
"""A stop token was emitted."""
LENGTH: Final[FinishReason] = "length"
"""`max_new_tokens` or the model's length is reached."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a round's tokens that a request keeps. All counts follow from the tokens."""

    token_ids: tuple[int, ...]
    """Tokens that the user sees."""
    num_draft_tokens: int
    """Drafts that count as proposed: of a round that ends the request, only those that could have been emitted."""
    num_accepted: int
    """Drafts among `token_ids`."""
    finish_reason: FinishReason | None
    """Why the request ends with these tokens; None if it goes on."""

    @property
    def num_computed(self) -> int:
        """Rows by which the request's valid K/V grows: the emitted tokens but the last, and the one before them.

        The last emitted token does not count, even if it was a draft with a row: so a request that was cut has the
        same K/V length as one that was decoded token by token.
        """
        return len(self.token_ids)


def cut_tokens(
    token_ids: Sequence[int], num_draft_tokens: int, *, num_allowed: int, stop_token_ids: Collection[int]
) -> Cut:
    """Cut the tokens of a round after the first stop token or at the allowed length, whatever comes first.

    A stop token at the last allowed place counts as stop.

    Args:
        token_ids: what the round emitted: the accepted drafts, then one token of the target; empty if it failed.
        num_draft_tokens: drafts that were verified, K.
        num_allowed: tokens the request may still emit, >= 0: what is left of `max_new_tokens` and the model's length.
    """
    assert num_allowed >= 0, f"{num_allowed} tokens are allowed"
    stops = (index for index, token_id in enumerate(token_ids) if token_id in stop_token_ids)
    stop_len = next(stops, len(token_ids)) + 1
    kept = tuple(token_ids[: min(stop_len, num_allowed)])
    finish_reason = STOP if len(kept) == stop_len else LENGTH if len(kept) == num_allowed else None
    num_accepted = min(len(kept), max(len(token_ids) - 1, 0))
    num_counted = num_draft_tokens if finish_reason is None else min(num_draft_tokens, len(kept))
    return Cut(kept, num_counted, num_accepted, finish_reason)


def num_useful_drafts(num_draft_tokens: int, num_allowed: int) -> int:
    """Return how many of K drafts to make when only `num_allowed` more tokens may come, >= 0.

    The target adds a token of its own, so the drafts may be one fewer. Near the end of the context this also keeps the
    position of every verified row below the model's length, and at 0 the request decodes on without drafts.
    """
    return max(0, min(num_draft_tokens, num_allowed - 1))

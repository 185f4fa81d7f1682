"""What a decoder gives its caller: events of a step, and the output of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pcp_compiler.errors import CallError
from pcp_compiler.runtime.metrics import AcceptanceStats
from pcp_compiler.runtime.request import FinishReason, Request, Tie
from pcp_compiler.runtime.sampling import SamplingParams

OnTokens = Callable[[int, tuple[int, ...]], None]
"""Takes the number of a prompt and its new tokens."""


@dataclass(frozen=True, slots=True)
class Event:
    """What a step gave one request: new tokens, and why it is finished if it is."""

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Generation:
    """The output of one request."""

    token_ids: list[int]
    finish_reason: FinishReason
    """"stop", "length", "cancelled", or "error" when its logits had no answer."""
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    """Drafts proposed and accepted: `acceptance_rate`, `acceptance_length`, `per_position`."""
    ties: tuple[Tie, ...] = ()
    """Greedy choices between two tokens with nearly equal logits; positions count from the start of the prompt."""

    @classmethod
    def of(cls, request: Request) -> Generation:
        """Return the output of a finished request.

        Raises:
            CallError: it is not finished.
        """
        if request.finish_reason is None:
            raise CallError(f"request {request.request_id} is not finished; call step() until it is, or cancel() it")
        return cls(request.output_ids, request.finish_reason, request.stats, tuple(request.ties))


def check_prompt(prompt_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Return a prompt as a list of token ids.

    Raises:
        CallError: not a flat sequence of integers, or an id that the target cannot look up.
    """
    values = prompt_ids.tolist() if hasattr(prompt_ids, "tolist") else prompt_ids
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise CallError(f"prompt_ids: got {prompt_ids!r}; allowed: a flat sequence of integers")
    for position, token_id in enumerate(values):
        if not hasattr(token_id, "__index__") or isinstance(token_id, bool):
            raise CallError(f"prompt_ids[{position}]: got {token_id!r}; allowed: a flat sequence of integers")
        if not 0 <= token_id < vocab_size:
            raise CallError(
                f"prompt_ids[{position}]: {token_id} is outside of the vocabulary; allowed: 0 to {vocab_size - 1}"
            )
    return [int(token_id) for token_id in values]


def check_params(params: object) -> SamplingParams:
    """Return sampling options as they are.

    Raises:
        CallError: they are something else.
    """
    if not isinstance(params, SamplingParams):
        raise CallError(f"params: got {params!r}; allowed: SamplingParams")
    return params


def params_of_each(params: SamplingParams | Sequence[SamplingParams], num_prompts: int) -> list[SamplingParams]:
    """Return the sampling options of every prompt.

    Raises:
        CallError: neither one for all nor one per prompt.
    """
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence):
        raise CallError(f"params: got {params!r}; allowed: SamplingParams, or a sequence with one per prompt")
    if len(params) != num_prompts:
        raise CallError(f"params: got {len(params)} for {num_prompts} prompts; allowed: one, or one per prompt")
    return [check_params(option) for option in params]

"""Sampling options of a request, as the user gives them and as tensors of a batch, and the draws of its drafts."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcp_compiler import sampling_ops
from pcp_compiler.errors import ConfigError
from pcp_compiler.runtime.layout import to_tensor
from pcp_compiler.runtime.noise import Stream, draw_keys

MAX_SEED: Final = 2**63 - 1
"""Seeds are kept in int64 tensors."""
MAX_TEMPERATURE: Final = float(np.finfo(np.float32).max)
"""Temperatures are kept in float32 tensors."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when to stop.

    Raises:
        ConfigError: a field is outside of what its line below allows.
    """

    max_new_tokens: int
    """Most tokens to generate, >= 0; 0 finishes the request without a token."""
    temperature: float = 0.0
    """Divides the logits, finite and >= 0; 0 is greedy: always the most likely token, the lowest id of a tie."""
    top_k: int = 0
    """Keep the k most likely tokens, and those that tie with the last of them; 0 keeps all."""
    top_p: float = 1.0
    """Of what `top_k` left, keep the fewest most likely tokens whose chances add up to this; in (0, 1]."""
    seed: int | None = None
    """Same seed, same tokens, in any batch; 0 to 2**63 - 1. None draws a new one for each request."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens after which the request stops; the token itself is the last one it emits. Each once, >= 0."""

    def __post_init__(self) -> None:
        """Check every field; a list of stop tokens becomes a tuple."""
        _check_integer("max_new_tokens", self.max_new_tokens)
        _check_integer("top_k", self.top_k)
        _check_number("temperature", self.temperature, MAX_TEMPERATURE, is_zero_allowed=True)
        _check_number("top_p", self.top_p, 1, is_zero_allowed=False)
        if self.seed is not None:
            _check_integer("seed", self.seed, highest=MAX_SEED)
        object.__setattr__(self, "stop_token_ids", _check_stop_tokens(self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken: temperature 0, or so small that float32 makes it 0."""
        return bool(np.float32(self.temperature) == 0)

    def with_seed(self) -> SamplingParams:
        """Return these options with a seed: their own, or else a fresh one from the operating system."""
        return self if self.seed is not None else replace(self, seed=secrets.randbelow(MAX_SEED + 1))


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """Options of N requests as tensors on one device."""

    temperature: Tensor
    """[N], float32."""
    top_k: Tensor | None
    """[N], int64, 0 for all; None if no request has one: then no vocabulary is sorted."""
    top_p: Tensor | None
    """[N], float64; None if no request has one."""
    seeds: Tensor
    """[N], int64."""
    is_greedy: NDArray[np.bool_]
    """[N], on the host, which decides with it what to run."""

    @classmethod
    def from_params(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> SamplingRows:
        """Return the options of these requests, one row each; they must have seeds, see `SamplingParams.with_seed`."""
        return cls._of(tuple(params), torch.device(device))

    @classmethod
    @functools.lru_cache(maxsize=64)  # the same requests come step after step
    def _of(cls, params: tuple[SamplingParams, ...], device: torch.device) -> SamplingRows:
        seeds = [option.seed for option in params]
        assert None not in seeds, f"request {seeds.index(None)} of the batch has no seed yet"
        top_k, top_p = [option.top_k for option in params], [option.top_p for option in params]

        def column(values: Sequence[float | None], dtype: type[np.number]) -> Tensor:
            return to_tensor(np.array(values, dtype=dtype), device)

        return cls(
            temperature=column([option.temperature for option in params], np.float32),
            top_k=column(top_k, np.int64) if any(top_k) else None,
            top_p=column(top_p, np.float64) if any(p < 1 for p in top_p) else None,
            seeds=column(seeds, np.int64),
            is_greedy=np.array([option.is_greedy for option in params], dtype=np.bool_),
        )

    @property
    def has_filters(self) -> bool:
        """Whether some request has top-k or top-p."""
        return self.top_k is not None or self.top_p is not None


def draft_keys(seeds: Tensor, round_starts: Tensor, steps: Tensor | int) -> Tensor:
    """Return the keys that draft tokens are drawn with, int64; the arguments broadcast.

    Args:
        seeds: [R], int64.
        round_starts: [R], int64, position of the request's last token, where the next verification starts.
        steps: 0 for the first draft token of the round; [K, 1] gives those of a whole proposal, [K, R].
    """
    return draw_keys(seeds, round_starts, round_starts + steps, Stream.DRAFT)


def sample_draft(logits: Tensor, options: SamplingRows, round_starts: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return the draft token of one step of a proposal and the distribution it came from, for `verify`.

    Args:
        logits: [R, V], the drafter's. round_starts, step: see `draft_keys`.
    Returns:
        Token ids [R], int64, and probabilities [R, V], float32.
    """
    return sampling_ops.sample_draft(logits, options.temperature, draft_keys(options.seeds, round_starts, step))


def _refuse(field: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"SamplingParams.{field} is {value!r}; give {allowed}")


def _check_integer(field: str, value: object, highest: int | None = None) -> None:
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or value < 0 or (highest is not None and value > highest):  # type: ignore[operator]
        allowed = "an integer >= 0" if highest is None else f"an integer from 0 to {highest}"
        raise _refuse(field, value, allowed)


def _check_number(field: str, value: object, highest: float, *, is_zero_allowed: bool) -> None:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not (0 <= value <= highest) or (value == 0 and not is_zero_allowed):  # type: ignore[operator]
        lowest = "from 0" if is_zero_allowed else "above 0 and"
        raise _refuse(field, value, f"a number {lowest} up to {highest:.3g}")


def _check_stop_tokens(token_ids: object) -> tuple[int, ...]:
    if isinstance(token_ids, str) or not isinstance(token_ids, Sequence):
        raise _refuse("stop_token_ids", token_ids, "a tuple of token ids")
    for index, token_id in enumerate(token_ids):
        _check_integer(f"stop_token_ids[{index}]", token_id)
    repeated = sorted({token_id for token_id in token_ids if token_ids.count(token_id) > 1})
    if repeated:
        raise _refuse("stop_token_ids", tuple(token_ids), f"each id once, not {repeated} several times")
    return tuple(map(int, token_ids))

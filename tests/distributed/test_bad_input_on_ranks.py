"""A bad call on all ranks is the same error on each of them, nothing waits, and the next good call works."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pcp_compiler
from pcp_compiler.errors import PcpError
from tests.backend.support import TokenModel, causal_attention, make_ids, options
from tests.distributed.run_ranks import run_ranks

WORLD_SIZE = 2
STEP_S = 20.0


class Named(Tensor):
    """A tensor subclass."""


class Writer(TokenModel):
    """A model that writes into its input."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [B, T] -> [B, T, 16]."""
        input_ids.clamp_(max=5)
        return super().forward(input_ids)


def nothing(model: nn.Module, compiled: Callable[[Tensor], Tensor]) -> None:
    compiled(make_ids(9)[:, :0])


def no_prompt(model: nn.Module, compiled: Callable[[Tensor], Tensor]) -> None:
    compiled(make_ids(9)[:0])


def subclass(model: nn.Module, compiled: Callable[[Tensor], Tensor]) -> None:
    compiled(make_ids(9).as_subclass(Named))


def in_place(model: nn.Module, compiled: Callable[[Tensor], Tensor]) -> None:
    pcp_compiler.compile(Writer(causal_attention), settings())(make_ids(9))


def beyond_the_vocabulary(model: nn.Module, compiled: Callable[[Tensor], Tensor]) -> None:
    compiled(torch.full((1, 9), 1000))


CASES = (nothing, no_prompt, subclass, in_place, beyond_the_vocabulary)


def settings() -> dict[str, object]:
    return options(WORLD_SIZE, timeout_s={"start": 60, "step": STEP_S})


def bad_then_good(rank: int) -> list[tuple[str, float, bool]]:
    """Return message, seconds, and whether the good call after it equalled eager, for each case."""
    model = TokenModel(causal_attention)
    compiled = pcp_compiler.compile(model, settings())
    outcomes = []
    for case in CASES:
        started = time.monotonic()
        try:
            case(model, compiled)
        except (PcpError, IndexError) as fault:
            seconds, ids = time.monotonic() - started, make_ids(11)
            outcomes.append((str(fault), seconds, torch.allclose(compiled(ids), model(ids), rtol=0, atol=1e-12)))
    pcp_compiler.assert_sharded(compiled, calls=len(CASES), pcp_size=WORLD_SIZE)
    return outcomes


@pytest.mark.slow
def test_a_bad_call_is_the_same_error_on_all_ranks_and_the_next_good_call_works() -> None:
    first, second = run_ranks(bad_then_good, WORLD_SIZE, limit_s=120)
    assert [message for message, _, _ in first] == [message for message, _, _ in second]
    assert len(first) == len(CASES)
    for message, fragment in zip(
        [message for message, _, _ in first],
        [
            "at least 1 token",
            "at least 1 prompt",
            "of class Named",
            "writes into this tensor in place",
            "index out of range",
        ],
        strict=True,
    ):
        assert fragment in message
    assert all(seconds < STEP_S and worked for outcome in (first, second) for _, seconds, worked in outcome)

"""Random numbers as a pure function of (seed, round, position, stream).

There is no generator state: a draw is a hash of what it is for. So a request gets the same numbers in any batch, on any
rank, before and after a preemption, and nothing has to be rewound when a round's tokens are cut.

Construct: the four words enter one after the other through the output function of SplitMix64 (Steele, Lea, Flood:
"Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, with Stafford's variant 13 of the mixer). Each step is a
bijection of the word that enters it, so draws that differ in one word never collide in their 64 bits.

The position of the round's first row is part of the key. Block verification looks at all drafts and all its draws
before it decides, so what a round saw at a rejected position is no longer noise: the next round must not use it again.
Every round emits a token, hence no two rounds of a request start at one position.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15 - 2**64
"""Increment of SplitMix64 as a signed 64-bit integer: torch has no shifts and products of unsigned ones."""
MIX_FACTORS: Final = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""Factors of Stafford's mixer 13, signed."""
NUM_BITS: Final = 52
"""Random bits of a draw; with the half added to them they still fit the 53 bits of a float64."""


class Stream(IntEnum):
    """What a draw is for; draws of two streams share nothing."""

    DRAFT = 0
    """Sample a draft token."""
    ACCEPT = 1
    """Decide whether a draft token, or a prefix of them, is accepted."""
    RESIDUAL = 2
    """Sample the token that replaces a rejected draft."""
    BONUS = 3
    """Sample the token after all drafts, or without any."""


def draw_uniform(seeds: Tensor, round_starts: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """Return one uniform number in the open interval (0, 1) for each key, float64; the arguments broadcast.

    Args:
        seeds: of each request, int64.
        round_starts: position of the first row that the target runs for the request in this round, int64.
        positions: position of the row whose next token the draw is for, int64.
    """
    bits = _absorb(_absorb(_absorb(_mix(seeds + GOLDEN_GAMMA), round_starts), positions), int(stream))
    return (_shift_right(bits, 64 - NUM_BITS).to(torch.float64) + 0.5) * 2.0**-NUM_BITS


def _absorb(state: Tensor, word: Tensor | int) -> Tensor:
    return _mix((state ^ word) + GOLDEN_GAMMA)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * MIX_FACTORS[0]
    bits = (bits ^ _shift_right(bits, 27)) * MIX_FACTORS[1]
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, distance: int) -> Tensor:
    """Shift zeros in from the left, where `>>` on a signed integer repeats the sign."""
    return (bits >> distance) & ((1 << (64 - distance)) - 1)

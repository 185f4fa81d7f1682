"""Random numbers as a pure function of (seed, round, position, stream).

There is no generator state: a draw is a hash of what it is for. So a request gets the same numbers in any batch, on any
rank, before and after a preemption, and nothing has to be rewound when a round's tokens are cut.

The four words enter the hash of `sampling_ops` one after the other and make the key of a draw. A single number is made
of the key itself; a draw of a token makes one for each token by a fifth word, the token.

The position of the round's first row is part of the key. Block verification looks at all drafts and all its draws
before it decides, so what a round saw at a rejected position is no longer noise: the next round must not use it again.
Every round emits a token, hence no two rounds of a request start at one position.
"""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor

from pcp_compiler.sampling_ops import GOLDEN_GAMMA, absorb, mix, to_uniform


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


def draw_keys(seeds: Tensor, round_starts: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """Return the key of each draw, int64; the arguments broadcast.

    Args:
        seeds: of each request, int64.
        round_starts: position of the first row that the target runs for the request in this round, int64.
        positions: position of the row whose next token the draw is for, int64.
    """
    return absorb(absorb(absorb(mix(seeds + GOLDEN_GAMMA), round_starts), positions), int(stream))


def draw_uniform(seeds: Tensor, round_starts: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """Return one uniform number in the open interval (0, 1) for each key, float64; see `draw_keys`."""
    return to_uniform(draw_keys(seeds, round_starts, positions, stream))

"""From logits to tokens: the distribution that sampling options make of a row, a draw from it, both as one op.

Everything is row by row and free of host synchronisation: a row's result depends on no other row, and the functions may
run inside a captured graph. What is random comes in as keys, 64-bit words of which each is good for one draw; all
numbers of that draw are hashes of its key. On a CUDA device `row_argmax` and `sample_draft` run kernels, which follow
the same definitions; the code here is their reference.

A draw is a race: token x arrives after `E_x / w_x`, with E_x exponentially distributed and w_x its weight, and the
first one wins. That is x with the chance w_x / sum(w), as of independent exponential times of rates w the smallest is.
If logits are given for log(w) it is the Gumbel-max trick, as -log(E_x) has the Gumbel distribution; but weights need no
logarithm and no sum, and one of 0 never arrives. Unlike a search in running sums it knows no order: the vocabulary may
be split at will.

The hash is the output function of SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators",
OOPSLA 2014, with Stafford's variant 13 of the mixer), one round a word. Each round is a bijection of the word that
enters it, so words that differ never collide under one key.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

_lib = torch.library.Library("pcp", "FRAGMENT")  # lives as long as the process

_lib.define("row_argmax(Tensor logits) -> Tensor")
_lib.define("sample_draft(Tensor logits, Tensor temperature, Tensor keys) -> (Tensor, Tensor)")

GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15 - 2**64
"""Increment of SplitMix64 as a signed 64-bit integer: torch has no shifts and products of unsigned ones."""
MIX_FACTORS: Final = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""Factors of Stafford's mixer 13, signed."""
NUM_BITS: Final = 52
"""Random bits of a number; with the half added to them they still fit the 53 bits of a float64."""


def mix(bits: Tensor) -> Tensor:
    """Return the words, int64, through the mixer."""
    bits = (bits ^ _shift_right(bits, 30)) * MIX_FACTORS[0]
    bits = (bits ^ _shift_right(bits, 27)) * MIX_FACTORS[1]
    return bits ^ _shift_right(bits, 31)


def absorb(state: Tensor, word: Tensor | int) -> Tensor:
    """Return the hash of one word more, int64; the arguments broadcast."""
    return mix((state ^ word) + GOLDEN_GAMMA)


def to_uniform(bits: Tensor) -> Tensor:
    """Return random words, int64, as numbers of the open interval (0, 1), float64."""
    return (_shift_right(bits, 64 - NUM_BITS).to(torch.float64) + 0.5) * 2.0**-NUM_BITS


def probabilities(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None = None, top_p: Tensor | None = None
) -> Tensor:
    """Return the distribution each row of logits is sampled from: temperature, then top-k, then top-p.

    Args:
        logits: [N, V], any float type; -inf for tokens that cannot come.
        temperature: [N], float32; a row with 0 becomes a point mass at its argmax.
        top_k: [N], int64; 0 or at least V keeps all. None for no top-k in any row.
        top_p: [N], in (0, 1]; 1 keeps all. None for no top-p in any row.
    Returns:
        [N, V], float32, each row adding up to 1. A row with NaN, +inf or no finite logit is NaN, or a point mass if
        greedy, without effect on the others.
    """
    best, scaled = _scale(logits, temperature)
    sampled = torch.softmax(scaled.masked_fill(_is_cut(scaled, top_k, top_p), -math.inf), dim=-1)
    return torch.where((temperature == 0)[:, None], torch.zeros_like(sampled).scatter(-1, best, 1.0), sampled)


def filter_logits(logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Return the logits with -inf for the tokens that top-k, then top-p, leave out, [N, V], float32.

    Without the two arguments `probabilities` makes the same of the result as of the logits with them. The most likely
    token of a row stays, and so does all of a row with NaN, +inf or no finite logit. Arguments: see `probabilities`.
    """
    _, scaled = _scale(logits, temperature)
    return logits.float().masked_fill(_is_cut(scaled, top_k, top_p), -math.inf)


def sample(weights: Tensor, keys: Tensor) -> Tensor:
    """Return a token of each row with chances in proportion to its weights: the winner of the race.

    Args:
        weights: [N, V], >= 0; they need not add up to 1.
        keys: [N], int64; token x of a row gets the hash of its key and x.
    Returns:
        [N], int64, the lowest id of a tie; never a token of weight 0 or NaN, except 0 in a row without others.
    """
    tokens = torch.arange(weights.shape[-1], device=weights.device)
    times = -to_uniform(absorb(keys[:, None], tokens)).log()
    return torch.where(weights > 0, weights / times, 0.0).argmax(dim=-1)


def row_argmax(logits: Tensor) -> Tensor:
    """Return the most likely token of each row, the lowest id of a tie; NaN counts as largest; `pcp::row_argmax`.

    Args:
        logits: [N, V], any float type; compared as float32, which sampled rows are made of too.
    Returns:
        [N], int64.
    """
    if logits.is_cuda:
        from pcp_compiler.kernels import sampling  # triton is not there on every machine without CUDA

        return sampling.row_argmax(logits)
    return logits.float().argmax(dim=-1)


def sample_draft(logits: Tensor, temperature: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the draft token of one step of a proposal and the distribution it came from; `pcp::sample_draft`.

    Only the temperature counts here: top-k and top-p would cost a sort of the vocabulary a step, and the verification
    makes the result exact without them.

    Args:
        logits: [R, V], the drafter's, any float type.
        temperature: [R], float32; 0 takes the most likely token.
        keys: [R], int64, of these draws.
    Returns:
        Token ids [R], int64, and probabilities [R, V], float32.
    """
    if logits.is_cuda:
        from pcp_compiler.kernels import sampling  # triton is not there on every machine without CUDA

        return sampling.sample_rows(logits, temperature, keys)
    probs = probabilities(logits, temperature)
    return sample(probs, keys), probs


def _shift_right(bits: Tensor, distance: int) -> Tensor:
    """Shift zeros in from the left, where `>>` on a signed integer repeats the sign."""
    return (bits >> distance) & ((1 << (64 - distance)) - 1)


def _scale(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return the argmax of each row, [N, 1], and logits divided by their temperature, the largest 0, [N, V]."""
    logits = logits.float()
    best = logits.argmax(dim=-1, keepdim=True)
    # the largest becomes 0 before the division, which therefore overflows only towards -inf
    return best, (logits - logits.gather(-1, best)) / torch.where(temperature == 0, 1.0, temperature)[:, None]


def _is_cut(scaled: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Return which tokens top-k, then top-p, leave out, [N, V], or [] without both."""
    if top_k is None and top_p is None:
        return torch.zeros((), dtype=torch.bool, device=scaled.device)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    is_cut = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k is not None:
        vocab_size = scaled.shape[-1]
        last = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size) - 1
        is_cut = ordered < ordered.gather(-1, last[:, None])
    if top_p is not None:
        probs = torch.softmax(ordered.masked_fill(is_cut, -math.inf), dim=-1).to(torch.float64)
        mass_before = probs.cumsum(dim=-1) - probs
        is_cut |= (mass_before >= top_p[:, None]) & (top_p < 1)[:, None]  # at 1 rounding alone could reach the sum
    return torch.empty_like(is_cut).scatter(-1, order, is_cut)


def _row_argmax_fake(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)


def _sample_draft_fake(logits: Tensor, _temperature: Tensor, _keys: Tensor) -> tuple[Tensor, Tensor]:
    return _row_argmax_fake(logits), torch.empty_like(logits, dtype=torch.float32)


_lib.impl("row_argmax", row_argmax, "CompositeExplicitAutograd")
_lib.impl("sample_draft", sample_draft, "CompositeExplicitAutograd")
torch.library.register_fake("pcp::row_argmax", _row_argmax_fake, lib=_lib)
torch.library.register_fake("pcp::sample_draft", _sample_draft_fake, lib=_lib)

ROW_ARGMAX = torch.ops.pcp.row_argmax.default
SAMPLE_DRAFT = torch.ops.pcp.sample_draft.default

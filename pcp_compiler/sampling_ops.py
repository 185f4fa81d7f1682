"""From logits to tokens: the distribution that sampling options make of a row, a draw from it, both as one op.

Everything is row by row and free of host synchronisation: a row's result depends on no other row, and the functions may
run inside a captured graph. The random numbers are arguments.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_lib = torch.library.Library("pcp", "FRAGMENT")  # lives as long as the process

_lib.define("sample_draft(Tensor logits, Tensor temperature, Tensor uniform) -> (Tensor, Tensor)")


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
    logits = logits.float()
    best = logits.argmax(dim=-1, keepdim=True)
    is_greedy = (temperature == 0)[:, None]
    # the largest becomes 0 before the division, which therefore overflows only towards -inf
    scaled = (logits - logits.gather(-1, best)) / torch.where(is_greedy, 1.0, temperature[:, None])
    sampled = torch.softmax(_truncate(scaled, top_k, top_p), dim=-1)
    return torch.where(is_greedy, torch.zeros_like(sampled).scatter(-1, best, 1.0), sampled)


def sample(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return a token of each row with chances in proportion to its weights, by the inverse of the running sum.

    Args:
        weights: [N, V], >= 0; they need not add up to 1.
        uniform: [N], float64, in the open interval (0, 1).
    Returns:
        [N], int64; never a token of weight 0, except 0 in a row without weight.
    """
    running = weights.to(torch.float64).cumsum(dim=-1)
    is_past = (running > uniform[:, None] * running[:, -1:]) & (weights > 0)
    return is_past.to(torch.uint8).argmax(dim=-1)  # the first of the largest


def sample_draft(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the draft token of one step of a proposal and the distribution it came from; `pcp::sample_draft`.

    Only the temperature counts here: top-k and top-p would cost a sort of the vocabulary a step, and the verification
    makes the result exact without them.

    Args:
        logits: [R, V], the drafter's, any float type.
        temperature: [R], float32; 0 takes the most likely token.
        uniform: [R], float64, in the open interval (0, 1).
    Returns:
        Token ids [R], int64, and probabilities [R, V], float32.
    """
    probs = probabilities(logits, temperature)
    return sample(probs, uniform), probs


def _truncate(scaled: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Return the logits with -inf for the tokens that top-k, then top-p, leave out, [N, V]."""
    if top_k is None and top_p is None:
        return scaled
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        vocab_size = scaled.shape[-1]
        last = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size) - 1
        ordered = ordered.masked_fill(ordered < ordered.gather(-1, last[:, None]), -math.inf)
    if top_p is not None:
        probs = torch.softmax(ordered, dim=-1).to(torch.float64)
        mass_before = probs.cumsum(dim=-1) - probs
        is_cut = (mass_before >= top_p[:, None]) & (top_p < 1)[:, None]  # at 1 rounding alone could reach the sum
        ordered = ordered.masked_fill(is_cut, -math.inf)
    return torch.empty_like(scaled).scatter(-1, order, ordered)


def _sample_draft_fake(logits: Tensor, _temperature: Tensor, _uniform: Tensor) -> tuple[Tensor, Tensor]:
    ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    return ids, torch.empty_like(logits, dtype=torch.float32)


_lib.impl("sample_draft", sample_draft, "CompositeExplicitAutograd")
torch.library.register_fake("pcp::sample_draft", _sample_draft_fake, lib=_lib)

SAMPLE_DRAFT = torch.ops.pcp.sample_draft.default

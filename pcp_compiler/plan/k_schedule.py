"""How many draft tokens a round makes, by how many requests are in the batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pcp_compiler.errors import ConfigError

Tier = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class KSchedule:
    """A step function from batch size to K, the draft tokens of each request."""

    starts: tuple[int, ...]
    """Batch sizes from which on the next K holds, ascending from 1."""
    num_draft_tokens: tuple[int, ...]
    """K from each start on."""
    notes: tuple[str, ...] = ()
    """What the user should know: entries above the limit, batch sizes that no entry names."""

    def lookup(self, num_requests: int) -> int:
        """Return K for a batch of `num_requests` >= 1."""
        assert num_requests >= 1, f"a batch of {num_requests} requests"
        return self.num_draft_tokens[bisect_right(self.starts, num_requests) - 1]

    def distinct(self, max_num_requests: int) -> tuple[int, ...]:
        """Return every K that a batch of up to `max_num_requests` can have, ascending: one captured graph each."""
        return tuple(sorted({self.lookup(start) for start in self.starts if start <= max_num_requests}))


def build_schedule(
    entries: Sequence[Sequence[int]], *, num_speculative_tokens: int, max_num_requests: int
) -> KSchedule:
    """Read `draft.k_schedule`: entries [lo, hi, K] give K for batches of lo to hi requests, both included.

    Entries may come in any order. A batch size between two entries, or above the last, has the K of the entry before
    it. K is at most `num_speculative_tokens`, which the drafter's buffers are made for; a larger one is lowered.
    Without entries every batch size has K = `num_speculative_tokens`.

    Args:
        num_speculative_tokens: the largest K, >= 0.
        max_num_requests: the largest batch, for the notes.
    Raises:
        ConfigError: no list, an entry that is not three integers with 1 <= lo <= hi and K >= 0, two entries for one
            batch size, or none for a batch of 1.
    Source: vLLM 0.33's `num_speculative_tokens_per_batch_size`.
    """
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise ConfigError(f"draft.k_schedule is {entries!r}; give a list of [lo, hi, K], or [] for one K")
    if not entries:
        return KSchedule((1,), (num_speculative_tokens,))
    tiers = sorted(_check_entry(index, entry) for index, entry in enumerate(entries))
    _check_order(tiers)
    return KSchedule(
        starts=tuple(lo for lo, _, _ in tiers),
        num_draft_tokens=tuple(min(k, num_speculative_tokens) for _, _, k in tiers),
        notes=(*_note_limits(tiers, num_speculative_tokens, max_num_requests), *_note_gaps(tiers, max_num_requests)),
    )


def _note_limits(tiers: list[Tier], num_speculative_tokens: int, max_num_requests: int) -> Iterator[str]:
    """Yield a note for each entry that does not do what it says."""
    for lo, hi, k in tiers:
        entry = f"draft.k_schedule: [{lo}, {hi}, {k}]"
        if lo > max_num_requests:
            yield f"{entry} is never used: limits.max_num_requests is {max_num_requests}"
        elif k > num_speculative_tokens:
            yield f"{entry} is lowered to K = {num_speculative_tokens}, draft.num_speculative_tokens"


def _note_gaps(tiers: list[Tier], max_num_requests: int) -> Iterator[str]:
    """Yield a note for each range of possible batch sizes that no entry names."""
    ends = [lo - 1 for lo, _, _ in tiers[1:]] + [max_num_requests]
    for (lo, hi, k), end in zip(tiers, ends, strict=True):
        end = min(end, max_num_requests)
        if hi < end:
            yield f"draft.k_schedule: batches of {hi + 1} to {end} requests are as those of [{lo}, {hi}, {k}]"


def _check_order(tiers: list[Tier]) -> None:
    """Refuse sorted entries that start late or overlap."""
    if tiers[0][0] != 1:
        raise ConfigError(f"draft.k_schedule starts at batch size {tiers[0][0]}; give an entry [1, hi, K]")
    for (_, hi, _), (next_lo, _, _) in pairwise(tiers):
        if next_lo <= hi:
            raise ConfigError(f"draft.k_schedule has two entries for batch size {next_lo}; give one")


def _check_entry(index: int, entry: Sequence[int]) -> Tier:
    """Return (lo, hi, K) of one entry."""
    is_list = isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 3
    if not is_list or not all(isinstance(value, (int, np.integer)) and not isinstance(value, bool) for value in entry):
        raise ConfigError(f"draft.k_schedule[{index}] is {entry!r}; give three integers [lo, hi, K]")
    lo, hi, k = map(int, entry)
    if not (1 <= lo <= hi and k >= 0):
        raise ConfigError(f"draft.k_schedule[{index}] is {entry!r}; give 1 <= lo <= hi and K >= 0")
    return lo, hi, k

"""Which captured graph a batch replays: the smallest of its phase that has room for it, or none and why.

A batch is described by global numbers only, never by how many rows this rank happens to have, so all ranks pick the
same capture.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pcp_compiler.errors import InvariantError
from pcp_compiler.plan.captures import CaptureKey, CaptureLimits, CapturePhase


@dataclass(frozen=True, slots=True)
class LiveBatch:
    """What one run of a program needs."""

    phase: CapturePhase
    """From the scheduler: a prompt of 1 + K tokens looks like a verify batch, and is none."""
    num_rows: int
    """Rows without padding, equal on all ranks: of the fullest rank if they are sharded, else of the batch."""
    num_requests: int
    """Of the whole batch."""
    query_width: int
    """Most rows of one request."""
    context_len: int
    """See `context_bound`."""
    num_draft_tokens: int = 0
    """Drafts that the program makes for each request."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What a batch replays."""

    live: LiveBatch
    key: CaptureKey | None
    """None: it runs eagerly."""
    reason: str = ""
    """Why there is no key, without numbers of the batch, so that equal reasons can be counted."""

    @property
    def num_pad_rows(self) -> int:
        """Rows that are computed and not used, on each rank; 0 when nothing is replayed."""
        return 0 if self.key is None else self.key.capture_size - self.live.num_rows

    @property
    def pad_waste(self) -> float:
        """Part of the replayed rows that is padding, 0 to 1."""
        return 0.0 if self.key is None else self.num_pad_rows / self.key.capture_size


class Dispatcher:
    """Finds the capture for each batch, among keys that have been captured.

    Args:
        keys: in any order.
    """

    def __init__(self, keys: Iterable[CaptureKey]) -> None:
        ordered = sorted(keys, key=lambda key: key.size_order)
        self._programs: dict[tuple[CapturePhase, int], list[CaptureKey]] = {}
        for key in ordered:
            self._programs.setdefault((key.phase, key.num_draft_tokens), []).append(key)
        self._buckets = sorted({key.context_bucket for key in ordered if key.context_bucket is not None})
        self._found: dict[tuple[object, ...], CaptureKey | None] = {}

    def find(self, live: LiveBatch) -> Dispatch:
        """Return the smallest capture of the batch's phase and K that covers it, else the reason why none does.

        A context above all shorter buckets gets the capture of the whole context, which is the largest bucket.
        Invariant: a function of the keys and `live` alone.
        """
        bucket = bisect_left(self._buckets, live.context_len)  # all contexts of one bucket have the same cover
        memo = (live.phase, live.num_draft_tokens, live.num_rows, live.num_requests, live.query_width, bucket)
        if memo not in self._found:
            candidates = self._programs.get((live.phase, live.num_draft_tokens), ())
            self._found[memo] = next((key for key in candidates if not find_gaps(key, live)), None)
        key = self._found[memo]
        return Dispatch(live, key, "" if key else self._explain(live))

    def _explain(self, live: LiveBatch) -> str:
        """Return why no capture covers the batch."""
        name = live.phase + (f" (K = {live.num_draft_tokens})" if live.num_draft_tokens else "")
        keys = self._programs.get((live.phase, live.num_draft_tokens))
        if not keys:
            return f"no {name} capture"
        missing = [set(find_gaps(key, live)) for key in keys]
        common = sorted(set.intersection(*missing))
        if not common:
            return f"no one {name} capture has enough of all: {', '.join(sorted(set.union(*missing)))}"
        return f"more than any {name} capture has: {', '.join(common)}"


def find_gaps(key: CaptureKey, live: LiveBatch) -> tuple[str, ...]:
    """Return in what the capture is too small, or made for something else; empty if it covers the batch."""
    gaps = []
    if key.phase != live.phase:
        gaps.append("phase")
    if key.num_draft_tokens != live.num_draft_tokens:
        gaps.append("draft tokens")
    if key.capture_size < live.num_rows:
        gaps.append("rows")
    if key.num_requests is not None and key.num_requests < live.num_requests:
        gaps.append("requests")
    if key.query_width is not None and key.query_width < live.query_width:
        gaps.append("rows per request")
    if key.context_bucket is not None and key.context_bucket < live.context_len:
        gaps.append("context")
    return tuple(gaps)


def check_cover(key: CaptureKey, live: LiveBatch) -> None:
    """Refuse to replay a capture for a batch it has no room for; call it right before each replay.

    Raises:
        InvariantError: naming what is too small.
    """
    gaps = find_gaps(key, live)
    if gaps:
        raise InvariantError(f"the capture ({key}) does not cover {live}: {', '.join(gaps)}")


def context_bound(
    seq_lens: Sequence[int] | NDArray[np.integer], *, max_model_len: int, num_ahead: int = 0
) -> int:  # fmt: skip
    """Return the positions of a request that a run may read, as the host knows it before any draft is verified.

    Args:
        seq_lens: positions of each request after its rows, all scheduled drafts counted, [R], R >= 1.
        num_ahead: positions that the run itself goes on to: K - 1 for a draft chain of K.
    """
    return min(int(np.max(seq_lens)) + num_ahead, max_model_len)


def unreachable_keys(keys: Sequence[CaptureKey], limits: CaptureLimits) -> tuple[CaptureKey, ...]:
    """Return the keys that no batch within the limits is dispatched to; looks every key up.

    If a smaller capture covers the largest batches a key has room for, it covers all of the key's batches.
    """
    dispatcher = Dispatcher(keys)
    return tuple(
        key for key in keys if not any(dispatcher.find(live).key == key for live in _largest_batches(key, limits))
    )


def _largest_batches(key: CaptureKey, limits: CaptureLimits) -> Iterator[LiveBatch]:
    """Yield the batches that a key has room for and that are in no larger one; none if there are no such batches."""
    context_len = min(key.context_bucket or limits.max_model_len, limits.max_model_len)
    live = LiveBatch(key.phase, min(key.capture_size, limits.max_num_tokens), 1, 1, context_len, key.num_draft_tokens)
    if key.num_requests is None or key.query_width is None:
        yield live
        return
    for most_requests, widest, k in limits.shapes(key.phase):
        if k != key.num_draft_tokens:
            continue
        for num_requests in range(min(key.num_requests, most_requests), 0, -1):
            # each request has a row, and one of them as many as are left
            width = min(key.query_width, widest, limits.max_num_tokens - num_requests + 1)
            num_rows = min(key.capture_size, num_requests * width, limits.max_num_tokens)
            if width > 1 or key.phase != "verify":
                yield replace(live, num_rows=num_rows, num_requests=num_requests, query_width=width)

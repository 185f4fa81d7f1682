"""Which rows of the global batch each PCP rank runs, and how to put them back in global order.

One layout object answers both questions, so cutting and restoring cannot disagree. Everything here is a function of
global data: every rank that calls `partition_batch` with the same batch gets the same answer without asking the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pcp_compiler.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Span:
    """A run of consecutive tokens of one request on one rank."""

    request: int
    """Index of the request in the batch."""
    global_start: int
    """First row in global order."""
    global_stop: int
    """One past the last row in global order."""
    local_start: int
    """Row of this rank that holds `global_start`."""

    @property
    def num_tokens(self) -> int:
        """Rows in the span, >= 1."""
        return self.global_stop - self.global_start


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Layout of one batch over the PCP ranks; T tokens, P ranks, `width` (W) rows on every rank.

    Invariants: `gather[restore[t]] == t` for every token t, and `write_mask` is true on exactly the rows
    `restore` names, so each token has one writer. With x of shape [T, ...] and an output row per expanded row,
    `x[gather]` is what the ranks run (rank-major) and `outputs[restore]` is global order again.
    """

    per_rank: tuple[int, ...]
    """Real rows of each rank, [P]; rows from there to `width` are padding."""
    width: int
    """Rows of every rank, padding included."""
    restore: NDArray[np.int64]
    """Expanded row that holds each token, [T]."""
    gather: NDArray[np.int64]
    """Token that each expanded row holds, [P * W]; padding rows hold 0 and are never restored or written."""
    write_mask: NDArray[np.bool_]
    """Whether the expanded row writes its token's K/V, [P * W]."""
    spans: tuple[tuple[Span, ...], ...]
    """Each rank's spans in local order: decodes first, then prefills, each by request and global row."""

    def local_rows(self, rank: int) -> NDArray[np.int64]:
        """Return the tokens that `rank` runs, its slice of `gather`: [W], a view."""
        assert 0 <= rank < len(self.per_rank), f"rank {rank} is not one of {len(self.per_rank)} PCP ranks"
        return self.gather[rank * self.width : (rank + 1) * self.width]


def zigzag_chunks(num_tokens: int, pcp_size: int) -> tuple[tuple[int, int], ...]:
    """Return the 2P shard chunks (start, stop) of one prefill; rank r runs chunks r and 2P - 1 - r.

    All chunks hold `ceil(num_tokens / 2P)` tokens, except that the last ones may be short or empty (start == stop).
    A causal row t costs t + 1, so an early and a late chunk together cost every rank the same when all are full.

    Args:
        num_tokens: rows of this prefill in the step, >= 0.
    Raises:
        ConfigError: `num_tokens` < 0 or `pcp_size` < 1.
    Invariant: the ranges cover 0..num_tokens - 1 in order, each row once.
    Source: DualChunkSwap, as vLLM 0.33 places prefills.
    """
    num_tokens = _check_count("num_tokens", num_tokens, lowest=0)
    num_chunks = 2 * _check_count("parallel.pcp_size", pcp_size, lowest=1)
    chunk_len = -(-num_tokens // num_chunks)
    borders = [min(index * chunk_len, num_tokens) for index in range(num_chunks + 1)]
    return tuple(pairwise(borders))


def partition_batch(
    query_lens: Sequence[int] | NDArray[np.integer],
    is_prefilling: Sequence[bool] | NDArray[np.bool_],
    *,
    pcp_size: int,
    shard_decode: bool,
    min_tokens_to_shard: int = 0,
    kv_sharded: bool = False,
    width: int | None = None,
) -> Partition:
    """Place every token of the batch on one rank, or on all of them.

    Requests without tokens are skipped. A request that has some is, by the first rule that fits:

    1. a prefill too short to shard: replicated, every rank runs all of it and rank 0 writes it. Too short is fewer than
       `min_tokens_to_shard` tokens, or, if `kv_sharded`, too few to fill all 2P chunks. So also with `shard_decode`:
       an owner alone would leave the other ranks without rows for a prompt's K/V gather.
    2. a prefill: sharded in zigzag, see `zigzag_chunks`.
    3. a decode with `shard_decode`: whole, owned by rank `ordinal % P`; `ordinal` counts this step's decodes that have
       tokens. Needs the whole KV cache on every rank.
    4. a decode without `shard_decode`: replicated as in 1.

    Args:
        query_lens: tokens of each request in this step, [R], >= 0. Draft tokens to verify count.
        is_prefilling: whether the request's prompt was still incomplete before this step, [R]. The token count never
            tells a decode from the last piece of a prompt.
        pcp_size: P, >= 1.
        min_tokens_to_shard: shortest prefill that is sharded, in tokens of this step.
        kv_sharded: each rank holds a part of the KV cache only (DCP), so each needs a row of every request.
        width: rows of every rank, of a captured graph say; None takes the fullest rank's.
    Raises:
        ConfigError: `pcp_size` < 1, lists of unequal length, a negative length, or `width` below the fullest rank.
    Source: vLLM 0.33's layout rule; rule 1's threshold is ours.
    """
    pcp_size = _check_count("parallel.pcp_size", pcp_size, lowest=1)
    min_tokens_to_shard = _check_count("parallel.min_tokens_to_shard", min_tokens_to_shard, lowest=0)
    lens, prefilling = _check_batch(query_lens, is_prefilling)
    too_short = lens < min_tokens_to_shard
    if kv_sharded:
        too_short |= _leaves_chunks_empty(lens, pcp_size)
    replicated = np.where(prefilling, too_short, not shard_decode)
    spans = _lay_out(lens, prefilling, replicated, pcp_size)
    per_rank = tuple(sum(span.num_tokens for span in rank_spans) for rank_spans in spans)
    width = _check_width(width, per_rank)
    gather, write_mask = _expand(spans, replicated, width)
    return Partition(per_rank, width, _invert(gather, write_mask), gather, write_mask, spans)


def _leaves_chunks_empty(lens: NDArray[np.int64], pcp_size: int) -> NDArray[np.bool_]:
    """Tell for each length, [R], whether the last of its 2P chunks would hold no token."""
    num_chunks = 2 * pcp_size
    return (num_chunks - 1) * -(-lens // num_chunks) >= lens


def _lay_out(
    lens: NDArray[np.int64], prefilling: NDArray[np.bool_], replicated: NDArray[np.bool_], pcp_size: int
) -> tuple[tuple[Span, ...], ...]:
    """Return each rank's spans in local order."""
    starts = np.cumsum(lens) - lens
    owners = (np.cumsum(~prefilling & (lens > 0)) - 1) % pcp_size
    spans: list[list[Span]] = [[] for _ in range(pcp_size)]
    num_rows = [0] * pcp_size
    for request in np.argsort(prefilling, kind="stable").tolist():  # attention backends need decodes first
        base = int(starts[request])
        owner = None if prefilling[request] else int(owners[request])
        for rank, start, stop in _place(int(lens[request]), bool(replicated[request]), owner, pcp_size):
            if start < stop:
                spans[rank].append(Span(request, base + start, base + stop, num_rows[rank]))
                num_rows[rank] += stop - start
    return tuple(map(tuple, spans))


def _place(num_tokens: int, replicated: bool, owner: int | None, pcp_size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, start, stop) of one request's pieces, ascending on each rank; `owner` is None for a prefill."""
    if replicated:
        yield from ((rank, 0, num_tokens) for rank in range(pcp_size))
    elif owner is not None:
        yield owner, 0, num_tokens
    else:
        for index, (start, stop) in enumerate(zigzag_chunks(num_tokens, pcp_size)):
            yield min(index, 2 * pcp_size - 1 - index), start, stop


def _expand(
    spans: tuple[tuple[Span, ...], ...], replicated: NDArray[np.bool_], width: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return `gather` and `write_mask`, both [P * W], from the spans and the requests that every rank has, [R]."""
    gather = np.zeros(len(spans) * width, dtype=np.int64)
    write_mask = np.zeros(len(spans) * width, dtype=np.bool_)
    for rank, rank_spans in enumerate(spans):
        for span in rank_spans:
            start = rank * width + span.local_start
            gather[start : start + span.num_tokens] = np.arange(span.global_start, span.global_stop)
            write_mask[start : start + span.num_tokens] = rank == 0 or not replicated[span.request]
    return gather, write_mask


def _invert(gather: NDArray[np.int64], write_mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the writing row of each token, [T]."""
    writers = np.flatnonzero(write_mask)
    restore = np.empty(len(writers), dtype=np.int64)
    restore[gather[writers]] = writers
    return restore


def _check_batch(
    query_lens: Sequence[int] | NDArray[np.integer], is_prefilling: Sequence[bool] | NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return both lists as arrays of shape [R]."""
    if len(query_lens) != len(is_prefilling):
        raise ConfigError(
            f"query_lens has {len(query_lens)} entries and is_prefilling {len(is_prefilling)}; give one per request"
        )
    lens = [_check_count(f"query_lens[{index}]", value, lowest=0) for index, value in enumerate(query_lens)]
    return np.array(lens, dtype=np.int64), np.array(is_prefilling, dtype=np.bool_)


def _check_width(width: int | None, per_rank: tuple[int, ...]) -> int:
    """Return the rows of every rank: `width`, or by default as many as the fullest rank has."""
    num_rows = max(per_rank)
    if width is None:
        return num_rows
    width = _check_count("width", width, lowest=0)
    if width < num_rows:
        raise ConfigError(
            f"width {width} is smaller than the {num_rows} rows of rank {per_rank.index(num_rows)} (rows of each rank: "
            f"{per_rank}); use a width >= {num_rows}, such as a larger entry of capture.sizes"
        )
    return width


def _check_count(name: str, value: int | np.integer, *, lowest: int) -> int:
    """Return `value` as an int if it is an integer, not a bool, of at least `lowest`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < lowest:
        raise ConfigError(f"{name} is {value!r}; give an integer >= {lowest}")
    return int(value)

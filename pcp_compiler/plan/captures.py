"""Which graphs are captured: the keys that capture sizes and context buckets make, within a memory budget.

Everything here is a function of the config and of global limits, so all ranks plan the same captures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pcp_compiler.errors import ConfigError
from pcp_compiler.plan.buckets import check_list, default_sizes, pick_context_buckets
from pcp_compiler.plan.k_schedule import KSchedule

CaptureMode = Literal["none", "piecewise", "full_decode", "full_and_piecewise"]
CapturePhase = Literal["prefill", "mixed", "decode", "verify", "window", "draft", "proposal"]
"""What a captured program is for. `window`: modules of a drafter, which run rows of the step before again. `draft`: a
draft chain. `proposal`: the drafter's first pass and its chain in one, or the whole round."""
CaptureKind = Literal["piecewise", "full"]

_PIECEWISE: Final[Mapping[CapturePhase, CaptureKind]] = {"prefill": "piecewise", "mixed": "piecewise"}
_FULL: Final[Mapping[CapturePhase, CaptureKind]] = {
    "decode": "full", "verify": "full", "window": "full", "draft": "full", "proposal": "full",
}  # fmt: skip
CAPTURED: Final[Mapping[CaptureMode, Mapping[CapturePhase, CaptureKind]]] = {
    "none": {},
    "piecewise": {**_PIECEWISE, "decode": "piecewise", "verify": "piecewise", "window": "piecewise"},
    "full_decode": _FULL,
    "full_and_piecewise": {**_PIECEWISE, **_FULL},
}
"""How each mode captures each phase; a phase that is not named runs eagerly."""

NO_DRAFTS: Final = KSchedule((1,), (0,))


@dataclass(frozen=True, slots=True)
class CaptureKey:
    """One captured graph: what it has room for, in numbers that are equal on all ranks.

    None: the number is in no captured piece, as attention is outside of them, so any value is covered.
    """

    phase: CapturePhase
    capture_size: int
    """Rows that a rank runs, padding included. Full captures: `num_requests * query_width`."""
    num_requests: int | None = None
    query_width: int | None = None
    """Rows of one request."""
    context_bucket: int | None = None
    """Positions of one request, drafts included."""
    num_draft_tokens: int = 0
    """Draft tokens that the program makes for each request; not a bound, a batch needs this very number."""

    @property
    def is_full(self) -> bool:
        """Whether the graph is whole, attention included."""
        return self.context_bucket is not None

    @property
    def num_cells(self) -> int:
        """Rows times the positions that each may see: what "smaller" means among captures that cover a batch."""
        return self.capture_size * (self.context_bucket or 1)

    @property
    def size_order(self) -> tuple[int, int, int, int]:
        """Sorts captures from small to large."""
        return self.num_cells, self.capture_size, self.query_width or 0, self.num_requests or 0

    def __str__(self) -> str:
        requests = "" if self.num_requests is None else f", {self.num_requests} requests of {self.query_width}"
        context = "" if self.context_bucket is None else f", context {self.context_bucket}"
        drafts = f", {self.num_draft_tokens} drafts" if self.num_draft_tokens else ""
        return f"{self.phase} {self.capture_size} rows{requests}{context}{drafts}"


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """What a batch can be, all of it global data."""

    max_num_requests: int
    max_num_tokens: int
    """Rows of a step over all requests."""
    max_model_len: int
    schedule: KSchedule = NO_DRAFTS
    """K by batch size; without a drafter K is 0."""
    windows: tuple[int, ...] = ()
    """Lengths of sliding windows of the model's layers."""
    pcp_size: int = 1
    shard_decode: bool = False
    num_rerun: int = 0
    """Rows of the step before that a request has in a window."""

    def shapes(self, phase: CapturePhase) -> Iterator[tuple[int, int, int]]:
        """Yield (requests, rows of a request, K) of the largest batches of a phase that has no prompts.

        A batch has the K of the batch that made its drafts, which had at least as many requests. So K's batches end
        with the last batch size that has K. In a verify batch at least one request has two rows.
        """
        if phase == "decode":
            yield min(self.max_num_requests, self.max_num_tokens), 1, 0
            return
        for k in self.schedule.distinct(self.max_num_requests):
            num_requests = min(self._last_batch(k), self.max_num_tokens - (phase == "verify"))
            width = min(1 + k, self.max_num_tokens)
            if phase == "proposal":
                yield num_requests, width, k
            elif phase == "window":
                yield num_requests, min(width + self.num_rerun, self.max_num_tokens), 0
            elif k and num_requests:
                yield (num_requests, width, 0) if phase == "verify" else (num_requests, 1, k)

    def _last_batch(self, k: int) -> int:
        return max(size for size in range(1, self.max_num_requests + 1) if self.schedule.lookup(size) == k)

    @property
    def dense_rows(self) -> int:
        """Rows up to which default sizes are close together: two full verify batches, at most 512; from vLLM 0.33."""
        width = 1 + max(self.schedule.distinct(self.max_num_requests))
        return min(2 * self.max_num_requests * width, 512)


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """The captures to make."""

    keys: tuple[CaptureKey, ...] = ()
    """Largest first: the first ones size the memory pool that all share."""
    pruned: tuple[CaptureKey, ...] = ()
    """Left out for `capture.memory_mb`."""
    num_bytes: int = 0
    """Estimate for `keys`; 0 without an estimator."""
    notes: tuple[str, ...] = ()
    """What the user should know."""

    def describe(self) -> tuple[str, ...]:
        """Return one line for each phase and K: its rows and context buckets."""
        groups: dict[tuple[str, int], list[CaptureKey]] = {}
        for key in sorted(self.keys, key=lambda key: key.size_order):
            groups.setdefault((key.phase, key.num_draft_tokens), []).append(key)
        return tuple(_describe_group(phase, k, keys) for (phase, k), keys in groups.items())


@dataclass(frozen=True, slots=True)
class _Ladder:
    """The sizes of one program are drawn up to `max_rows`, in multiples of `width`."""

    phase: CapturePhase
    max_rows: int
    bound: str
    """The config keys that `max_rows` comes from."""
    exact: tuple[int, ...] = ()
    """Sizes that are in any list."""
    is_full: bool = False
    width: int = 1
    num_draft_tokens: int = 0


def plan_captures(
    mode: CaptureMode, phases: Sequence[CapturePhase], limits: CaptureLimits, *,
    sizes: Sequence[int] | None = None, context_buckets: Sequence[int] | None = None, memory_mb: int | None = None,
    estimate_bytes: Callable[[CaptureKey], int] | None = None,
) -> CapturePlan:  # fmt: skip
    """Return the keys to capture: sizes for each phase that `mode` captures, times context buckets for full captures.

    The most rows a phase can have are always among its sizes, and the whole context among the buckets. Shorter buckets
    are made for 1, 2, 4, 8, ... requests and for the most: a batch in between is padded, which costs less.

    Args:
        phases: those whose programs exist.
        sizes: `capture.sizes` in rows, any order; verify sizes are rounded up to whole requests. None: 1, 2, 4, then
            steps of 8, above 255 of 16, and above `limits.dense_rows` of a quarter. []: nothing is captured.
        context_buckets: `capture.context_buckets` in positions, any order. None: 2048, 8192, 32768, ... below
            `max_model_len`. Windows are added. []: the whole context only.
        memory_mb: `capture.memory_mb`, budget in MiB; captures that would exceed it are left out and named. The
            largest of each phase come first, full captures before pieces, small before large. None: no budget.
        estimate_bytes: memory that a capture adds; must be equal on all ranks.
    Raises:
        ConfigError: a list with anything but integers in range, or a budget below the largest capture.
    Source: sizes as vLLM 0.33, except above `dense_rows`, where it captures nothing but the largest.
    """
    ladders = [ladder for phase in phases for ladder in _find_ladders(phase, mode, limits)]
    widest = max(ladders, key=lambda ladder: ladder.max_rows, default=_prompt_ladder("prefill", limits))
    notes = [*_note_sharded_decode(mode, limits)]
    if sizes is not None:
        sizes = check_list("capture.sizes", sizes, widest.max_rows, widest.bound, notes)
    buckets = pick_context_buckets(context_buckets, limits.max_model_len, limits.windows, notes)
    if not ladders or sizes == ():
        notes += ["capture.sizes: [] captures nothing, every step runs eagerly"] if ladders else []
        return CapturePlan(notes=tuple(notes))
    keys: dict[CaptureKey, bool] = {}
    for ladder in ladders:
        for rows in _pick_rows(ladder, sizes, limits, notes):
            for key in _make_keys(ladder, rows, buckets):
                is_first = rows == ladder.max_rows and key.context_bucket in (None, limits.max_model_len)
                keys[key] = keys.get(key, False) or is_first
    return _fit_budget(keys, memory_mb, estimate_bytes, notes)


# --- sizes of each program -------------------------------------------------------------------------------------------


def _find_ladders(phase: CapturePhase, mode: CaptureMode, limits: CaptureLimits) -> Iterator[_Ladder]:
    """Yield the ladders of a phase: one for pieces, one per K for full captures, none if the phase runs eagerly."""
    kind = CAPTURED[mode].get(phase)
    if phase in ("prefill", "mixed"):
        if kind is not None:
            yield _prompt_ladder(phase, limits)
        return
    is_sharded = limits.shard_decode and phase in ("decode", "verify", "window")
    shapes = list(limits.shapes(phase))
    if kind == "full" and not is_sharded:
        for num_requests, width, k in shapes:
            bound = f"limits.max_num_requests {limits.max_num_requests}: {num_requests} requests of {width} rows"
            yield _Ladder(phase, num_requests * width, bound, (), True, width, k)
    elif shapes and kind is not None and mode != "full_decode":
        num_ranks = limits.pcp_size if is_sharded else 1
        max_rows = max(-(-num_requests // num_ranks) * width for num_requests, width, _ in shapes)
        bound = f"limits.max_num_requests {limits.max_num_requests}, limits.max_num_tokens {limits.max_num_tokens}"
        yield _Ladder(phase, min(max_rows, limits.max_num_tokens), bound)


def _prompt_ladder(phase: CapturePhase, limits: CaptureLimits) -> _Ladder:
    """Return the ladder of prefills, from the rows of a long prompt's rank to a step that every rank runs whole."""
    max_rows, num_chunks = limits.max_num_tokens, 2 * limits.pcp_size
    exact = min(max_rows, 2 * -(-max_rows // num_chunks))
    return _Ladder(phase, max_rows, f"limits.max_num_tokens {max_rows}", (exact,))


def _note_sharded_decode(mode: CaptureMode, limits: CaptureLimits) -> Iterator[str]:
    if limits.shard_decode and mode == "full_decode":
        yield (
            "capture.mode: full_decode captures no decode and no verify step with parallel.shard_decode: true, whose "
            "layers have collectives; use full_and_piecewise"
        )


def _pick_rows(
    ladder: _Ladder, sizes: tuple[int, ...] | None, limits: CaptureLimits, notes: list[str]
) -> tuple[int, ...]:
    """Return the capture sizes of one ladder, ascending; the last is its most rows."""
    chosen = default_sizes(ladder.max_rows, limits.dense_rows) if sizes is None else sizes
    aligned = {-(-size // ladder.width) * ladder.width for size in (*chosen, *ladder.exact)}
    rows = sorted(size for size in aligned if size < ladder.max_rows)
    if ladder.max_rows not in aligned:
        notes.append(
            f"capture.sizes: {ladder.phase} batches of {rows[-1] + 1 if rows else 1} to {ladder.max_rows} rows replay "
            f"a capture of {ladder.max_rows}, which is added"
        )
    return (*rows, ladder.max_rows)


# --- keys and budget -------------------------------------------------------------------------------------------------


def _make_keys(ladder: _Ladder, rows: int, buckets: tuple[int, ...]) -> Iterator[CaptureKey]:
    """Yield the keys of one capture size."""
    if not ladder.is_full:
        yield CaptureKey(ladder.phase, rows)
        return
    num_requests = rows // ladder.width
    is_power_of_2 = num_requests & (num_requests - 1) == 0
    for bucket in buckets if is_power_of_2 or rows == ladder.max_rows else buckets[-1:]:
        yield CaptureKey(ladder.phase, rows, num_requests, ladder.width, bucket, ladder.num_draft_tokens)


def _fit_budget(
    keys: Mapping[CaptureKey, bool], memory_mb: int | None, estimate_bytes: Callable[[CaptureKey], int] | None,
    notes: list[str],
) -> CapturePlan:  # fmt: skip
    """Return the plan with the keys that fit; those marked True, the largest of their kind, are taken first."""
    assert memory_mb is None or estimate_bytes is not None, "a budget needs an estimate"
    costs = {key: estimate_bytes(key) if estimate_bytes else 0 for key in keys}
    budget = sum(costs.values()) if memory_mb is None else memory_mb * 2**20
    _check_budget(costs, memory_mb, budget)
    kept, pruned, num_bytes = [], [], 0
    for key in sorted(keys, key=lambda key: (not keys[key], not key.is_full, key.size_order)):
        if num_bytes + costs[key] <= budget:
            kept.append(key)
            num_bytes += costs[key]
        else:
            pruned.append(key)
    if pruned:
        names = "; ".join(map(str, pruned))
        notes.append(f"capture.memory_mb: {memory_mb} leaves out {len(pruned)} of {len(keys)} captures: {names}")
    kept.sort(key=lambda key: (key.capture_size, key.size_order), reverse=True)
    return CapturePlan(tuple(kept), tuple(pruned), num_bytes, tuple(notes))


def _check_budget(costs: Mapping[CaptureKey, int], memory_mb: int | None, budget: int) -> None:
    largest = max(costs, key=lambda key: costs[key])
    lowest = -(-costs[largest] // 2**20)
    if costs[largest] > budget:
        raise ConfigError(
            f"capture.memory_mb: got {memory_mb}, and the largest capture ({largest}) needs about "
            f"{lowest} MiB; allowed: integers >= {lowest}; raise it, lower limits.max_num_requests or "
            "limits.max_num_tokens, or set capture.mode to none"
        )


def _describe_group(phase: str, k: int, keys: Sequence[CaptureKey]) -> str:
    """Return one line about the captures of a program."""
    rows = sorted({key.capture_size for key in keys})
    contexts = sorted({key.context_bucket for key in keys if key.context_bucket is not None})
    drafts = f" (K = {k})" if k else ""
    context = f", context up to {contexts}" if contexts else ""
    return f"{phase}{drafts}: {len(keys)} captures, rows {rows}{context}"

"""What each attention backend can run, as data, and which one is taken: the first that has no gap.

Backends are modules with a `BACKEND`, loaded by name: ours in `backends/attention/`, those of other packages by entry
points of the group `pcp_compiler.attention`; their name is the backend's, their value its `AttentionBackend`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from pcp_compiler.config_sections import ATTENTION_ENTRY_POINTS, BUILTIN_ATTENTION_BACKENDS, AttentionConfig
from pcp_compiler.errors import ConfigError

ATTENTION_KINDS: Final = ("full", "sliding_window", "mla", "sparse_index")
"""Names of the kinds a layer's attention can have."""


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a caller asks of a backend; False and None mean not needed, or not known yet."""

    kind: str
    """Kind of the layer, one of `ATTENTION_KINDS`."""
    pcp: bool = False
    """Query rows are a rank's zigzag rows: two runs of positions of one prompt, with K/V rows between them."""
    ragged_queries: bool = False
    """Requests of one batch have different numbers of query rows."""
    paged: bool = False
    """Keys and values lie in kv_blocks, found by block tables."""
    non_causal: bool = False
    """Rows of a draft_block see each other in both directions."""
    device: str = "cpu"
    """Type of the device."""
    dtype: str | None = None
    """Of the queries, as `bfloat16`."""
    head_dims: tuple[int, int] | None = None
    """Numbers in a key and in a value of one head."""
    grouped_queries: bool = False
    """Several query heads share a key head."""
    soft_cap: bool = False
    """Scores go through soft_cap * tanh(s / soft_cap)."""
    sinks: bool = False
    """Each head has the score of a key without a value."""
    fp8_kv: bool = False
    """Keys and values are stored in eight bits with scales."""
    capture: bool = False
    """The call becomes part of a captured graph: no host value may depend on a device value."""


@dataclass(frozen=True, slots=True)
class AttentionCapabilities:
    """What one attention backend can run; fields as in `AttentionNeeds`."""

    name: str
    """Name in the config."""
    kinds: frozenset[str]
    """Kinds it can run."""
    supports_pcp: bool
    """Whether it takes a rank's zigzag rows. A backend that places a request's query rows by counting back from its
    last position cannot."""
    ragged_queries: bool
    """Whether requests may have different numbers of query rows."""
    paged: bool
    """Whether it reads keys and values by block tables."""
    non_causal: bool
    """Whether rows of a draft_block may see each other in both directions."""
    priorities: Mapping[str, int]
    """Devices it runs on; where several backends can run a layer, `auto` takes the one with the smallest number."""
    dtypes: frozenset[str] = frozenset(["float64", "float32", "bfloat16", "float16"])
    """Types of queries it takes."""
    min_head_dim: int = 1
    """Numbers in the smallest head."""
    max_head_dim: int | None = None
    """Numbers in the largest head; None: any."""
    equal_head_dims: bool = False
    """Whether keys and values must be equally wide."""
    grouped_queries: bool = True
    soft_cap: bool = True
    sinks: bool = True
    fp8_kv: bool = True
    is_capture_safe: bool = False
    """Whether a captured call serves other lengths: all that it reads of the batch lies on the device."""
    context_buckets: bool = False
    """Whether its launch follows the width of the block tables, the context bucket of a captured graph."""
    missing: str | None = None
    """Why it cannot run in this environment, as `triton is not installed`."""

    def find_gaps(self, needs: AttentionNeeds) -> tuple[str, ...]:
        """Return what this backend lacks of `needs`, one phrase each; empty if it can run them."""
        heads = needs.head_dims or (self.min_head_dim,)
        checks = (
            (needs.kind in self.kinds, f"kind {needs.kind}"),
            (self.supports_pcp or not needs.pcp, "PCP rank-local rows"),
            (self.ragged_queries or not needs.ragged_queries, "query rows that differ by request"),
            (self.paged or not needs.paged, "paged K/V"),
            (self.non_causal or not needs.non_causal, "non-causal draft_blocks"),
            (needs.device in self.priorities, f"device {needs.device}"),
            (needs.dtype is None or needs.dtype in self.dtypes, f"dtype {needs.dtype}"),
            (self.max_head_dim is None or max(heads) <= self.max_head_dim, f"heads of {max(heads)} numbers"),
            (min(heads) >= self.min_head_dim, f"heads of {min(heads)} numbers"),
            (not self.equal_head_dims or needs.head_dims is None or len(set(needs.head_dims)) == 1,
             "values narrower than keys"),
            (self.grouped_queries or not needs.grouped_queries, "query heads that share a key head"),
            (self.soft_cap or not needs.soft_cap, "soft caps"),
            (self.sinks or not needs.sinks, "sinks"),
            (self.fp8_kv or not needs.fp8_kv, "fp8 K/V"),
            (self.is_capture_safe or not needs.capture, "captured graphs"),
        )  # fmt: skip
        gaps = tuple(phrase for is_met, phrase in checks if not is_met)
        return gaps if self.missing is None else (f"what it needs: {self.missing}", *gaps)


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """A backend: its record, and the function that `pcp::paged_attention` calls for it."""

    capabilities: AttentionCapabilities
    attend: Callable[..., Any]
    """Takes what `kv_ops.paged_attention` takes, without `backend`, and returns the same."""


@functools.cache
def load_backends() -> tuple[AttentionBackend, ...]:
    """Return every backend: ours, then those of installed packages.

    Raises:
        ConfigError: a package's backend cannot be loaded, or is none.
    """
    ours = [import_module(f"pcp_compiler.backends.attention.{name}").BACKEND for name in BUILTIN_ATTENTION_BACKENDS]
    return (*ours, *map(_load, entry_points(group=ATTENTION_ENTRY_POINTS)))


def _load(entry: EntryPoint) -> AttentionBackend:
    where = f"attention backend {entry.name} (entry point {entry.value} of the group {ATTENTION_ENTRY_POINTS})"
    if entry.name in BUILTIN_ATTENTION_BACKENDS:
        raise ConfigError(f"{where}: this name is one of ours; its package has to take another")
    try:
        backend = entry.load()
    except Exception as fault:
        raise ConfigError(f"{where} cannot be loaded: {type(fault).__name__}: {fault}; fix or remove it") from fault
    if not isinstance(backend, AttentionBackend) or backend.capabilities.name != entry.name:
        raise ConfigError(f"{where}: got {backend!r}; allowed: an AttentionBackend whose record has the entry's name")
    return backend


def load_records() -> tuple[AttentionCapabilities, ...]:
    """Return the record of every backend."""
    return tuple(backend.capabilities for backend in load_backends())


def find_backend(name: str) -> AttentionBackend:
    """Return the backend `name`, which the config has already checked."""
    found = [backend for backend in load_backends() if backend.capabilities.name == name]
    assert len(found) == 1, f"{len(found)} attention backends are called {name}"
    return found[0]


def find_record(name: str, records: Sequence[AttentionCapabilities]) -> AttentionCapabilities:
    """Return the record of `name`."""
    return next(record for record in records if record.name == name)


def target_backends(section: AttentionConfig, kind: str) -> tuple[str, str, Sequence[AttentionCapabilities]]:
    """Return which config key names the backend of the target's layers of `kind`, what it says, and whom it allows."""
    key, name = f"attention.backend_per_kind.{kind}", getattr(section.backend_per_kind, kind, None)
    if name is None:
        key, name = "attention.backend", section.backend
    records = load_records()
    return key, name, records if name == "auto" else [find_record(name, records)]


def pick_backend(needs: AttentionNeeds, records: Sequence[AttentionCapabilities]) -> str | None:
    """Return the name of the backend that `auto` takes for `needs`; None if none can run them."""
    able = [record for record in records if not record.find_gaps(needs)]
    return min(able, key=lambda record: record.priorities[needs.device]).name if able else None


def describe_gaps(needs: AttentionNeeds, records: Sequence[AttentionCapabilities]) -> str:
    """Return what each backend lacks of `needs`, for messages: `sdpa_prefix has no PCP rank-local rows`."""
    gaps = {record.name: record.find_gaps(needs) for record in records}
    return "; ".join(f"{name} has no {', no '.join(missing)}" for name, missing in gaps.items() if missing)

"""What each attention backend can run, as data: plans choose and refuse a backend before any of its code is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ATTENTION_KINDS: Final = ("full", "sliding_window", "mla", "sparse_index")
"""Names of the kinds a layer's attention can have."""


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a caller asks of a backend; False means not needed."""

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

    def find_gaps(self, needs: AttentionNeeds) -> tuple[str, ...]:
        """Return what this backend lacks of `needs`, one phrase each; empty if it can run them."""
        checks = (
            (needs.kind in self.kinds, f"kind {needs.kind}"),
            (self.supports_pcp or not needs.pcp, "PCP rank-local rows"),
            (self.ragged_queries or not needs.ragged_queries, "query rows that differ by request"),
            (self.paged or not needs.paged, "paged K/V"),
            (self.non_causal or not needs.non_causal, "non-causal draft_blocks"),
        )
        return tuple(phrase for is_met, phrase in checks if not is_met)


SDPA_PREFIX: Final = AttentionCapabilities(
    name="sdpa_prefix",
    kinds=frozenset(["full", "sliding_window", "mla"]),
    supports_pcp=False,  # its query rows are the last positions of the request, which zigzag rows are not
    ragged_queries=True,
    paged=True,
    non_causal=False,
)
"""Query rows are the last q positions of each request's paged K/V: decode, verify, chunked prefill, and every pass of a
replicated drafter."""

SDPA: Final = AttentionCapabilities(
    name="sdpa",
    kinds=frozenset(["full", "sliding_window", "mla"]),
    supports_pcp=True,
    ragged_queries=True,
    paged=True,
    non_causal=False,
)
"""The reference: any query rows, each masked by its own position."""

BACKENDS: Final = (SDPA_PREFIX, SDPA)
"""Every backend, in the order `auto` tries them: the narrower one does less work where it fits."""


def find_backend(name: str, backends: Sequence[AttentionCapabilities] = BACKENDS) -> AttentionCapabilities:
    """Return the record of the backend `name`, which the config has already checked."""
    found = [record for record in backends if record.name == name]
    assert len(found) == 1, f"{len(found)} records for attention backend {name}"
    return found[0]


def pick_backend(needs: AttentionNeeds, backends: Sequence[AttentionCapabilities] = BACKENDS) -> str | None:
    """Return the name of the first backend that can run `needs`; None if there is none."""
    return next((record.name for record in backends if not record.find_gaps(needs)), None)


def describe_gaps(needs: AttentionNeeds, backends: Sequence[AttentionCapabilities] = BACKENDS) -> str:
    """Return what each backend lacks of `needs`, for messages: `sdpa_prefix has no PCP rank-local rows`."""
    gaps = {record.name: record.find_gaps(needs) for record in backends}
    return "; ".join(f"{name} has no {', no '.join(missing)}" for name, missing in gaps.items() if missing)

"""Every combination of config and model that is refused before anything is built: one table, checked and printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pcp_compiler.config import Config
from pcp_compiler.config_sections import BackendPerKind
from pcp_compiler.errors import ConfigError
from pcp_compiler.plan.capabilities import AttentionCapabilities, target_backends
from pcp_compiler.plan.draft import BLOCK_METHODS, DRAFT_METHODS, choose_draft_backend, find_sharding_obstacle


@dataclass(frozen=True, slots=True)
class RefusalFacts:
    """What the config does not say: facts of the models, and settings that have no config key of their own yet."""

    target_kinds: tuple[str, ...] = ()
    """Attention kinds of the target's layers; empty: unknown."""
    drafter_method: str | None = None
    """Method the drafter or its checkpoint declares; None: `draft.method`."""
    drafter_kind: str | None = None
    """Attention kind of the drafter's layers; None: unknown."""
    dcp_size: int = 1
    """Decode context parallel ranks."""
    device: str = "cpu"
    """Type of the device that the models are on."""
    kv_sharded: bool = False
    """Whether each rank holds a part of the KV cache only."""
    full_capture_phases: tuple[str, ...] = ()
    """Phases that are to be captured as one whole graph: prefill, mixed, decode, verify, draft."""
    adaptive_verification: bool = False
    """Whether the device decides how many drafts of each request are verified."""
    has_varlen_captures: bool = False
    """Whether captured verify graphs take requests with different numbers of rows."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One row of the table."""

    name: str
    """Short name, unique in the table."""
    condition: str
    """What is refused."""
    reason: str
    """Why it cannot work."""
    knob: str
    """What to do instead."""
    find: Callable[[Config, RefusalFacts], str | None]
    """Returns the field and value that meet the condition; None if nothing does."""


@dataclass(frozen=True, slots=True)
class RefusalRow:
    """One row as it is printed."""

    name: str
    condition: str
    reason: str
    knob: str
    found: str | None
    """Field and value that meet the condition; None: not refused."""


def list_refusals(config: Config, facts: RefusalFacts | None = None) -> tuple[RefusalRow, ...]:
    """Return every row of the table with what it finds; without `facts` only what the config alone decides is found."""
    facts = RefusalFacts() if facts is None else facts
    return tuple(
        RefusalRow(refusal.name, refusal.condition, refusal.reason, refusal.knob, refusal.find(config, facts))
        for refusal in REFUSALS
    )


def check_refusals(config: Config, facts: RefusalFacts) -> None:
    """Raise one ConfigError with a line `found; reason; knob` for each row that applies."""
    rows = [row for row in list_refusals(config, facts) if row.found is not None]
    if rows:
        raise ConfigError("\n".join(f"{row.found}; {row.reason}; {row.knob}" for row in rows))


# --- conditions ------------------------------------------------------------------------------------------------------


def _find_dcp(config: Config, facts: RefusalFacts) -> str | None:
    return f"parallel.dcp_size: got {facts.dcp_size}" if facts.dcp_size > 1 else None


def _find_owned_decodes(config: Config, facts: RefusalFacts) -> str | None:
    if not (config.parallel.shard_decode and facts.kv_sharded):
        return None
    return "parallel.shard_decode: got True with a KV cache that is sharded over the ranks"


def _find_sparse_index(config: Config, facts: RefusalFacts) -> str | None:
    if config.parallel.pcp_size == 1 or "sparse_index" not in facts.target_kinds:
        return None
    return f"parallel.pcp_size: got {config.parallel.pcp_size} with a target that has sparse_index layers"


def _find_target_without_kind(config: Config, facts: RefusalFacts) -> str | None:
    for kind in facts.target_kinds:
        key, _, candidates = target_backends(config.attention, kind)
        if not any(kind in record.kinds for record in candidates):
            return f"{key}: got {_show_backends(candidates)} for the target's layers of kind {kind}"
    return None


def _find_target_without_pcp(config: Config, facts: RefusalFacts) -> str | None:
    if config.parallel.pcp_size == 1:
        return None
    return _judge_kinds(facts.target_kinds, lambda kind: _describe_target_without_pcp(config, kind))


def _describe_target_without_pcp(config: Config, kind: str) -> str | None:
    key, _, candidates = target_backends(config.attention, kind)
    able = [record for record in candidates if kind in record.kinds]
    if not able or any(record.supports_pcp for record in able):
        return None  # no backend for the kind at all is another row
    return f"{key}: got {_show_backends(able)} with parallel.pcp_size = {config.parallel.pcp_size}"


def _find_unknown_method(config: Config, facts: RefusalFacts) -> str | None:
    if facts.drafter_method is None or facts.drafter_method in DRAFT_METHODS:
        return None
    return f'draft.method: the drafter declares "{facts.drafter_method}"'


def _find_sharded_block_drafter(config: Config, facts: RefusalFacts) -> str | None:
    if config.draft.mode != "sharded" or facts.drafter_method not in BLOCK_METHODS:
        return None
    return f'draft.mode: got "sharded" with a {facts.drafter_method} drafter'


def _find_sharded_without_pcp(config: Config, facts: RefusalFacts) -> str | None:
    method = facts.drafter_method or config.draft.method
    if config.draft.mode != "sharded" or method == "none" or method in BLOCK_METHODS:
        return None
    kinds = () if facts.drafter_kind is None else (facts.drafter_kind,)
    return _judge_kinds(kinds, lambda kind: _describe_sharded_without_pcp(config, method, kind, facts.device))


def _describe_sharded_without_pcp(config: Config, method: str, kind: str, device: str) -> str | None:
    if find_sharding_obstacle(config, method, kind, device) is None:
        return None
    choice = choose_draft_backend(config, kind)
    return f'draft.mode: got "sharded" with {choice.key} = {choice.name or "auto"} for kind {kind}'


def _find_full_prefill(config: Config, facts: RefusalFacts) -> str | None:
    phases = [phase for phase in facts.full_capture_phases if phase in ("prefill", "mixed")]
    return f"capture.mode: got full captures of {' and '.join(phases)} batches" if phases else None


def _find_adaptive(config: Config, facts: RefusalFacts) -> str | None:
    if not facts.adaptive_verification or facts.has_varlen_captures:
        return None
    return "draft.adaptive_verification: got True without captures of variable length"


def _judge_kinds(kinds: tuple[str, ...], judge: Callable[[str], str | None]) -> str | None:
    """Return the first finding for `kinds`; if they are unknown, one that holds for each kind a backend is set for."""
    findings = [judge(kind) for kind in kinds or BackendPerKind.model_fields]
    if not kinds and None in findings:
        return None
    return next((finding for finding in findings if finding is not None), None)


def _show_backends(records: Sequence[AttentionCapabilities]) -> str:
    return " or ".join(record.name for record in records)


# --- the table -------------------------------------------------------------------------------------------------------

REFUSALS: Final = (
    Refusal(
        name="decode-context-parallel",
        condition="dcp_size > 1",
        reason="every rank holds the whole KV cache, there is no decode over a part of it",
        knob="set parallel.dcp_size to 1",
        find=_find_dcp,
    ),
    Refusal(
        name="owned-decode-of-sharded-kv",
        condition="shard_decode with a KV cache that is sharded over the ranks",
        reason="the owner of a request has only a part of its keys and values",
        knob="set parallel.shard_decode to false",
        find=_find_owned_decodes,
    ),
    Refusal(
        name="sparse-index-under-pcp",
        condition="pcp_size > 1 with a target that has sparse_index layers",
        reason="the compressor joins neighbouring tokens into one key, and neighbours lie on different ranks",
        knob="set parallel.pcp_size to 1",
        find=_find_sparse_index,
    ),
    Refusal(
        name="target-kind-without-backend",
        condition="a target layer of a kind that its backend does not run",
        reason="the backend does not run attention of this kind",
        knob="leave the key out, or, if every backend is named above, use a target without such layers",
        find=_find_target_without_kind,
    ),
    Refusal(
        name="target-backend-without-pcp",
        condition="pcp_size > 1 with a target backend without PCP",
        reason="the backend does not take a rank's zigzag rows",
        knob="set it to a backend that takes them, such as sdpa or triton, or leave it out",
        find=_find_target_without_pcp,
    ),
    Refusal(
        name="unknown-draft-method",
        condition=f"a drafter whose method is none of {', '.join(DRAFT_METHODS)}",
        reason="how it drafts is not known",
        knob=f"use a drafter whose method is {' or '.join(DRAFT_METHODS)}",
        find=_find_unknown_method,
    ),
    Refusal(
        name="sharded-block-drafter",
        condition=f"draft.mode sharded with method {' or '.join(BLOCK_METHODS)}",
        reason="it drafts from restored global rows",
        knob="set draft.mode to auto or replicated",
        find=_find_sharded_block_drafter,
    ),
    Refusal(
        name="sharded-drafter-without-pcp",
        condition="draft.mode sharded with a drafter backend without PCP",
        reason="the first pass of a sharded drafter runs on a rank's zigzag rows, which the backend does not take",
        knob="set draft.mode to auto or replicated, or set another backend for the drafter",
        find=_find_sharded_without_pcp,
    ),
    Refusal(
        name="full-capture-with-prefill",
        condition="full captures of batches that hold prefills",
        reason="rows and K/V gathers of a prefill differ from step to step",
        knob="set capture.mode to none, piecewise, full_decode or full_and_piecewise",
        find=_find_full_prefill,
    ),
    Refusal(
        name="adaptive-without-variable-length",
        condition="adaptive verification without captures of variable length",
        reason="the device decides each request's rows after the graph was captured",
        knob="set draft.adaptive_verification to false",
        find=_find_adaptive,
    ),
)
"""The table, in the order in which it is printed."""

"""How a drafter runs under PCP, decided before it is built: sharded like the target, or whole on every rank.

The decision needs the config and the capability records of the attention backends only, so a drafter is built once,
from a config that says what it will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pcp_compiler.config import Config
from pcp_compiler.errors import ConfigError
from pcp_compiler.plan.capabilities import (
    AttentionCapabilities,
    AttentionNeeds,
    describe_gaps,
    find_record,
    load_records,
    pick_backend,
)

DraftMode = Literal["sharded", "replicated"]

DRAFT_METHODS: Final = ("mtp", "model", "dspark")
"""Methods a mode can be resolved for."""

BLOCK_METHODS: Final = ("dspark",)
"""Methods that draft a whole block from restored global rows, so that there are no rank-local rows to run."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Which config key names the drafter's attention backend."""

    key: str
    """Dotted config key that decides."""
    name: str | None
    """Backend it names; None: no key names one, `auto` decides."""
    overruled: tuple[str, ...]
    """One sentence for each key that names a backend and loses."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How the drafter runs."""

    mode: DraftMode
    """`sharded`: first pass over the rank's own rows, with the target's metadata. `replicated`: over all rows."""
    backend: str
    """Attention backend of the drafter's layers."""
    kind: str
    """Attention kind of the drafter's layers."""
    reasons: tuple[str, ...]
    """Why, one sentence each: keys that lost, then the backend, then the mode."""
    draft_config: Config
    """Config the drafter is built and compiled with; a copy, the target's is untouched."""


def choose_draft_backend(config: Config, kind: str) -> BackendChoice:
    """Return the key and name of the drafter's attention backend for layers of `kind`.

    The first key that names a backend wins: `draft.backend_per_kind[kind]`, `attention.backend_per_kind[kind]`,
    `draft.attention_backend`. The target's per-kind key precedes the drafter's general one, as in vLLM 0.33.
    """
    names = {
        f"draft.backend_per_kind.{kind}": getattr(config.draft.backend_per_kind, kind, None),
        f"attention.backend_per_kind.{kind}": getattr(config.attention.backend_per_kind, kind, None),
        "draft.attention_backend": config.draft.attention_backend,
    }
    named = [(key, name) for key, name in names.items() if name not in (None, "auto")]
    if not named:
        return BackendChoice("draft.attention_backend", None, ())
    (winner, backend), *losers = named
    overruled = tuple(f"{key}: {name} is not used, {winner}: {backend} comes first" for key, name in losers)
    return BackendChoice(winner, backend, overruled)


def find_sharding_obstacle(
    config: Config, method: str, kind: str, device: str = "cpu", dtype: str | None = None,
    backends: Sequence[AttentionCapabilities] | None = None,
) -> str | None:  # fmt: skip
    """Return why the first pass of this drafter cannot run on rank-local rows; None if it can."""
    if method in BLOCK_METHODS:
        return f"method {method} drafts from restored global rows"
    records = load_records() if backends is None else backends
    return _describe_missing(config, _needs(method, kind, device, dtype, pcp=True), records)


def resolve_draft(
    config: Config, *, method: str, kind: str, device: str = "cpu", dtype: str | None = None,
    backends: Sequence[AttentionCapabilities] | None = None,
) -> DraftPlan:  # fmt: skip
    """Return how the drafter runs; call this before building it.

    Shard-first: with `draft.mode: auto` the drafter is sharded if its method and its backend allow it and there is more
    than one rank, else replicated. An explicit backend without PCP therefore gives a replicated drafter beside a
    sharded target.

    Args:
        config: the target's config.
        method: one of `DRAFT_METHODS`.
        kind: attention kind of the drafter's layers.
        device: type of the device it runs on. dtype: of its weights, as `bfloat16`; None: unknown.
        backends: records to choose from; None: all there are.
    Raises:
        ConfigError: `draft.mode: sharded` cannot be done, or no backend can run the drafter at all.
    Invariant: `config` is equal before and after, and shares no mutable part with `draft_config`.
    Source: vLLM pull request 53427; the last error, `draft.mode` and one rank are ours.
    """
    assert method in DRAFT_METHODS, f"draft method {method}"
    records = load_records() if backends is None else backends
    choice = choose_draft_backend(config, kind)
    mode, mode_reason = _pick_mode(config, find_sharding_obstacle(config, method, kind, device, dtype, records))
    needs = _needs(method, kind, device, dtype, pcp=mode == "sharded")
    backend = _pick_draft_backend(config, mode, needs, method, records)
    backend_reason = f"backend {backend}: {'automatic' if choice.name is None else f'set by {choice.key}'}"
    reasons = (*choice.overruled, f"{backend_reason}, kind {kind}", f"mode {mode}: {mode_reason}")
    return DraftPlan(mode, backend, kind, reasons, _copy_config(config, mode, backend))


def _needs(method: str, kind: str, device: str, dtype: str | None, *, pcp: bool) -> AttentionNeeds:
    """Return what any drafter needs: a step's requests have different numbers of rows, and their K/V is paged."""
    return AttentionNeeds(
        kind, pcp=pcp, ragged_queries=True, paged=True, non_causal=method in BLOCK_METHODS, device=device, dtype=dtype
    )


def _describe_missing(config: Config, needs: AttentionNeeds, backends: Sequence[AttentionCapabilities]) -> str | None:
    """Return what the chosen backend, or with `auto` every backend, lacks of `needs`; None if one can run them."""
    choice = choose_draft_backend(config, needs.kind)
    candidates = _find_candidates(choice, backends)
    if pick_backend(needs, candidates) is not None:
        return None
    return f"{describe_gaps(needs, candidates)} ({'automatic choice' if choice.name is None else choice.key})"


def _find_candidates(
    choice: BackendChoice, backends: Sequence[AttentionCapabilities]
) -> Sequence[AttentionCapabilities]:
    return backends if choice.name is None else [find_record(choice.name, backends)]


def _pick_mode(config: Config, obstacle: str | None) -> tuple[DraftMode, str]:
    """Return the mode and why; ConfigError if the user asks for `sharded` and there is an obstacle."""
    if config.draft.mode == "replicated":
        return "replicated", "set by draft.mode"
    if config.draft.mode == "sharded":
        if obstacle is not None:
            raise ConfigError(f'draft.mode: got "sharded", but {obstacle}; set draft.mode to auto or replicated')
        return "sharded", "set by draft.mode"
    if config.parallel.pcp_size == 1:
        return "replicated", "parallel.pcp_size is 1, there is nothing to shard"
    if obstacle is not None:
        return "replicated", obstacle
    return "sharded", "the backend runs PCP rank-local rows"


def _pick_draft_backend(
    config: Config, mode: DraftMode, needs: AttentionNeeds, method: str, backends: Sequence[AttentionCapabilities]
) -> str:
    """Return the backend that runs the drafter in `mode`; ConfigError with both modes' reasons if there is none."""
    choice = choose_draft_backend(config, needs.kind)
    name = pick_backend(needs, _find_candidates(choice, backends))
    if name is not None:
        return name
    able = [record.name for record in backends if not record.find_gaps(needs)]
    knob = f"set draft.backend_per_kind.{needs.kind} to {' or '.join(able)}" if able else "use another drafter"
    raise ConfigError(
        f"{choice.key}: got {choice.name or 'auto'}, which cannot run a {method} drafter of kind {needs.kind}; "
        f"sharded: {find_sharding_obstacle(config, method, needs.kind, needs.device, needs.dtype, backends)}; "
        f"replicated: {_describe_missing(config, needs, backends)}; {knob}"
    )


def _copy_config(config: Config, mode: DraftMode, backend: str) -> Config:
    """Return the drafter's config: its backend is the only one named, and a replicated drafter sees one rank."""
    values: dict[str, Any] = config.model_dump()
    values["attention"] = {"backend": backend}
    values["draft"] |= {"attention_backend": backend, "backend_per_kind": {}, "mode": mode}
    values["tokens"] = {}  # these name arguments of the target
    if mode == "replicated":
        values["parallel"] |= {"pcp_size": 1, "shard_decode": False}
    return Config(**values)

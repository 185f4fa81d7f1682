"""From a target, a config and maybe a drafter to the compiled models that a decoder runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pcp_compiler.config import COMPILER_KEYS, Config, check_used, load_config
from pcp_compiler.drafters.base import Drafter, TargetParts, find_target_parts
from pcp_compiler.drafters.load import load_drafter
from pcp_compiler.errors import ConfigError
from pcp_compiler.kv_formats import FP8
from pcp_compiler.plan.draft import DraftPlan, resolve_draft
from pcp_compiler.plan.refusals import RefusalFacts, check_refusals
from pcp_compiler.runtime.cached_model import CachedModel, CompileCache, KvPlacement
from pcp_compiler.runtime.model_proposer import ModelProposer
from pcp_compiler.runtime.modules_proposer import ModulesProposer
from pcp_compiler.runtime.proposer import MTPProposer, Proposer
from pcp_compiler.runtime.rows import TargetRows, attention_as_rows
from pcp_compiler.runtime.scheduler import SchedulerLimits

log = logging.getLogger(__name__)

ConfigSource = Config | Mapping[str, Any] | str | Path | None
KV_DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": FP8}
SHARE_OF_FREE_MEMORY = 4
"""`limits.kv_blocks: auto` takes one part in so many of what is free; activations and others need the rest."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts of a decoder."""

    config: Config
    plan: DraftPlan | None
    parts: TargetParts
    drafter: Drafter | None
    target: CachedModel
    proposer: Proposer | None
    limits: SchedulerLimits
    num_blocks: int


def assemble(
    target: nn.Module, source: ConfigSource, drafter: Drafter | nn.Module | None, kv: KvPlacement,
    compile_cache: CompileCache,
) -> Assembly:  # fmt: skip
    """Resolve how the drafter runs, build it, trace and lower both models, and give them their KV caches.

    Raises:
        ConfigError, UnsupportedGraphError: before anything runs.
    """
    config, named = split_model(source)
    check_used(config, COMPILER_KEYS, "SpeculativeDecoder", "torch.compile or pcp_compiler.compile")
    drafter = named if drafter is None else drafter
    ready = drafter if isinstance(drafter, Drafter) else None
    parts = find_target_parts(target)
    plan = resolve_plan(config, ready, parts.embedding.weight)
    max_model_len = find_max_model_len(config, parts)
    built = None if plan is None else ready or _load(target, plan, drafter)
    proposer = None
    if built is not None:
        assert plan is not None
        check_drafter(built, plan, parts)
        proposer = pick_proposer(built)(built, plan, config, max_model_len, compile_cache)
    with attention_as_rows(target):
        keeps_hidden = proposer is not None and proposer.needs_global_hidden
        compiled = _compile_target(target, parts, config, compile_cache, keeps_hidden=keeps_hidden)
    models = [compiled, *(proposer.models if proposer else ())]
    num_blocks = _count_blocks(config, models, max_model_len, parts.embedding.weight.device)
    copies = config.parallel.pcp_size if kv == "per_rank" else 1
    for model in models:
        model.allocate(num_blocks * config.limits.kv_block_size, KV_DTYPES[config.limits.kv_cache_dtype], copies=copies)
    return Assembly(
        config, plan, parts, built, compiled, proposer, _scheduler_limits(config, proposer, max_model_len), num_blocks
    )


def split_model(source: ConfigSource) -> tuple[Config, nn.Module | None]:
    """Return the config, and the draft model if `draft.model` is a module and not a name."""
    if not isinstance(source, Mapping):
        return load_config(source), None
    options = dict(source)
    section = options.get("draft")
    module = options.get("draft.model")
    if isinstance(section, Mapping) and isinstance(section.get("model"), nn.Module):
        module = section["model"]
        options["draft"] = {name: value for name, value in section.items() if name != "model"}
    if not isinstance(module, nn.Module):
        return load_config(source), None
    options.pop("draft.model", None)
    return load_config(options), module


def resolve_plan(config: Config, ready: Drafter | None, embedding: Tensor) -> DraftPlan | None:
    """Return how the drafter will run, on the device and in the type of the target's embedding; None without one."""
    device, dtype = embedding.device.type, str(embedding.dtype).removeprefix("torch.")
    method = None if ready is None else ready.capabilities.method
    check_refusals(config, RefusalFacts(drafter_method=method, device=device))
    if method is not None and method != config.draft.method:
        raise ConfigError(
            f'draft.method: got "{config.draft.method}", and the drafter given is of method {method}; allowed: {method}'
        )
    if config.draft.method == "none":
        return None
    kind = "full" if ready is None else ready.capabilities.attention_kinds[0]
    return resolve_draft(config, method=config.draft.method, kind=kind, device=device, dtype=dtype)


def check_drafter(drafter: Drafter, plan: DraftPlan, parts: TargetParts) -> None:
    """Check that a drafter fits the plan and the target.

    Raises:
        ConfigError: another mode, width or vocabulary, or fewer tokens than asked for.
    """
    found = drafter.capabilities
    if found.mode not in (None, plan.mode):
        raise ConfigError(
            f"draft.mode: {plan.mode} was decided, and the drafter runs {found.mode} only; set draft.mode to that"
        )
    if found.needs_hidden and found.hidden_size != parts.config.hidden_size:
        raise ConfigError(
            f"drafter: takes hidden states of width {found.hidden_size}, and the target's have "
            f"{parts.config.hidden_size}; allowed: equal widths"
        )
    if found.vocab_size != parts.vocab_size:
        raise ConfigError(
            f"drafter: has logits for {found.vocab_size} ids, and the target has {parts.vocab_size}; "
            "allowed: equal sizes"
        )
    wanted = plan.draft_config.draft.num_speculative_tokens
    if found.max_draft_tokens is not None and wanted > found.max_draft_tokens:
        raise ConfigError(
            f"draft.num_speculative_tokens: got {wanted}; the drafter proposes up to {found.max_draft_tokens}"
        )


def pick_proposer(drafter: Drafter) -> type[Proposer]:
    """Return what runs a drafter, by what it says of itself.

    Raises:
        ConfigError: nothing does.
    """
    found = drafter.capabilities
    if found.row_form == "token":
        return ModelProposer
    if found.row_form == "next_token_and_hidden":
        return MTPProposer if found.max_draft_tokens is None else ModulesProposer
    raise ConfigError(f"drafter: rows of the form {found.row_form} are planned and do not work yet")


def find_max_model_len(config: Config, parts: TargetParts) -> int:
    """Return the tokens of the longest request.

    Raises:
        ConfigError: the config asks for more positions than the target has.
    """
    longest = int(parts.config.max_position_embeddings)
    wanted = config.limits.max_model_len
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"limits.max_model_len: got {wanted}; the target has {longest} positions, allowed: up to that"
        )
    return longest if wanted is None else wanted


def _load(target: nn.Module, plan: DraftPlan, model: nn.Module | None) -> Drafter:
    """Build the drafter from its own config."""
    section = plan.draft_config.draft.model_dump()
    drafter = load_drafter(target, section if model is None else section | {"model": model})
    assert drafter is not None
    return drafter


def _compile_target(
    target: nn.Module, parts: TargetParts, config: Config, compile_cache: CompileCache, *, keeps_hidden: bool
) -> CachedModel:  # fmt: skip
    rows = torch.zeros(1, 7, dtype=torch.int64, device=parts.embedding.weight.device)
    example = (rows, rows.clone(), torch.zeros(3, dtype=torch.int64, device=rows.device))
    return CachedModel(
        TargetRows(target), example, ("input_ids", "position_ids"), config, name="target",
        compile_cache=compile_cache, local_output=None if keeps_hidden else 0,
    )  # fmt: skip


def _scheduler_limits(config: Config, proposer: Proposer | None, max_model_len: int) -> SchedulerLimits:
    limits = config.limits
    return SchedulerLimits(
        max_model_len, limits.max_num_requests, limits.max_num_tokens, limits.prefill_chunk_resolved,
        limits.prefix_cache, config.draft.num_speculative_tokens if proposer else 0,
        proposer.num_lookahead if proposer else 0, proposer.draft_shift if proposer else 0,
    )  # fmt: skip


def _count_blocks(config: Config, models: Sequence[CachedModel], max_model_len: int, device: torch.device) -> int:
    """Return KV blocks: what the config says, or a part of free memory, at most what all requests can use."""
    limits = config.limits
    if isinstance(limits.kv_blocks, int):
        return limits.kv_blocks
    dtype = KV_DTYPES[limits.kv_cache_dtype]
    block_bytes = limits.kv_block_size * sum(model.bytes_per_slot(dtype) for model in models)
    useful = limits.max_num_requests * -(-max_model_len // limits.kv_block_size) + 1
    num_blocks = max(2, min(useful, _free_memory(device) // SHARE_OF_FREE_MEMORY // block_bytes))
    log.info(
        "limits.kv_blocks: auto is %d blocks of %d tokens, %.1f MiB of target and drafter", num_blocks,
        limits.kv_block_size, num_blocks * block_bytes / 2**20,
    )  # fmt: skip
    return num_blocks


def _free_memory(device: torch.device) -> int:
    """Return free bytes on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

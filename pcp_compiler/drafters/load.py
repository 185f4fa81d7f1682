"""From the section `draft` of a config to a drafter for a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from pcp_compiler.drafters.base import Drafter, TargetParts, find_target_parts
from pcp_compiler.drafters.model import load_model
from pcp_compiler.drafters.mtp import load_mtp
from pcp_compiler.errors import ConfigError


def _load_mtp(parts: TargetParts, draft: Mapping[str, Any]) -> Drafter:
    folder = draft.get("model") or parts.folder
    if not isinstance(folder, str | Path):
        raise ConfigError(
            f"draft.model: got {folder!r}; allowed: folder of an MTP drafter (None works when the target was read from "
            "a local folder that holds the modules)"
        )
    return load_mtp(parts, Path(folder))


def _load_model(parts: TargetParts, draft: Mapping[str, Any]) -> Drafter:
    model = draft.get("model")
    if not isinstance(model, str | Path | nn.Module):
        raise ConfigError(f"draft.model: got {model!r}; allowed: folder or name of a causal language model, or a model")
    return load_model(parts, model, draft.get("vocab_mismatch") or "refuse")


LOADERS: Mapping[str, Callable[[TargetParts, Mapping[str, Any]], Drafter]] = {"mtp": _load_mtp, "model": _load_model}


def load_drafter(target: nn.Module, draft: Mapping[str, Any]) -> Drafter | None:
    """Return the drafter that the section `draft` names, in type and on device of the target; None for method `none`.

    Args:
        target: causal language model with the interface of transformers; not changed.
        draft: keys `method`, `model`, `vocab_mismatch`, `num_speculative_tokens` of the config; others are not read.
    Raises:
        ConfigError: unknown method, a drafter that cannot be read or does not fit the target, more draft tokens than
            the drafter can propose.
    """
    method = draft.get("method") or "none"
    if method == "none":
        return None
    if method not in LOADERS:
        raise ConfigError(f"draft.method: got {method!r}; allowed: none, {', '.join(LOADERS)}")
    drafter = LOADERS[method](find_target_parts(target), draft)
    _check_num_draft_tokens(draft.get("num_speculative_tokens"), drafter)
    return drafter


def _check_num_draft_tokens(num_draft_tokens: int | None, drafter: Drafter) -> None:
    limit = drafter.capabilities.max_draft_tokens
    if num_draft_tokens is not None and limit is not None and num_draft_tokens > limit:
        raise ConfigError(
            f"draft.num_speculative_tokens: got {num_draft_tokens}; the drafter has {limit} modules of one token each, "
            f"allowed: 0 to {limit}"
        )

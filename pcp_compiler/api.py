"""The functions a user imports from `pcp_compiler`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pcp_compiler import ops, torch_private
from pcp_compiler.backends.compilation import CallRecord, Compilation
from pcp_compiler.backends.pcp_spec import backend
from pcp_compiler.config import Config, load_config
from pcp_compiler.errors import BypassError, UnsupportedGraphError
from pcp_compiler.trace import trace_module

Options = Config | Mapping[str, Any] | str | Path | None


def compile(model: Any, config: Options = None) -> Any:
    """Return `torch.compile(model, backend="pcp_spec")` that traces once for every prompt length.

    Args:
        model: a decoder in eval mode. config: a `Config`, a dict, or the path of a config file.
    Returns:
        A callable with the model's attributes. Each call runs without gradients.
    Raises:
        ConfigError: at once. The first call raises UnsupportedGraphError or BypassError.
    """
    return CompiledModel(model, load_config(config))


class CompiledModel:
    """A model compiled by `pcp_compiler.compile`."""

    def __init__(self, model: Any, config: Config) -> None:
        self._config = config
        self._positional = _positional_names(model)
        self._compiled: Any = torch.compile(model, backend="pcp_spec", fullgraph=True, options=config.resolved())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; integer inputs (or those of option tokens) may have another length each time."""
        self._mark_token_dims(args, kwargs)
        with torch_private.one_trace_settings(), torch.no_grad():
            return self._compiled(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def _mark_token_dims(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        tokens = self._config.tokens
        names = chain(self._positional, repeat(""))  # "" for those of *args
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            if name in tokens:
                torch_private.mark_dynamic(value, tokens[name] % value.dim())
            elif not value.is_floating_point():
                torch_private.mark_dynamic(value, value.dim() - 1)


def _positional_names(model: Any) -> tuple[str, ...]:
    """Return the names of the arguments that a caller may give by position."""
    parameters = signature(model.forward if isinstance(model, nn.Module) else model).parameters.values()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def inspect(
    model: nn.Module, args: tuple[Any, ...] = (), config: Options = None, kwargs: Mapping[str, Any] | None = None
) -> Compilation:
    """Trace and lower a model for a look at its stages, programs and decisions, without torch.compile.

    Args:
        args, kwargs: an example call; transformers models need use_cache=False.
    Raises:
        UnsupportedGraphError, ConfigError.
    """
    resolved = load_config(config)
    traced = trace_module(model, args, dict(kwargs or {}), tokens=resolved.tokens)
    return Compilation(resolved, traced.trace, name=type(model).__name__)


def compilations(compiled: object) -> list[Compilation]:
    """Return what was compiled for a `torch.compile(..., backend="pcp_spec")` object.

    Raises:
        BypassError: nothing was: the model has not been called, or its forward never reached the compiler.
    """
    wrapped = compiled._compiled if isinstance(compiled, CompiledModel) else compiled
    target = torch_private.compiled_target(wrapped)
    options = torch_private.compiled_options(wrapped)
    if target is None or options is None:
        raise BypassError(f"{type(compiled).__name__} was not compiled with backend='pcp_spec'")
    config = load_config(options)
    found = [entry for entry in backend.compilations(target) if entry.config == config]
    if not found:
        raise BypassError(
            "nothing was compiled: call the model first; when it was called, its forward is disabled for Dynamo "
            "(compile with fullgraph=True to see why)"
        )
    return found


def assert_sharded(compiled: object, calls: int, pcp_size: int, *, replicated: int = 0) -> list[CallRecord]:
    """Raise AssertionError unless the compiled program ran for every call and sharded it.

    Proves for each call: a program of ours ran; every rank ran W < T rows (W = T = 1 excepted), together exactly T;
    the collectives that ran are those scheduled.

    Args:
        calls: how often the model was called. replicated: how many of them were too short to shard.
    Returns:
        Records of the latest calls.
    """
    entries = compilations(compiled)
    ran = sum(entry.num_calls for entry in entries)
    sharded = sum(entry.num_sharded for entry in entries)
    assert ran == calls, f"compiled programs ran {ran} times for {calls} calls: the original model ran instead"
    records = [record for entry in entries for record in entry.calls]
    for entry in entries:
        size = entry.config.parallel.pcp_size
        assert size == pcp_size, f"compiled for pcp_size {size}, expected {pcp_size}"
        for record in entry.calls:
            if record.is_sharded:
                assert record.width < record.num_tokens or record.num_tokens == 1, f"a rank ran all rows: {record}"
                assert len(record.collectives) == len(entry.lowered.program.schedule) > 0, (
                    f"no collective ran: {record}"
                )
    expected = calls - replicated if pcp_size > 1 else 0
    assert sharded == expected, f"{sharded} of {calls} calls ran sharded, expected {expected}"
    return records


def attention(q: Tensor, k: Tensor, v: Tensor, *, layer: int, kind: str = "full", scale: float | None = None) -> Tensor:
    """Causal attention of a prompt's rows over themselves; sharded when compiled, plain SDPA otherwise.

    Args:
        q: [B, T, Hq, D]. k: [B, T, Hkv, D]. v: [B, T, Hkv, Dv]; Hq is a multiple of Hkv.
        layer: number of the layer. scale: factor on q.k, default D ** -0.5.
    Returns:
        [B, T, Hq, Dv].
    Raises:
        UnsupportedGraphError: kind is not supported.
    """
    if kind not in ops.ATTENTION_KINDS:
        raise UnsupportedGraphError(f"attention: kind is {kind!r}; allowed: {', '.join(ops.ATTENTION_KINDS)}")
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = ops.ATTENTION(q, k, v, None, None, layer=layer, kind=kind, scale=factor)
    return out

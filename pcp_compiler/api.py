"""The functions a user imports from `pcp_compiler`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pcp_compiler import model_check, ops, torch_private
from pcp_compiler.backends.compilation import CallRecord, Compilation
from pcp_compiler.backends.pcp_spec import backend
from pcp_compiler.compare import check_equal_trees
from pcp_compiler.config import Config, load_config
from pcp_compiler.errors import BypassError, ConfigError, UnsupportedGraphError
from pcp_compiler.ranks.launch import split_group
from pcp_compiler.trace import trace_module

Options = Config | Mapping[str, Any] | str | Path | None


def compile(model: Any, config: Options = None, *, group: object = None) -> Any:
    """Return `torch.compile(model, backend="pcp_spec")` that traces once for every prompt length.

    Args:
        model: a decoder in eval mode. config: a `Config`, a dict, or the path of a config file.
        group: the ProcessGroup or DeviceMesh whose ranks run the model; None: all processes, or virtual ranks.
    Returns:
        A callable with the model's attributes. Each call runs without gradients.
    Raises:
        ConfigError, and UnsupportedGraphError for a model in a wrapper such as DistributedDataParallel: at once.
        UnsupportedGraphError, BypassError: in the first call. CallError: in the call that has a bad input.
    """
    in_config, options = split_group(config)
    return CompiledModel(model, load_config(options), in_config if group is None else group)


class CompiledModel:
    """A model compiled by `pcp_compiler.compile`."""

    def __init__(self, model: Any, config: Config, group: object = None) -> None:
        model_check.check_module(model)
        self._config = config
        self._model = model
        self._has_run = False
        self._traces_one_token_apart = False
        self._positional = _positional_names(model)
        options = config.resolved() if group is None else {**config.resolved(), "group": group}
        self._compiled: Any = torch.compile(model, backend="pcp_spec", fullgraph=True, options=options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; integer inputs (or those of option tokens) may have another length each time."""
        token_inputs = self._token_inputs(args, kwargs)
        if not self._has_run:
            model_check.check_weights(self._model)
        is_single = any(value.shape[dim] == 1 for value, dim in token_inputs)
        with torch.no_grad():
            if is_single and self._traces_one_token_apart:
                result = self._compiled(*args, **kwargs)
            else:
                result = self._call_for_every_length(args, kwargs, token_inputs, is_single)
            if self._config.check.mode == "shadow":
                check_equal_trees(result, self._model(*args, **kwargs), self._config.check, "the original model")
        self._has_run = True
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def _call_for_every_length(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], token_inputs: list[tuple[Tensor, int]], is_single: bool
    ) -> Any:
        """Call the model with its token dims as symbols; models that ask "more than one token?" get an own trace for 1.

        No symbol answers that question, so tracing fails for a single token after a longer prompt, in transformers'
        sdpa attention for one.
        """
        for value, dim in token_inputs:
            torch_private.mark_dynamic(value, dim)
        try:
            with torch_private.one_trace_settings():
                return self._compiled(*args, **kwargs)
        except torch_private.TracingFailed:
            if not is_single:
                raise
        self._traces_one_token_apart = True
        args, kwargs = tree_map_only(Tensor, Tensor.detach, (tuple(args), dict(kwargs)))  # without the marks
        return self._compiled(*args, **kwargs)

    def _token_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
        """Return the inputs that count tokens and the dims that do; raise CallError when there are no tokens."""
        tokens = self._config.tokens
        names = chain(self._positional, (f"args[{number}]" for number in count()))
        found: dict[str, tuple[Tensor, int]] = {}
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            if not isinstance(value, Tensor):
                continue
            model_check.check_input(name, value)
            if value.dim() and (name in tokens or not value.is_floating_point()):
                found[name] = value, tokens.get(name, -1) % value.dim()
        if found and not any(value.shape[dim] for value, dim in found.values()):
            name, (value, dim) = next(iter(found.items()))  # Dynamo would show where the model itself fails on it
            model_check.check_not_empty(name, value.shape, dim)
        return list(found.values())


def _positional_names(model: Any) -> tuple[str, ...]:
    """Return the names of the arguments that a caller may give by position."""
    parameters = signature(model.forward if isinstance(model, nn.Module) else model).parameters.values()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def inspect(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    config: Options = None,
    *,
    check_rows: bool = False,
) -> Compilation:
    """Trace and lower a model for a look at what the compiler does, without torch.compile.

    Args:
        example_inputs: a tensor, a tuple of arguments, or a dict of keyword arguments. A forward that takes `use_cache`
            gets False unless the dict says otherwise.
        check_rows: also run each row-local call on some rows of the example alone and compare: finds wrong placement
            rules. Config key `check.rows` does the same.
    Returns:
        The compilation: `.stages`, `.programs[phase, rank]`, `.decisions`, `.write(folder)`.
    Raises:
        UnsupportedGraphError: the model cannot be sharded, or a placement rule is wrong. ConfigError.
    """
    resolved = load_config(config)
    args, kwargs = _example_call(model, example_inputs)
    traced = trace_module(model, args, kwargs, tokens=resolved.tokens)
    compilation = Compilation(resolved, traced.trace, name=type(model).__name__, record=True)
    if check_rows or resolved.check.rows:
        compilation.check_rows(traced.flat_inputs(args, kwargs))
    if resolved.dump.dir is not None:
        compilation.write(resolved.dump.dir)
    return compilation


def _example_call(model: nn.Module, example: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an example call."""
    if not isinstance(example, (Tensor, tuple, list, Mapping)):
        raise ConfigError(
            f"example_inputs: got {type(example).__name__}; allowed: a tensor, a tuple of arguments, or a dict of "
            "keyword arguments"
        )
    kwargs = dict(example) if isinstance(example, Mapping) else {}
    args = (example,) if isinstance(example, Tensor) else () if kwargs else tuple(example)
    if "use_cache" in signature(model.forward).parameters:
        kwargs.setdefault("use_cache", False)
    return args, kwargs


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
    config = load_config(split_group(options)[1])
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


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layer: int,
    kind: str = "full",
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a prompt's rows over themselves; sharded when compiled, plain PyTorch otherwise.

    Args:
        q: [B, T, Hq, D]. k: [B, T, Hkv, D]. v: [B, T, Hkv, Dv]; Hq is a multiple of Hkv.
        layer: number of the layer. scale: factor on q.k, default D ** -0.5.
        kind: "full", or "sliding_window", which needs `window`.
        window: keys that a row sees, its own included, >= 1.
        soft_cap: > 0; a score s becomes soft_cap * tanh(s / soft_cap).
        sinks: [Hq] scores of a key without a value, one a head.
    Returns:
        [B, T, Hq, Dv].
    Raises:
        UnsupportedGraphError: a kind that is not supported, or arguments that do not fit it.
    """
    fault = _attention_fault(q, k, kind, window, soft_cap, sinks)
    if fault is not None:
        raise UnsupportedGraphError(f"attention of layer {layer}: {fault}")
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = ops.ATTENTION(
        q, k, v, None, None, layer=layer, kind=kind, scale=factor, window=window, soft_cap=soft_cap, sinks=sinks
    )
    return out


def _attention_fault(
    q: Tensor, k: Tensor, kind: str, window: int | None, soft_cap: float | None, sinks: Tensor | None
) -> str | None:
    """Return what is wrong with the arguments of `attention`, None when nothing is."""
    if kind not in ops.ATTENTION_KINDS:
        return f"kind is {kind!r}; allowed: {', '.join(ops.ATTENTION_KINDS)}"
    if kind == "full" and window is not None:
        return f"window is {window!r} and kind is 'full'; pass kind='sliding_window'"
    if kind == "sliding_window" and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        return f"window is {window!r}; allowed with kind='sliding_window': an integer >= 1"
    if soft_cap is not None and not soft_cap > 0:
        return f"soft_cap is {soft_cap!r}; allowed: a number > 0"
    if q.shape[2] % k.shape[2]:
        return f"q has {q.shape[2]} heads and k {k.shape[2]}; allowed: a multiple"
    if sinks is not None and tuple(sinks.shape) != (q.shape[2],):
        return f"sinks has shape {tuple(sinks.shape)}; allowed: one score a head, ({q.shape[2]},)"
    return None

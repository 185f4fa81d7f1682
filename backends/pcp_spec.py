"""The torch.compile backend `pcp_spec`.

Dynamo may call a backend more often than once per compile, for pieces of a model, or not at all; each case in which
the original model (or a part of it) would run instead of our program is an error here, never a fallback.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from functorch.compile import aot_module_simplified, make_boxed_func
from torch import Tensor, fx, nn

from pcp_compiler import torch_private
from pcp_compiler.backends.compilation import Compilation
from pcp_compiler.config import Config, load_config
from pcp_compiler.errors import BypassError, ConfigError, UnsupportedGraphError
from pcp_compiler.pass_api import refuse
from pcp_compiler.trace import TraceInput, dynamo_inputs, replace_sdpa, trace_dynamo_graph

log = logging.getLogger(__name__)

_CACHE_KNOB = "generate with pcp_compiler.SpeculativeDecoder, or pass use_cache=False"


class PcpSpecBackend:
    """`torch.compile(model, backend="pcp_spec", options={...})`; options are those of `pcp_compiler.Config`."""

    def __init__(self) -> None:
        self._compilations: weakref.WeakKeyDictionary[object, list[Compilation]] = weakref.WeakKeyDictionary()
        self._warned_about_gradients = False

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[object], *,
        options: Mapping[str, object] | None = None, mode: str | None = None,
    ) -> Callable[..., Any]:  # fmt: skip
        """Compile one graph of Dynamo's.

        Raises:
            ConfigError: options or mode. BypassError: not the whole model would be compiled.
            UnsupportedGraphError: the model cannot be sharded.
        """
        if torch_private.errors_are_suppressed():
            return _refuse_to_run
        if mode is not None:
            raise ConfigError(f"mode={mode!r} is not used by backend pcp_spec; allowed: options={{...}} without mode")
        config = load_config(options)
        for note in config.notes:
            log.info("%s", note)
        target = _check_not_bypassed(gm)
        inputs = dynamo_inputs(gm)
        self._check_mode(gm, inputs, target)
        replace_sdpa(gm)

        def lower_inference(aten_gm: fx.GraphModule, _inputs: Sequence[object]) -> Callable[..., Any]:
            trace = trace_dynamo_graph(aten_gm, inputs, config.tokens)
            _refuse_cache_inputs(trace.graph_module, trace.inputs)
            with torch_private.real_tensors():
                compilation = Compilation(config, trace, name=type(target).__name__)
            self._compilations.setdefault(target, []).append(compilation)
            return make_boxed_func(lambda *args: compilation.run(args))  # type: ignore[no-any-return]

        with torch.no_grad():
            return aot_module_simplified(  # type: ignore[no-any-return]
                gm, example_inputs, fw_compiler=_refuse_training, inference_compiler=lower_inference
            )

    def reset(self) -> None:
        """Forget all compilations; called by `torch._dynamo.reset()`, possibly several times."""
        self._compilations.clear()

    def compilations(self, target: object) -> list[Compilation]:
        """Return what was compiled for a module or function."""
        return self._compilations.get(target, [])

    def _check_mode(self, gm: fx.GraphModule, inputs: tuple[TraceInput, ...], target: object) -> None:
        """Refuse training; programs run without gradients, which is said once."""
        if isinstance(target, nn.Module) and target.training:
            raise UnsupportedGraphError(
                f"{type(target).__name__} is in training mode; call model.eval() before compiling"
            )
        for node in gm.graph.nodes:
            if node.target is F.dropout and node.kwargs.get("training", True) and node.kwargs.get("p", 0.5):
                raise refuse(node, "dropout is active", "call model.eval() before compiling")
        if not torch.is_grad_enabled():
            return
        for node, entry in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
            example = node.meta.get("example_value")
            if not isinstance(example, Tensor) or not example.requires_grad:
                continue
            if entry.kind == "user":
                raise UnsupportedGraphError(f"input {entry.name} requires grad; allowed: inference; detach it first")
            if not self._warned_about_gradients:
                log.warning("parameters require grad, but pcp_spec runs without gradients: results are detached")
                self._warned_about_gradients = True


def _check_not_bypassed(gm: fx.GraphModule) -> object:
    """Return the module or function being compiled; raise when not all of it would run in our program."""
    line = torch_private.graph_break(gm)
    if line is not None:
        raise BypassError(
            f"graph break at {line.filename}:{line.lineno} in {line.name}: {line.line}\n  the rest of the model would "
            "run uncompiled; remove the break (fullgraph=True explains it)"
        )
    frame = torch_private.compile_frame()
    if frame is None:
        raise BypassError(
            "the backend was not called from torch.compile; allowed: torch.compile(model, backend='pcp_spec')"
        )
    if frame.foreign is not None:
        at = f"{frame.foreign.filename}:{frame.foreign.lineno} in {frame.foreign.name}"
        raise BypassError(
            f"only a part of the model reaches the compiler: {at} runs uncompiled; compile with fullgraph=True to see why"
        )
    if torch_private.is_last_recompile():
        raise BypassError(
            f"this would be variant {torch_private.recompile_limit()} of one function, the last that Dynamo keeps; the "
            "next would silently run the original model; pass dynamic=True, use pcp_compiler.compile, or raise "
            "torch._dynamo.config.recompile_limit"
        )
    return frame.target


def _refuse_to_run(*_args: object) -> NoReturn:
    """Stand in for a program while Dynamo would swallow an error at compile time and run the original model."""
    raise BypassError(
        "torch._dynamo.config.suppress_errors is True: an error would be swallowed and the original model run; set it "
        "to False and call torch.compiler.reset()"
    )


def _refuse_training(*_args: object) -> NoReturn:
    raise UnsupportedGraphError("the graph needs gradients; allowed: inference under torch.no_grad()")


def _refuse_cache_inputs(gm: fx.GraphModule, inputs: tuple[TraceInput, ...]) -> None:
    """Refuse graphs that continue from a KV cache: their keys are not those of this call's rows."""
    for entry in inputs:
        if entry.kind == "user" and any(word in entry.source for word in ("past_key_values", ".layers[", "cache")):
            raise UnsupportedGraphError(
                f"input {entry.source} is a KV cache: this call continues from one; {_CACHE_KNOB}"
            )


backend = PcpSpecBackend()

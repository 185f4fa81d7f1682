"""What tests of passes share: tracing a few lines, running passes one by one, running a graph on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from functorch.compile import aot_module_simplified, make_boxed_func
from torch import Tensor, fx, nn

from pcp_compiler.config import Config, load_config
from pcp_compiler.graph_text import format_graph
from pcp_compiler.invariants import check_values
from pcp_compiler.pass_api import Pass, PassContext
from pcp_compiler.pipeline import CANONICAL_PASSES, SHARDING_PASSES, run_pass
from pcp_compiler.plan.partition import partition_batch
from pcp_compiler.program import RankProgram, build_program
from pcp_compiler.ranks import index_tensors, run_lockstep
from pcp_compiler.trace import Trace, dynamo_inputs, is_positions, replace_sdpa, trace_dynamo_graph, trace_module

PASSES = CANONICAL_PASSES + SHARDING_PASSES
Route = Literal["make_fx", "static", "dynamic"]
"""How a graph came about: `trace_module`, or torch.compile with sizes as numbers or as symbols."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A trace and a function from a call of the model to the inputs of the graph."""

    trace: Trace
    inputs_for: Callable[..., list[object]]

    def context(self, *, pcp_size: int = 2, on_token_mixing: str = "refuse") -> PassContext:
        """Return a fresh context for the passes."""
        config = load_config({"parallel": {"pcp_size": pcp_size, "on_token_mixing": on_token_mixing}})
        return context_for(self.trace, config)


class _Lines(nn.Module):
    """A function as a module: its arguments are the model's inputs."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = forward


def trace(
    model: nn.Module | Callable[..., Any], *example: Any, route: Route = "make_fx",
    tokens: Mapping[str, int] | None = None, **kwargs: Any,
) -> Traced:  # fmt: skip
    """Trace a module, or a function whose arguments are the inputs.

    Args:
        example, kwargs: an example call. tokens: option `tokens`.
    """
    module = model if isinstance(model, nn.Module) else _Lines(model)
    module.eval()
    if route != "make_fx":
        return _trace_with_dynamo(module, example, kwargs, route == "dynamic", dict(tokens or {}))
    traced = trace_module(module, example, kwargs, tokens=tokens)
    return Traced(traced.trace, lambda *args: traced.flat_inputs(args, kwargs))


@dataclass(slots=True)
class _Capture:
    """A torch.compile backend that keeps the trace, and on each call the inputs of the graph."""

    tokens: dict[str, int]
    traces: list[Trace] = field(default_factory=list)
    inputs: list[object] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., Any]:
        entries = dynamo_inputs(gm)
        replace_sdpa(gm)

        def keep(aten_gm: fx.GraphModule, _inputs: object) -> Callable[..., Any]:
            self.traces.append(trace_dynamo_graph(aten_gm, entries, self.tokens))
            return make_boxed_func(lambda *args: self._run(aten_gm, args))  # type: ignore[no-any-return]

        return aot_module_simplified(gm, example_inputs, fw_compiler=keep, inference_compiler=keep)  # type: ignore[no-any-return]

    def _run(self, gm: fx.GraphModule, args: Sequence[object]) -> object:
        self.inputs = list(args)
        return gm(*args)


def _trace_with_dynamo(
    module: nn.Module, example: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: bool, tokens: dict[str, int]
) -> Traced:
    torch._dynamo.reset()
    capture = _Capture(tokens)
    compiled = torch.compile(module, backend=capture, fullgraph=True, dynamic=dynamic)

    def inputs_for(*args: Any) -> list[object]:
        with torch.no_grad():
            compiled(*args, **kwargs)
        assert len(capture.traces) == 1, "the call was traced again: its inputs do not belong to the first graph"
        return capture.inputs

    inputs_for(*example)
    return Traced(capture.traces[0], inputs_for)


def context_for(trace: Trace, config: Config) -> PassContext:
    """Return what the passes read besides the graph."""
    return PassContext(
        config,
        trace.seeds,
        position_inputs=frozenset(entry.name for entry in trace.inputs if is_positions(entry)),
        user_inputs=frozenset(entry.name for entry in trace.inputs if entry.kind == "user"),
    )


@dataclass(frozen=True, slots=True)
class PassRun:
    """One pass on one graph."""

    step: Pass
    before: str
    after: str
    num_rewrites: int
    graph_module: fx.GraphModule
    seeds: Mapping[str, int]

    def program(self) -> RankProgram:
        """Return the graph as it would run if this were the last pass."""
        return build_program(self.graph_module, dict(self.seeds), pcp_size=1, title=f"after {self.step.name}")


def run_passes(traced: Traced, ctx: PassContext, *, until: str | None = None) -> Iterator[PassRun]:
    """Run the passes in pipeline order, through the pipeline's runner, and yield each; `until` is the last one."""
    gm = traced.trace.copy_graph()
    for step in PASSES:
        before = format_graph(gm, ctx.seeds)
        gm, stage = run_pass(step, gm, ctx)
        check_values(gm)
        yield PassRun(step, before, format_graph(gm, ctx.seeds), stage.num_rewrites, gm, ctx.seeds)
        if step.name == until:
            return


def run_only(name: str, traced: Traced, **options: Any) -> PassRun:
    """Return what one pass does to the graph that all earlier passes leave it."""
    return list(run_passes(traced, traced.context(**options), until=name))[-1]


def run_on_ranks(
    program: RankProgram, inputs: Sequence[object], *, pcp_size: int, num_tokens: int
) -> list[Tensor]:
    """Run a graph's program on virtual ranks in lock-step and return its results, after checking that ranks agree."""
    partition = partition_batch([num_tokens], [True], pcp_size=pcp_size, shard_decode=False)
    index = [index_tensors(partition, rank, torch.device("cpu")) for rank in range(pcp_size)]
    with torch.no_grad():
        done = run_lockstep([program.start(inputs, of_rank) for of_rank in index])
    assert tuple((ran.name, ran.op) for ran in done.collectives) == program.schedule
    for outputs in done.outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs, done.outputs[0], strict=True))
    return list(done.outputs[0])


def assert_same(results: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-12) -> None:
    """Compare floats within a tolerance, everything else exactly."""
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
        torch.testing.assert_close(result, wanted, rtol=0, atol=tolerance if wanted.is_floating_point() else 0)

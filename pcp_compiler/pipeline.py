"""The order of the passes, with the reasons, and the runner that checks, times and records each one."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from pcp_compiler import torch_private
from pcp_compiler.config import Config
from pcp_compiler.errors import InvariantError
from pcp_compiler.graph_text import count_ops, format_graph
from pcp_compiler.invariants import check_invariants
from pcp_compiler.pass_api import Decisions, Pass, PassContext, Phase
from pcp_compiler.passes.attach_kv import AttachKv
from pcp_compiler.passes.canonicalize_attention import CanonicalizeAttention
from pcp_compiler.passes.canonicalize_experts import CanonicalizeExperts
from pcp_compiler.passes.explicit_shapes import ExplicitShapes
from pcp_compiler.passes.fuse_decode import FuseDecode
from pcp_compiler.passes.gather_kv import GatherKv
from pcp_compiler.passes.hoist_prologue import HoistPrologue
from pcp_compiler.passes.infer_placements import InferPlacements
from pcp_compiler.passes.restore_rows import RestoreRows
from pcp_compiler.passes.shard_tokens import ShardTokens
from pcp_compiler.passes.split_segments import SplitSegments
from pcp_compiler.passes.unroll_draft import UnrollDraft
from pcp_compiler.program import RankProgram, build_program
from pcp_compiler.trace import Trace, copy_graph, is_positions, paused_gc

log = logging.getLogger(__name__)

CANONICAL_PASSES: tuple[Pass, ...] = (
    ExplicitShapes(),  # first: later passes change sizes and must not meet -1 or a size read off a tensor
    CanonicalizeAttention(),  # before placements: a [T, T] mask has rows on two dims and could not be placed
    CanonicalizeExperts(),  # before placements: it takes out a sort of tokens, which would be refused
)
CACHE_PASSES: tuple[Pass, ...] = (
    AttachKv(),  # before placements: with a cache, K and V of all rows are wanted by the write, not by attention
)
SHARDING_PASSES: tuple[Pass, ...] = (
    InferPlacements(),  # decides and refuses before anything is rewritten
    ShardTokens(),  # carries the placements out, with one plain unshard wherever all rows are needed
    GatherKv(),  # after shard_tokens: packs its two unshards a layer
    RestoreRows(),  # last: an unshard that only feeds a row selection is left over once K and V are packed
)
METADATA_PASSES: tuple[Pass, ...] = (
    UnrollDraft(),  # the steps of a proposal in one graph, so that what they share can be seen
    HoistPrologue(),  # last: metadata of all layers and steps is there now
)
FEW_ROWS_PASSES: tuple[Pass, ...] = (
    FuseDecode(),  # last: unroll_draft and hoist_prologue look for the calls that disappear
)


def passes_for(config: Config, phase: Phase) -> tuple[Pass, ...]:
    """Return the passes of a config and phase: nothing is sharded on one rank."""
    is_sharded = phase.is_sharded and config.parallel.pcp_size > 1
    passes = CANONICAL_PASSES
    if phase.block_size is not None:
        passes += CACHE_PASSES
    if is_sharded:
        passes += SHARDING_PASSES
    if phase.rows is not None:
        passes += METADATA_PASSES
    if phase.has_few_rows and config.numerics == "fast":
        passes += FEW_ROWS_PASSES
    if phase.is_split:
        passes += (SplitSegments(phase.splitting_ops),)  # last: the others look for calls in one graph
    return passes


@dataclass(frozen=True, slots=True)
class Stage:
    """What one pass did."""

    name: str
    num_rewrites: int
    pass_ms: float
    check_ms: float
    num_nodes: int
    op_counts: Mapping[str, int]
    graph_module: fx.GraphModule | None = field(repr=False, default=None)
    """A copy of the graph after the pass, when stages are recorded."""

    def text(self, seeds: Mapping[str, int]) -> str:
        """Return the recorded graph as text."""
        assert self.graph_module is not None, "stages were not recorded"
        return format_graph(self.graph_module, seeds)


@dataclass(frozen=True, slots=True)
class Lowered:
    """A trace after all passes: the program, what each pass did, what was decided."""

    program: RankProgram
    stages: tuple[Stage, ...]
    decisions: Decisions


def make_context(trace: Trace, config: Config, phase: Phase | None = None) -> PassContext:
    """Return what the passes read besides the graph of a trace."""
    return PassContext(
        config,
        trace.seeds,
        position_inputs=frozenset(entry.name for entry in trace.inputs if is_positions(entry)),
        user_inputs=frozenset(entry.name for entry in trace.inputs if entry.kind == "user"),
        phase=phase or Phase(),
    )


@paused_gc()
def lower(
    trace: Trace,
    config: Config,
    *,
    record: bool = False,
    phase: Phase | None = None,
    passes: tuple[Pass, ...] | None = None,
) -> Lowered:
    """Run the passes of a config over a copy of a trace and print the program.

    Args:
        record: keep a copy of the graph after each pass, for dumps and inspection.
        phase: what the program is for; default: a sharded prefill without a cache.
        passes: other passes than `passes_for` this config and phase, to see what one of them is good for.
    Raises:
        UnsupportedGraphError: the model cannot be sharded; names node, source line and knob.
    """
    phase = phase or Phase()
    gm = trace.copy_graph()
    ctx = make_context(trace, config, phase)
    stages = [_stage("trace", gm, 0, 0.0, 0.0, record)]
    for number, step in enumerate(passes_for(config, phase) if passes is None else passes, 1):
        _publish(f"pcp.{number:02}.{step.name}.before", gm, ctx)
        gm, stage = run_pass(step, gm, ctx, record=record)
        _publish(f"pcp.{number:02}.{step.name}.after", gm, ctx)
        stages.append(stage)
    _log_summary(config, stages)
    gm.recompile()
    program = build_program(
        gm, dict(trace.seeds), pcp_size=config.parallel.pcp_size, title=f"{phase.name}, P = {config.parallel.pcp_size}"
    )
    return Lowered(program, tuple(stages), ctx.decisions)


def run_pass(step: Pass, gm: fx.GraphModule, ctx: PassContext, *, record: bool = False) -> tuple[fx.GraphModule, Stage]:
    """Run one pass with its conditions, the invariants, and its promise about the signature."""
    signature = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    step.requires(gm, ctx)
    started = time.perf_counter()
    gm, num_rewrites = step(gm, ctx)
    ended = time.perf_counter()
    step.ensures(gm, ctx)
    check_invariants(gm, step.name)
    if step.keeps_signature and signature != [node.name for node in gm.graph.find_nodes(op="placeholder")]:
        raise InvariantError(f"{step.name} changed the inputs of the graph")
    checked = time.perf_counter()
    stage = _stage(step.name, gm, num_rewrites, 1e3 * (ended - started), 1e3 * (checked - ended), record)
    message = "%s: %d rewrites, %d nodes, %.1f ms, checks %.1f ms"
    logger = logging.getLogger(type(step).__module__)  # below pcp_compiler.passes, which TORCH_LOGS can name
    logger.debug(message, stage.name, num_rewrites, stage.num_nodes, stage.pass_ms, stage.check_ms)
    return gm, stage


def _publish(name: str, gm: fx.GraphModule, ctx: PassContext) -> None:
    """Add a graph to what TORCH_TRACE collects."""
    if torch_private.is_structured_trace_on():
        torch_private.add_trace_artifact(name, format_graph(gm, ctx.seeds))


def _log_summary(config: Config, stages: Sequence[Stage]) -> None:
    """Log what every pass did, in one message of the logger `pcp_compiler.pipeline`."""
    if log.isEnabledFor(logging.DEBUG):
        lines = [f"{s.name}: {s.num_rewrites} rewrites, {s.num_nodes} nodes, {s.pass_ms:.1f} ms" for s in stages]
        log.debug("passes for pcp_size %d:\n  %s", config.parallel.pcp_size, "\n  ".join(lines))


def _stage(name: str, gm: fx.GraphModule, rewrites: int, pass_ms: float, check_ms: float, record: bool) -> Stage:
    return Stage(
        name, rewrites, pass_ms, check_ms, len(gm.graph.nodes), count_ops(gm), copy_graph(gm) if record else None
    )

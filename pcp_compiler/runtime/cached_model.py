"""One traced module with its KV caches and its programs: rows sharded over the ranks, or whole on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from pcp_compiler.config import Config
from pcp_compiler.errors import InvariantError
from pcp_compiler.kv_formats import cache_shape
from pcp_compiler.kv_ops import PAGED_ATTENTION
from pcp_compiler.pass_api import Phase, calls
from pcp_compiler.passes.attach_kv import SLOTS
from pcp_compiler.passes.gather_kv import EXPANDED_SLOTS
from pcp_compiler.passes.split_segments import find_ops
from pcp_compiler.pipeline import Lowered, lower
from pcp_compiler.plan.captures import CapturePhase
from pcp_compiler.plan.dispatch import LiveBatch
from pcp_compiler.program import RankProgram, SegmentRunner
from pcp_compiler.ranks import ExecutedCollective, run_lockstep
from pcp_compiler.runtime.batch import PAD_SLOT, Batch
from pcp_compiler.runtime.captures import CapturedProgram, Captures
from pcp_compiler.runtime.layout import StepIndex, live_batch, partition_step, step_index, widen
from pcp_compiler.runtime.pieces import Pieces
from pcp_compiler.runtime.static_inputs import StaticForm, describe
from pcp_compiler.trace import ModuleTrace, trace_module

KvPlacement = Literal["shared", "per_rank"]


@dataclass(slots=True)
class RunCounts:
    """What a model ran so far."""

    num_sharded: int = 0
    num_whole: int = 0
    num_rows: int = 0
    """Rows of a rank in sharded runs, padding included."""
    num_global_rows: int = 0
    """Rows of the whole batch in sharded runs."""
    num_collectives: int = 0


class CompileCache:
    """Traces and programs by what they were made of: decoders of the same models share them.

    A trace is for modules whose weights are the same objects; hyper-parameters must not change in between.
    """

    def __init__(self) -> None:
        self._traces: dict[tuple[object, ...], tuple[nn.Module, ModuleTrace]] = {}
        self._programs: dict[tuple[object, ...], tuple[ModuleTrace, Lowered]] = {}

    def trace(self, module: nn.Module, example: tuple[Tensor, ...], tokens: Sequence[str]) -> ModuleTrace:
        """Return the trace of a module of `runtime.rows`, made now or before."""
        options = tuple(value for value in vars(module).values() if isinstance(value, int | str))
        key = (type(module), options, *map(id, module.parameters()), *map(id, module.buffers()))
        if key not in self._traces:
            traced = trace_module(module, example, tokens=dict.fromkeys(tokens, 1), other_sizes={"logit_rows": 0})
            self._traces[key] = module, traced  # the module too: ids are only unique among living objects
        return self._traces[key][1]

    def lower(self, traced: ModuleTrace, config: Config, phase: Phase) -> Lowered:
        """Return the program of a trace for a phase, made now or before.

        Limits, draft and capture options reach a program through its phase alone; the passes do not see them.
        """
        own = Config(**config.model_dump(exclude={"limits", "draft", "capture"}))
        key = (id(traced), own, phase)
        if key not in self._programs:
            self._programs[key] = traced, lower(traced.trace, own, phase=phase)
        return self._programs[key][1]


class CachedModel:
    """Runs a module of `runtime.rows` for all virtual ranks. `allocate` gives it its caches.

    Args:
        module: takes rows as [1, T]-shaped tensors, and `logit_rows`. example: a call of it. tokens: its token inputs.
        local_input, local_output: a token input and a result that stay on their rank when rows are sharded.
        compile_cache: where the module may have been compiled before.
    """

    def __init__(
        self, module: nn.Module, example: tuple[Tensor, ...], tokens: Sequence[str], config: Config, *, name: str,
        compile_cache: CompileCache, local_input: str | None = None, local_output: int | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.pcp_size = config.parallel.pcp_size
        self.counts = RunCounts()
        self.executed: list[ExecutedCollective] = []
        self.caches: list[dict[str, Tensor]] = []
        self.captures: Captures | None = None
        self._split: dict[str, Lowered] = {}
        self._split_form: StaticForm | None = None
        self._pieces: dict[str, list[Pieces]] = {}
        self.tokens = tuple(tokens)
        self._captured: dict[int, CapturedProgram] = {}
        self._module = module
        self._weights: list[Tensor] = []
        self.refresh_weights()
        self._compile_cache = compile_cache
        self.traced = compile_cache.trace(module, example, tokens)
        self._config = config
        self.block_size = block_size = config.limits.kv_block_size
        self._phases = {"whole": Phase(f"{name}, whole", is_sharded=False, block_size=block_size)}
        self.whole = self.lower(self._phases["whole"])
        self.few_rows = self.whole
        """For steps of decode rows."""
        if config.numerics == "fast":
            self.few_rows = self.lower(
                Phase(f"{name}, decode rows", is_sharded=False, block_size=block_size, has_few_rows=True)
            )
        self.sharded: Lowered | None = None
        if self.pcp_size > 1:
            self._phases["sharded"] = Phase(
                f"{name}, sharded", block_size=block_size,
                local_inputs=frozenset() if local_input is None else frozenset({local_input}),
                local_outputs=frozenset() if local_output is None else frozenset({local_output}),
            )  # fmt: skip
            self.sharded = self.lower(self._phases["sharded"])

    @property
    def num_weights(self) -> int:
        """Inputs of a program before those of a call."""
        return len(self._weights)

    @property
    def windows(self) -> tuple[int, ...]:
        """Lengths of the sliding windows of its layers, ascending."""
        attentions = calls(self.whole.program.graph_module, PAGED_ATTENTION)
        return tuple(sorted({w for node in attentions if isinstance(w := node.kwargs.get("window"), int)}))

    def lower(self, phase: Phase) -> Lowered:
        """Return a program of the module for another phase; it runs with the same weights and caches."""
        phase = replace(
            phase, has_fp8_kv=self._config.limits.kv_cache_dtype == "fp8_e4m3",
            is_captured=not phase.is_sharded and self._config.capture.mode in ("full_decode", "full_and_piecewise"),
        )  # fmt: skip
        return self._compile_cache.lower(self.traced, self._config, phase)

    def refresh_weights(self) -> None:
        """Run with the parameters and buffers that the module has now."""
        self._weights = [*self._module.parameters(), *self._module.buffers()]  # the order of the programs' inputs
        if self.captures is not None:
            self.captures.drop()
            if self._pieces:
                self._make_pieces()

    def bytes_per_slot(self, dtype: torch.dtype | None) -> int:
        """Return the memory of one KV slot over all layers."""
        layouts = (_slot_layout(node, dtype) for node in _cache_inputs(self.whole.program))
        return sum(math.prod(shape) * stored.itemsize for shape, stored in layouts)

    def allocate(self, num_slots: int, dtype: torch.dtype | None, *, copies: int = 1) -> None:
        """Make the caches of all layers, each with a spare row.

        Args:
            dtype: type of stored keys and values, None: the model's.
            copies: 1: the ranks of one process share a cache, which rank 0 writes; P: each rank has its own, as on
                several devices.
        """
        self.caches = []
        for _ in range(copies):
            caches = {}
            for node in _cache_inputs(self.whole.program):
                shape, stored = _slot_layout(node, dtype)
                device = node.meta["val"].device
                caches[node.meta["index_input"]] = torch.zeros(num_slots + 1, *shape, dtype=stored, device=device)
            self.caches.append(caches)

    def run_whole(
        self, inputs: Mapping[str, Tensor], index: Mapping[str, Tensor], program: RankProgram | None = None,
        live: LiveBatch | None = None,
    ) -> Sequence[Any]:  # fmt: skip
        """Run all rows on every rank; ranks that share a cache would all do the same, so one stands for all.

        Args:
            program: one of `lower`, default: that of the module itself.
            live: what a batch of decode rows needs of a capture; None: the batch has prompts.
        """
        values = {**inputs, **index}
        self.counts.num_whole += 1
        has_prompts = live is None or live.phase == "prefill"
        program = program or (self.whole if has_prompts else self.few_rows).program
        key = None if live is None or self.captures is None else self.captures.find(self._name_of(program), live)
        if key is None:
            return self._run_copies(program, values)
        assert self.captures is not None
        if key.is_full:
            return self.captures.replay(self._captured[id(program)], key, values)
        return self._run_in_pieces(values, key.capture_size)

    def run_captured(self, values: Mapping[str, Tensor], program: RankProgram | None = None) -> Sequence[Any]:
        """Run decode rows as part of something that is captured: all inputs are static."""
        return self._run_copies(program or self.few_rows.program, values)

    def plan_step(self, batch: Batch, max_model_len: int, *, is_window: bool = False) -> StepIndex:
        """Return how a step runs: which rows on which rank, as many as a capture has, and the index inputs.

        Args:
            is_window: steps without prompts have rows of the step before too.
        """
        parallel = self._config.parallel
        partition = partition_step(batch, parallel)
        live = live_batch(batch, partition, max_model_len)
        if is_window and live.phase != "prefill":
            live = replace(live, phase="window")
        if partition is not None and self.captures is not None and (width := self.captures.piece_rows(live)):
            partition = widen(partition, batch, parallel, width)
        return step_index(batch, partition, self.block_size, live)

    def use_captures(self, captures: Captures) -> None:
        """Replay what was captured. Programs that run in pieces are made here."""
        self.captures = captures
        if not captures.has_pieces:
            return
        called = {node.target for node in self.whole.program.graph_module.graph.nodes}
        names = self._config.capture.splitting_ops
        if self.name != "target":  # where each name has to be an op; a drafter may have fewer
            names = tuple(name for name in names if not called.isdisjoint(find_ops(name)))
        self._split = {
            kind: self.lower(replace(phase, is_split=True, splitting_ops=names)) for kind, phase in self._phases.items()
        }
        self._split_form = describe(self._split["whole"].program, len(self._weights), self.tokens)
        self._make_pieces()

    def _make_pieces(self) -> None:
        assert self.captures is not None
        for pieces in chain.from_iterable(self._pieces.values()):
            pieces.drop()
        self._pieces = {}
        for kind, lowered in self._split.items():
            num_ranks = len(self.caches) if kind == "whole" else self.pcp_size
            self._pieces[kind] = [
                self.captures.make_pieces(
                    lowered.program, [*self._weights, *self.caches[min(rank, len(self.caches) - 1)].values()],
                    f"{self.name}, {kind}",
                )
                for rank in range(num_ranks)
            ]  # fmt: skip

    def _name_of(self, program: RankProgram) -> str:
        found = self._captured.get(id(program))
        return self.name if found is None else found.name

    def _run_in_pieces(self, values: Mapping[str, Tensor], capture_size: int) -> Sequence[Any]:
        """Run all rows on every rank, padded to a capture size."""
        program, form = self._split["whole"].program, self._split_form
        assert form is not None
        sizes = form.live_sizes(values)
        padded = form.pad_rows(_Mover(self._weights[0].device)(values), capture_size)
        results = [
            self._run([self._start(program, padded, padded, rank, pieces.runner(capture_size))])[0]
            for rank, pieces in enumerate(self._pieces["whole"])
        ]
        return form.cut(results[0], sizes)

    def may_capture(
        self, program: RankProgram, phases: tuple[CapturePhase, ...], *, name: str, logit_rows: str = "rows",
        num_draft_tokens: int = 0,
    ) -> CapturedProgram:  # fmt: skip
        """Return a program of this model as one that `run_whole` may replay.

        Args:
            phases: that it is captured for. logit_rows: see `StaticForm`. num_draft_tokens: of a draft chain.
        """
        captured = CapturedProgram(
            name, describe(program, len(self._weights), self.tokens, logit_rows=logit_rows),
            lambda values: self._run_copies(program, values), phases, num_draft_tokens,
        )  # fmt: skip
        self._captured[id(program)] = captured
        return captured

    def _run_copies(self, program: RankProgram, values: Mapping[str, Tensor]) -> Sequence[Any]:
        """Run a program once for each copy of the caches; the results are the same."""
        values = _Mover(self._weights[0].device)(values)
        results = [self._run([self._start(program, values, values, rank)])[0] for rank in range(len(self.caches))]
        return results[0]

    def run_sharded(self, inputs: Sequence[Mapping[str, Tensor]], step: StepIndex) -> list[Sequence[Any]]:
        """Run each rank's rows; return the results of every rank."""
        assert self.sharded is not None and step.partition is not None
        runners: list[SegmentRunner | None] = [None] * self.pcp_size
        program, width = self.sharded.program, step.partition.width
        key = None if self.captures is None else self.captures.find(f"{self.name}, sharded", step.live)
        if key is not None:
            assert not key.is_full and key.capture_size == width, f"{key} for {width} rows a rank"
            program = self._split["sharded"].program
            runners = [pieces.runner(width) for pieces in self._pieces["sharded"]]
        move = _Mover(self._weights[0].device)
        results = self._run(
            [
                self._start(program, move(inputs[rank]), move(step.ranks[rank]), rank, runners[rank])
                for rank in range(self.pcp_size)
            ]
        )
        ran = tuple((collective.name, collective.op) for collective in self.executed)
        if ran != program.schedule:
            raise InvariantError(f"ran collectives {ran}, scheduled were {program.schedule}")
        self.counts.num_sharded += 1
        self.counts.num_rows += step.partition.width
        self.counts.num_global_rows += len(step.partition.restore)
        self.counts.num_collectives += len(ran)
        return results

    def _start(
        self, program: RankProgram, inputs: Mapping[str, Tensor], index: Mapping[str, Tensor], rank: int,
        run: SegmentRunner | None = None,
    ) -> Any:  # fmt: skip
        is_shared = len(self.caches) == 1
        if is_shared and rank > 0:
            written = [role for role in (SLOTS, EXPANDED_SLOTS) if role in index]
            index = {**index, **{role: torch.full_like(index[role], PAD_SLOT) for role in written}}
        cache = self.caches[0 if is_shared else rank]
        names = program.input_names[len(self._weights) :]
        return program.start([*self._weights, *(inputs[name] for name in names)], {**index, **cache}, run)

    def _run(self, programs: list[Any]) -> list[Sequence[Any]]:
        with torch.no_grad():
            done = run_lockstep(programs)
        self.executed = done.collectives
        return done.outputs


class _Mover:
    """Brings tensors to a device, each once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}  # with the original: ids are unique among living objects

    def __call__(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._move(value) for name, value in values.items()}

    def _move(self, value: Tensor) -> Tensor:
        if value.device == self._device:
            return value
        if id(value) not in self._moved:
            self._moved[id(value)] = value, value.to(self._device, non_blocking=True)
        return self._moved[id(value)][1]


def _cache_inputs(program: RankProgram) -> list[fx.Node]:
    placeholders = program.graph_module.graph.find_nodes(op="placeholder")
    return [node for node in placeholders if node.meta.get("index_input", "").startswith(("k_cache_", "v_cache_"))]


def _slot_layout(node: fx.Node, dtype: torch.dtype | None) -> tuple[tuple[int, ...], torch.dtype]:
    value = node.meta["val"]
    return cache_shape(tuple(value.shape[1:]), dtype or value.dtype)

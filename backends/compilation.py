"""A compiled model: its programs, and running them for one call on all virtual ranks."""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from pcp_compiler import dump
from pcp_compiler.compare import check_equal
from pcp_compiler.config import DECODER_KEYS, Config, check_used
from pcp_compiler.errors import CallError, InvariantError
from pcp_compiler.model_check import check_not_empty
from pcp_compiler.pass_api import CallCheck, refuse
from pcp_compiler.pipeline import Lowered, Stage, lower
from pcp_compiler.plan.partition import Partition, partition_batch
from pcp_compiler.program import RankProgram
from pcp_compiler.ranks import ExecutedCollective, LockstepResult, agreement, index_tensors, run_lockstep
from pcp_compiler.ranks.distributed import RankGroup, run_distributed
from pcp_compiler.row_check import check_rows
from pcp_compiler.trace import Trace

log = logging.getLogger(__name__)

KEPT_CALLS = 64
"""How many of the latest calls a compilation keeps the records of."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """What one call did: tokens, real rows and query-key pairs of each rank, padded rows, collectives."""

    num_tokens: int
    rows_per_rank: tuple[int, ...]
    width: int
    attention_work: tuple[int, ...]
    collectives: tuple[ExecutedCollective, ...]
    rank: int | None = None
    """The distributed rank that ran in this process; None: all ranks did, as virtual ones."""

    @property
    def is_sharded(self) -> bool:
        """False when every rank ran all rows (a short prompt, or one rank)."""
        return sum(self.rows_per_rank) == self.num_tokens and len(self.rows_per_rank) > 1

    @property
    def attention_balance(self) -> float:
        """Causal attention work of the slowest rank over the mean; row t costs t + 1 keys. Replicated rows: 1."""
        if not self.is_sharded:
            return 1.0
        return max(self.attention_work) * len(self.attention_work) / sum(self.attention_work)


@dataclass(eq=False)
class Compilation:
    """One traced model, lowered for one config."""

    config: Config
    trace: Trace
    name: str = "model"
    ranks: RankGroup | None = None
    """The distributed ranks that run the programs, this process being one of them; None: virtual ranks."""
    record: bool = False
    """Whether `stages` keep the graph after each pass; dumps need them too."""
    num_calls: int = 0
    num_sharded: int = 0
    calls: deque[CallRecord] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS))
    lowered: Lowered = field(init=False)

    def __post_init__(self) -> None:
        check_used(self.config, DECODER_KEYS, "a compiled model", "pcp_compiler.SpeculativeDecoder")
        _refuse_random_ops(self.trace)
        shards = self.config.parallel.pcp_size > 1 and not self.trace.is_single_token
        self._shards = shards
        config = self.config if shards else self.config.with_pcp_size(1)
        self.lowered = lower(self.trace, config, record=self.record or self.config.dump.dir is not None)
        placeholders = {entry.name: position for position, entry in enumerate(self.trace.inputs)}
        self._positions = placeholders
        self._index: tuple[int, torch.device, Partition, list[dict[str, Tensor]]] | None = None
        self._weight_hashes: Mapping[str, str] | None = None
        self._is_row_checked = False
        self._lock = threading.Lock()  # held for counts, and while the trace is lowered: lowerings share its symbols

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What each pass did."""
        return self.lowered.stages

    @property
    def decisions(self) -> dict[str, list[str]]:
        """What the passes chose, by topic."""
        return self.lowered.decisions.entries

    @property
    def programs(self) -> dict[tuple[str, int], RankProgram]:
        """The program of each (phase, rank); ranks differ in their index inputs only."""
        return {("prefill", rank): self.lowered.program for rank in range(self.config.parallel.pcp_size)}

    def for_another_model(self, name: str) -> Compilation:
        """Return a compilation with the same program and its own count of calls."""
        other = copy.copy(self)
        other.name, other.num_calls, other.num_sharded, other.calls = name, 0, 0, deque(maxlen=KEPT_CALLS)
        other._weight_hashes = None
        return other

    def write(self, folder: str | Path) -> Path:
        """Write one folder per rank of this process with every stage of the graph. See `pcp_compiler.dump`.

        Returns:
            The folder.
        """
        lowered = self.lowered
        if lowered.stages[0].graph_module is None:
            lowered = lower(self.trace, self.config, record=True)
        return dump.write(Path(folder), lowered, self.config, self.trace, self._own_ranks)

    def run(self, inputs: Sequence[object]) -> list[object]:
        """Run one call: on all virtual ranks, or this process's part of it.

        Args:
            inputs: values for the trace's inputs, in order.
        Returns:
            The results in global order, new tensors on every call.
        Raises:
            CallError: no tokens, or an input that breaks what a pass relied on.
            RankError: another rank failed, lags or is gone, or ranks differ in what they must share.
        """
        if self.ranks is None:
            return self._run(inputs)
        with self.ranks.call(self.config.parallel.timeout_s):
            return self._run(inputs)

    def _run(self, inputs: Sequence[object]) -> list[object]:
        num_tokens, device = self._num_tokens(inputs)
        for check in self.lowered.decisions.call_checks:
            _check_input(check, inputs[self._positions[check.input_name]])
        if self.ranks is not None:
            self.ranks.agree(self._statement(inputs))
        if not self._shards or num_tokens < max(2, self.config.parallel.min_tokens_to_shard_resolved):
            return self._run_replicated(inputs, num_tokens)
        if self.config.check.rows and not self._is_row_checked:
            self.check_rows(inputs)
        partition, index = self._index_for(num_tokens, device)
        done = self._run_program(self.lowered.program, inputs, index)
        work = _attention_work(partition)
        self._record(num_tokens, partition.per_rank, partition.width, work, done)
        results = list(done.outputs[0])
        if self.config.check.mode == "shadow":
            unsharded = self._run_program(self._replicated, inputs, [{}]).outputs[0]
            check_equal(results, unsharded, self.config.check, "the unsharded program")
        return results

    def check_rows(self, inputs: Sequence[object]) -> int:
        """Check with numbers that every call which runs on a rank's own rows may do so: see `pcp_compiler.row_check`.

        Args:
            inputs: values for the trace's inputs, in order.
        Returns:
            How many calls were checked.
        Raises:
            UnsupportedGraphError: a placement rule is wrong; names the call.
        """
        with self._lock:
            num_checked = check_rows(self.trace, self.config, inputs)
        self._is_row_checked = True
        self.lowered.decisions.add("row checks", f"{num_checked} calls gave the same on half of the rows alone")
        return num_checked

    def _run_program(
        self, program: RankProgram, inputs: Sequence[object], index: Sequence[dict[str, Tensor]]
    ) -> LockstepResult:
        """Run a program on the ranks of this process, of which `index` holds the index tensors."""
        starts = [program.start(inputs, tensors) for tensors in index]
        with torch.no_grad(), program.noted_errors():
            done = run_lockstep(starts) if self.ranks is None else run_distributed(starts[0], self.ranks)
        ran = tuple((collective.name, collective.op) for collective in done.collectives)
        if ran != program.schedule:
            raise InvariantError(f"ran collectives {ran}, scheduled were {program.schedule}")
        return done

    def _run_replicated(self, inputs: Sequence[object], num_tokens: int) -> list[object]:
        """Run the unsharded program, once in each process: every rank has the same result."""
        done = self._run_program(self._replicated, inputs, [{}])
        pcp_size = self.config.parallel.pcp_size
        work = (num_tokens * (num_tokens + 1) // 2,) * pcp_size
        self._record(num_tokens, (num_tokens,) * pcp_size, num_tokens, work, done)
        return list(done.outputs[0])

    @cached_property
    def _replicated(self) -> RankProgram:
        if not self._shards:
            return self.lowered.program
        with self._lock:
            return lower(self.trace, self.config.with_pcp_size(1)).program

    def _num_tokens(self, inputs: Sequence[object]) -> tuple[int, torch.device]:
        """Return T and the device of the tokens; raise CallError for none, or token inputs that differ in length."""
        lengths: dict[str, int] = {}
        for name, dim in self.trace.seeds.items():
            tokens = inputs[self._positions[name]]
            assert isinstance(tokens, Tensor)
            check_not_empty(name, tokens.shape, dim)
            lengths[name], device = tokens.shape[dim], tokens.device
        if len(set(lengths.values())) > 1:
            table = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise CallError(f"token inputs have different lengths: {table}; allowed: one length")
        return lengths[name], device

    def _index_for(self, num_tokens: int, device: torch.device) -> tuple[Partition, list[dict[str, Tensor]]]:
        """Return the partition and the index tensors of own ranks, kept while the length does not change."""
        kept = self._index  # another thread may replace it
        if kept is None or kept[:2] != (num_tokens, device):
            pcp_size = self.config.parallel.pcp_size
            partition = partition_batch([num_tokens], [True], pcp_size=pcp_size, shard_decode=False)
            tensors = [index_tensors(partition, rank, device) for rank in self._own_ranks]
            self._index = kept = (num_tokens, device, partition, tensors)
        return kept[2], kept[3]

    @property
    def _own_ranks(self) -> Sequence[int]:
        """The ranks that run in this process."""
        return range(self.config.parallel.pcp_size) if self.ranks is None else (self.ranks.rank,)

    def _record(
        self, num_tokens: int, rows: tuple[int, ...], width: int, work: tuple[int, ...], done: LockstepResult
    ) -> None:
        rank = None if self.ranks is None else self.ranks.rank
        call = CallRecord(num_tokens, rows, width, work, tuple(done.collectives), rank)
        with self._lock:
            self.num_calls += 1
            self.num_sharded += call.is_sharded
            self.calls.append(call)

    def _statement(self, inputs: Sequence[object]) -> agreement.Statement:
        """Return what all ranks must share in this call; token ids on the first one, or when that is to be checked."""
        values = {entry.name: value for entry, value in zip(self.trace.inputs, inputs, strict=True)}
        weights = {entry.name for entry in self.trace.inputs if entry.kind == "weight"}
        if self._weight_hashes is None:
            self._weight_hashes = {
                name: agreement.hash_parameter(value)
                for name, value in values.items()
                if name in weights and isinstance(value, Tensor)
            }
        given = {name: value for name, value in values.items() if name not in weights}
        statement: dict[str, Mapping[str, str]] = {
            **self._fixed_statement,
            "parameters": self._weight_hashes,
            "shapes": {name: agreement.describe_shape(value) for name, value in given.items()},
        }
        if self.num_calls == 0 or self.config.check.mode == "inputs":
            tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
            statement["token ids"] = {name: agreement.hash_values(value) for name, value in tensors.items()}
        return statement

    @cached_property
    def _fixed_statement(self) -> dict[str, Mapping[str, str]]:
        """What all ranks must share whatever the call: versions, config, collectives."""
        schedule = self.lowered.program.schedule
        return {
            "versions": {name: _version(name) for name in ("torch", "pcp-compiler")},
            "config": agreement.describe_config(self.config.resolved()),
            "collectives": {str(number): f"{op} {name}" for number, (name, op) in enumerate(schedule, 1)},
        }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a bare checkout on the path
        return "not installed"


def _attention_work(partition: Partition) -> tuple[int, ...]:
    """Return the query-key pairs of each rank's rows."""
    return tuple(
        sum((s.global_stop * (s.global_stop + 1) - s.global_start * (s.global_start + 1)) // 2 for s in spans)
        for spans in partition.spans
    )


def _refuse_random_ops(trace: Trace) -> None:
    """Raise UnsupportedGraphError for dropout and whatever else draws random numbers: each rank would draw its own."""
    for node in trace.graph_module.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise refuse(node, "draws random numbers, as active dropout does", "call model.eval() before compiling")


def _check_input(check: CallCheck, value: object) -> None:
    """Raise CallError when an input does not have the property that the program was compiled for."""
    assert isinstance(value, Tensor)
    if check.kind == "all_ones":
        holds = bool((value == 1).all())
        allowed = "all ones; leave the mask out, or compile each prompt without padding"
    else:
        holds = bool((value.diff(dim=-1) == 1).all())
        allowed = "consecutive positions in every row"
    if not holds:
        raise CallError(f"{check.input_name}: {check.reason}; allowed: {allowed}")

"""A compiled model: its programs, and running them for one call on all virtual ranks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from pcp_compiler import dump
from pcp_compiler.config import Config
from pcp_compiler.errors import CallError, InvariantError
from pcp_compiler.pass_api import CallCheck
from pcp_compiler.pipeline import Lowered, Stage, lower
from pcp_compiler.plan.partition import Partition, partition_batch
from pcp_compiler.program import RankProgram
from pcp_compiler.ranks import ExecutedCollective, LockstepResult, index_tensors, run_lockstep
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
    num_calls: int = 0
    num_sharded: int = 0
    calls: deque[CallRecord] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS))
    lowered: Lowered = field(init=False)

    def __post_init__(self) -> None:
        shards = self.config.parallel.pcp_size > 1 and not self.trace.is_single_token
        self._shards = shards
        config = self.config if shards else self.config.with_pcp_size(1)
        self.lowered = lower(self.trace, config, record=self.config.dump.dir is not None)
        placeholders = {entry.name: position for position, entry in enumerate(self.trace.inputs)}
        self._positions = placeholders
        self._index: tuple[int, torch.device, Partition, list[dict[str, Tensor]]] | None = None
        if self.config.dump.dir is not None:
            self.write(self.config.dump.dir)

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

    def write(self, folder: str | Path) -> Path:
        """Write one folder per rank with every stage of the graph; return the folder. See `pcp_compiler.dump`."""
        lowered = self.lowered
        if lowered.stages[0].graph_module is None:
            lowered = lower(self.trace, self.config, record=True)
        return dump.write(Path(folder), lowered, self.config, self.trace)

    def run(self, inputs: Sequence[object]) -> list[object]:
        """Run one call on all ranks.

        Args:
            inputs: values for the trace's inputs, in order.
        Returns:
            The results in global order, new tensors on every call.
        Raises:
            CallError: no tokens, or an input that breaks what a pass relied on.
        """
        num_tokens, device = self._num_tokens(inputs)
        for check in self.lowered.decisions.call_checks:
            _check_input(check, inputs[self._positions[check.input_name]])
        pcp_size = self.config.parallel.pcp_size
        if not self._shards or num_tokens < max(2, self.config.parallel.min_tokens_to_shard_resolved):
            return self._run_replicated(inputs, num_tokens)
        partition, index = self._index_for(num_tokens, device)
        program = self.lowered.program
        with torch.no_grad():
            done = run_lockstep([program.start(inputs, index[rank]) for rank in range(pcp_size)])
        self._check_path(done, program)
        self._record(
            CallRecord(
                num_tokens, partition.per_rank, partition.width, _attention_work(partition), tuple(done.collectives)
            )
        )
        return list(done.outputs[0])

    def _run_replicated(self, inputs: Sequence[object], num_tokens: int) -> list[object]:
        """Run the unsharded program; every rank of a distributed group would run the same."""
        with torch.no_grad():
            done = run_lockstep([self._replicated.start(inputs, {})])
        pcp_size = self.config.parallel.pcp_size
        work = (num_tokens * (num_tokens + 1) // 2,) * pcp_size
        self._record(CallRecord(num_tokens, (num_tokens,) * pcp_size, num_tokens, work, ()))
        return list(done.outputs[0])

    @cached_property
    def _replicated(self) -> RankProgram:
        if not self._shards:
            return self.lowered.program
        return lower(self.trace, self.config.with_pcp_size(1)).program

    def _num_tokens(self, inputs: Sequence[object]) -> tuple[int, torch.device]:
        name, dim = next(iter(self.trace.seeds.items()))
        tokens = inputs[self._positions[name]]
        assert isinstance(tokens, Tensor)
        if tokens.shape[dim] == 0:
            raise CallError(f"{name} has shape {tuple(tokens.shape)}; allowed: at least 1 token in dim {dim}")
        return tokens.shape[dim], tokens.device

    def _index_for(self, num_tokens: int, device: torch.device) -> tuple[Partition, list[dict[str, Tensor]]]:
        """Return the partition and the ranks' index tensors, kept while the length does not change."""
        if self._index is None or self._index[:2] != (num_tokens, device):
            pcp_size = self.config.parallel.pcp_size
            partition = partition_batch([num_tokens], [True], pcp_size=pcp_size, shard_decode=False)
            tensors = [index_tensors(partition, rank, device) for rank in range(pcp_size)]
            self._index = (num_tokens, device, partition, tensors)
        return self._index[2], self._index[3]

    def _check_path(self, done: LockstepResult, program: RankProgram) -> None:
        ran = tuple((collective.name, collective.op) for collective in done.collectives)
        if ran != program.schedule:
            raise InvariantError(f"ran collectives {ran}, scheduled were {program.schedule}")

    def _record(self, call: CallRecord) -> None:
        self.num_calls += 1
        self.num_sharded += call.is_sharded
        self.calls.append(call)


def _attention_work(partition: Partition) -> tuple[int, ...]:
    """Return the query-key pairs of each rank's rows."""
    return tuple(
        sum((s.global_stop * (s.global_stop + 1) - s.global_start * (s.global_start + 1)) // 2 for s in spans)
        for spans in partition.spans
    )


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

"""One traced module with its KV caches and its programs: rows sharded over the ranks, or whole on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pcp_compiler.config import Config
from pcp_compiler.errors import InvariantError
from pcp_compiler.pass_api import Phase
from pcp_compiler.passes.attach_kv import BLOCK_TABLES, SLOTS, SPANS
from pcp_compiler.pipeline import Lowered, lower
from pcp_compiler.plan.partition import Partition
from pcp_compiler.program import RankProgram
from pcp_compiler.ranks import ExecutedCollective, index_tensors, run_lockstep
from pcp_compiler.runtime.batch import PAD_SLOT, Batch, SpanRow, local_view
from pcp_compiler.trace import ModuleTrace

KvPlacement = Literal["shared", "per_rank"]


@dataclass(frozen=True, slots=True, eq=False)
class StepIndex:
    """Index inputs of one step: of the whole batch, and of each rank when its rows are sharded."""

    whole: Mapping[str, Tensor]
    ranks: tuple[Mapping[str, Tensor], ...]
    partition: Partition | None


@dataclass(slots=True)
class RunCounts:
    """What a model ran so far."""

    num_sharded: int = 0
    num_whole: int = 0
    num_rows: int = 0
    """Rows of the busiest rank, padding included, summed over runs."""
    num_collectives: int = 0


class CachedModel:
    """Runs a module of `runtime.rows` for all virtual ranks.

    Args:
        traced: inputs [1, T]-shaped rows and `logit_rows`. num_slots: KV slots of every layer.
        kv: `shared`: the ranks of one process share one cache, which rank 0 writes; `per_rank`: each has its own, as on
            several devices.
        local_input, local_output: a token input and a result that stay on their rank when rows are sharded.
    """

    def __init__(
        self, traced: ModuleTrace, config: Config, *, name: str, num_slots: int, dtype: torch.dtype | None,
        kv: KvPlacement = "shared", local_input: str | None = None, local_output: int | None = None,
    ) -> None:  # fmt: skip
        block_size = config.limits.kv_block_size
        self.pcp_size = config.parallel.pcp_size
        self.counts = RunCounts()
        self.executed: list[ExecutedCollective] = []
        self._traced = traced
        self._kv = kv
        whole = Phase(f"{name}, whole", is_sharded=False, block_size=block_size)
        self.whole: Lowered = lower(traced.trace, config, phase=whole)
        self.sharded: Lowered | None = None
        if self.pcp_size > 1:
            phase = Phase(
                f"{name}, sharded", block_size=block_size,
                local_inputs=frozenset() if local_input is None else frozenset({local_input}),
                local_outputs=frozenset() if local_output is None else frozenset({local_output}),
            )  # fmt: skip
            self.sharded = lower(traced.trace, config, phase=phase)
        copies = self.pcp_size if kv == "per_rank" else 1
        self.caches = [_allocate(self.whole.program, num_slots, dtype) for _ in range(copies)]

    def run_whole(self, inputs: Mapping[str, Tensor], index: Mapping[str, Tensor]) -> Sequence[Any]:
        """Run all rows on every rank; ranks that share a cache would all do the same, so one stands for all."""
        results = [self._run([self._start(self.whole.program, inputs, index, rank)])[0] for rank in range(len(self.caches))]
        self.counts.num_whole += 1
        return results[0]

    def run_sharded(self, inputs: Sequence[Mapping[str, Tensor]], step: StepIndex) -> list[Sequence[Any]]:
        """Run each rank's rows; return the results of every rank."""
        assert self.sharded is not None and step.partition is not None
        program = self.sharded.program
        results = self._run([self._start(program, inputs[rank], step.ranks[rank], rank) for rank in range(self.pcp_size)])
        ran = tuple((collective.name, collective.op) for collective in self.executed)
        if ran != program.schedule:
            raise InvariantError(f"ran collectives {ran}, scheduled were {program.schedule}")
        self.counts.num_sharded += 1
        self.counts.num_rows += step.partition.width
        self.counts.num_collectives += len(ran)
        return results

    def _start(self, program: RankProgram, inputs: Mapping[str, Tensor], index: Mapping[str, Tensor], rank: int) -> Any:
        cache = self.caches[rank if self._kv == "per_rank" else 0]
        if self._kv == "shared" and rank > 0:
            index = {**index, SLOTS: torch.full_like(index[SLOTS], PAD_SLOT)}
        names = [entry.name for entry in self._traced.trace.inputs if entry.kind == "user"]
        values = [*self._traced.weights, *(inputs[name] for name in names)]
        return program.start(values, {**index, **cache})

    def _run(self, programs: list[Any]) -> list[Sequence[Any]]:
        with torch.no_grad():
            done = run_lockstep(programs)
        self.executed = done.collectives
        return done.outputs


def _allocate(program: RankProgram, num_slots: int, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the caches of all layers, one spare row in each."""
    caches = {}
    for node in program.graph_module.graph.find_nodes(op="placeholder"):
        role = node.meta.get("index_input", "")
        if role.startswith(("k_cache_", "v_cache_")):
            value = node.meta["val"]
            shape = (num_slots + 1, *value.shape[1:])
            caches[role] = torch.zeros(shape, dtype=dtype or value.dtype, device=value.device)
    return caches


def bytes_per_slot(program: RankProgram, dtype: torch.dtype | None) -> int:
    """Return the memory of one KV slot over all layers."""
    return sum(cache.numel() * cache.element_size() for cache in _allocate(program, 0, dtype).values())


def step_index(batch: Batch, partition: Partition | None, device: torch.device) -> StepIndex:
    """Return the index inputs of a step."""
    tables = torch.from_numpy(batch.block_tables).to(device)
    whole = {
        SLOTS: torch.from_numpy(batch.slots).to(device),
        BLOCK_TABLES: tables,
        SPANS: spans_tensor(
            SpanRow(request, int(start), int(length), int(seq_len))
            for request, (start, length, seq_len) in enumerate(
                zip(batch.query_start[:-1], batch.query_lens, batch.seq_lens, strict=True)
            )
            if length
        ),
    }
    if partition is None:
        return StepIndex(whole, (), None)
    ranks = tuple(
        {
            **index_tensors(partition, rank, device),
            SLOTS: whole[SLOTS],
            BLOCK_TABLES: tables,
            SPANS: spans_tensor(local_view(batch, partition, rank).spans),
        }
        for rank in range(len(partition.per_rank))
    )
    return StepIndex(whole, ranks, partition)


def spans_tensor(spans: Any) -> Tensor:
    """Return spans as [N, 4] int64 on the host."""
    rows = np.array([tuple(span) for span in spans], dtype=np.int64).reshape(-1, 4)
    return torch.from_numpy(rows)

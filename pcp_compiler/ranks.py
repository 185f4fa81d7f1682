"""Running one program on all PCP ranks.

A program is a Python generator: it computes, yields a `Collective` when it needs the other ranks, and gets its result
back. `run_lockstep` drives the generators of P virtual ranks in one process with one copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pcp_compiler import ops
from pcp_compiler.errors import InvariantError
from pcp_compiler.plan.partition import Partition


@dataclass(slots=True)
class Collective:
    """One rank's part in a collective: which op, the graph node it came from, the op's arguments on this rank."""

    op: torch._ops.OpOverload
    name: str
    args: tuple[Any, ...]

    def contribution(self) -> Tensor:
        """Return what this rank sends: the same shape on every rank."""
        if self.op is ops.UNSHARD:
            x, _, dim = self.args
            return ops.pack_rows([x], [dim])
        if self.op is ops.GATHER_START:
            return ops.pack_rows(*self.args)
        x, sources, rank, dim = self.args
        return ops.owned_rows(x, sources, rank, dim)

    def result(self, combined: Tensor) -> Tensor:
        """Return what the program gets back, from what all ranks sent."""
        if self.op is ops.UNSHARD:
            x, restore, dim = self.args
            return ops.gather_wait(combined, [x], restore, [dim])[0]
        return combined

    @property
    def is_sum(self) -> bool:
        """Whether contributions are added up (all-reduce) and not laid in rank order (all-gather)."""
        return self.op is ops.RESTORE_ROWS


Program = Generator[Collective, Any, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class ExecutedCollective:
    """One collective that ran: node name, op, shape and dtype of one rank's part, bytes a rank received."""

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    received_bytes: int


@dataclass(slots=True)
class LockstepResult:
    """Results of every rank and the collectives that ran, in order."""

    outputs: list[Sequence[Any]] = field(default_factory=list)
    collectives: list[ExecutedCollective] = field(default_factory=list)


def run_lockstep(programs: Sequence[Program]) -> LockstepResult:
    """Run the programs of all ranks up to each collective in turn, do it in memory, go on.

    The result of a collective is the same on every rank, so all ranks share one tensor; programs never write into one.

    Raises:
        InvariantError: ranks reached different collectives, or one ended while another waits.
    """
    done = LockstepResult()
    answer: Tensor | None = None
    while True:
        requests, finished = [], []
        for program in programs:
            try:
                requests.append(program.send(answer))
            except StopIteration as stop:
                finished.append(stop.value)
        if finished:
            if requests:
                raise InvariantError(f"{len(finished)} ranks ended while {len(requests)} wait at {requests[0].name}")
            done.outputs = finished
            return done
        answer = _combine(requests, done.collectives)


def _combine(requests: list[Collective], log: list[ExecutedCollective]) -> Tensor:
    """Do one collective for all ranks, and free what they sent as soon as it is combined."""
    first = requests[0]
    if len({(request.name, request.op) for request in requests}) > 1:
        raise InvariantError(f"ranks reached different collectives: {', '.join(request.name for request in requests)}")
    sent = [request.contribution() for request in requests]
    if len({part.shape for part in sent}) > 1:
        raise InvariantError(f"{first.name}: ranks send different shapes: {[tuple(part.shape) for part in sent]}")
    others = len(sent) - 1
    log.append(
        ExecutedCollective(
            first.name, first.op._schema.name.removeprefix("pcp::"), tuple(sent[0].shape), sent[0].dtype,
            others * sent[0].numel() * sent[0].element_size(),
        )
    )  # fmt: skip
    if first.is_sum:
        combined = sent[0].clone()
        for part in sent[1:]:
            combined += part
    else:
        combined = torch.cat(sent)
    sent.clear()
    return first.result(combined)


def index_tensors(partition: Partition, rank: int, device: torch.device) -> dict[str, Tensor]:
    """Return the index inputs of one rank's program: local_rows [W], restore [T], rank []; int64."""
    return {
        "local_rows": torch.from_numpy(partition.local_rows(rank)).to(device),
        "restore": torch.from_numpy(partition.restore).to(device),
        "rank": torch.tensor(rank, device=device),
    }


ProgramFunction = Callable[..., Program]

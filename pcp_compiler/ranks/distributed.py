"""Ranks in several processes: agreeing before a call, and running one rank's program with the others."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from pcp_compiler import torch_private
from pcp_compiler.config import Config
from pcp_compiler.config_sections import TimeoutConfig
from pcp_compiler.errors import CallError, RankError, RankMismatchError
from pcp_compiler.ranks import agreement, control
from pcp_compiler.ranks.control import ControlPlane, Goal
from pcp_compiler.ranks.launch import device_backends, find_process_group
from pcp_compiler.ranks.transport import Transfer, Transport
from pcp_compiler.ranks.virtual import Collective, LockstepResult, Program

log = logging.getLogger(__name__)

BEFORE_COLLECTIVES = 0
"""Step of a rank that has not come to the first collective of a call, which is step 1."""
CONNECT_S = 30.0
"""How much longer the communication library waits than we do: its errors do not name a rank."""


class RankGroup:
    """The ranks of one process group; this process is one of them.

    A call goes: `call()` around it, `agree` on what all ranks must share, `run_distributed`. A failure between
    collectives uses up the connections, so that nothing of the failed call can reach a later one; the next call makes
    new ones. They are ours alone: the caller's own collectives are never mixed with ours.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        """Join: give signs of life from now on. Does not wait for the other ranks."""
        members = dist.get_process_group_ranks(process_group)
        self.rank = dist.get_rank(process_group)
        self.size = len(members)
        self._libraries = device_backends(process_group)
        self._prefix = f"pcp_spec/{'-'.join(map(str, members))}"
        self._control = ControlPlane(partial(torch_private.open_store, self._prefix), self.rank, _names(members))
        self._timeouts = TimeoutConfig()
        self._lock = threading.Lock()
        self._transports: dict[str, Transport] = {}
        self._under_way: list[tuple[Transfer, Goal]] = []
        self._call = 0
        self._step = BEFORE_COLLECTIVES
        self._epoch = 0
        self._has_met = False

    # --- around a call -----------------------------------------------------------------------------------------------

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Say that this rank compiles; an error is a failed call, which the other ranks raise too."""
        self._say(control.COMPILING)
        try:
            yield
        except BaseException as fault:
            self._fail(fault)
            raise
        self._say(control.IDLE)

    @contextmanager
    def call(self, timeouts: TimeoutConfig) -> Iterator[None]:
        """Run one call; an error is told to the other ranks, which raise it too.

        Raises:
            CallError: another thread is in a call. RankError: another rank failed, lags or is gone.
        """
        if not self._lock.acquire(blocking=False):
            raise CallError(
                "two threads call distributed ranks at once; allowed: one at a time, in the same order on every rank"
            )
        try:
            self._timeouts = timeouts
            self._say(f"in call {self._call}, before its first collective")
            yield
            self._call += 1
            self._say(control.IDLE)
        except BaseException as fault:
            self._fail(fault)
            raise
        finally:
            self._lock.release()

    def agree(self, statement: agreement.Statement) -> None:
        """Compare with all ranks what they must share.

        Raises:
            RankMismatchError: the same text on every rank. RankError: a rank failed, or did not come in time.
        """
        words = json.dumps({"epoch": self._epoch, "digests": agreement.digests(statement)})
        stated = [json.loads(text) for text in self._exchange("statement", words)]
        self._has_met = True
        epoch = max(one["epoch"] for one in stated)
        if epoch != self._epoch:  # a rank failed after this one had ended the call
            self._close_transports()
            self._epoch = epoch
        topic = agreement.find_difference([one["digests"] for one in stated])
        if topic is not None:
            entries = [json.loads(text) for text in self._exchange(topic, json.dumps(dict(statement[topic])))]
            raise RankMismatchError(agreement.describe_difference(topic, entries, self._control.names))

    def _exchange(self, topic: str, text: str) -> list[str]:
        limit_s, knob = (self._timeouts.step, "step") if self._has_met else (self._timeouts.start, "start")
        goal = Goal(self._call, BEFORE_COLLECTIVES, f"call {self._call}", limit_s, f"parallel.timeout_s.{knob}")
        return self._control.exchange(topic, text, goal)

    def _say(self, activity: str) -> None:
        self._control.set_state(self._call, self._step, activity)

    def _fail(self, fault: BaseException) -> None:
        """End a call that failed here: tell the others, and break connections that were in use."""
        if not isinstance(fault, RankError):
            self._publish(
                f"call {self._call}: {self._control.names[self.rank]} failed: {type(fault).__name__}: {fault}"
            )
        if self._step != BEFORE_COLLECTIVES:
            self._epoch += 1
            self._close_transports()
        self._call, self._step = self._call + 1, BEFORE_COLLECTIVES
        self._say(control.IDLE)

    def _publish(self, message: str) -> None:
        try:
            self._control.fail(self._call, message)
        except RankError as unreachable:  # this rank has its own error to raise
            log.warning("%s", unreachable)

    # --- collectives -------------------------------------------------------------------------------------------------

    def start_collective(self, request: Collective, sent: Tensor) -> Tensor:
        """Exchange rows with the other ranks: [N, ..] -> [P * N, ..] in rank order, or [N, ..] if it is a sum.

        Raises:
            RankError: a rank failed, lags or is gone.
        """
        self._step += 1
        what = f"call {self._call}, collective {self._step} ({request.name})"
        self._say(f"in {what}")
        goal = Goal(self._call, self._step, what, self._timeouts.step, "parallel.timeout_s.step")
        with self._explained(goal):
            transport = self._transport(sent.device)
            transfer = transport.start(sent, is_sum=request.is_sum)
            self._under_way.append((transfer, goal))
            if transport.is_asynchronous:
                transfer.finish()
        if not transport.is_asynchronous:
            self._wait_for_all()
        return transfer.received.to(sent.device, non_blocking=True)

    def end_collectives(self) -> None:
        """Wait until all collectives of a call have ended on the device too.

        Raises:
            RankError: a rank failed, lags or is gone.
        """
        self._wait_for_all()
        self._control.raise_if_failed(self._call)  # a late rank finds all that it needs in its sockets
        self._step = BEFORE_COLLECTIVES

    def _wait_for_all(self) -> None:
        while self._under_way:
            transfer, goal = self._under_way[0]
            with self._explained(goal):
                self._control.wait(transfer.is_done, goal)
                transfer.finish()
            self._under_way.pop(0)

    @contextmanager
    def _explained(self, goal: Goal) -> Iterator[None]:
        """Turn an error of the communication library, which names an address, into one that names a rank."""
        try:
            yield
        except (RankError, torch.OutOfMemoryError):
            raise
        except RuntimeError as fault:
            raise self._control.explain(fault, goal) from None

    def _transport(self, device: torch.device) -> Transport:
        """Return the connections for tensors of a device: the library of the caller's group, gloo for all but NCCL."""
        library = "nccl" if self._libraries.get(device.type) == "nccl" else "gloo"
        if library not in self._transports:
            store = torch_private.open_store(f"{self._prefix}/epoch {self._epoch}/{library}")
            timeout_s = 2 * self._timeouts.step + CONNECT_S
            self._transports[library] = Transport(library, store, self.rank, self.size, timeout_s)
        return self._transports[library]

    def _close_transports(self) -> None:
        transfers = [transfer for transfer, _ in self._under_way]
        self._under_way.clear()
        while self._transports:
            self._transports.popitem()[1].close(transfers)


def run_distributed(program: Program, group: RankGroup) -> LockstepResult:
    """Run this rank's program; the other ranks run theirs in their processes.

    Returns:
        One output, this rank's, which has all rows; and the collectives that ran.
    Raises:
        RankError: another rank failed, lags or is gone.
    """
    done = LockstepResult()
    answer: Tensor | None = None
    while True:
        try:
            request = program.send(answer)
        except StopIteration as stop:
            group.end_collectives()
            done.outputs = [stop.value]
            return done
        sent = request.contribution().contiguous()
        done.collectives.append(request.record(sent, group.size))
        answer = request.result(group.start_collective(request, sent))


class RankGroups:
    """The groups that this process has joined: one for each set of ranks, whichever models use it."""

    def __init__(self) -> None:
        self._world: dist.ProcessGroup | None = None
        self._groups: dict[tuple[int, ...], RankGroup] = {}

    def find(self, config: Config, group: object) -> RankGroup | None:
        """Return the group that runs a model's programs, joining it at first; None: virtual ranks.

        Args:
            group: option `group`.
        Raises:
            ConfigError, RankError: see `find_process_group`.
        """
        process_group = find_process_group(config, group)
        if process_group is None:
            return None
        if self._world is not dist.group.WORLD:  # the caller has started torch.distributed anew
            self._groups.clear()
            self._world = dist.group.WORLD
        members = tuple(dist.get_process_group_ranks(process_group))
        if members not in self._groups:
            self._groups[members] = RankGroup(process_group)
        return self._groups[members]


def _names(members: Sequence[int]) -> list[str]:
    """Return what messages call each rank of a group."""
    return [
        f"rank {rank}" if rank == member else f"pcp rank {rank} (rank {member} of the job)"
        for rank, member in enumerate(members)
    ]

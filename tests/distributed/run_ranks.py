"""Running a function on several processes that form a gloo group, for tests."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

START_LIMIT_S = 240.0
"""How long the processes may take to import torch and meet; not part of a test's own limit."""

EXIT_LIMIT_S = 5.0
"""How long a process may take to end by itself after its result."""


class Ended:
    """What `run_ranks` returns for a process that ended without a result: killed, or left early."""

    def __init__(self, exit_code: int | None) -> None:
        self.exit_code = exit_code


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, limit_s: float, may_end: bool = False
) -> list[Any]:
    """Call `function(rank, *args)` in `world_size` processes of one gloo group.

    The store is in this process, so that any rank may be killed, as with torchrun.

    Args:
        function: of a module, so that another process can import it.
        limit_s: seconds from when all processes have met until all have a result.
        may_end: whether a process may end without a result; it counts as `Ended`.
    Returns:
        The results in rank order.
    Raises:
        AssertionError: a process raised (its traceback is in the message), ended, or took too long.
    """
    assert world_size <= 4, "process tests use at most 4 processes"
    store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes: list[BaseProcess] = [
        context.Process(target=_child, args=(pipes[rank][1], function, rank, world_size, store.port, args), daemon=True)
        for rank in range(world_size)
    ]
    try:
        for process, (_, writer) in zip(processes, pipes, strict=True):
            process.start()
            writer.close()
        readers = [reader for reader, _ in pipes]
        _collect(readers, processes, START_LIMIT_S, may_end=False)
        results = _collect(readers, processes, limit_s, may_end=may_end)
        for process in processes:
            process.join(EXIT_LIMIT_S)
        return results
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _collect(readers: list[Connection], processes: list[BaseProcess], limit_s: float, *, may_end: bool) -> list[Any]:
    """Return one message of each process."""
    deadline = monotonic() + limit_s
    results: dict[Connection, Any] = {}
    while len(results) < len(readers):
        waiting = [reader for reader in readers if reader not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - monotonic()))
        ranks = [readers.index(reader) for reader in waiting]
        assert ready, f"ranks {ranks} have no result after {limit_s:g} s"
        for reader in ready:
            assert isinstance(reader, Connection)
            results[reader] = _receive(reader, processes[readers.index(reader)], may_end)
    return [results[reader] for reader in readers]


def _receive(reader: Connection, process: BaseProcess, may_end: bool) -> Any:
    try:
        fault, value = reader.recv()
    except EOFError:
        process.join()
        assert may_end, f"{process.name} ended with exit code {process.exitcode} and no result"
        return Ended(process.exitcode)
    assert fault is None, f"{process.name} raised:\n{fault}"
    return value


def _child(
    writer: Connection, function: Callable[..., Any], rank: int, world_size: int, port: int, args: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(1)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    store = TCPStore("127.0.0.1", port, world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    writer.send((None, "ready"))
    try:
        value = function(rank, *args)
    except Exception:
        writer.send((traceback.format_exc(), None))
    else:
        writer.send((None, value))

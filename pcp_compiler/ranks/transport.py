"""Carrying rows between processes: gloo through host memory, NCCL on the device.

Rows travel as integers that hold their bits: any dtype passes, and a sum in which every element has one owner and is
zero elsewhere is exact, minus zeros and NaNs included.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from pcp_compiler import torch_private

CLOSE_S = 1.0
"""How long a rank waits for broken connections to close; gloo may take until its own time-out, in the background."""


@dataclass(slots=True)
class Transfer:
    """One collective under way: torch's handle (None: there was nothing to send) and the buffer that receives."""

    work: dist.Work | None
    received: Tensor

    def is_done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self.work is None or bool(self.work.is_completed())

    def finish(self) -> None:
        """Make the result usable on the current stream; RuntimeError when a connection broke."""
        if self.work is not None:
            self.work.wait()


class Transport:
    """Connections between all ranks of a group. A failure uses them up: close them, make new ones."""

    def __init__(self, library: str, store: Store, rank: int, size: int, timeout_s: float) -> None:
        """Connect; gloo blocks until every rank does.

        Args:
            library: gloo or nccl. store: of these connections alone. timeout_s: the library's own time-out.
        """
        self.is_asynchronous = library == "nccl"
        """Whether results are ready on the device's stream and not yet in memory once a transfer has started."""
        self._size = size
        self._backend = torch_private.new_backend(library, store, rank, size, timedelta(seconds=timeout_s))

    def start(self, sent: Tensor, *, is_sum: bool) -> Transfer:
        """Send this rank's part: [N, ..] -> [P * N, ..] in rank order, or [N, ..] if it is a sum.

        Args:
            sent: contiguous, of the same shape on every rank; ours from now on.
        """
        assert self._backend is not None, "the transport is closed"
        if not self.is_asynchronous:
            sent = _on_host(sent)
        received = sent if is_sum else sent.new_empty(self._size * sent.shape[0], *sent.shape[1:])
        if sent.numel() == 0:  # gloo refuses to send nothing
            return Transfer(None, received)
        integers = torch.int32 if sent.numel() * sent.element_size() % 4 == 0 else torch.uint8
        received_bits = received.view(-1).view(integers)
        if is_sum:
            return Transfer(self._backend.allreduce([received_bits]), received)
        sent_bits = sent.view(-1).view(integers)
        return Transfer(torch_private.all_gather(self._backend, received_bits, sent_bits), received)

    def close(self, transfers: Iterable[Transfer]) -> None:
        """Break the connections, so that other ranks' transfers end; `transfers` are those of this rank under way."""
        dying = [self._backend]
        self._backend = None
        for transfer in transfers:
            dying.append(transfer.work)
            transfer.work = None
        thread = threading.Thread(target=_close, args=(dying,), name="pcp_spec close", daemon=True)
        thread.start()
        thread.join(CLOSE_S)


def _close(dying: list[Any]) -> None:
    """Abort a backend, the first of the list, then drop it and its works: gloo closes what nothing refers to."""
    dying[0].abort()
    dying.clear()


def _on_host(x: Tensor) -> Tensor:
    """Return the tensor in host memory, pinned when it comes from a device: gloo does not take device memory."""
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)

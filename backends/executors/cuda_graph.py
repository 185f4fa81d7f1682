"""`cuda_graph`: captures as CUDA graphs, which share one memory pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcp_compiler.backends.executors.base import Capture, Executor, Function
from pcp_compiler.errors import CaptureError


class GraphExecutor(Executor):
    """See the module. Captures replay one after the other, never two at once: they share their memory.

    Args:
        device: where the models are.
    Raises:
        ConfigError: by the caller, when there is no such device.
    """

    name = "cuda_graph"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, function: Function, title: str) -> GraphCapture:
        """See `Executor`. Runs the function once before: kernels are compiled and libraries set up then."""
        with torch.no_grad():
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                function()
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            torch.cuda.synchronize(self._device)
            before = torch.cuda.memory_reserved(self._device)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    outputs = function()
            except RuntimeError as fault:
                raise CaptureError(f"{title}: cannot be captured as a CUDA graph: {fault}") from fault
        return GraphCapture(graph, outputs, torch.cuda.memory_reserved(self._device) - before)


class GraphCapture(Capture):
    """One CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Sequence[Tensor], num_bytes: int) -> None:
        self.outputs = tuple(outputs)
        self.num_bytes = num_bytes
        self._graph = graph

    def replay(self) -> None:
        """See `Capture`."""
        self._graph.replay()

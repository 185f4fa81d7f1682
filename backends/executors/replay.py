"""`replay`: captured graphs emulated on the CPU, with what makes them dangerous.

A capture is the list of op calls that ran, with the very tensors that they took and gave. A replay runs the calls again
and copies each result to where it lay. So inputs have to be static, host values are those of the capture, reading a
value of a tensor is an error, and before each replay all intermediate results become NaN or out of range: what a replay
reads and has not written shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pcp_compiler.backends.executors.base import Capture, Executor, Function
from pcp_compiler.errors import CaptureError

aten = torch.ops.aten

READS_ON_HOST = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default)
"""Ops whose result the host has to wait for."""


class ReplayExecutor(Executor):
    """See the module."""

    name = "replay"

    def capture(self, function: Function, title: str) -> ReplayCapture:
        """See `Executor`."""
        recorder = _Recorder(title)
        with torch.no_grad(), recorder:
            outputs = function()
        return ReplayCapture(recorder.calls, tuple(outputs))


class _Call(NamedTuple):
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Tensor, ...]
    """Tensors that the call made; none if it only changed or viewed others."""


class ReplayCapture(Capture):
    """The calls of one run."""

    def __init__(self, calls: list[_Call], outputs: tuple[Tensor, ...]) -> None:
        self.outputs = outputs
        self.num_bytes = sum(result.nbytes for call in calls for result in call.results)
        self._calls = calls

    def replay(self) -> None:
        """See `Capture`."""
        for call in self._calls:
            for result in call.results:
                _poison(result)
        with torch.no_grad():
            for call in self._calls:
                made = call.func(*call.args, **call.kwargs)
                if call.results:
                    for kept, new in zip(call.results, _tensors(made), strict=True):
                        kept.copy_(new)


class _Recorder(TorchDispatchMode):
    """Writes down the op calls that run."""

    def __init__(self, title: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self._title = title

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS_ON_HOST:
            raise CaptureError(f"{self._title}: {func} needs a value of a tensor on the host; no capture can have that")
        results = func(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        made = tuple(_tensors(results))
        is_new = all(tensor.untyped_storage().data_ptr() not in known or not tensor.numel() for tensor in made)
        self.calls.append(_Call(func, args, kwargs, made if is_new else ()))
        return results


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _poison(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)

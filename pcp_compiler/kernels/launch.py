"""Launches that fail say which kernel failed, in which variant, and what to set; nothing else is run in its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pcp_compiler.errors import KernelError

NO_KNOB = "no option runs something else in its place"
_FAULTS_OF_OTHERS = ("device-side assert", "illegal memory access", "unspecified launch failure", "captur")
"""In messages of the CUDA driver: what an earlier kernel did, and what may not be done during a capture."""


class NamedKernel:
    """A kernel to be launched as `kernel[grid](..)`."""

    __slots__ = ("_kernel", "_knob")

    def __init__(self, kernel: Any, knob: str) -> None:
        self._kernel = kernel
        self._knob = knob

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return what launches so many programs.

        Raises:
            KernelError: when that is called, and Triton cannot compile or launch this variant.
        """
        run = self._kernel.run  # what Triton's own kernel[grid] calls, which would pack all arguments once more

        def launch(*args: object, **options: object) -> None:
            try:
                run(*args, grid=grid, warmup=False, **options)
            except Exception as fault:  # whatever it is, Triton raised it: nothing else runs in there
                if isinstance(fault, RuntimeError) and any(text in str(fault) for text in _FAULTS_OF_OTHERS):
                    raise
                raise KernelError(self._describe(fault, args, options)) from fault

        return launch

    def _describe(self, fault: Exception, args: Iterable[object], options: Mapping[str, object]) -> str:
        """Return the message: kernel, constants and launch options, the other arguments, knob, cause."""
        function = self._kernel.fn
        parameters = inspect.signature(function).parameters
        given = {**dict(zip(parameters, args, strict=False)), **options}
        is_constant = {name: "constexpr" in str(parameter.annotation) for name, parameter in parameters.items()}
        variant = {name: value for name, value in given.items() if is_constant.get(name, True)}
        rest = {name: value for name, value in given.items() if name not in variant}
        return (
            f"kernel {function.__name__} ({function.__module__}) cannot be compiled or launched\n"
            f"  variant: {_list(variant)}\n  arguments: {_list(rest)}\n  {self._knob}\n"
            f"  {type(fault).__name__}: {fault}"
        )


def named_kernel(knob: str) -> Callable[[Any], NamedKernel]:
    """Return a decorator for a `triton.jit` function that is launched, and not only called by others.

    Args:
        knob: how to run something else in its place, for messages.
    """
    return partial(NamedKernel, knob=knob)


def _list(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={_text(value)}" for name, value in values.items())


def _text(value: object) -> str:
    """Return type and sizes of a tensor, anything else as it prints."""
    if isinstance(value, TensorDescriptor):
        value = value.base
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)

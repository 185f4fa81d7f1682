"""What a capture is: a function with static inputs that can run again without Python in between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

Function = Callable[[], Sequence[Tensor]]
"""Reads static tensors only, the same each time, and returns its results."""


class Capture(ABC):
    """One captured call. Its inputs and results stay where they are; what is in them changes with each replay."""

    outputs: tuple[Tensor, ...]
    """Results of the last replay."""
    num_bytes: int
    """Memory that the capture added."""

    @abstractmethod
    def replay(self) -> None:
        """Run again over what the static inputs hold now."""


class Executor(ABC):
    """Makes captures."""

    name: str

    @abstractmethod
    def capture(self, function: Function, title: str) -> Capture:
        """Run a function and keep what it does.

        Args:
            title: what it is, for messages.
        Raises:
            CaptureError: it reads a value of a tensor on the host, or does something else that cannot run again.
        """

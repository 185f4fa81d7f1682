"""Every exception a user of pcp_compiler can meet.

All of them derive from `ValueError` and from Dynamo's `ShortenTraceback`, so that an error raised inside
`torch.compile` reaches the user as itself, with a short traceback, and not as `BackendCompilerFailed`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from torch._dynamo.exc import ShortenTraceback

_PROJECT_FOLDER = str(Path(__file__).parent)


class PcpError(ShortenTraceback, ValueError):
    """Base of all errors that a user can cause: the message names the field or node, the value, and the knob."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)

    def remove_dynamo_frames(self) -> Self:
        """Return the error with a traceback that starts at our first frame; Dynamo calls this before it raises."""
        step = self.__traceback__
        while step is not None and not step.tb_frame.f_code.co_filename.startswith(_PROJECT_FOLDER):
            step = step.tb_next
        return self if step is None else self.with_traceback(step)


class ConfigError(PcpError):
    """A config key, value or combination that is not allowed."""


class UnsupportedGraphError(PcpError):
    """A model does something that cannot be sharded; names the graph node, its source line and the knob."""


class BypassError(PcpError):
    """The compiled program would not run, or would run only a part of the model."""


class CallError(PcpError):
    """A call of a compiled model has inputs that its program does not serve."""


class RankError(PcpError):
    """Another rank failed, lags, or is gone; names the rank and its cause, the same on every rank that waits."""


class RankMismatchError(RankError):
    """Ranks differ in what they must share: input, weights, versions, config or schedule; the same on every rank."""


class CaptureError(PcpError):
    """A program does something that a captured graph cannot do; names the program and the op."""


class KernelError(PcpError):
    """A kernel cannot be compiled for this device, or not launched; names kernel, variant and knob."""


class InvariantError(AssertionError):
    """A pass broke a graph invariant: a fault of ours, not of the user."""

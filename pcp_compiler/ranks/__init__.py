"""Running one program on all PCP ranks: virtual ones in this process, or one in each process of a process group."""

from __future__ import annotations

from pcp_compiler.ranks.virtual import (
    Collective,
    ExecutedCollective,
    LockstepResult,
    Program,
    ProgramFunction,
    index_tensors,
    run_lockstep,
)

__all__ = [
    "Collective", "ExecutedCollective", "LockstepResult", "Program", "ProgramFunction", "index_tensors", "run_lockstep",
]  # fmt: skip

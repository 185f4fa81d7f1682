"""Captured programs of a decoder: which one a batch replays, and what happened so far."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from pcp_compiler.backends.executors.base import Capture, Executor
from pcp_compiler.backends.executors.cuda_graph import GraphExecutor
from pcp_compiler.backends.executors.replay import ReplayExecutor
from pcp_compiler.config_sections import CaptureConfig
from pcp_compiler.errors import ConfigError
from pcp_compiler.plan.captures import CaptureKey, CapturePhase
from pcp_compiler.plan.dispatch import Dispatcher, LiveBatch, check_cover
from pcp_compiler.program import RankProgram
from pcp_compiler.runtime.pieces import Pieces
from pcp_compiler.runtime.static_inputs import Sizes, StaticBuffers, StaticForm

log = logging.getLogger(__name__)

Run = Callable[[Mapping[str, Tensor]], Sequence[Tensor]]
"""Runs a program over its inputs, index inputs among them."""


@dataclass(slots=True)
class CaptureStats:
    """What captures did for a decoder."""

    hits: Counter[str] = field(default_factory=Counter)
    """Replays by program and key."""
    misses: Counter[str] = field(default_factory=Counter)
    """Eager runs by program and reason."""
    num_captures: int = 0
    num_bytes: int = 0
    """Memory that captures added."""
    num_rows: int = 0
    """Rows of all replays, without padding."""
    num_pad_rows: int = 0
    """Padding of all replays."""
    pieces: list[Pieces] = field(default_factory=list)
    """Of each split program and rank."""

    @property
    def num_replays(self) -> int:
        """Runs of programs that were replayed, whole or in pieces."""
        return self.hits.total()

    @property
    def num_piece_captures(self) -> int:
        """Pieces that were captured, on all ranks of this process."""
        return sum(pieces.num_captures for pieces in self.pieces)

    @property
    def num_piece_replays(self) -> int:
        """Replays of single pieces, on all ranks of this process."""
        return sum(pieces.num_replays for pieces in self.pieces)

    @property
    def pad_waste(self) -> float:
        """Part of the replayed rows that was padding, 0 to 1."""
        total = self.num_rows + self.num_pad_rows
        return self.num_pad_rows / total if total else 0.0


class CapturedProgram(NamedTuple):
    """A program that may be captured."""

    name: str
    form: StaticForm
    run: Run
    phases: tuple[CapturePhase, ...]
    num_draft_tokens: int = 0
    """Of a draft chain."""

    def takes(self, key: CaptureKey) -> bool:
        """Return whether a key is one of this program's."""
        return key.phase in self.phases and key.num_draft_tokens == self.num_draft_tokens


class _Held(NamedTuple):
    capture: Capture
    buffers: StaticBuffers


class Captures:
    """Captures of any number of programs, made by one executor with one set of keys.

    Args:
        keys: what is captured. block_size: positions of a KV block.
    """

    def __init__(self, executor: Executor, keys: Sequence[CaptureKey], block_size: int) -> None:
        self.stats = CaptureStats()
        self.keys = tuple(keys)
        self._executor = executor
        self._dispatcher = Dispatcher(keys)
        self._block_size = block_size
        self._held: dict[tuple[str, CaptureKey], _Held] = {}

    def find(self, name: str, live: LiveBatch) -> CaptureKey | None:
        """Return the key that covers a batch of a program, and count it; None: it runs eagerly."""
        dispatch = self._dispatcher.find(live)
        if dispatch.key is None:
            self._count_miss(name, dispatch.reason)
            return None
        check_cover(dispatch.key, live)
        self.stats.hits[f"{name}: {dispatch.key}"] += 1
        self.stats.num_rows += live.num_rows
        self.stats.num_pad_rows += dispatch.num_pad_rows
        return dispatch.key

    def piece_rows(self, live: LiveBatch) -> int | None:
        """Return the capture size that the pieces of a batch would replay; None if it has no pieces."""
        key = self._dispatcher.find(live).key
        return None if key is None or key.is_full else key.capture_size

    def replay(self, program: CapturedProgram, key: CaptureKey, values: Mapping[str, Tensor]) -> list[Tensor]:
        """Replay the capture of a whole program, which is made now if it was dropped.

        Args:
            values: the batch's inputs, index inputs among them.
        Returns:
            Copies of the results, without padding.
        """
        held = self._held.get((program.name, key)) or self.capture(program, key)
        held.buffers.fill(values)
        held.capture.replay()
        return program.form.cut(held.capture.outputs, program.form.live_sizes(values))

    def make_pieces(self, program: RankProgram, fixed: Sequence[Tensor], name: str) -> Pieces:
        """Return the pieces of a program on one rank; they are captured when they first run."""
        pieces = Pieces(program, self._executor, fixed, name)
        self.stats.pieces.append(pieces)
        return pieces

    def capture(self, program: CapturedProgram, key: CaptureKey) -> _Held:
        """Capture a program at the sizes of a key, over inputs that are all padding, so that no KV is written."""
        sizes = key_sizes(key, self._block_size, program.form)
        buffers = StaticBuffers(program.form.inputs, sizes)
        title = f"{program.name}, {key}"
        held = _Held(self._executor.capture(lambda: program.run(buffers.tensors), title), buffers)
        self._held[program.name, key] = held
        self.stats.num_captures += 1
        self.stats.num_bytes += held.capture.num_bytes
        log.info("captured %s, %.1f MiB", title, held.capture.num_bytes / 2**20)
        return held

    def capture_all(self, programs: Sequence[CapturedProgram]) -> None:
        """Capture each program at the keys of its phases, the largest first: it sizes the memory that all share."""
        full = [key for key in self.keys if key.is_full]
        todo = [(program, key) for key in full for program in programs if program.takes(key)]
        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
            for program, key in bar.track(todo, description="capturing"):
                self.capture(program, key)

    @property
    def has_pieces(self) -> bool:
        """Whether some steps replay piece by piece."""
        return any(not key.is_full for key in self.keys)

    def drop(self) -> None:
        """Forget the captures of whole programs: what they read, weights or caches, lies elsewhere now."""
        self._held.clear()

    def _count_miss(self, name: str, reason: str) -> None:
        miss = f"{name}: {reason}"
        if miss not in self.stats.misses:
            log.info("%s; it runs eagerly", miss)
        self.stats.misses[miss] += 1


def key_sizes(key: CaptureKey, block_size: int, form: StaticForm) -> Sizes:
    """Return the named sizes of a capture."""
    assert key.num_requests is not None and key.context_bucket is not None, "a piece has no sizes of requests"
    sizes = {
        "rows": key.capture_size, "requests": key.num_requests, "spans": key.num_requests,
        "kv_blocks": -(-key.context_bucket // block_size),
    }  # fmt: skip
    drafts = key.capture_size - key.num_requests
    return {**sizes, "logit_rows": sizes[form.logit_rows], "drafts": drafts}


def pick_executor(section: CaptureConfig, device: torch.device) -> Executor | None:
    """Return what makes captures; None: nothing is captured.

    Raises:
        ConfigError: CUDA graphs without CUDA, or the emulator on a GPU.
    """
    name = section.executor
    if name == "auto":
        name = "cuda_graph" if device.type == "cuda" else "eager"
    if section.mode == "none" or name == "eager":
        return None
    if name == "cuda_graph":
        if device.type != "cuda":
            raise ConfigError(
                f"capture.executor: got cuda_graph, and the target is on {device}; allowed here: auto, eager, replay"
            )
        return GraphExecutor(device)
    if device.type != "cpu":
        raise ConfigError(f"capture.executor: got replay, and the target is on {device}; allowed here: cuda_graph")
    return ReplayExecutor()

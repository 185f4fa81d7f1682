"""Pieces: the segments of a program captured one by one; attention, KV writes and collectives run between them.

A piece is captured at its first use with a capture size, over copies of its arguments. Later it replays if what it gets
has the sizes it was captured with, which holds for all that depends on a rank's rows alone. Segments with other sizes
(the prompt's tokens before they are cut to rows, rows with logits) run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pcp_compiler.backends.executors.base import Capture, Executor
from pcp_compiler.errors import InvariantError
from pcp_compiler.passes.attach_kv import SLOTS
from pcp_compiler.program import RankProgram
from pcp_compiler.torch_private import size_expression

ROW_INPUTS = ("local_rows", SLOTS)
"""Index inputs with a rank's rows: of a sharded program, else of any."""


class _Piece(NamedTuple):
    capture: Capture
    arguments: tuple[Any, ...]
    """What it reads: weights and results of other pieces as they are, copies of everything else."""


class Pieces:
    """The captured pieces of one split program on one rank, of all capture sizes.

    Args:
        fixed: tensors that never change their place, such as weights and caches.
        name: for messages.
    """

    def __init__(self, program: RankProgram, executor: Executor, fixed: Sequence[Tensor], name: str) -> None:
        self.num_replays = 0
        self.num_eager = 0
        """Calls of segments that run as they are."""
        self.num_captures = 0
        self.num_bytes = 0
        self._name = name
        self._executor = executor
        self._fixed = {id(tensor) for tensor in fixed}
        self._of_rows = find_row_segments(program)
        self._held: dict[tuple[int, int], _Piece] = {}

    def runner(
        self, capture_size: int
    ) -> Callable[[int, Callable[..., Sequence[Any]], tuple[Any, ...]], Sequence[Any]]:
        """Return what runs the segments of one run with so many rows."""

        def run(number: int, segment: Callable[..., Sequence[Any]], arguments: tuple[Any, ...]) -> Sequence[Any]:
            if number not in self._of_rows:
                self.num_eager += 1
                return segment(*arguments)
            piece = self._held.get((capture_size, number))
            if piece is None:
                piece = self._held[capture_size, number] = self._capture(capture_size, number, segment, arguments)
            self._fill(piece, arguments)
            piece.capture.replay()
            self.num_replays += 1
            return piece.capture.outputs

        return run

    def drop(self) -> None:
        """Forget the captures for good; what was counted stays."""
        self._held.clear()

    def _capture(
        self, capture_size: int, number: int, segment: Callable[..., Sequence[Any]], arguments: tuple[Any, ...]
    ) -> _Piece:
        static = tuple(
            argument.clone() if isinstance(argument, Tensor) and id(argument) not in self._fixed else argument
            for argument in arguments
        )
        title = f"{self._name}, segment {number} at {capture_size} rows"
        piece = _Piece(self._executor.capture(lambda: segment(*static), title), static)
        self._fixed |= {id(output) for output in piece.capture.outputs}
        self.num_captures += 1
        self.num_bytes += piece.capture.num_bytes
        return piece

    def _fill(self, piece: _Piece, arguments: tuple[Any, ...]) -> None:
        for kept, argument in zip(piece.arguments, arguments, strict=True):
            if not isinstance(kept, Tensor):
                if kept != argument:
                    raise InvariantError(f"{self._name}: a piece captured with the size {kept} got {argument}")
            elif kept is not argument:
                if kept.shape != argument.shape:
                    raise InvariantError(f"{self._name}: a piece for {tuple(kept.shape)} got {tuple(argument.shape)}")
                kept.copy_(argument)


def find_row_segments(program: RankProgram) -> frozenset[int]:
    """Return the numbers of the calls of segments whose sizes are constants or made of a rank's rows."""
    graph = program.graph_module.graph
    inputs = {node.meta.get("index_input"): node for node in graph.find_nodes(op="placeholder")}
    rows = next(inputs[role] for role in ROW_INPUTS if role in inputs).meta["val"].shape[0]
    allowed = size_expression(rows).free_symbols
    called = [node for node in graph.nodes if node.op == "call_module"]
    return frozenset(number for number, node in enumerate(called) if _symbols(node) <= allowed)


def _symbols(call: fx.Node) -> set[object]:
    """Return the symbols in the sizes of a call's arguments."""
    found: set[object] = set()
    for argument in call.all_input_nodes:
        value = argument.meta["val"]
        sizes = value.shape if isinstance(value, Tensor) else (value,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                found |= size_expression(size).free_symbols
    return found

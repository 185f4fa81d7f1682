"""The static inputs of a captured program: which sizes they have room for, and what is in the room that is left.

The sizes of a capture have names. Which name the dims of a program's inputs have follows from the index inputs and the
token inputs; a dim without a name would be an input that nobody pads, which is an error.

    rows        token rows                        [1, rows], slots [rows]
    requests    rows of the block tables          block_tables [requests, kv_blocks]
    spans       runs of rows of one request       spans [spans, 4]
    kv_blocks   KV blocks of the longest request
    logit_rows  rows that get logits
    drafts      rows that are not the first of their request
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, fx

from pcp_compiler.errors import InvariantError
from pcp_compiler.passes.attach_kv import BLOCK_TABLES, SLOTS, SPANS
from pcp_compiler.program import RankProgram
from pcp_compiler.runtime.batch import PAD_SLOT
from pcp_compiler.torch_private import size_expression

Sizes = Mapping[str, int]
ALIGNMENT = 16
"""Bytes; enough for any type, and for wide loads."""

INDEX_DIMS: Mapping[str, tuple[str | None, ...]] = {
    SLOTS: ("rows",), SPANS: ("spans", None), BLOCK_TABLES: ("requests", "kv_blocks"),
}  # fmt: skip
PADS: Mapping[str, int] = {SLOTS: PAD_SLOT}
"""What unused entries hold, if not 0: rows of no span and of block 0 read nothing, and write nothing in slot -1."""


@dataclass(frozen=True, slots=True)
class StaticInput:
    """One input of a captured program."""

    name: str
    dims: tuple[int | str, ...]
    """A size of its own, or the name of one."""
    dtype: torch.dtype
    device: torch.device
    pad: int
    """What entries beyond those of the batch hold."""

    def allocate(self, sizes: Sizes) -> Tensor:
        """Return a tensor that holds padding only."""
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in self.dims]
        return torch.full(shape, self.pad, dtype=self.dtype, device=self.device)

    def fill(self, buffer: Tensor, value: Tensor) -> None:
        """Put a batch's value at the front, padding behind it."""
        if value.shape != buffer.shape:
            buffer.fill_(self.pad)
            for dim, size in enumerate(value.shape):
                buffer = buffer.narrow(dim, 0, size)
        buffer.copy_(value)


class StaticBuffers:
    """The static inputs of one capture. Integers lie side by side, so that a batch reaches the device in one copy.

    Args:
        sizes: what there is room for.
    """

    def __init__(self, inputs: Sequence[StaticInput], sizes: Sizes) -> None:
        self.tensors = {entry.name: entry.allocate(sizes) for entry in inputs}
        self._inputs = tuple(inputs)
        staged = [entry for entry in inputs if not entry.dtype.is_floating_point]
        ends = list(accumulate(-(-self.tensors[entry.name].nbytes // ALIGNMENT) * ALIGNMENT for entry in staged))
        device = inputs[0].device
        self._arena = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8, device=device)
        self._staging = torch.empty(self._arena.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._staged: dict[str, Tensor] = {}
        for entry, start in zip(staged, [0, *ends], strict=False):
            self._staged[entry.name] = _view_bytes(self._staging, start, self.tensors[entry.name])
            self._staged[entry.name].fill_(entry.pad)
            self.tensors[entry.name] = _view_bytes(self._arena, start, self.tensors[entry.name])
        self._arena.copy_(self._staging)

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Put a batch's values in. What is on the host may change only after the device has caught up."""
        on_host = {entry.name for entry in self._inputs if values[entry.name].device.type == "cpu"} & set(self._staged)
        for entry in self._inputs:
            if entry.name in on_host:
                entry.fill(self._staged[entry.name], values[entry.name])
        self._arena.copy_(self._staging, non_blocking=True)
        for entry in self._inputs:
            if entry.name not in on_host:
                entry.fill(self.tensors[entry.name], values[entry.name])


def _view_bytes(memory: Tensor, start: int, like: Tensor) -> Tensor:
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


@dataclass(frozen=True, slots=True)
class StaticForm:
    """Inputs and results of a program in named sizes."""

    inputs: tuple[StaticInput, ...]
    outputs: tuple[tuple[int | str, ...], ...]
    """Sizes of each result, at least those of its first dims that have a name."""
    logit_rows: str
    """What there are as many of as rows with logits: rows or requests."""

    def live_sizes(self, values: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the sizes that a batch has.

        Raises:
            InvariantError: two inputs disagree.
        """
        sizes: dict[str, int] = {}
        for entry in self.inputs:
            for dim, size in zip(entry.dims, values[entry.name].shape, strict=True):
                if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                    raise InvariantError(f"{entry.name} has {size} {dim}, another input {sizes[dim]}")
        return sizes

    def pad_rows(self, values: Mapping[str, Tensor], num_rows: int) -> dict[str, Tensor]:
        """Return the values with padding up to a number of token rows; nothing else is padded."""
        padded = dict(values)
        for entry in self.inputs:
            if "rows" in entry.dims:
                shape = [num_rows if dim == "rows" else size for dim, size in zip(
                    entry.dims, values[entry.name].shape, strict=True)]  # fmt: skip
                padded[entry.name] = torch.full(shape, entry.pad, dtype=entry.dtype, device=entry.device)
                entry.fill(padded[entry.name], values[entry.name])
        return padded

    def cut(self, outputs: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        """Return copies of the results without padding."""
        cut = []
        for dims, output in zip(self.outputs, outputs, strict=True):
            for number, dim in enumerate(dims):
                if isinstance(dim, str):
                    output = output.narrow(number, 0, sizes[dim])
            cut.append(output.clone())
        return cut


def describe(
    program: RankProgram, num_weights: int, token_inputs: Sequence[str], *, logit_rows: str = "rows"
) -> StaticForm:
    """Return the form of a program.

    Args:
        num_weights: inputs before those of a call. token_inputs: inputs with rows in dim 1.
        logit_rows: see `StaticForm`.
    Raises:
        InvariantError: a size of an input or result that no name fits.
    """
    placeholders = program.graph_module.graph.find_nodes(op="placeholder")
    called = [node for node in placeholders if "index_input" not in node.meta][num_weights:]
    index = [node for node in placeholders if node.meta.get("index_input") in INDEX_DIMS]
    names: dict[object, str] = {}
    for node in called:
        if node.name in token_inputs:
            _name_sizes(node, (None, "rows"), names)
    for node in index:
        _name_sizes(node, INDEX_DIMS[node.meta["index_input"]], names)
    for node in called:
        if node.name == "logit_rows":
            _name_sizes(node, ("logit_rows",), names)
    inputs = tuple(_static_input(node, names) for node in (*called, *index))
    (results,) = program.graph_module.graph.find_nodes(op="output")[0].args
    return StaticForm(inputs, tuple(_dims(node, names) for node in results), logit_rows)


def _name_sizes(node: fx.Node, dims: Sequence[str | None], names: dict[object, str]) -> None:
    """Name the symbols of one input; the first name of a symbol stays."""
    for size, name in zip(node.meta["val"].shape, dims, strict=False):
        if name is not None and isinstance(size, torch.SymInt):
            names.setdefault(size_expression(size), name)


def _static_input(node: fx.Node, names: Mapping[object, str]) -> StaticInput:
    role, value = node.meta.get("index_input", node.name), node.meta["val"]
    return StaticInput(role, _dims(node, names), value.dtype, value.device, PADS.get(role, 0))


def _dims(node: fx.Node, names: Mapping[object, str]) -> tuple[int | str, ...]:
    dims: list[int | str] = []
    for size in node.meta["val"].shape:
        expression = size_expression(size)
        if expression.is_number:
            dims.append(int(expression))
        elif expression in names:
            dims.append(names[expression])
        else:
            raise InvariantError(f"{node.name}: nothing pads its size {expression}; a static input needs a named size")
    return tuple(dims)

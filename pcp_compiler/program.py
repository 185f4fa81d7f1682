"""Program: what one rank runs for one graph, as Python source and as a function."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.profiler import record_function

from pcp_compiler import ops, torch_private
from pcp_compiler.codegen.python_source import print_program
from pcp_compiler.errors import KernelError
from pcp_compiler.graph_text import find_segments
from pcp_compiler.plan.partition import partition_batch
from pcp_compiler.ranks import Program, ProgramFunction, index_tensors, run_lockstep
from pcp_compiler.trace import source_line

SegmentRunner = Callable[[int, Callable[..., Sequence[Any]], tuple[Any, ...]], Sequence[Any]]
"""Gets the number of the call, the segment and its arguments; returns its results."""
InputSpec = tuple[str, torch.dtype | None, Sequence[int | str], str | None, int | None]


@dataclass(frozen=True, slots=True)
class RankProgram:
    """The lowered graph of one phase. Ranks run the same program; what differs are its index inputs."""

    graph_module: fx.GraphModule
    source: str
    function: ProgramFunction
    input_names: tuple[str, ...]
    """The caller's inputs: weights first, then those of a call."""
    index_roles: tuple[tuple[int, str], ...]
    """Position among the inputs and role of every index tensor."""
    schedule: tuple[tuple[str, str], ...]
    """Node name and op of every collective, in the order every rank runs them."""
    phase: str = "prefill"
    segments: tuple[int, ...] = ()
    """For each call of a segment, in the order in which every rank makes them, which of the unique segments it is."""

    def start(self, inputs: Sequence[object], index: dict[str, Tensor], run: SegmentRunner | None = None) -> Any:
        """Return the generator of one rank: the caller's inputs, then the rank's index tensors.

        Args:
            run: calls the segments of a program that was cut into such; None: they are called as they are.
        """
        options = {"run": run} if run is not None and self.segments else {}
        program = self.function(*inputs, *(index[role] for _, role in self.index_roles), **options)
        return _in_profiler_ranges(program, self.phase) if torch_private.profiler_is_active() else program

    @contextmanager
    def noted_errors(self) -> Iterator[None]:
        """Add to an error that an op of this program raises which node it was and the user's line behind it.

        The error stays what it is: it is the one that the original model raises.
        """
        try:
            yield
        except (RuntimeError, IndexError, KernelError) as fault:
            passed = self._passed_nodes(fault)
            if passed:
                *calls, node = passed
                where = "".join(f"{call.target} ({call.name}) of " for call in calls)
                line = source_line(node)
                fault.add_note(f"in {node.name} ({node.target}) of {where}the compiled program\n  at {line}")
            raise

    def _passed_nodes(self, fault: BaseException) -> list[fx.Node]:
        """Return the nodes whose lines of the printed program an error passed through: a segment's call comes first."""
        filename = self.function.__code__.co_filename
        steps = [step for step in traceback.extract_tb(fault.__traceback__) if step.filename == filename]
        return [node for step in steps if (node := self._node_at(step)) is not None]

    def _node_at(self, step: traceback.FrameSummary) -> fx.Node | None:
        """Return the node that a line of the printed program computes, None when it computes none."""
        graph_module = find_segments(self.graph_module).get(step.name, self.graph_module)
        names = (step.line or "").split(" = ", 1)[0].strip("(,)").split(", ")
        node = next((node for node in graph_module.graph.nodes if node.name in names), None)
        source = node.args[0] if node is not None and node.args else None
        return source if isinstance(source, fx.Node) and source.op == "call_module" else node


def _in_profiler_ranges(program: Program, phase: str) -> Program:
    """Run a program with a profiler range, `pcp.prefill.03`, around each stretch between collectives."""
    answer: Any = None
    number = 0
    while True:
        with record_function(f"pcp.{phase}.{number:02}"):
            try:
                request = program.send(answer)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
        answer = yield request
        number += 1


def build_program(gm: fx.GraphModule, seeds: dict[str, int], *, pcp_size: int, title: str) -> RankProgram:
    """Print a lowered graph and load the print."""
    source = print_program(gm, seeds, pcp_size=pcp_size, title=title)
    placeholders = gm.graph.find_nodes(op="placeholder")
    names = tuple(node.name for node in placeholders if "index_input" not in node.meta)
    roles = tuple(
        (position, node.meta["index_input"]) for position, node in enumerate(placeholders) if "index_input" in node.meta
    )
    schedule = tuple(
        (node.name, node.target._schema.name.removeprefix("pcp::"))
        for node in gm.graph.nodes
        if node.target in ops.COLLECTIVES
    )
    numbers = {name: number for number, name in enumerate(find_segments(gm))}
    segments = tuple(numbers[node.target] for node in gm.graph.find_nodes(op="call_module"))
    return RankProgram(gm, source, load_program(source, title), names, roles, schedule, segments=segments)


def load_program(source: str, title: str) -> ProgramFunction:
    """Execute a printed program and return its function; tracebacks show its lines."""
    filename = f"<pcp_spec {title} {abs(hash(source)):x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope: dict[str, Any] = {"__name__": "pcp_spec_program"}
    exec(compile(source, filename, "exec"), scope)
    function: ProgramFunction = scope["program"]
    return function


def run_example(
    program: Callable[..., Any], inputs: Sequence[InputSpec], *, pcp_size: int, num_tokens: int
) -> list[Sequence[Any]]:
    """Run a printed program for all ranks on random inputs and print what came out; its `__main__`.

    Args:
        inputs: name, dtype, sizes ("T" and others by name), role of index tensors, bound of integers.
        num_tokens: T.
    """
    partition = partition_batch([num_tokens], [True], pcp_size=pcp_size, shard_decode=False)
    generator = torch.Generator().manual_seed(0)
    caller = [_random_input(spec, num_tokens, generator) for spec in inputs if spec[3] is None]
    roles = [spec[3] for spec in inputs if spec[3] is not None]
    index = [index_tensors(partition, rank, torch.device("cpu")) for rank in range(pcp_size)]
    done = run_lockstep([program(*caller, *(index[rank][role] for role in roles)) for rank in range(pcp_size)])
    print(f"{num_tokens} tokens on {pcp_size} ranks: {list(partition.per_rank)} rows, width {partition.width}")
    print(f"{len(done.collectives)} collectives: {', '.join(c.name for c in done.collectives[:6])} ...")
    for position, value in enumerate(done.outputs[0]):
        print(f"result {position}: {value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else value)
    return done.outputs


def _random_input(spec: InputSpec, num_tokens: int, generator: torch.Generator) -> Tensor | int:
    name, dtype, sizes, _, bound = spec
    shape = [_size_number(name, num_tokens if size == "T" else size) for size in sizes]
    if dtype is None:
        return shape[0]
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype) / 16
    if "position" in name:
        return torch.arange(num_tokens).expand(shape).to(dtype)
    return torch.randint(0, bound or 2, shape, generator=generator).to(dtype)


def _size_number(name: str, size: int | str) -> int:
    if isinstance(size, str):
        raise ValueError(f"input {name}: size {size} is not known; edit INPUTS")
    return size

"""Measure what compiling costs: Dynamo, AOT, passes, code generation and the first run, for two depths and some P.

The model is a Llama of SmolLM2-135M's width with random weights. Two ways in: `pcp_compiler.compile`, what a user
calls, and `trace_module`, what `inspect` and the decoder use, where one trace serves every P.

    python benchmarks/compile_time.py [--layers 8 30] [--ranks 1 4 8] [--attention sdpa pcp_spec] [--json out.json]

Run it on an idle machine: steps are wall seconds, and CPU seconds beside the total tell whether something else ran. The
exit code is 1 when a `must` of `TARGETS` does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from functorch.compile import aot_module_simplified
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import pcp_compiler
import pcp_compiler.integrations.transformers  # registers attn_implementation="pcp_spec"
from pcp_compiler.backends import pcp_spec
from pcp_compiler.backends.compilation import Compilation
from pcp_compiler.config import load_config
from pcp_compiler.pipeline import Lowered
from pcp_compiler.trace import trace_module

NUM_TOKENS = 64
DEEP = 30
TARGETS = {"compile": (20.0, 13.0), "trace_module": (7.0, 4.0), "passes": (2.0, 2.0)}
"""Wall seconds at 30 layers on an idle 2-core machine: must, aim."""
LINEAR_SLACK = 1.5
"""Passes count as linear when a node of the deepest model costs at most so many times one of the shallowest."""
STEPS = ("trace", "dynamo", "aot", "passes", "codegen", "first run")


@dataclass(slots=True)
class Row:
    """What one model cost for one number of ranks."""

    route: str
    attention: str
    num_layers: int
    pcp_size: int
    num_nodes: int = 0
    steps_s: dict[str, float] = field(default_factory=dict)
    """Wall seconds of each step that this way in has; "trace" is missing where an earlier trace served."""
    total_s: float = 0.0
    cpu_s: float = 0.0


@contextmanager
def clock(row: Row, step: str) -> Iterator[None]:
    """Add the wall seconds of what runs inside to a step of a row."""
    started = time.perf_counter()
    yield
    row.steps_s[step] = row.steps_s.get(step, 0.0) + time.perf_counter() - started


def clocked(row: Row, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that adds its time to a step."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with clock(row, step):
            return function(*args, **kwargs)

    return run


def make_model(num_layers: int, attention: str) -> LlamaForCausalLM:
    """Return a Llama of SmolLM2-135M's width in float32, random weights, tied embeddings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=num_layers, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True,
    )  # fmt: skip
    config._attn_implementation = attention
    model = LlamaForCausalLM(config)
    model.train(False)
    return model


def split_lowering(row: Row, lowered: Lowered, lowering_s: float) -> None:
    """Divide the time of a lowering into passes (with the checks after each) and the rest, which prints the program."""
    row.num_nodes = lowered.stages[0].num_nodes
    row.steps_s["passes"] = sum(stage.pass_ms + stage.check_ms for stage in lowered.stages) / 1e3
    row.steps_s["codegen"] = lowering_s - row.steps_s["passes"]


def measure_compile(model: LlamaForCausalLM, row: Row, input_ids: Tensor) -> None:
    """Measure the first call of `pcp_compiler.compile`; what is neither AOT nor ours nor a run is Dynamo."""
    torch._dynamo.reset()
    aot = clocked(row, "aot", aot_module_simplified)
    ours = clocked(row, "ours", Compilation)
    with patch.object(pcp_spec, "aot_module_simplified", aot), patch.object(pcp_spec, "Compilation", ours):
        compiled = pcp_compiler.compile(model, {"parallel.pcp_size": row.pcp_size})
        wall, cpu = time.perf_counter(), time.process_time()
        compiled(input_ids, use_cache=False)
        row.total_s, row.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    with clock(row, "first run"):
        compiled(input_ids, use_cache=False)
    (entry,) = pcp_compiler.compilations(compiled)
    ours_s = row.steps_s.pop("ours")
    row.steps_s["aot"] -= ours_s
    row.steps_s["dynamo"] = row.total_s - ours_s - row.steps_s["aot"] - row.steps_s["first run"]
    split_lowering(row, entry.lowered, ours_s)


def measure_trace(model: LlamaForCausalLM, rows: Sequence[Row], input_ids: Tensor) -> Iterator[None]:
    """Measure one trace, and with it the lowering and the first run for each row's P; yields after each row."""
    arguments: tuple[tuple[Tensor], dict[str, Any]] = ((input_ids,), {"use_cache": False})
    wall, cpu = time.perf_counter(), time.process_time()
    with clock(rows[0], "trace"):
        traced = trace_module(model, *arguments)
    for row in rows:
        started = time.perf_counter()
        compilation = Compilation(load_config({"parallel.pcp_size": row.pcp_size}), traced.trace)
        split_lowering(row, compilation.lowered, time.perf_counter() - started)
        with clock(row, "first run"):
            compilation.run(traced.flat_inputs(*arguments))
        row.total_s, row.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        yield
        wall, cpu = time.perf_counter(), time.process_time()


def measure(
    layers: Iterable[int], ranks: Sequence[int], attentions: Sequence[str], routes: Sequence[str], console: Console
) -> list[Row]:
    """Return a row for each way in, attention implementation, depth and P."""
    input_ids = torch.randint(0, 49152, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    cases = [(attention, depth) for attention in attentions for depth in layers]
    done: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("compile", total=len(cases) * len(ranks) * len(routes))
        for attention, depth in cases:
            model = make_model(depth, attention)
            for route in routes:
                rows = [Row(route, attention, depth, size) for size in ranks]
                progress.update(task, description=f"{route}, {attention}, {depth} layers")
                if route == "trace_module":
                    for _ in measure_trace(model, rows, input_ids):
                        progress.advance(task)
                else:
                    for row in rows:
                        measure_compile(model, row, input_ids)
                        progress.advance(task)
                done += rows
    return done


def find_misses(rows: Sequence[Row]) -> Iterator[tuple[bool, str]]:
    """Yield what is over a target: whether it is a `must`, and a sentence."""
    for row in rows:
        if row.num_layers != DEEP:
            continue
        name = f"{row.route}, {row.attention}, P = {row.pcp_size}"
        spans = {"passes": row.steps_s["passes"]}
        if row.route == "compile":
            spans["compile"] = row.total_s
        elif "trace" in row.steps_s:
            spans["trace_module"] = row.steps_s["trace"]
        for step, seconds in spans.items():
            must, aim = TARGETS[step]
            if seconds > aim:
                yield seconds > must, f"{name}: {step} took {seconds:.1f} s; must {must:g}, aim {aim:g}"
    yield from find_superlinear(rows)


def find_superlinear(rows: Sequence[Row]) -> Iterator[tuple[bool, str]]:
    """Yield a miss for each case in which the passes cost more per node in the deepest model than in the shallowest."""
    cases = {(row.route, row.attention, row.pcp_size) for row in rows if row.pcp_size > 1}  # nothing is sharded on one
    for case in sorted(cases):
        found = [row for row in rows if (row.route, row.attention, row.pcp_size) == case]
        per_node = {row.num_layers: row.steps_s["passes"] / row.num_nodes for row in found}
        ratio = per_node[max(per_node)] / per_node[min(per_node)]
        if ratio > LINEAR_SLACK:
            yield True, f"{case}: a node costs {ratio:.2f} times as much at {max(per_node)} layers; must {LINEAR_SLACK}"


def make_table(rows: Sequence[Row]) -> Table:
    """Return all rows as one table."""
    table = Table(title=f"seconds to compile and run {NUM_TOKENS} tokens")
    for name in ("way in", "attention", "layers", "P", "nodes", *STEPS, "total", "CPU"):
        table.add_column(name, justify="left" if name in ("way in", "attention") else "right")
    for row in rows:
        steps = [f"{row.steps_s[step]:.2f}" if step in row.steps_s else "-" for step in STEPS]
        head = (row.route, row.attention, str(row.num_layers), str(row.pcp_size), str(row.num_nodes))
        table.add_row(*head, *steps, f"{row.total_s:.2f}", f"{row.cpu_s:.2f}")
    return table


def describe_machine() -> dict[str, str]:
    """Return what the numbers depend on."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpus": str(os.cpu_count()),
        "machine": platform.machine(),
        "load before": f"{os.getloadavg()[0]:.2f}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, DEEP])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--attention", nargs="+", choices=["sdpa", "pcp_spec"], default=["sdpa", "pcp_spec"])
    parser.add_argument("--routes", nargs="+", choices=["compile", "trace_module"], default=["trace_module", "compile"])
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    options = parser.parse_args()
    console = Console()
    machine = describe_machine()
    trace_module(make_model(1, "sdpa"), (torch.ones(1, 4, dtype=torch.int64),), {"use_cache": False})  # imports, caches
    rows = measure(options.layers, options.ranks, options.attention, options.routes, console)
    misses = list(find_misses(rows))
    console.print(make_table(rows))
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()))
    for is_must, text in misses:
        console.print(("MUST MISSED " if is_must else "aim missed ") + text)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"
        )
    return int(any(is_must for is_must, _ in misses))


if __name__ == "__main__":
    sys.exit(main())

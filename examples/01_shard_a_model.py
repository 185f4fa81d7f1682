"""Shard SmolLM2-135M-Instruct over 1, 2, 4 and 8 virtual PCP ranks and compare every run with eager PyTorch.

Part 1 goes the usual way, `torch.compile(model, backend="pcp_spec")`. Part 2 traces the model once and lowers that one
trace for each number of ranks. Both use a short GSM8K prompt and one with five worked examples. The exit code is 1
when a result differs from eager, or when it is not proven that the sharded program ran.

    python examples/01_shard_a_model.py [--questions 2] [--ranks 1 2 4 8] [--dump folder]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import pcp_compiler
import smollm2
from pcp_compiler.backends.compilation import CallRecord, Compilation
from pcp_compiler.trace import ModuleTrace, trace_module

LARGEST_DIFFERENCE = 2e-3
"""Allowed |logit difference| to eager; fp32 logits of this model reach about 30, and sums run in another order."""
TABLE_WIDTH = 112
MEMORY_RATIO = 1.3
"""Allowed peak memory of the largest number of ranks, as a multiple of one rank's."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and what eager PyTorch makes of it: logits [1, T, V]."""

    name: str
    input_ids: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Row:
    """One line of the result table."""

    num_ranks: int
    prompt: Prompt
    record: CallRecord
    difference: float
    same_argmax: bool
    run_s: float
    peak_mib: float | None

    @property
    def fault(self) -> str | None:
        """What is wrong with the run, if anything."""
        if not self.same_argmax or not self.difference <= LARGEST_DIFFERENCE:
            return f"P = {self.num_ranks}, {self.prompt.name}: differs from eager by {self.difference:.1e}"
        if self.num_ranks > 1 and not (self.record.is_sharded and self.record.width < self.record.num_tokens):
            return f"P = {self.num_ranks}, {self.prompt.name}: the sharded program did not run"
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=2, metavar="N", help="questions to run, 1 to 20 (default 2)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], metavar="P", help="numbers of ranks")
    parser.add_argument("--dump", metavar="FOLDER", help="write what the compiler did to FOLDER/pcp_<P>")
    options = parser.parse_args()
    if not 1 <= options.questions <= len(smollm2.questions()):
        parser.error(f"--questions: got {options.questions}; allowed: 1 to {len(smollm2.questions())}")
    if any(ranks < 1 for ranks in options.ranks):
        parser.error(f"--ranks: got {options.ranks}; allowed: numbers >= 1")
    console = Console(width=max(Console().width, TABLE_WIDTH))
    steps = 2 + 2 * options.questions + len(options.ranks) * (1 + 2 * options.questions)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("loading SmolLM2-135M-Instruct", total=steps)

        def step(text: str) -> None:
            progress.update(task, advance=1, description=text)

        model = smollm2.load_model()
        step("eager PyTorch")
        prompts = list(eager_prompts(model, options.questions, step))
        through_torch_compile(model, prompts[:2], console)
        step("tracing once")
        started = time.perf_counter()
        traced = trace_module(model, (prompts[0].input_ids,), {"use_cache": False})
        console.print(f"\nOne trace for every length and every P: {time.perf_counter() - started:.1f} s")
        rows = [row for ranks in options.ranks for row in sweep(traced, ranks, prompts, options.dump, step, console)]
    console.print(result_table(rows))
    faults = [fault for row in rows if (fault := row.fault)] + list(memory_faults(rows))
    for fault in faults:
        console.print(f"[red]FAILED[/red] {fault}")
    if not faults:
        console.print(f"All {len(rows)} runs equal eager; every sharded run was proven to be sharded.")
    return bool(faults)


def eager_prompts(model: nn.Module, num_questions: int, step) -> list[Prompt]:  # type: ignore[no-untyped-def]
    """Run the plain model on a short and a 5-shot prompt for each question."""
    prompts = []
    for number, question in enumerate(smollm2.questions()[:num_questions]):
        for name, shots in (("short", []), ("5-shot", smollm2.shots())):
            input_ids = smollm2.gsm8k_prompt(question, shots)
            with torch.no_grad():
                prompts.append(Prompt(f"{number} {name}", input_ids, model(input_ids, use_cache=False).logits))
            step(f"eager PyTorch, question {number} {name}")
    return prompts


def through_torch_compile(model: nn.Module, prompts: list[Prompt], console: Console) -> None:
    """The usual way: one line, then call the model as ever."""
    compiled = pcp_compiler.compile(model, {"parallel": {"pcp_size": 4}})
    started = time.perf_counter()
    for prompt in prompts:
        logits = compiled(prompt.input_ids, use_cache=False).logits
        torch.testing.assert_close(logits, prompt.logits, atol=LARGEST_DIFFERENCE, rtol=0)
    records = pcp_compiler.assert_sharded(compiled, calls=len(prompts), pcp_size=4)
    rows = ", ".join(f"{list(record.rows_per_rank)} of {record.num_tokens}" for record in records)
    console.print(
        f"torch.compile(model, backend='pcp_spec'), pcp_size 4: equal to eager, rows per rank {rows} "
        f"({time.perf_counter() - started:.1f} s with compiling)"
    )


def sweep(traced: ModuleTrace, num_ranks: int, prompts: list[Prompt], dump: str | None, step, console: Console):  # type: ignore[no-untyped-def]
    """Lower the trace for a number of ranks and run all prompts."""
    config = pcp_compiler.load_config({"parallel": {"pcp_size": num_ranks}})
    started = time.perf_counter()
    compilation = Compilation(config, traced.trace, name="SmolLM2-135M-Instruct")
    console.print(f"P = {num_ranks}: passes and program {time.perf_counter() - started:.1f} s")
    step(f"P = {num_ranks}")
    if dump is not None:
        compilation.write(Path(dump) / f"pcp_{num_ranks}")
    for prompt in prompts:
        reset_peak_memory()
        started = time.perf_counter()
        flat = compilation.run(traced.flat_inputs((prompt.input_ids,), {"use_cache": False}))
        run_s = time.perf_counter() - started
        peak = peak_memory_mib()
        logits = traced.rebuild(flat).logits
        yield Row(
            num_ranks, prompt, compilation.calls[-1], (logits - prompt.logits).abs().max().item(),
            torch.equal(logits.argmax(-1), prompt.logits.argmax(-1)), run_s, peak,
        )  # fmt: skip
        step(f"P = {num_ranks}, question {prompt.name}")


def result_table(rows: list[Row]) -> Table:
    """Show all runs."""
    table = Table(title="SmolLM2-135M-Instruct, fp32, virtual ranks", box=None, pad_edge=False)
    for heading in ("P", "prompt", "tokens", "rows per\nrank", "balance\nof work", "collec-\ntives", "MiB\nreceived",
                    "max |logit\ndifference|", "argmax", "run\ns", "peak\nMiB"):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        record = row.record
        table.add_row(
            str(row.num_ranks), row.prompt.name, str(record.num_tokens), rows_text(record.rows_per_rank),
            f"{record.attention_balance:.3f}", str(len(record.collectives)),
            f"{sum(c.received_bytes for c in record.collectives) / 2**20:.1f}", f"{row.difference:.1e}",
            "same" if row.same_argmax else "OTHER", f"{row.run_s:.2f}",
            "-" if row.peak_mib is None else f"{row.peak_mib:.0f}",
        )  # fmt: skip
    return table


def rows_text(rows_per_rank: tuple[int, ...]) -> str:
    """Write runs of equal counts short: 77 92x7."""
    groups = [(rows, len(list(group))) for rows, group in itertools.groupby(rows_per_rank)]
    return " ".join(f"{rows}x{count}" if count > 1 else str(rows) for rows, count in groups)


def memory_faults(rows: list[Row]):  # type: ignore[no-untyped-def]
    """Compare the peak memory of the fewest and the most ranks on the longest prompt: the weights exist once."""
    longest = max(row.record.num_tokens for row in rows)
    peaks = {row.num_ranks: row.peak_mib for row in rows if row.record.num_tokens == longest and row.peak_mib}
    if len(peaks) > 1:
        ratio = peaks[max(peaks)] / peaks[min(peaks)]
        if ratio > MEMORY_RATIO:
            yield f"peak memory at P = {max(peaks)} is {ratio:.2f} times P = {min(peaks)}'s, allowed {MEMORY_RATIO}"


def reset_peak_memory() -> None:
    """Let the kernel start counting this process's peak anew (Linux)."""
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mib() -> float | None:
    """Return the largest resident memory since the reset in MiB; None where the kernel does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), None)


if __name__ == "__main__":
    sys.exit(main())

"""Run the whole support matrix and write it to a Markdown file; `make matrix`.

It stands with the tests, not in benchmarks/, since it measures nothing: its cells are those of test_matrix.py, all of
them. Exit code 1 when a variant that must be equal is not, or when one that must be refused runs.

    python -m tests.matrix.generate docs/support_matrix.md
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import Progress

from tests.matrix.cells import VariantResult, check_torch_compile, run_variant
from tests.matrix.families import VARIANTS, Variant

PCP_SIZES = (1, 2, 3, 4, 8)
COMPILED_ON, COMPILED_LENGTHS = 4, (19, 64, 7)
HEADER = """# Support matrix

Written by `make matrix`; do not edit. torch {torch}, transformers {transformers}, CPU, tiny models with random weights.

Each row is one way to load one family, traced once. The trace is lowered for {sizes} ranks, and on each it runs prompts
of 1, 2, P - 1, P, 2P - 1, 2P, 2P + 1, 64 and 129 tokens, and none, which must be an error as it is in eager. Every run
is compared at all positions with transformers' own eager attention and experts, and must prove that the ranks shared
the rows: fewer rows per rank than tokens, all collectives run. "Difference" is the largest one, over the largest
|logit|. Families without a row have not been tried.

{total}

| family | attention | experts | dtype | cells equal | refused | difference | allowed |
|---|---|---|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="Markdown file to write")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="run the variants with TEXT in their name; writes no file"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # the models are too small to share
    console = Console(highlight=False, width=160)
    chosen = [variant for variant in VARIANTS if options.only in variant.name]
    families = first_of_each_family(chosen)
    results: list[VariantResult] = []
    faults: list[str] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(chosen) + len(families))
        for variant in chosen:
            progress.update(task, description=variant.name)
            started = time.perf_counter()
            results.append(run_variant(variant, PCP_SIZES))
            console.print(line(results[-1]), f"{time.perf_counter() - started:.1f} s")
            progress.advance(task)
        for variant in families:
            progress.update(task, description=f"torch.compile {variant.name}")
            faults += compile_faults(variant)
            progress.advance(task)
    faults += [f"{result.variant.name}: {result.fault}" for result in results if result.fault is not None]
    console.print(f"{total(results)}; {len(families)} families through torch.compile")
    for fault in faults:
        console.print(f"[red]FAILED[/red] {fault}")
    if not options.only:
        options.file.write_text(markdown(results))
    return bool(faults or not chosen)


def first_of_each_family(variants: Sequence[Variant]) -> list[Variant]:
    """Return the first variant of each family that must be equal."""
    found: dict[str, Variant] = {}
    for variant in variants:
        if variant.refusal is None:
            found.setdefault(variant.family, variant)
    return list(found.values())


def compile_faults(variant: Variant) -> Iterator[str]:
    """Yield what is wrong with a variant that goes through torch.compile."""
    for cell in check_torch_compile(variant, COMPILED_ON, COMPILED_LENGTHS):
        if cell.outcome != "equal":
            yield f"torch.compile, {variant.name}, T = {cell.num_tokens}: {cell.reason}"


def line(result: VariantResult) -> str:
    """Return one variant for the terminal."""
    counts = f"{result.count('equal')} equal, {result.count('refused')} refused, {result.count('failed')} failed"
    reason = f" ({result.refusal})" if result.refusal else ""
    return f"{result.variant.name:42} {counts}{reason}, difference {result.worst:.0e}"


def total(results: Sequence[VariantResult]) -> str:
    """Return the counts of all cells."""
    counts = {outcome: sum(r.count(outcome) for r in results) for outcome in ("equal", "refused", "failed")}
    return f"{counts['equal']} cells equal, {counts['refused']} refused, {counts['failed']} failed"


def markdown(results: Sequence[VariantResult]) -> str:
    """Return the file."""
    text = HEADER.format(
        torch=torch.__version__.split("+")[0], transformers=transformers.__version__,
        sizes=", ".join(map(str, PCP_SIZES)), total=f"{total(results)}.",
    )  # fmt: skip
    rows = [
        [v.family, v.attention, v.experts or "", str(v.dtype).removeprefix("torch."),
         f"{r.count('equal')} of {len(r.cells)}", str(r.count("refused")) if r.count("refused") else "",
         f"{r.worst:.0e}" if r.worst else "0", f"{v.tolerance:.0e}"]
        for r in results for v in [r.variant]
    ]  # fmt: skip
    text += "".join(f"| {' | '.join(row)} |\n" for row in rows)
    refused = [(result.variant.name, result.refusal) for result in results if result.refusal]
    return text + "\nRefused:\n\n" + "".join(f"- {name}: {reason}\n" for name, reason in refused)


if __name__ == "__main__":
    sys.exit(main())

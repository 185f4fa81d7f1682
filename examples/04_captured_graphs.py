"""SmolLM2-135M-Instruct with its MTP drafter, captured: what was replayed, what ran eagerly and why, what was padding.

    python examples/04_captured_graphs.py --prompts 2 --tokens 12 --mode full_and_piecewise

On a GPU captures are CUDA graphs; on a CPU the executor `replay` emulates them, which is slow and strict. Prompts are
GSM8K questions. The same is generated without captures first; both must be the same tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import pcp_compiler
import smollm2
from pcp_compiler.runtime.cached_model import CompileCache
from pcp_compiler.runtime.captures import CaptureStats

DRAFTER = smollm2.DATA.parent / "drafters" / "smollm2-135m-mtp"
MODES = ("full_and_piecewise", "full_decode", "piecewise")


def main() -> int:
    """Generate without and with captures; return 1 if the tokens differ or nothing was replayed."""
    options = parse_arguments()
    console = Console()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with console.status("loading SmolLM2-135M-Instruct"):
        model: Any = smollm2.load_model()
        model.to(device)
        prompts = load_prompts(options.prompts)
    compile_cache = CompileCache()
    params = pcp_compiler.SamplingParams(options.tokens, stop_token_ids=(smollm2.load_tokenizer().eos_token_id,))
    outputs = {}
    for mode in ("none", options.mode):
        started = time.perf_counter()
        with console.status(f"compiling for {options.ranks} ranks, captures: {mode}"):
            config = make_config(options, mode, device)
            decoder = pcp_compiler.SpeculativeDecoder(model, config, compile_cache=compile_cache)
        built = time.perf_counter()
        outputs[mode] = [generation.token_ids for generation in decoder.generate(prompts, params)]
        done = time.perf_counter()
        console.print(f"captures {mode}: built in {built - started:.1f} s, generated in {done - built:.1f} s")
    print_texts(console, outputs[options.mode])
    stats = decoder.capture_stats()
    console.print(runs_table(stats))
    print_summary(console, stats)
    if outputs[options.mode] != outputs["none"]:
        console.print("[red]FAILED[/red] captures changed the output")
        return 1
    if not stats.num_replays:
        console.print("[red]FAILED[/red] nothing was replayed")
        return 1
    console.print("The same tokens as without captures.")
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2, metavar="N", help="questions, 1 to 20 (default 2)")
    parser.add_argument("--tokens", type=int, default=12, metavar="N", help="most new tokens each (default 12)")
    parser.add_argument("--ranks", type=int, default=2, metavar="P", help="virtual ranks (default 2)")
    parser.add_argument("--mode", choices=MODES, default=MODES[0], help=f"what is captured (default {MODES[0]})")
    parser.add_argument("--sizes", type=int, nargs="*", default=[8], metavar="N", help="capture sizes (default 8)")
    parser.add_argument(
        "--contexts", type=int, nargs="*", default=[128], metavar="N", help="context buckets beside 512 (default 128)"
    )
    options = parser.parse_args()
    for name, lowest in (("prompts", 1), ("tokens", 1), ("ranks", 1)):
        if getattr(options, name) < lowest:
            parser.error(f"--{name}: got {getattr(options, name)}; allowed: numbers >= {lowest}")
    if options.prompts > len(smollm2.questions()):
        parser.error(f"--prompts: got {options.prompts}; allowed: 1 to {len(smollm2.questions())}")
    return options


def load_prompts(count: int) -> list[list[int]]:
    """Return the shortest questions as token ids."""
    prompts = [smollm2.gsm8k_prompt(question)[0].tolist() for question in smollm2.questions()]
    return sorted(prompts, key=len)[:count]


def make_config(options: argparse.Namespace, mode: str, device: str) -> dict[str, Any]:
    """Return the config of a decoder."""
    return {
        "parallel": {"pcp_size": options.ranks},
        "draft": {"method": "mtp", "model": str(DRAFTER), "num_speculative_tokens": 3},
        "limits": {"max_model_len": 512, "max_num_requests": 2, "max_num_tokens": 64},
        "capture": {
            "mode": mode, "executor": "cuda_graph" if device == "cuda" else "replay",
            "sizes": options.sizes, "context_buckets": options.contexts,
        },
    }  # fmt: skip


def print_texts(console: Console, outputs: list[list[int]]) -> None:
    """Show each answer."""
    tokenizer = smollm2.load_tokenizer()
    for number, token_ids in enumerate(outputs):
        console.rule(f"question {number}")
        console.print(tokenizer.decode(token_ids), markup=False, highlight=False)
    console.rule()


def runs_table(stats: CaptureStats) -> Table:
    """Show how often each program ran, by what it replayed, or eagerly and why."""
    table = Table(box=None, pad_edge=False, title="runs of programs")
    for heading in ("program", "replayed", "eager", "capture, or why there was none"):
        table.add_column(heading, justify="right" if heading in ("replayed", "eager") else "left")
    for name, count in sorted(stats.hits.items()):
        program, _, key = name.partition(": ")
        table.add_row(program, str(count), "", key)
    for name, count in sorted(stats.misses.items()):
        program, _, reason = name.partition(": ")
        table.add_row(program, "", str(count), reason)
    return table


def print_summary(console: Console, stats: CaptureStats) -> None:
    """Show the sums over all programs, and over the pieces of those that run in such."""
    console.print(
        f"{stats.num_captures} whole programs captured ({stats.num_bytes / 2**20:.1f} MiB), {stats.num_replays} runs "
        f"replayed, {stats.misses.total()} eager, {stats.pad_waste:.0%} of the replayed rows were padding"
    )
    if stats.num_piece_captures:
        num_bytes = sum(pieces.num_bytes for pieces in stats.pieces)
        num_eager = sum(pieces.num_eager for pieces in stats.pieces)
        console.print(
            f"{stats.num_piece_captures} pieces captured ({num_bytes / 2**20:.1f} MiB) and {stats.num_piece_replays} "
            f"times replayed, on all ranks; {num_eager} other segments ran as they are"
        )


if __name__ == "__main__":
    sys.exit(main())

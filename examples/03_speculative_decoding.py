"""SmolLM2-135M-Instruct with its MTP drafter on virtual PCP ranks: the text, how much was accepted, who ran which rows.

    python examples/03_speculative_decoding.py --prompts 2 --tokens 48 --mode sharded

Prompts are GSM8K questions. The answer without a drafter is generated too; both must be the same tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import pcp_compiler
import smollm2
from pcp_compiler.runtime.cached_model import CompileCache

DRAFTER = Path(__file__).parent / "drafters" / "smollm2-135m-mtp"
MODES = ("auto", "sharded", "replicated")


def main() -> int:
    """Generate with and without the drafter; return 1 if the tokens differ."""
    options = parse_arguments()
    console = Console()
    with console.status("loading SmolLM2-135M-Instruct"):
        model = smollm2.load_model()
        prompts = [smollm2.gsm8k_prompt(question)[0].tolist() for question in smollm2.questions()[: options.prompts]]
    compile_cache = CompileCache()
    params = pcp_compiler.SamplingParams(options.tokens, stop_token_ids=(smollm2.load_tokenizer().eos_token_id,))
    outputs = {}
    for name in ("none", "mtp"):
        with console.status(f"compiling for {options.ranks} ranks, drafter: {name}"):
            decoder = pcp_compiler.SpeculativeDecoder(model, make_config(options, name), compile_cache=compile_cache)
        started = time.perf_counter()
        outputs[name] = decoder.generate(prompts, params)
        seconds = time.perf_counter() - started
        num_tokens = sum(len(generation.token_ids) for generation in outputs[name])
        console.print(f"drafter {name}: {num_tokens} tokens in {seconds:.1f} s")
    print_texts(console, outputs["mtp"])
    console.print(summary(decoder))
    if [g.token_ids for g in outputs["mtp"]] != [g.token_ids for g in outputs["none"]]:
        console.print("[red]FAILED[/red] the drafter changed the output")
        return 1
    console.print("The same tokens as without a drafter.")
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2, metavar="N", help="questions, 1 to 20 (default 2)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="most new tokens each (default 32)")
    parser.add_argument("--ranks", type=int, default=4, metavar="P", help="virtual ranks (default 4)")
    parser.add_argument("--drafts", type=int, default=3, metavar="K", help="draft tokens a round (default 3)")
    parser.add_argument("--mode", choices=MODES, default="auto", help="rows of the drafter's first pass (default auto)")
    options = parser.parse_args()
    for name, lowest in (("prompts", 1), ("tokens", 1), ("ranks", 1), ("drafts", 0)):
        if getattr(options, name) < lowest:
            parser.error(f"--{name}: got {getattr(options, name)}; allowed: numbers >= {lowest}")
    if options.prompts > len(smollm2.questions()):
        parser.error(f"--prompts: got {options.prompts}; allowed: 1 to {len(smollm2.questions())}")
    return options


def make_config(options: argparse.Namespace, method: str) -> dict[str, object]:
    """Return the config of a decoder; method "none" has no drafter."""
    draft = {"method": method, "model": str(DRAFTER), "mode": options.mode, "num_speculative_tokens": options.drafts}
    return {
        "parallel": {"pcp_size": options.ranks},
        "limits": {"max_model_len": 1024, "max_num_requests": 8, "prefill_chunk": 256},
        **({"draft": draft} if method != "none" else {}),
    }


def print_texts(console: Console, generations: list[pcp_compiler.Generation]) -> None:
    """Show each answer with its acceptance."""
    tokenizer = smollm2.load_tokenizer()
    for number, generation in enumerate(generations):
        stats = generation.stats
        share = ", ".join(f"{rate:.0%}" for rate in stats.per_position)
        console.rule(f"question {number}: {stats.acceptance_length:.2f} tokens a round, accepted by position {share}")
        console.print(tokenizer.decode(generation.token_ids), markup=False, highlight=False)
        for tie in generation.ties:
            console.print(f"close call at position {tie.position}: {tie.token_ids}, {tie.margin:.1e} apart")
    console.rule()


def summary(decoder: pcp_compiler.SpeculativeDecoder) -> Table:
    """Show what target and drafter ran."""
    table = Table(box=None, pad_edge=False, title=f"acceptance rate {decoder.acceptance.acceptance_rate:.1%}")
    for heading in (
        "",
        "sharded\nruns",
        "rows of the\nbatch in them",
        "rows of\na rank",
        "collec-\ntives",
        "whole\nruns",
    ):
        table.add_column(heading, justify="right")
    proposer = decoder.proposer
    assert proposer is not None
    for model in (decoder.target, *proposer.models):
        counts = model.counts
        table.add_row(
            model.name, *map(str, (counts.num_sharded, counts.num_global_rows, counts.num_rows, counts.num_collectives,
                                   counts.num_whole)),
        )  # fmt: skip
    table.caption = f"drafter: {proposer.mode}"
    chains = getattr(proposer, "chains", None)
    if chains is not None and chains.counts.num_proposals:
        made = chains.counts
        table.caption += (
            f"; attention metadata of {made.num_proposals} proposals: first passes {made.first_builds} builds, "
            f"chains {made.builds} builds and {made.advances} advances"
        )
    return table


if __name__ == "__main__":
    sys.exit(main())

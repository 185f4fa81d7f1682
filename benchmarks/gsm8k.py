"""Solve GSM8K questions with SmolLM2-135M-Instruct and its MTP drafter; measure answers, acceptance and speed.

One run prints one row. `--table` runs greedy, probabilistic, and probabilistic with a K schedule, each with P = 1 and
P = 4, and prints the differences of P = 4 to P = 1 with the same settings. Answers are scored by the last number
in the text. Agreement: every greedy output is checked token by token against plain greedy decoding of the eager
model, by running it once over prompt and output. The first differing token is a tie flip when the model in float32,
which decides, gives it a logit within `--tie-margin` of its best: below that bfloat16 cannot tell the two apart.
`eager's own` is how far below the best, in float32, the eager model's choice was at worst at these places. The exit
code is 1 when a greedy output differs and it is no tie.

    python benchmarks/gsm8k.py --count 20 --max-new-tokens 64 --pcp 4 --mode sharded
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import smollm2  # noqa: E402
from pcp_compiler import Generation, SamplingParams, SpeculativeDecoder  # noqa: E402

SCHEDULE = [[1, 8, 3], [9, 16, 2], [17, 32, 1]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """Results of one configuration; `acceptance_error` is the standard error of the rate over prompts."""

    name: str
    num_prompts: int
    correct: float
    invalid: float
    acceptance_rate: float
    acceptance_length: float
    acceptance_error: float
    per_position: list[float]
    tokens: int
    tokens_per_s: float
    equal_outputs: int
    tie_flips: int
    other_flips: int
    largest_gap: float
    """In float32 logits, of our token to the best, over all flips."""
    eager_gap: float
    """The same of the eager model's token."""
    steps_by_k: dict[int, int]
    """Steps by the number of drafts that a request could get in them."""
    counts: dict[str, Any]


def main() -> int:
    options = parse_arguments()
    console = Console(width=150)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = smollm2.load_model(DTYPES[options.dtype]).to(device)
    problems = smollm2.read_problems(Path(options.data))[: options.count]
    shots = smollm2.shots()[: options.shots]
    prompts = [smollm2.gsm8k_prompt(problem.question, shots)[0].tolist() for problem in problems]
    rows, outputs = [], []
    for name, config in configurations(options):
        row, generated = run(name, config, target, prompts, problems, options)
        rows.append(row)
        outputs.append([generation.token_ids for generation in generated])
        steps = ", ".join(f"{count} with K = {k}" for k, count in row.steps_by_k.items())
        console.print(
            f"{name}: {row.tokens_per_s:.0f} tokens/s, acceptance length {row.acceptance_length:.3f}; steps: {steps}"
        )
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    console.print(result_table(rows, outputs, f"{device.type}, torch {torch.__version__}, {options.dtype}"))
    return int(any(row.other_flips for row in rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = EXAMPLES / "data" / "gsm8k_test.jsonl"
    parser.add_argument("--data", default=str(data), help="JSON lines with question and answer")
    parser.add_argument("--count", type=int, default=20, help="questions from the start of the file (default 20)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8, help="requests at once (default 8)")
    parser.add_argument("--k", type=int, default=3, help="draft tokens, 0: no drafter (default 3)")
    parser.add_argument("--schedule", type=json.loads, default=[], help="K by batch size, such as [[1,8,3],[9,32,1]]")
    parser.add_argument("--pcp", type=int, default=1, help="virtual ranks (default 1)")
    parser.add_argument(
        "--mode", choices=["auto", "sharded", "replicated"], default="auto", help="how the drafter runs"
    )
    parser.add_argument("--sampling", choices=["greedy", "probabilistic"], default="greedy")
    parser.add_argument("--temperature", type=float, default=1.0, help="of probabilistic runs (default 1.0)")
    parser.add_argument("--shots", type=int, default=0, choices=range(6), help="worked examples in the prompt")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--tie-margin", type=float, help="default 1e-3 in fp32, 0.5 in bf16")
    parser.add_argument("--prefill-chunk", type=int)
    parser.add_argument("--capture", default="none", help="capture.mode (default none)")
    parser.add_argument("--numerics", default="exact", help="exact or fast (default exact)")
    parser.add_argument("--backend", default="auto", help="attention backend of target and drafter (default auto)")
    parser.add_argument("--table", action="store_true", help="P = 1 and P = 4 side by side, greedy and sampled")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.tie_margin is None:
        options.tie_margin = 1e-3 if options.dtype == "fp32" else 0.5
    return options


def configurations(options: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Return name and config of every run."""
    if not options.table:
        name = f"P = {options.pcp} {options.sampling}, K = {options.schedule or options.k}"
        return [(name, config_of(options, options.pcp, options.sampling, options.schedule))]
    settings = [("greedy", []), ("probabilistic", []), ("probabilistic", SCHEDULE)]
    return [
        (f"P = {pcp_size} {sampling} {schedule or ''}".strip(), config_of(options, pcp_size, sampling, schedule))
        for sampling, schedule in settings
        for pcp_size in (1, 4)
    ]


def config_of(options: argparse.Namespace, pcp_size: int, sampling: str, schedule: list[list[int]]) -> dict[str, Any]:
    """Return the decoder's config for one run."""
    limits = {"max_model_len": 2048, "max_num_requests": options.concurrency, "prefill_chunk": options.prefill_chunk}
    config: dict[str, Any] = {
        "parallel": {"pcp_size": pcp_size}, "limits": limits, "attention": {"backend": options.backend},
        "capture": {"mode": options.capture}, "numerics": options.numerics,
    }  # fmt: skip
    if options.k:
        config["draft"] = {
            "method": "mtp",
            "model": str(EXAMPLES / "drafters" / "smollm2-135m-mtp"),
            "num_speculative_tokens": options.k,
            "mode": options.mode if pcp_size > 1 else "auto",
            "sampling": sampling,
            "k_schedule": schedule,
            "attention_backend": options.backend,
        }
    return config


def run(
    name: str,
    config: dict[str, Any],
    target: nn.Module,
    prompts: list[list[int]],
    problems: list[smollm2.Problem],
    options: argparse.Namespace,
) -> tuple[Row, list[Generation]]:
    """Generate for all prompts and score the outputs."""
    decoder = SpeculativeDecoder(target, config)
    is_greedy = "probabilistic" not in name
    end = smollm2.load_tokenizer().eos_token_id
    temperature = 0.0 if is_greedy else options.temperature
    params = [
        SamplingParams(options.max_new_tokens, temperature=temperature, seed=number, stop_token_ids=(end,))
        for number in range(len(prompts))
    ]
    started = time.perf_counter()
    generated = decoder.generate(prompts, params)
    seconds = time.perf_counter() - started
    found = agreement(target, prompts, generated, options.tie_margin) if is_greedy else Agreement()
    totals = type(generated[0].stats)()
    for generation in generated:
        totals.add(generation.stats)
    answers = [score(generation, problem) for generation, problem in zip(generated, problems, strict=True)]
    rates = torch.tensor([g.stats.acceptance_rate for g in generated if g.stats.num_draft_tokens], dtype=torch.float64)
    tokens = sum(len(generation.token_ids) for generation in generated)
    row = Row(
        name=name,
        num_prompts=len(prompts),
        correct=answers.count("correct") / len(answers),
        invalid=answers.count("invalid") / len(answers),
        acceptance_rate=totals.acceptance_rate,
        acceptance_length=totals.acceptance_length,
        acceptance_error=float(rates.std() / len(rates) ** 0.5) if len(rates) > 1 else 0.0,
        per_position=list(totals.per_position),
        tokens=tokens,
        tokens_per_s=tokens / seconds,
        equal_outputs=found.equal,
        tie_flips=found.ties,
        other_flips=found.others,
        largest_gap=found.largest_gap,
        eager_gap=found.eager_gap,
        steps_by_k=dict(sorted(decoder.num_proposals.items())),
        counts=asdict(decoder.target.counts),
    )
    return row, generated


def score(generation: Generation, problem: smollm2.Problem) -> str:
    """Return correct, wrong or invalid (no number)."""
    text = smollm2.load_tokenizer().decode(generation.token_ids, skip_special_tokens=True)
    numbers = re.findall(r"-?\d[\d,]*\.?\d*", text)
    wanted = problem.answer.rsplit("####", 1)[1].strip().replace(",", "")
    if not numbers:
        return "invalid"
    found = numbers[-1].replace(",", "").rstrip(".")
    return "correct" if float(found) == float(wanted) else "wrong"


@dataclass
class Agreement:
    """How greedy outputs compare with the eager model's; the first difference of an output counts."""

    equal: int = 0
    ties: int = 0
    others: int = 0
    largest_gap: float = 0.0
    eager_gap: float = 0.0


def agreement(target: nn.Module, prompts: list[list[int]], generated: list[Generation], tie_margin: float) -> Agreement:
    """Compare greedy outputs with the eager model in its own type, and where they differ ask it in float32."""
    found = Agreement()
    device = next(target.parameters()).device
    oracle = smollm2.load_model(torch.float32).to(device)
    with torch.no_grad(), Progress(transient=True) as progress:
        for prompt, generation in progress.track(list(zip(prompts, generated, strict=True)), description="checking"):
            ids = torch.tensor([prompt + generation.token_ids], device=device)
            best = target(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(-1)
            differs = (best != ids[0, len(prompt) :]).nonzero()
            if not len(differs):
                found.equal += 1
                continue
            first = int(differs[0])
            logits = oracle(ids[:, : len(prompt) + first], use_cache=False, logits_to_keep=1).logits[0, -1]
            gap = float(logits.max() - logits[generation.token_ids[first]])
            found.ties += gap < tie_margin
            found.others += gap >= tie_margin
            found.largest_gap = max(found.largest_gap, gap)
            found.eager_gap = max(found.eager_gap, float(logits.max() - logits[best[first]]))
    return found


def result_table(rows: list[Row], outputs: list[list[list[int]]], title: str) -> Table:
    """Show all runs; those of a table come in pairs, and the second is held against the first."""
    table = Table(title=f"GSM8K, SmolLM2-135M-Instruct + MTP, {title}", box=None)
    headings = (
        "run", "correct", "invalid", "accept\nrate", "accept\nlength", "tokens/s", "equal to\neager greedy",
        "tie flips,\nothers", "largest gap,\neager's own", "equal to\nP = 1", "rate - P = 1,\nin std errors",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    for number, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        first, first_output = rows[number // 2 * 2], outputs[number // 2 * 2]
        same = sum(a == b for a, b in zip(output, first_output, strict=True))
        error = (row.acceptance_error**2 + first.acceptance_error**2) ** 0.5
        distance = (row.acceptance_rate - first.acceptance_rate) / error if error else 0.0
        checked = "probabilistic" not in row.name
        table.add_row(
            row.name,
            f"{row.correct:.1%}",
            f"{row.invalid:.1%}",
            f"{row.acceptance_rate:.3f}",
            f"{row.acceptance_length:.3f}",
            f"{row.tokens_per_s:.0f}",
            f"{row.equal_outputs}/{row.num_prompts}" if checked else "-",
            f"{row.tie_flips}, {row.other_flips}" if checked else "-",
            f"{row.largest_gap:.3f}, {row.eager_gap:.3f}" if checked else "-",
            f"{same}/{row.num_prompts}" if row is not first else "-",
            f"{distance:+.1f}" if row is not first else "-",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())

"""Run one model over several processes with torchrun, and compare with virtual ranks and with eager PyTorch.

Every process holds the whole model and runs its share of the token rows; all get the whole result. The exit code is 1
when a result differs, or when it is not proven that each process ran only its share.

    torchrun --standalone --nproc-per-node 4 examples/02_torchrun.py [--model tiny|smollm2] [--kill-rank R]

`--kill-rank R` shows what happens when a process dies in the middle of a call: the others end with an error that
names it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import pcp_compiler
from pcp_compiler.errors import RankError

LARGEST_DIFFERENCE = {"tiny": 1e-5, "smollm2": 2e-3}
"""Allowed |logit difference| to eager: fp32, and sums run in another order. To virtual ranks: none."""
LENGTHS = {"tiny": (5, 64, 333), "smollm2": (5, 257)}
KILL_AFTER_S = 1.0


class Outcome(NamedTuple):
    """One prompt on one rank."""

    num_tokens: int
    own_rows: int
    width: int
    is_sharded: bool
    num_collectives: int
    received_bytes: int
    to_eager: float
    to_virtual: float
    run_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=LENGTHS, default="tiny", help="random two-layer Llama, or SmolLM2-135M")
    parser.add_argument("--kill-rank", type=int, metavar="R", help="let rank R die in the middle of a call")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as above")
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    model = load_model(options.model)
    with torch.no_grad():
        if options.kill_rank is not None:
            return call_until_killed(model, options.kill_rank)
        outcomes = compare(model, LENGTHS[options.model])
    return report(outcomes, LARGEST_DIFFERENCE[options.model])


def load_model(name: str) -> nn.Module:
    """Return the model, the same on every rank."""
    if name == "smollm2":
        import smollm2

        trained: nn.Module = smollm2.load_model()
        return trained
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model.eval()


def prompt(model: nn.Module, num_tokens: int) -> Tensor:
    """Return random token ids [1, T], the same on every rank."""
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(0, model.config.vocab_size, (1, num_tokens), generator=generator)  # type: ignore[union-attr,arg-type]


def compare(model: nn.Module, lengths: tuple[int, ...]) -> list[Outcome]:
    """Run prompts on distributed ranks, on virtual ranks and in eager PyTorch; each rank does all three."""
    size = dist.get_world_size()
    compiled = pcp_compiler.compile(model, {"parallel": {"pcp_size": size}})  # torchrun's group: nothing else to say
    virtual = pcp_compiler.compile(model, {"parallel": {"pcp_size": size, "ranks": "virtual"}})
    outcomes: list[Outcome] = []
    for num_tokens in lengths:
        input_ids = prompt(model, num_tokens)
        compiled(input_ids, use_cache=False)  # compiles for the first prompt
        started = time.perf_counter()
        logits = compiled(input_ids, use_cache=False).logits
        run_s = time.perf_counter() - started
        replicated = 2 * sum(length < 2 * size for length in lengths[: len(outcomes) + 1])
        record = pcp_compiler.assert_sharded(compiled, 2 * len(outcomes) + 2, size, replicated=replicated)[-1]
        outcomes.append(
            Outcome(
                num_tokens, record.rows_per_rank[dist.get_rank()], record.width, record.is_sharded,
                len(record.collectives), sum(one.received_bytes for one in record.collectives),
                difference(logits, model(input_ids, use_cache=False).logits),
                difference(logits, virtual(input_ids, use_cache=False).logits), run_s,
            )
        )  # fmt: skip
    return outcomes


def difference(left: Tensor, right: Tensor) -> float:
    return (left - right).abs().max().item()


def report(outcomes: list[Outcome], allowed: float) -> int:
    """Show the outcomes of all ranks on rank 0; return 1 on every rank when one of them is wrong."""
    ranks: list[list[Outcome]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, outcomes)
    faults = [
        f"rank {rank}, {one.num_tokens} tokens: {one}"
        for rank, own in enumerate(ranks)
        for one in own
        if one.to_eager > allowed or one.to_virtual > 0 or (one.is_sharded and one.width >= one.num_tokens)
    ]
    if dist.get_rank() == 0:
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(result_table(ranks))
        for fault in faults:
            console.print(f"[red]FAILED[/red] {fault}")
        if not faults:
            console.print(f"All {len(ranks)} ranks agree with virtual ranks, bit for bit, and with eager PyTorch.")
    dist.destroy_process_group()
    return bool(faults)


def result_table(ranks: list[list[Outcome]]) -> Table:
    table = Table(title=f"{len(ranks)} processes, gloo", box=None, pad_edge=False)
    for heading in ("tokens", "rows of each rank", "collec-\ntives", "MiB\nreceived", "max |difference|\nto virtual",
                    "max |difference|\nto eager", "slowest\nrank, s"):  # fmt: skip
        table.add_column(heading, justify="right")
    for own in zip(*ranks, strict=True):
        first = own[0]
        rows = " ".join(str(one.own_rows) for one in own)
        table.add_row(
            str(first.num_tokens), rows if first.is_sharded else f"{rows} (whole)", str(first.num_collectives),
            f"{first.received_bytes / 2**20:.2f}", f"{max(one.to_virtual for one in own):.1e}",
            f"{max(one.to_eager for one in own):.1e}", f"{max(one.run_s for one in own):.3f}",
        )  # fmt: skip
    return table


def call_until_killed(model: Any, killed: int) -> int:
    """Call until one rank dies, and show how the others end."""
    size, rank = dist.get_world_size(), dist.get_rank()
    compiled = pcp_compiler.compile(model, {"parallel": {"pcp_size": size}})
    input_ids = prompt(model, 333)
    compiled(input_ids, use_cache=False)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others at once; here they shall say something
    if rank == killed:
        threading.Timer(KILL_AFTER_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
    ended = 0.0
    try:
        while True:
            ended = time.perf_counter()
            compiled(input_ids, use_cache=False)
    except RankError as fault:
        print(f"rank {rank}, {time.perf_counter() - ended:.1f} s after its last good call: {fault}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())

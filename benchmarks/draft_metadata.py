"""What hoisting saves: attention metadata of one proposal, built per layer and step, per step, or once and advanced.

    python benchmarks/draft_metadata.py                   # one table; times are medians, forms take turns
    python benchmarks/draft_metadata.py --json --device cuda

Per layer and step is what the graph says naively, per step is what serving engines do; the gain is quoted against that.
"Metadata" is the time of the metadata ops alone, with the same arguments; on a CUDA device it is host time, until the
last of them is launched, and "device us" is what they take in a replayed CUDA graph, each build and advance being one
launch. "Chain" is the whole proposal, until its tokens are there. On a CPU set the variables
MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ to 2000000000: otherwise glibc returns each step's memory, which costs
more than the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pcp_compiler.config import load_config
from pcp_compiler.drafters import layers
from pcp_compiler.kv_ops import ADVANCE_METADATA, BUILD_METADATA
from pcp_compiler.pass_api import DraftChain, Pass, Phase, RowMetadata, calls
from pcp_compiler.passes.attach_kv import BLOCK_TABLES
from pcp_compiler.passes.hoist_prologue import HoistPrologue
from pcp_compiler.passes.unroll_draft import LOGITS, UnrollDraft
from pcp_compiler.pipeline import CACHE_PASSES, CANONICAL_PASSES, lower
from pcp_compiler.program import RankProgram
from pcp_compiler.runtime.cached_model import CachedModel, CompileCache

UNHOISTED: tuple[Pass, ...] = (*CANONICAL_PASSES, *CACHE_PASSES, UnrollDraft())
FORMS: Mapping[str, tuple[Pass, ...]] = {
    "per layer and step": UNHOISTED,
    "per step": (*UNHOISTED, HoistPrologue(over_steps=False)),
    "hoisted": (*UNHOISTED, HoistPrologue()),
}
COMPARED_WITH = "per step"


class DraftStep(nn.Module):
    """A drafter's step of some decoder layers: tokens and hidden states to hidden states and logits."""

    def __init__(self, num_layers: int, vocab_size: int, shape: layers.LayerShape) -> None:
        super().__init__()
        config = {"max_position_embeddings": 1 << 17, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        self.embedding = nn.Embedding(vocab_size, shape.hidden)
        self.rotary = layers.RotaryEmbedding(config, shape.head_dim)
        self.layers = nn.ModuleList(layers.DecoderLayer(shape, number) for number in range(num_layers))
        self.head = nn.Linear(shape.hidden, vocab_size, bias=False)

    def forward(self, next_ids: Tensor, hidden: Tensor, positions: Tensor, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        """next_ids, positions [1, T], hidden [1, T, H], logit_rows [L] -> [L, H] and [L, V]."""
        x = self.embedding(next_ids) + hidden
        turn = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=turn)
        picked = x[0].index_select(0, logit_rows)
        return picked, self.head(picked)


@dataclass(frozen=True, slots=True)
class Setting:
    """One proposal: R requests with `context` positions each before it."""

    num_layers: int
    num_draft_tokens: int
    num_requests: int
    context: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Row:
    """What one form of a proposal does and takes."""

    layers: int
    k: int
    form: str
    builds: int
    advances: int
    metadata_ms: float
    metadata_gain: float
    """Times faster than one build per step."""
    device_us: float | None
    """On the device, on a CUDA device only."""
    chain_ms: float
    chain_gain: float


class _Counter(TorchDispatchMode):
    """Counts the ops that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[object] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def build_model(num_layers: int, block_size: int, num_slots: int, device: torch.device) -> CachedModel:
    """Return a small drafter with empty caches: little work a layer, so that what is around it shows."""
    torch.manual_seed(0)
    shape = layers.LayerShape(
        hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, eps=1e-6, attention_bias=False, mlp_bias=False,
        norms_heads=False,
    )  # fmt: skip
    step = DraftStep(num_layers, 512, shape).eval().requires_grad_(False).to(device)
    ids = torch.zeros(1, 7, dtype=torch.int64, device=device)
    example = (ids, torch.zeros(1, 7, shape.hidden, device=device), ids.clone(), ids[0, :3].clone())
    config = load_config({"limits": {"kv_block_size": block_size}})
    model = CachedModel(
        step, example, ("next_ids", "hidden", "positions"), config, name="drafter", compile_cache=CompileCache()
    )
    model.allocate(num_slots, None)
    return model


def build_programs(model: CachedModel, setting: Setting) -> dict[str, RankProgram]:
    """Return the program of each form."""
    phase = Phase(
        "proposal", is_sharded=False, block_size=setting.block_size, rows=RowMetadata("positions", 1 << 17),
        chain=DraftChain(setting.num_draft_tokens, True, "next_ids", "hidden", "logit_rows"),
    )  # fmt: skip
    config = load_config({"limits": {"kv_block_size": setting.block_size}})
    trace = model.traced.trace
    return {name: lower(trace, config, phase=phase, passes=passes).program for name, passes in FORMS.items()}


def build_inputs(setting: Setting, device: torch.device) -> dict[str, Tensor]:
    """Return the inputs of a proposal, index tensors among them."""
    num_requests, bound = setting.num_requests, setting.context + setting.num_draft_tokens - 1
    max_blocks = -(-bound // setting.block_size)
    tables = 1 + torch.arange(num_requests * max_blocks, dtype=torch.int32, device=device)
    return {
        LOGITS: torch.randn(num_requests, 512, device=device),
        "hidden": torch.randn(1, num_requests, 64, device=device),
        "positions": torch.full((1, num_requests), setting.context, device=device),
        BLOCK_TABLES: tables.reshape(num_requests, max_blocks),
    }


def metadata_only(program: RankProgram) -> Callable[..., Any]:
    """Return a function of a program's inputs that makes its metadata and nothing else."""
    gm = program.graph_module
    made = list(calls(gm, BUILD_METADATA, ADVANCE_METADATA))
    wanted, todo = set(made), list(made)
    while todo:
        sources = [node for node in todo.pop().all_input_nodes if node not in wanted]
        wanted.update(sources)
        todo += sources
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" or node in wanted:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output([copies[node] for node in made])
    return fx.GraphModule(gm, graph)


def measure(model: CachedModel, setting: Setting, num_repeats: int, device: torch.device) -> list[Row]:
    """Return a row per form; forms take turns, so that a slow second slows all of them."""
    programs, inputs = build_programs(model, setting), build_inputs(setting, device)
    weights = model.traced.weights
    alone = {name: metadata_only(program) for name, program in programs.items()}
    values = {name: _arguments(program, weights, {**inputs, **model.caches[0]}) for name, program in programs.items()}
    counts, tokens = {}, {}
    for name, program in programs.items():
        with _Counter() as ran:
            tokens[name] = model.run_whole(inputs, inputs, program)[0]
        counts[name] = ran.counts
    assert all(torch.equal(ids, tokens[COMPARED_WITH]) for ids in tokens.values()), "forms propose different tokens"
    metadata: dict[str, list[float]] = {name: [] for name in FORMS}
    chain: dict[str, list[float]] = {name: [] for name in FORMS}
    with torch.no_grad():
        for number in range(num_repeats * len(FORMS)):
            name = list(FORMS)[(number + number // len(FORMS)) % len(FORMS)]  # each form is as often the first
            run = partial(model.run_whole, inputs, inputs, programs[name])
            metadata[name].append(_time_ms(partial(alone[name], *values[name]), device, waits=False))
            chain[name].append(_time_ms(run, device, waits=True))
    device_us = {
        name: _device_us(partial(alone[name], *values[name])) if device.type == "cuda" else None for name in FORMS
    }
    metadata_ms = {name: statistics.median(times) for name, times in metadata.items()}
    chain_ms = {name: statistics.median(times) for name, times in chain.items()}
    return [
        Row(
            setting.num_layers, setting.num_draft_tokens, name,
            counts[name][BUILD_METADATA], counts[name][ADVANCE_METADATA],
            metadata_ms[name], metadata_ms[COMPARED_WITH] / metadata_ms[name], device_us[name],
            chain_ms[name], chain_ms[COMPARED_WITH] / chain_ms[name],
        )
        for name in FORMS
    ]  # fmt: skip


def _arguments(program: RankProgram, weights: Sequence[Tensor], named: Mapping[str, Tensor]) -> list[Tensor]:
    """Return all inputs of a program in order."""
    names = [*program.input_names[len(weights) :], *(role for _, role in program.index_roles)]
    return [*weights, *(named[name] for name in names)]


def _time_ms(run: Callable[[], Any], device: torch.device, *, waits: bool) -> float:
    """Return how long a call takes the host; `waits`: until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if waits and device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def _device_us(run: Callable[[], Any], num_runs: int = 20, num_replays: int = 20) -> float:
    """Return what a call takes a CUDA device as a part of a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        for _ in range(num_runs):
            run()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num_replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / num_runs / num_replays


def print_table(rows: Sequence[Row], title: str) -> None:
    """Print one table; the form that gains are counted against has gain 1."""
    columns = ("layers", "K", "metadata", "builds", "advances", "metadata ms", "gain", "device us", "chain ms", "gain")
    table = Table(*(Column(name, no_wrap=True) for name in columns), title=title)
    for row in rows:
        device_us = "-" if row.device_us is None else f"{row.device_us:.1f}"
        table.add_row(
            str(row.layers), str(row.k), row.form, str(row.builds), str(row.advances), f"{row.metadata_ms:.3f}",
            f"{row.metadata_gain:.2f}x", device_us, f"{row.chain_ms:.2f}", f"{row.chain_gain:.2f}x",
            end_section=row.form == "hoisted",
        )  # fmt: skip
    Console(width=110).print(table)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 30])
    parser.add_argument("--k", type=int, nargs="+", default=[3, 5], help="draft tokens, >= 2")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048, help="positions of each request before the proposal")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    device = torch.device(options.device)
    num_blocks = 1 + options.requests * -(-(options.context + max(options.k)) // options.block_size)
    rows: list[Row] = []
    for num_layers in options.layers:
        model = build_model(num_layers, options.block_size, num_blocks * options.block_size, device)
        for k in options.k:
            setting = Setting(num_layers, k, options.requests, options.context, options.block_size)
            rows += measure(model, setting, options.repeats, device)
    where = f"{options.requests} requests, {options.context} positions, {device}, torch {torch.__version__}"
    if options.json:
        print(json.dumps({"setting": where, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        print_table(rows, where)


if __name__ == "__main__":
    main()

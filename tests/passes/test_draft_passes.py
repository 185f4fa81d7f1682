"""`unroll_draft` and `hoist_prologue`: what they do to a small step, as text, and the laws that they keep."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pcp_compiler import dump
from pcp_compiler.config import load_config
from pcp_compiler.errors import InvariantError, UnsupportedGraphError
from pcp_compiler.graph_text import count_ops, format_graph
from pcp_compiler.invariants import check_values
from pcp_compiler.kv_ops import BUILD_METADATA, PAGED_ATTENTION, STORE_KV
from pcp_compiler.pass_api import Pass, PassContext, Phase, add_call, calls
from pcp_compiler.passes import hoist_prologue, unroll_draft
from pcp_compiler.passes.attach_kv import BLOCK_TABLES
from pcp_compiler.passes.hoist_prologue import HoistPrologue
from pcp_compiler.passes.unroll_draft import UnrollDraft
from pcp_compiler.pipeline import CACHE_PASSES, CANONICAL_PASSES, METADATA_PASSES, lower, passes_for, run_pass
from pcp_compiler.program import build_program
from pcp_compiler.ranks import run_lockstep
from pcp_compiler.trace import ModuleTrace
from tests.passes.draft_steps import BLOCK_SIZE, HIDDEN, NUM_IDS, Step, chain_phase, context, step_phase, trace_step

GOLDENS = Path(__file__).parent / "draft_goldens"
aten = torch.ops.aten


class PlainStep(nn.Module):
    """A step with one layer and no projections, short enough to read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(NUM_IDS, HIDDEN))
        self.training = False

    def forward(self, next_ids: Tensor, hidden: Tensor, positions: Tensor, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        x = (F.embedding(next_ids, self.table) + hidden)[:, :, None].transpose(1, 2)
        x = F.scaled_dot_product_attention(x * 2, x, x, is_causal=True)[0, 0]
        x = x * (positions[0, :, None] + 1).cos()
        picked = x.index_select(0, logit_rows)
        return picked, picked @ self.table.t()


class StepThatCountsItsRows(PlainStep):
    """Reads the row numbers themselves."""

    def forward(self, next_ids: Tensor, hidden: Tensor, positions: Tensor, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        picked, logits = super().forward(next_ids, hidden, positions, logit_rows)
        return picked, logits + logit_rows[:, None]


@dataclass(frozen=True, slots=True)
class Before:
    """The graph that a pass of METADATA_PASSES is given, and what it may read."""

    gm: fx.GraphModule
    ctx: PassContext


def before(step: Pass, module: nn.Module, phase: Phase) -> Before:
    """Run the passes in front of one."""
    traced = trace_step(module)
    gm, ctx = traced.trace.copy_graph(), context(traced, phase)
    for earlier in passes_for(ctx.config, phase):
        if earlier.name == step.name:
            break
        gm, _ = run_pass(earlier, gm, ctx)
        check_values(gm)
    return Before(gm, ctx)


def with_positions_of(make: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node], *, tables: bool = False) -> Before:
    """Return an unrolled chain whose second step has its metadata made of other positions, or of other tables.

    Args:
        make: (graph, positions, positions of the second step) -> new positions, or block tables.
    """
    start = before(HoistPrologue(), PlainStep(), chain_phase(3))
    graph = start.gm.graph
    _, second = calls(start.gm, BUILD_METADATA)
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    with graph.inserting_before(second):
        made = make(graph, inputs[BLOCK_TABLES if tables else "positions"], second.args[0])  # type: ignore[arg-type]
    second.update_arg(1 if tables else 0, made)
    return start


def twice_the_position(graph: fx.Graph, positions: fx.Node, _own: fx.Node) -> fx.Node:
    return add_call(graph, aten.mul.Tensor, (positions, 2))


def chosen_position(graph: fx.Graph, positions: fx.Node, own: fx.Node) -> fx.Node:
    return add_call(graph, aten.minimum.default, (own, positions))


def position_before(graph: fx.Graph, positions: fx.Node, _own: fx.Node) -> fx.Node:
    return add_call(graph, aten.add.Tensor, (positions, -1))


def other_tables(graph: fx.Graph, tables: fx.Node, _own: fx.Node) -> fx.Node:
    return add_call(graph, aten.bitwise_xor.Scalar, (tables, 1))


def two_positions_further(graph: fx.Graph, positions: fx.Node, own: fx.Node) -> fx.Node:
    return add_call(graph, aten.add.Tensor, (own, 2))


CASES: dict[str, tuple[Pass, Callable[[], Before]]] = {
    "unroll_draft__greedy": (UnrollDraft(), lambda: before(UnrollDraft(), PlainStep(), chain_phase(2))),
    "unroll_draft__sampled": (
        UnrollDraft(), lambda: before(UnrollDraft(), PlainStep(), chain_phase(2, is_greedy=False)),
    ),
    "unroll_draft__one_token": (UnrollDraft(), lambda: before(UnrollDraft(), PlainStep(), chain_phase(1))),
    "hoist_prologue__chain": (HoistPrologue(), lambda: before(HoistPrologue(), PlainStep(), chain_phase(3))),
    "hoist_prologue__layers": (HoistPrologue(), lambda: before(HoistPrologue(), Step(2), step_phase())),
    "hoist_prologue__step_of_two": (HoistPrologue(), lambda: with_positions_of(two_positions_further)),
}  # fmt: skip
NOT_MATCHING: dict[str, tuple[Pass, Callable[[], Before]]] = {
    "unroll_draft__step": (UnrollDraft(), lambda: before(UnrollDraft(), PlainStep(), step_phase())),
}
VARYING: dict[str, Callable[[], Before]] = {
    "hoist_prologue__twice_the_position": lambda: with_positions_of(twice_the_position),
    "hoist_prologue__chosen_position": lambda: with_positions_of(chosen_position),
    "hoist_prologue__position_before": lambda: with_positions_of(position_before),
    "hoist_prologue__other_tables": lambda: with_positions_of(other_tables, tables=True),
}
"""Second steps whose metadata is no advance of the first step's."""


def run(step: Pass, start: Before) -> tuple[str, str, int]:
    """Return the graph before and after a pass, and the rewrites."""
    old = format_graph(start.gm, start.ctx.seeds)
    gm, stage = run_pass(step, start.gm, start.ctx)
    check_values(gm)
    return old, format_graph(gm, start.ctx.seeds), stage.num_rewrites


def check_golden(request: pytest.FixtureRequest, name: str, old: str, new: str) -> None:
    """Compare with a golden file."""
    path, text = GOLDENS / f"{name}.txt", f"{old}---\n{new}"
    if request.config.getoption("--update-goldens"):
        path.write_text(text)
    assert path.is_file() and text == path.read_text(), f"{name} differs; if that is meant: pytest --update-goldens"


@pytest.mark.parametrize("name", CASES)
def test_a_pass_rewrites_what_it_is_for(name: str, request: pytest.FixtureRequest) -> None:
    step, make = CASES[name]
    old, new, rewrites = run(step, make())
    assert rewrites > 0 and new != old
    check_golden(request, name, old, new)


@pytest.mark.parametrize("name", NOT_MATCHING)
def test_a_pass_leaves_alone_what_it_is_not_for(name: str, request: pytest.FixtureRequest) -> None:
    step, make = NOT_MATCHING[name]
    old, new, rewrites = run(step, make())
    assert rewrites == 0 and new == old
    check_golden(request, name, old, new)


@pytest.mark.parametrize("name", VARYING)
def test_metadata_that_is_not_affine_in_the_step_stays_where_it_is(name: str, request: pytest.FixtureRequest) -> None:
    start = VARYING[name]()
    old, new, rewrites = run(HoistPrologue(), start)
    assert rewrites == 1  # the first step's build goes up; nothing else moves
    assert count_ops(start.gm)["pcp.build_metadata.default"] == 2
    assert "advance_metadata" not in new
    assert sorted(old.splitlines()) == sorted(new.splitlines())
    check_golden(request, name, old, new)


def test_every_golden_file_belongs_to_a_case() -> None:
    assert {path.stem for path in GOLDENS.iterdir()} == {*CASES, *NOT_MATCHING, *VARYING}


@pytest.mark.parametrize("module", [unroll_draft, hoist_prologue], ids=lambda module: module.__name__.split(".")[-1])
def test_before_and_after_in_the_docstring_of_a_pass_come_from_one_of_its_goldens(module: Any) -> None:
    found = re.search(r"^Before:(.+?)^After:(.+?)^Why here:", module.__doc__, re.MULTILINE | re.DOTALL)
    assert found is not None
    shown = [re.findall(r"%.* = ([\w.]+)\(", part) for part in found.groups()]
    name = module.__name__.split(".")[-1]
    goldens = [path.read_text().split("---\n") for path in GOLDENS.glob(f"{name}__*.txt")]
    calls_in = [[re.findall(r"%.* = ([\w.]+)\(", part) for part in golden] for golden in goldens]
    assert all(shown) and any(
        all(_is_subsequence(few, many) for few, many in zip(shown, golden, strict=True)) for golden in calls_in
    )


def _is_subsequence(few: list[str], many: list[str]) -> bool:
    rest = iter(many)
    return all(item in rest for item in few)


@pytest.mark.parametrize("phase", [chain_phase(1), chain_phase(4), chain_phase(3, is_greedy=False), step_phase()])
def test_a_pass_that_runs_again_finds_nothing_to_do(phase: Phase) -> None:
    traced = trace_step(Step(2))
    gm, ctx = traced.trace.copy_graph(), context(traced, phase)
    for step in passes_for(ctx.config, phase):
        gm, _ = run_pass(step, gm, ctx)
        once = format_graph(gm, ctx.seeds)
        gm, again = run_pass(step, gm, ctx)
        assert (step.name, again.num_rewrites) == (step.name, 0)
        assert format_graph(gm, ctx.seeds) == once


def test_a_step_that_reads_row_numbers_is_refused_and_left_untouched() -> None:
    start = before(UnrollDraft(), StepThatCountsItsRows(), chain_phase(2))
    old = format_graph(start.gm, start.ctx.seeds)
    with pytest.raises(UnsupportedGraphError, match=r"uses logit_rows otherwise than to select (.|\n)*index_select"):
        run_pass(UnrollDraft(), start.gm, start.ctx)
    assert format_graph(start.gm, start.ctx.seeds) == old


def test_a_hoist_that_leaves_a_copy_behind_is_an_error() -> None:
    start = before(HoistPrologue(), Step(2), step_phase())
    with pytest.raises(InvariantError, match="builds again what could be reused"):
        HoistPrologue().ensures(start.gm, start.ctx)


@pytest.mark.parametrize(
    ("num_layers", "num_draft_tokens", "expected"),
    [(1, 2, (1, 1, 1, 0)), (1, 5, (4, 4, 1, 3)), (3, 1, (0, 0, 0, 0)), (3, 4, (9, 3, 1, 2))],
)
def test_builds_go_from_one_per_layer_and_step_to_one(
    num_layers: int, num_draft_tokens: int, expected: tuple[int, int, int, int]
) -> None:
    traced, phase = trace_step(Step(num_layers)), chain_phase(num_draft_tokens)
    naive = lower(traced.trace, load_config({}), phase=phase, passes=UNHOISTED)
    per_step = lower(traced.trace, load_config({}), phase=phase, passes=(*UNHOISTED, HoistPrologue(over_steps=False)))
    hoisted = lower(traced.trace, load_config({}), phase=phase)
    counts = [count_ops(lowered.program.graph_module) for lowered in (naive, per_step, hoisted)]
    builds = [count.get("pcp.build_metadata.default", 0) for count in counts]
    assert (*builds, counts[2].get("pcp.advance_metadata.default", 0)) == expected
    assert all(not count.get("pcp.advance_metadata.default") for count in counts[:2])


def test_decisions_list_the_class_of_each_value() -> None:
    traced = trace_step(Step(3))
    chain = lower(traced.trace, load_config({}), phase=chain_phase(4)).decisions.entries["attention metadata"]
    where = "1 builds, 2 advances for 9 uses, positions positions + [0, 1, 2]"
    assert chain == [f"spans: affine: {where}", f"slots: affine: {where}"]
    step = lower(traced.trace, load_config({}), phase=step_phase()).decisions.entries["attention metadata"]
    assert [line.split(":")[1] for line in step] == [" invariant"] * 2
    varying = VARYING["hoist_prologue__chosen_position"]()
    run_pass(HoistPrologue(), varying.gm, varying.ctx)
    classes = [line.split(":")[1].strip() for line in varying.ctx.decisions.entries["attention metadata"]]
    assert classes == ["invariant"] * 2 + ["varying"] * 2


def test_dumps_show_the_graph_before_and_after_and_the_classes(tmp_path: Path) -> None:
    traced, config = trace_step(Step(2)), load_config({})
    lowered = lower(traced.trace, config, phase=chain_phase(3), record=True)
    folder = dump.write(tmp_path, lowered, config, traced.trace) / "rank_0"
    (diff,) = folder.glob("*_hoist_prologue.diff")
    lines = diff.read_text().splitlines()
    assert sum(line.startswith("-") and "pcp.build_metadata" in line for line in lines) == 4
    assert sum(line.startswith("+") and "pcp.build_metadata" in line for line in lines) == 1
    assert sum(line.startswith("+") and "pcp.advance_metadata" in line for line in lines) == 1
    assert list(folder.glob("*_unroll_draft.txt"))
    decisions = json.loads((folder / "decisions.json").read_text())
    assert decisions["draft chain"] == ["3 draws, 2 steps"]
    assert any(line.startswith("slots: affine") for line in decisions["attention metadata"])


UNHOISTED = CANONICAL_PASSES + CACHE_PASSES + METADATA_PASSES[:-1]


def start_values(lowered: Any, traced: ModuleTrace, is_greedy: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return inputs of a chain of 2 requests at positions 5 and 13, and caches with random K/V."""
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(2, NUM_IDS, generator=generator), torch.randn(1, 2, HIDDEN, generator=generator)]
    sampling = [] if is_greedy else [torch.tensor([0.7, 0.0]), torch.randint(2**62, (4, 2), generator=generator)]
    index = {BLOCK_TABLES: torch.tensor([[3, 1, 6, 0, 0], [5, 2, 7, 4, 8]], dtype=torch.int32)}
    for node in lowered.program.graph_module.graph.find_nodes(op="placeholder"):
        role = node.meta.get("index_input", "")
        if "cache" in role:
            index[role] = torch.randn(9 * BLOCK_SIZE + 1, *node.meta["val"].shape[1:], generator=generator)
    positions = torch.tensor([[5, 13]])
    return [*traced.weights, inputs[0], *sampling, inputs[1], positions], index


@pytest.mark.parametrize("is_greedy", [True, False])
def test_hoisted_and_unhoisted_chains_give_the_same_bits_and_write_the_same_cache(is_greedy: bool) -> None:
    traced, phase = trace_step(Step(2)), chain_phase(4, is_greedy=is_greedy)
    results = []
    for passes in (UNHOISTED, (*UNHOISTED, HoistPrologue(over_steps=False)), None):
        lowered = lower(traced.trace, load_config({}), phase=phase, passes=passes)
        values, index = start_values(lowered, traced, is_greedy)
        untouched = {role: value.clone() for role, value in index.items()}
        with torch.no_grad():
            done = run_lockstep([lowered.program.start(values, index)])
        written = {role for role, value in index.items() if not torch.equal(value, untouched[role])}
        assert written == {f"{kind}_cache_{layer}" for kind in "kv" for layer in range(2)}
        results.append([*done.outputs[0], *index.values()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert results[0][0].shape == (2, 4)
    assert is_greedy or results[0][1].shape == (2, 4, NUM_IDS)


@pytest.mark.parametrize("number", range(2))
def test_the_unrolled_graph_is_right_as_text_too(number: int) -> None:
    start = before(UnrollDraft(), Step(2), chain_phase(3, is_greedy=bool(number)))
    gm, _ = run_pass(UnrollDraft(), start.gm, start.ctx)
    source = build_program(gm, dict(start.ctx.seeds), pcp_size=1, title="chain").source
    assert source.count("pcp.store_kv.default") == source.count("pcp.paged_attention.default") == 4
    assert len(list(calls(gm, STORE_KV))) == len(list(calls(gm, PAGED_ATTENTION))) == 4
    assert source.count("aten.t.default") == 3  # transposed weights are made once, not once a step

"""`split_segments`: what it does to a few lines, as text, the laws that it keeps, and the programs that come of it."""

from __future__ import annotations

import operator
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, fx, nn
from torch.profiler import profile

import pcp_compiler.integrations.transformers  # noqa: F401 - registers attn_implementation="pcp_spec"
from pcp_compiler import dump, kv_ops, ops
from pcp_compiler.config import load_config
from pcp_compiler.errors import ConfigError, InvariantError
from pcp_compiler.graph_text import count_ops, find_segments, format_graph
from pcp_compiler.invariants import check_values
from pcp_compiler.pass_api import Pass, PassContext, PassResult, Phase, calls
from pcp_compiler.passes import split_segments
from pcp_compiler.passes.attach_kv import BLOCK_TABLES, SLOTS, SPANS
from pcp_compiler.passes.gather_kv import EXPANDED_SLOTS
from pcp_compiler.passes.split_segments import SplitSegments
from pcp_compiler.pipeline import Lowered, lower, passes_for, run_pass
from pcp_compiler.plan.partition import Partition, partition_batch
from pcp_compiler.program import RankProgram
from pcp_compiler.ranks import LockstepResult, index_tensors, run_lockstep
from pcp_compiler.runtime.batch import PAD_SLOT
from tests.matrix.families import CONFIGS
from tests.passes.draft_steps import Step, chain_phase, trace_step
from tests.passes.models import CASES, NUM_IDS, Decoder, DecoderSettings, build
from tests.passes.support import Traced, trace
from tests.passes.test_draft_passes import start_values

GOLDENS = Path(__file__).parent / "split_goldens"
ROOT = Path(__file__).parents[2]
IDS, WEIGHT, BLOCK_SIZE = torch.arange(8)[None], torch.ones(16, 16), 4
PLAIN, CACHED = Phase(), Phase(block_size=BLOCK_SIZE)
aten = torch.ops.aten


# -- goldens ---------------------------------------------------------------------------------------------------------


def heads(x: Tensor) -> Tensor:
    return x.view(1, x.shape[1], 4, 4).transpose(1, 2)


def attention_then_relu(input_ids: Tensor, table: Tensor) -> Tensor:
    x = F.embedding(input_ids, table)
    return F.scaled_dot_product_attention(heads(x), heads(x * 2), heads(x * 3), is_causal=True).relu()


def equal_layers(input_ids: Tensor, table: Tensor) -> Tensor:
    x = F.embedding(input_ids, table)
    for weight in (table * 2, table * 3, table * 4):
        x = x + F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True).transpose(1, 2).flatten(2)
        x = x @ weight
    return x


def twice_the_rows(input_ids: Tensor, table: Tensor) -> Tensor:
    x = F.embedding(input_ids, table)
    for _ in range(3):
        x = F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True).transpose(1, 2).flatten(2)
        x = x.view(2 * x.shape[1], 8).relu().view(1, x.shape[1], 16)
    return x


def size_of_an_earlier_value(input_ids: Tensor, table: Tensor) -> Tensor:
    x = F.embedding(input_ids, table)
    y = F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True).transpose(1, 2).flatten(2)
    return torch.where(y > 0, torch.zeros_like(x), y)


def parts_of_one_result(input_ids: Tensor, table: Tensor) -> Tensor:
    x = F.embedding(input_ids, table)
    best, places = x.topk(4)
    y = F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True).transpose(1, 2).flatten(2)
    return y[..., :4] * best + places


def views_alone(embeds: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(heads(embeds), heads(embeds), heads(embeds), is_causal=True).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Golden:
    """One golden file: which lines, and how they are lowered."""

    forward: Callable[..., Any]
    pcp_size: int = 2
    phase: Phase = PLAIN
    extra_ops: tuple[str, ...] = ()
    inputs: tuple[Tensor, ...] = (IDS, WEIGHT)

    @property
    def name(self) -> str:
        """The file name."""
        options = ["cached"] * (self.phase is CACHED) + [op.replace(".", "_") for op in self.extra_ops]
        return "_".join(["split_segments_", self.forward.__name__, *options])

    def start(self) -> tuple[fx.GraphModule, PassContext]:
        """Return the graph that the pass is given."""
        tokens = {"embeds": 1} if self.inputs[0].is_floating_point() else None
        return before_split(trace(self.forward, *self.inputs, tokens=tokens), self.pcp_size, self.phase)


def before_split(traced: Traced, pcp_size: int, phase: Phase) -> tuple[fx.GraphModule, PassContext]:
    """Run the passes in front of split_segments."""
    gm, ctx = traced.trace.copy_graph(), replace(traced.context(pcp_size=pcp_size), phase=phase)
    for step in passes_for(ctx.config, phase):
        gm, _ = run_pass(step, gm, ctx)
    return gm, ctx


MATCHING = (
    Golden(attention_then_relu),
    Golden(attention_then_relu, phase=CACHED),
    Golden(equal_layers, pcp_size=1),
    Golden(equal_layers, pcp_size=1, extra_ops=("aten.mm",)),
    Golden(twice_the_rows, pcp_size=1),
    Golden(size_of_an_earlier_value, pcp_size=1),
    Golden(parts_of_one_result, pcp_size=1),
)
NOT_MATCHING = (Golden(views_alone, pcp_size=1, inputs=(torch.ones(1, 8, 16),)),)


def check_golden(request: pytest.FixtureRequest, name: str, old: str, new: str) -> None:
    path, text = GOLDENS / f"{name}.txt", f"{old}---\n{new}"
    if request.config.getoption("--update-goldens"):
        path.write_text(text)
    assert path.is_file() and text == path.read_text(), f"{name} differs; if that is meant: pytest --update-goldens"


@pytest.mark.parametrize("golden", MATCHING, ids=lambda golden: golden.name)
def test_a_graph_is_cut(golden: Golden, request: pytest.FixtureRequest) -> None:
    gm, ctx = golden.start()
    old = format_graph(gm, ctx.seeds)
    gm, stage = run_pass(SplitSegments(golden.extra_ops), gm, ctx)
    check_values(gm)
    assert stage.num_rewrites == len(gm.graph.find_nodes(op="call_module")) > 0
    check_golden(request, golden.name, old, format_graph(gm, ctx.seeds))


@pytest.mark.parametrize("golden", NOT_MATCHING, ids=lambda golden: golden.name)
def test_a_graph_without_anything_to_capture_is_left_alone(golden: Golden, request: pytest.FixtureRequest) -> None:
    gm, ctx = golden.start()
    old = format_graph(gm, ctx.seeds)
    gm, stage = run_pass(SplitSegments(), gm, ctx)
    assert stage.num_rewrites == 0
    assert format_graph(gm, ctx.seeds) == old
    check_golden(request, golden.name, old, old)


def test_every_golden_file_belongs_to_a_case() -> None:
    assert {path.stem for path in GOLDENS.iterdir()} == {golden.name for golden in MATCHING + NOT_MATCHING}


def test_before_and_after_in_the_docstring_come_from_a_golden() -> None:
    found = re.search(r"^Before:(.+?)^After:(.+?)^Why here:", split_segments.__doc__ or "", re.MULTILINE | re.DOTALL)
    assert found is not None
    shown = [re.findall(r"%.* = ([\w.]+)\(", part) for part in found.groups()]
    golden = (GOLDENS / f"{MATCHING[0].name}.txt").read_text().split("---\n")
    for few, part in zip(shown, golden, strict=True):
        rest = iter(re.findall(r"%.* = ([\w.]+)\(", part))
        assert few and all(op in rest for op in few)


# -- laws ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Recorder:
    """A `run` that notes which calls it is asked for and what crosses the cuts."""

    numbers: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    crossing: list[object] = field(default_factory=list)

    def __call__(self, number: int, segment: Callable[..., Any], arguments: tuple[Any, ...]) -> Sequence[Any]:
        self.numbers.append(number)
        self.names.append(segment.__name__)
        results: list[Any] = segment(*arguments)
        self.crossing += [*arguments, *results]
        return results

    def check(self, program: RankProgram) -> None:
        """Every call was made once, in order, of the segment that the program says, with tensors and integers."""
        assert self.numbers == list(range(len(program.segments)))
        assert self.names == [f"segment_{number}" for number in program.segments]
        assert {type(value) for value in self.crossing} <= {Tensor, nn.Parameter, int}


@cache
def case(name: str) -> Traced:
    """Return the trace of a model of CASES."""
    return trace(build(name), CASES[name].input_ids(5), **dict(CASES[name].kwargs))


def lower_both(traced: Traced, pcp_size: int, phase: Phase, **parallel: Any) -> tuple[RankProgram, RankProgram]:
    """Return the program in one piece and the one in segments."""
    config = load_config({"parallel": {"pcp_size": pcp_size, **parallel}})
    whole, split = (lower(traced.trace, config, phase=replace(phase, is_split=is_split)) for is_split in (False, True))
    check_values(split.program.graph_module)
    assert whole.program.schedule == split.program.schedule
    return whole.program, split.program


def run_ranks(
    program: RankProgram, inputs: Sequence[object], index: Sequence[dict[str, Tensor]], records: bool
) -> LockstepResult:
    """Run all ranks, with recorders if asked for."""
    recorders = [Recorder() for _ in index]
    with torch.no_grad():
        done = run_lockstep(
            [program.start(inputs, tensors, *([recorder] if records else []))
             for tensors, recorder in zip(index, recorders, strict=True)]
        )  # fmt: skip
    assert tuple((ran.name, ran.op) for ran in done.collectives) == program.schedule
    for recorder in recorders if records else []:
        recorder.check(program)
    return done


def plain_index(num_tokens: int, pcp_size: int) -> list[dict[str, Tensor]]:
    partition = partition_batch([num_tokens], [True], pcp_size=pcp_size, shard_decode=False)
    return [index_tensors(partition, rank, torch.device("cpu")) for rank in range(pcp_size)]


def assert_same_bits(results: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == wanted.dtype and torch.equal(result, wanted)


@pytest.mark.parametrize("name", CASES)
def test_segments_compute_the_same_bits_as_the_whole_program(name: str) -> None:
    whole, split = lower_both(case(name), 2, PLAIN)
    assert set(split.segments) == set(range(len(find_segments(split.graph_module))))
    assert not whole.segments
    for pcp_size in (1, 2, 3):
        for num_tokens in {1, 2, 2 * pcp_size + 1, 16}:
            inputs, index = case(name).inputs_for(CASES[name].input_ids(num_tokens)), plain_index(num_tokens, pcp_size)
            expected = run_ranks(whole, inputs, index, records=False)
            for records in (False, True):
                done = run_ranks(split, inputs, index, records)
                assert done.collectives == expected.collectives
                for rank in range(pcp_size):
                    assert_same_bits(done.outputs[rank], expected.outputs[rank])


@pytest.mark.parametrize("route", ["static", "dynamic"])
def test_graphs_of_dynamo_are_cut_too(route: Any) -> None:
    ids = CASES["llama"].input_ids(7)
    traced = trace(build("llama"), ids, route=route)
    whole, split = lower_both(traced, 2, PLAIN)
    inputs, index = traced.inputs_for(ids), plain_index(7, 2)
    expected = run_ranks(whole, inputs, index, records=False)
    assert_same_bits(run_ranks(split, inputs, index, records=True).outputs[0], expected.outputs[0])


@pytest.mark.parametrize("is_greedy", [True, False])
def test_a_whole_proposal_can_be_cut(is_greedy: bool) -> None:
    traced, phase = trace_step(Step(2)), chain_phase(3, is_greedy=is_greedy)
    results = []
    for is_split in (False, True):
        lowered = lower(traced.trace, load_config({}), phase=replace(phase, is_split=is_split))
        values, index = start_values(lowered, traced, is_greedy)
        done = run_ranks(lowered.program, values, [index], records=True)
        results.append([*done.outputs[0], *index.values()])
    assert_same_bits(*results)
    assert len(lowered.program.segments) == 2 * 2 + 1  # K - 1 steps of two layers, and what follows


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pcp_size", [1, 2])
def test_a_graph_that_is_cut_already_is_left_alone(name: str, pcp_size: int) -> None:
    gm, ctx = before_split(case(name), pcp_size, PLAIN)
    gm, first = run_pass(SplitSegments(), gm, ctx)
    once, noted = format_graph(gm, ctx.seeds), list(ctx.decisions.entries["segments"])
    gm, again = run_pass(SplitSegments(), gm, ctx)
    assert first.num_rewrites > 0 and again.num_rewrites == 0
    assert format_graph(gm, ctx.seeds) == once
    assert ctx.decisions.entries["segments"] == noted


def test_cuts_stay_outside_in_their_order_and_attention_reads_what_the_write_returns() -> None:
    whole, split = lower_both(case("llama"), 2, CACHED)
    order = (*ops.COLLECTIVES, kv_ops.STORE_GATHERED_KV, kv_ops.PAGED_ATTENTION)
    outside = [node.name for node in calls(split.graph_module, *order)]
    assert outside == [node.name for node in calls(whole.graph_module, *order)]
    for attention in calls(split.graph_module, kv_ops.PAGED_ATTENTION):
        assert attention.args[1].target is kv_ops.STORE_GATHERED_KV  # type: ignore[union-attr]
    for segment in find_segments(split.graph_module).values():
        assert not list(calls(segment, *order))


def test_a_rank_without_rows_and_ranks_without_any_run_all_segments() -> None:
    traced = case("llama")
    whole, split = lower_both(traced, 3, PLAIN)
    index = plain_index(1, 3)
    assert [int(tensors["num_rows"]) for tensors in index] == [1, 0, 0]
    run_ranks(split, traced.inputs_for(CASES["llama"].input_ids(1)), index, records=True)
    none = [{**tensors, "local_rows": torch.empty(0, dtype=torch.int64)} for tensors in index]
    inputs = [*traced.inputs_for(CASES["llama"].input_ids(1))[:-1], torch.empty(1, 0, dtype=torch.int64)]
    empty = [{**tensors, "restore": torch.empty(0, dtype=torch.int64)} for tensors in none]
    done = run_ranks(split, inputs, empty, records=True)
    assert_same_bits(done.outputs[2], run_ranks(whole, inputs, empty, records=False).outputs[2])
    assert done.outputs[0][0].shape == (1, 0, NUM_IDS)


# -- segments of layers ----------------------------------------------------------------------------------------------


@cache
def tiny_llama(num_layers: int) -> Traced:
    config = transformers.LlamaConfig(
        vocab_size=NUM_IDS, hidden_size=16, intermediate_size=24, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    config._attn_implementation = "pcp_spec"
    torch.manual_seed(0)
    return trace(transformers.LlamaForCausalLM(config), IDS, use_cache=False)


def lower_split(traced: Traced, pcp_size: int = 2, phase: Phase = CACHED) -> Lowered:
    config = load_config({"parallel": {"pcp_size": pcp_size}})
    return lower(traced.trace, config, phase=replace(phase, is_split=True))


@pytest.mark.parametrize("pcp_size", [1, 2])
def test_thirty_layers_have_three_segments_first_middle_and_last(pcp_size: int) -> None:
    lowered = lower_split(tiny_llama(30), pcp_size)
    assert lowered.program.segments == (0, *[1] * 29, 2)
    counted, cut = lowered.decisions.entries["segments"]
    assert counted == "31 segments, 3 of them unique: segment_0 x1, segment_1 x29, segment_2 x1"
    write = "pcp.store_kv.default" if pcp_size == 1 else "pcp.store_gathered_kv.default"
    assert f"{write} x30, pcp.paged_attention.default x30" in cut
    assert lowered.program.source.count("\ndef segment_") == 3


@pytest.mark.parametrize("experts", ["pcp_spec", "grouped_mm"])
@pytest.mark.parametrize("family", ["DeepSeek-V3", "GPT-OSS"])
def test_experts_behind_a_dense_layer_add_one_segment(family: str, experts: str) -> None:
    config = CONFIGS[family]()
    config.num_hidden_layers, config.layer_types = 5, ["sliding_attention", "full_attention"] * 3
    model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation="pcp_spec", experts_implementation=experts
    )
    segments = lower_split(trace(model, IDS, use_cache=False)).program.segments
    assert segments == ((0, 1, 2, 2, 2, 3) if family == "DeepSeek-V3" else (0, 1, 1, 1, 1, 2))


def test_layers_of_another_width_type_or_constant_share_nothing() -> None:
    def forward(input_ids: Tensor, table: Tensor) -> Tensor:
        x = F.embedding(input_ids, table)
        for constant in (2, 2.0, 3, 2):
            x = F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True).transpose(1, 2).flatten(2)
            x = x * constant
        x = F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True).transpose(1, 2).flatten(2)
        return x.to(torch.float64) * 2

    assert lower_split(trace(forward, IDS, WEIGHT), 1).program.segments == (0, 1, 2, 3, 1, 4)


def test_sizes_that_others_make_up_are_computed_inside() -> None:
    gm, ctx = Golden(twice_the_rows, pcp_size=1).start()
    gm, _ = run_pass(SplitSegments(), gm, ctx)
    segment = find_segments(gm)["segment_1"]
    (number,) = [n for n in segment.graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], torch.SymInt)]
    assert number.meta["val"].node.expr.is_Symbol
    assert sum(isinstance(node.meta.get("val"), torch.SymInt) for node in segment.graph.nodes) > 1
    assert [call.target for call in gm.graph.find_nodes(op="call_module")] == [f"segment_{n}" for n in (0, 1, 1, 2)]


def decoder(num_layers: int) -> Traced:
    torch.manual_seed(0)
    return trace(Decoder(DecoderSettings(num_layers=num_layers)).eval(), IDS)


def work_of_split(num_layers: int) -> tuple[int, int]:
    """Return the segments of a decoder and the Python calls that cutting and checking it took."""
    gm, ctx = before_split(decoder(num_layers), 2, CACHED)
    num_calls = 0

    def count(_frame: FrameType, event: str, _value: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        gm, stage = run_pass(SplitSegments(), gm, ctx)
    finally:
        sys.setprofile(None)
    return stage.num_rewrites, num_calls


def test_segments_and_the_work_to_cut_them_grow_linearly_with_layers() -> None:
    (few, work_few), (more, work_more), (most, work_most) = map(work_of_split, (4, 8, 16))
    assert (few, more, most) == (5, 9, 17)
    assert work_most - work_more < 2.1 * (work_more - work_few)


# -- splitting ops ---------------------------------------------------------------------------------------------------


def test_named_ops_are_cuts() -> None:
    gm, ctx = Golden(equal_layers, pcp_size=1).start()
    gm, _ = run_pass(SplitSegments(("aten.mm.default", "aten.add")), gm, ctx)
    assert len(list(calls(gm, aten.mm.default))) == 3
    assert "aten.mm.default x3" in ctx.decisions.entries["segments"][1]
    assert not any(list(calls(segment, aten.add.Tensor)) for segment in find_segments(gm).values())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("aten.no_such_op", "got 'aten.no_such_op', which is no op"),
        ("aten.mm.no_such_overload", "which is no op"),
        ("no_such_library.op.default", "which is no op"),
        ("mm", "which is no op"),
        ("", "which is no op"),
        ("aten.mm.default.more", "which is no op"),
        ("aten.addmm.default", r"aten.addmm.default is not in the graph; nearest there: aten.mm.default"),
    ],
)
def test_names_of_no_op_or_of_none_in_the_graph_are_refused_and_nothing_is_touched(name: str, reason: str) -> None:
    gm, ctx = Golden(equal_layers, pcp_size=1).start()
    old = format_graph(gm, ctx.seeds)
    with pytest.raises(ConfigError, match=rf"^capture\.splitting_ops: .*{reason}"):
        run_pass(SplitSegments(("aten.mm", name)), gm, ctx)
    assert format_graph(gm, ctx.seeds) == old


# -- invariants ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BrokenPass(Pass):
    """A pass that does one wrong thing to a graph in segments."""

    break_graph: Callable[[fx.GraphModule], None]
    name = "broken_pass"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        self.break_graph(gm)
        return PassResult(gm, 1)


def write_in_place_inside(gm: fx.GraphModule) -> None:
    next(calls(gm.segment_1, aten.relu.default)).target = aten.relu_.default  # type: ignore[arg-type]


def call_a_module_that_is_no_segment(gm: fx.GraphModule) -> None:
    gm.add_module("segment_1", nn.ReLU())


def freeze_the_rows_of_a_call(gm: fx.GraphModule) -> None:
    gm.register_buffer("frozen_rows", torch.arange(4))
    call = gm.graph.find_nodes(op="call_module")[0]
    position = next(i for i, node in enumerate(call.args) if node.name == "local_rows")
    with gm.graph.inserting_before(call):
        constant = gm.graph.get_attr("frozen_rows")
    call.update_arg(position, constant)


def leave_out_an_argument(gm: fx.GraphModule) -> None:
    call = gm.graph.find_nodes(op="call_module")[0]
    call.args = call.args[:-1]


def swap_arguments(gm: fx.GraphModule) -> None:
    call = gm.graph.find_nodes(op="call_module")[0]
    call.args = call.args[::-1]


def read_a_result_that_is_not_there(gm: fx.GraphModule) -> None:
    item = next(calls(gm, operator.getitem))
    item.update_arg(1, 9)


@pytest.mark.parametrize(
    ("fault", "invariant"),
    [
        (write_in_place_inside, "op-allowed"),
        (call_a_module_that_is_no_segment, "op-allowed"),
        (freeze_the_rows_of_a_call, "index-is-input"),
        (leave_out_an_argument, "segment-fits"),
        (swap_arguments, "segment-fits"),
        (read_a_result_that_is_not_there, "segment-fits"),
    ],
)
def test_the_invariants_look_into_segments(fault: Callable[[fx.GraphModule], None], invariant: str) -> None:
    gm, ctx = Golden(attention_then_relu).start()
    gm, _ = run_pass(SplitSegments(), gm, ctx)
    with pytest.raises(InvariantError, match=f"^{invariant} does not hold after broken_pass: "):
        run_pass(BrokenPass(fault), gm, ctx)


def test_a_cut_inside_a_segment_is_an_error() -> None:
    gm, ctx = Golden(equal_layers, pcp_size=1).start()
    gm, _ = run_pass(SplitSegments(), gm, ctx)
    with pytest.raises(InvariantError, match=r"mm\w* \(aten.mm.default\) is inside segment_\d"):
        SplitSegments(("aten.mm",)).ensures(gm, ctx)


def test_values_inside_segments_and_of_their_calls_are_checked() -> None:
    for wrong in ("inside", "call"):
        gm, ctx = Golden(attention_then_relu).start()
        gm, _ = run_pass(SplitSegments(), gm, ctx)
        if wrong == "inside":
            relu = next(calls(gm.segment_1, aten.relu.default))  # type: ignore[arg-type]
            relu.meta["val"] = relu.meta["val"].to(torch.float16)
        else:
            call = gm.graph.find_nodes(op="call_module")[1]
            call.meta["val"] = tuple(value.unsqueeze(0) for value in call.meta["val"])
        with pytest.raises(InvariantError, match=r"^value-matches does not hold: "):
            check_values(gm)


# -- programs --------------------------------------------------------------------------------------------------------


def cached_index(partition: Partition, program: RankProgram) -> list[dict[str, Tensor]]:
    """Return index tensors and caches of ranks that share one prompt, stored from block 1 on."""
    num_tokens = len(partition.restore)
    expanded_slots = torch.full((len(partition.gather),), PAD_SLOT)
    expanded_slots[torch.from_numpy(partition.restore)] = torch.arange(num_tokens) + BLOCK_SIZE
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    found = []
    for rank in range(len(partition.per_rank)):
        spans = [(0, span.local_start, span.num_tokens, span.global_stop) for span in partition.spans[rank]]
        found.append(index_tensors(partition, rank, torch.device("cpu")))
        found[-1][SLOTS], found[-1][EXPANDED_SLOTS] = torch.arange(num_tokens) + BLOCK_SIZE, expanded_slots
        found[-1][SPANS] = torch.tensor(spans, dtype=torch.int64).reshape(-1, 4)
        found[-1][BLOCK_TABLES] = torch.arange(1, num_blocks + 1, dtype=torch.int32)[None]
        for node in program.graph_module.graph.find_nodes(op="placeholder"):
            if "cache" in (role := node.meta.get("index_input", "")):
                shape = node.meta["val"].shape[1:]
                found[-1][role] = torch.zeros((num_blocks + 1) * BLOCK_SIZE + 1, *shape, dtype=node.meta["val"].dtype)
    return found


@pytest.mark.parametrize("pcp_size", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16])
def test_programs_with_a_cache_compute_and_store_the_same_bits(pcp_size: int, num_tokens: int) -> None:
    traced = tiny_llama(2)
    whole, split = lower_both(traced, 2, CACHED)
    inputs = traced.inputs_for(CASES["llama"].input_ids(num_tokens))
    partition = partition_batch([num_tokens], [True], pcp_size=pcp_size, shard_decode=False)
    indices = [cached_index(partition, whole) for _ in range(2)]
    expected = run_ranks(whole, inputs, indices[0], records=False)
    done = run_ranks(split, inputs, indices[1], records=True)
    for rank in range(pcp_size):
        assert_same_bits(done.outputs[rank], expected.outputs[rank])
        assert_same_bits(list(indices[1][rank].values()), list(indices[0][rank].values()))
    assert indices[0][0]["k_cache_1"].any()


def test_the_printed_program_runs_on_its_own(tmp_path: Path) -> None:
    lowered = lower_split(case("last_logits"), 2, PLAIN)
    (tmp_path / "final.py").write_text(lowered.program.source)
    done = subprocess.run(
        [sys.executable, "final.py", "9"], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert f"result 0: torch.float64 (1, 1, {NUM_IDS})" in done.stdout


def test_the_printed_program_names_each_call_and_frees_what_dies() -> None:
    source = lower_split(tiny_llama(4)).program.source
    numbers = [(int(call), int(segment)) for call, segment in re.findall(r"= run\((\d+), segment_(\d+), \(", source)]
    assert numbers == [(0, 0), (1, 1), (2, 1), (3, 1), (4, 2)]
    assert "calls, 5 collectives, 5 calls of 3 segments." in source
    assert "Called 3 times; names are those of the first." in source
    assert re.search(r"= run\(1, segment_1, \(.*; del .*paged_attention", source)
    assert f"('input_ids', torch.int64, [1, 'T'], None, {NUM_IDS})" in source, "ids are below the size of the table"


def test_a_constant_of_the_model_comes_in_as_an_argument() -> None:
    def forward(input_ids: Tensor, table: Tensor) -> Tensor:
        x = F.embedding(input_ids, table) + torch.tensor([1.0, 2.0] * 8)
        y = F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True)
        return y * torch.tensor([3.0, 4.0, 5.0, 6.0])

    traced = trace(forward, IDS, WEIGHT)
    whole, split = lower_both(traced, 2, PLAIN)
    assert all(not segment.graph.find_nodes(op="get_attr") for segment in find_segments(split.graph_module).values())
    inputs, index = traced.inputs_for(IDS, torch.randn(16, 16)), plain_index(8, 2)
    expected = run_ranks(whole, inputs, index, records=False)
    assert_same_bits(run_ranks(split, inputs, index, records=True).outputs[0], expected.outputs[0])


def test_dumps_show_the_outer_graph_its_segments_and_the_decisions(tmp_path: Path) -> None:
    traced, config = case("llama"), load_config({"parallel": {"pcp_size": 2}})
    lowered = lower(traced.trace, config, phase=replace(CACHED, is_split=True), record=True)
    folder = dump.write(tmp_path, lowered, config, traced.trace) / "rank_0"
    (text,) = folder.glob("*_split_segments.txt")
    assert re.findall(r"^(segment_\d+):$", text.read_text(), re.MULTILINE) == ["segment_0", "segment_1", "segment_2"]
    assert '"3 segments, 3 of them unique' in (folder / "decisions.json").read_text()
    before, after = (stage.op_counts for stage in lowered.stages[-2:])
    for op in ("aten.addmm.default", "aten.mm.default", "pcp.gather_start.default"):
        assert after[op] == before[op] > 0
    assert count_ops(lowered.program.graph_module)["segment_1"] == 1


def test_an_error_inside_a_segment_names_node_segment_and_line() -> None:
    program = lower_split(tiny_llama(3), 1, PLAIN).program
    inputs = tiny_llama(3).inputs_for(IDS)
    middle = program.input_names.index("model_layers_1_mlp_down_proj_weight")
    inputs[middle] = torch.ones(16, 25)
    with pytest.raises(RuntimeError) as caught, torch.no_grad(), program.noted_errors():
        run_lockstep([program.start(inputs, {})])
    (note,) = caught.value.__notes__
    where = r"in mm_\d+ \(aten.mm.default\) of segment_1 \(call_2\) of the compiled program"
    assert re.match(rf"{where}\n  at .*down_proj", note)


def test_an_error_of_what_runs_the_segments_names_the_call() -> None:
    def refuse(number: int, segment: Callable[..., Any], arguments: tuple[Any, ...]) -> Sequence[Any]:
        if number == 2:
            raise RuntimeError("no graph was captured")
        results: Sequence[Any] = segment(*arguments)
        return results

    program = lower_split(tiny_llama(3), 1, PLAIN).program
    with pytest.raises(RuntimeError, match="no graph") as caught, torch.no_grad(), program.noted_errors():
        run_lockstep([program.start(tiny_llama(3).inputs_for(IDS), {}, refuse)])
    assert caught.value.__notes__[0].startswith("in call_2 (segment_1) of the compiled program\n  at ")


def test_profiler_ranges_hold_the_calls_of_segments() -> None:
    traced = case("llama")
    program = lower_split(traced, 2, PLAIN).program
    with profile() as profiled:
        run_ranks(program, traced.inputs_for(CASES["llama"].input_ids(9)), plain_index(9, 2), records=True)
    ranges = {event.key: event.count for event in profiled.key_averages() if event.key.startswith("pcp.prefill")}
    assert ranges == {f"pcp.prefill.{number:02}": 2 for number in range(len(program.schedule) + 1)}

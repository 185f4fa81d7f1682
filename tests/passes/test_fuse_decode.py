"""`fuse_decode`: what it does to a small layer, as text, what it leaves alone, and that results stay."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, fx, nn

from pcp_compiler.config import load_config
from pcp_compiler.drafters.layers import DecoderLayer, LayerShape, RMSNorm, rotate
from pcp_compiler.graph_text import count_ops, format_graph
from pcp_compiler.invariants import check_values
from pcp_compiler.kv_ops import STORE_KV
from pcp_compiler.ops import ATTENTION
from pcp_compiler.pass_api import DraftChain, PassContext, Phase, RowMetadata, calls
from pcp_compiler.passes import fuse_decode
from pcp_compiler.passes.attach_kv import BLOCK_TABLES
from pcp_compiler.passes.fuse_decode import FUSED, LEFT, FuseDecode
from pcp_compiler.pipeline import Lowered, lower, passes_for, run_pass
from pcp_compiler.ranks import run_lockstep
from pcp_compiler.runtime.rows import TargetRows, attention_as_rows
from pcp_compiler.trace import ModuleTrace, trace_module
from tests.passes.draft_steps import context

GOLDENS = Path(__file__).parent / "fuse_goldens"
NUM_IDS, HIDDEN, MLP, HEAD_DIM, MAX_LEN, BLOCK_SIZE = 11, 16, 24, 4, 32, 4
ROWS = RowMetadata("positions", MAX_LEN)
STEP = Phase("step", is_sharded=False, block_size=BLOCK_SIZE, rows=ROWS)
CHAIN = Phase(
    "chain", is_sharded=False, block_size=BLOCK_SIZE, rows=ROWS,
    chain=DraftChain(3, True, "next_ids", "hidden", "logit_rows"),
)  # fmt: skip
PER_LAYER = {"rms_norm_linear": 1, "rope_store_kv": 1, "linear_residual": 2, "rms_norm_swiglu": 1}


def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
    """positions [1, T] -> cos and sin [1, T, HEAD_DIM]."""
    turns = positions[..., None] * 10.0 ** -torch.arange(HEAD_DIM // 2)
    turns = torch.cat([turns, turns], dim=-1)
    return turns.cos(), turns.sin()


class Step(nn.Module):
    """A drafter's step of plain layers, with the signature of `runtime.rows.DraftRows`."""

    def __init__(self, *, bias: bool = False, norms_heads: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        shape = LayerShape(HIDDEN, MLP, 4, 2, HEAD_DIM, 1e-5, bias, bias, norms_heads)
        self.embedding = nn.Embedding(NUM_IDS, HIDDEN)
        self.layer = DecoderLayer(shape, 0)
        self.head = nn.Linear(HIDDEN, NUM_IDS, bias=False)
        self.training = False

    def forward(self, next_ids: Tensor, hidden: Tensor, positions: Tensor, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        """next_ids, positions [1, T], hidden [1, T, H], logit_rows [L] -> [L, H] and [L, V]."""
        x = self.embedding(next_ids) + hidden
        picked = self.layer(x, position_embeddings=angles(positions))[0].index_select(0, logit_rows)
        return picked, self.head(picked)


class Pieces(Step):
    """Lines that look much like what is fused."""

    def __init__(self, lines: Callable[[Pieces, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.lines = lines
        self.norm, self.other = RMSNorm(HIDDEN, 1e-5), nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, next_ids: Tensor, hidden: Tensor, positions: Tensor, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        """As that of `Step`."""
        x = self.lines(self, self.embedding(next_ids) + hidden, positions)
        return x[0].index_select(0, logit_rows), x


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = ATTENTION(q, k, v, None, None, layer=0, kind="full", scale=0.5)
    return out.flatten(-2)


def heads(x: Tensor) -> Tensor:
    out: Tensor = x.unflatten(-1, (-1, HEAD_DIM))
    return out


def norm_that_is_returned_too(step: Pieces, x: Tensor, _positions: Tensor) -> Any:
    normed = step.norm(x)
    return step.other(normed).relu() + normed


def norm_in_another_order(step: Pieces, x: Tensor, _positions: Tensor) -> Any:
    return step.other(x * torch.rsqrt((x + 1e-5).pow(2).mean(-1, keepdim=True)) * step.norm.weight).relu()


def norm_of_tokens(step: Pieces, x: Tensor, _positions: Tensor) -> Any:
    return step.other(step.norm.weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5))).relu()


def computed_weight(step: Pieces, x: Tensor, _positions: Tensor) -> Any:
    return F.linear(step.norm(x), step.other.weight * 2) + x


def sum_that_broadcasts(step: Pieces, x: Tensor, _positions: Tensor) -> Any:
    return step.other(x) + x[:, :1]


def product_that_is_read_twice(step: Pieces, x: Tensor, _positions: Tensor) -> Any:
    y = step.other(x)
    return (x + y) * y


def turned_in_pairs(_step: Pieces, x: Tensor, positions: Tensor) -> Any:
    cos, sin = angles(positions)
    q = heads(x)
    crossed = torch.stack([-q[..., 1::2], q[..., ::2]], dim=-1).flatten(-2)
    turned = q * cos.unsqueeze(2) + crossed * sin.unsqueeze(2)
    return attend(turned, turned * 2, q)


def turned_by_other_angles(_step: Pieces, x: Tensor, positions: Tensor) -> Any:
    return attend(rotate(heads(x), *angles(positions)), rotate(heads(x * 2), *angles(positions + 1)), heads(x))


def turned_the_other_way(_step: Pieces, x: Tensor, positions: Tensor) -> Any:
    cos, sin = angles(positions)
    first, second = heads(x).chunk(2, dim=-1)
    turned = heads(x) * cos.unsqueeze(2) + torch.cat([second, -first], dim=-1) * sin.unsqueeze(2)
    return attend(turned, turned * 2, heads(x))


def turned_keys_that_are_read_too(_step: Pieces, x: Tensor, positions: Tensor) -> Any:
    k = rotate(heads(x), *angles(positions))
    return attend(rotate(heads(x * 2), *angles(positions)), k, heads(x)) + k.flatten(-2)


LEFT_ALONE = (
    norm_that_is_returned_too, norm_in_another_order, norm_of_tokens, computed_weight, sum_that_broadcasts,
    product_that_is_read_twice, turned_in_pairs, turned_by_other_angles, turned_the_other_way,
    turned_keys_that_are_read_too,
)  # fmt: skip


def trace_step(step: nn.Module) -> ModuleTrace:
    """Trace a step for any number of rows."""
    ids = torch.zeros(1, 7, dtype=torch.int64)
    example = (ids, torch.zeros(1, 7, HIDDEN), ids.clone(), torch.zeros(3, dtype=torch.int64))
    return trace_module(
        step, example, tokens={"next_ids": 1, "hidden": 1, "positions": 1}, other_sizes={"logit_rows": 0}
    )


def before(step: nn.Module, phase: Phase) -> tuple[fx.GraphModule, PassContext]:
    """Return the graph that the pass is given."""
    traced = trace_step(step)
    gm, ctx = traced.trace.copy_graph(), context(traced, phase)
    for earlier in passes_for(ctx.config, phase):
        gm, _ = run_pass(earlier, gm, ctx)
    return gm, ctx


def fuse(gm: fx.GraphModule, ctx: PassContext) -> tuple[str, str, int]:
    """Return the graph before and after the pass, and the rewrites."""
    old = format_graph(gm, ctx.seeds)
    gm, stage = run_pass(FuseDecode(), gm, ctx)
    check_values(gm)
    return old, format_graph(gm, ctx.seeds), stage.num_rewrites


def check_golden(request: pytest.FixtureRequest, name: str, old: str, new: str) -> None:
    """Compare with a golden file."""
    path, text = GOLDENS / f"{name}.txt", f"{old}---\n{new}"
    if request.config.getoption("--update-goldens"):
        path.write_text(text)
    assert path.is_file() and text == path.read_text(), f"{name} differs; if that is meant: pytest --update-goldens"


CASES: Mapping[str, tuple[Callable[[], nn.Module], Phase]] = {
    "layer": (Step, STEP),
    "layer_with_bias": (lambda: Step(bias=True), STEP),
    "greedy_chain": (Step, CHAIN),
}


@pytest.mark.parametrize("name", CASES)
def test_the_pass_rewrites_what_it_is_for(name: str, request: pytest.FixtureRequest) -> None:
    make, phase = CASES[name]
    old, new, rewrites = fuse(*before(make(), phase))
    assert rewrites > 0 and new != old
    check_golden(request, f"fuse_decode__{name}", old, new)


@pytest.mark.parametrize("lines", LEFT_ALONE, ids=lambda lines: lines.__name__)
def test_the_pass_leaves_alone_what_it_is_not_for_and_says_why(lines: Any, request: pytest.FixtureRequest) -> None:
    gm, ctx = before(Pieces(lines), STEP)
    old, new, rewrites = fuse(gm, ctx)
    assert rewrites == 0 and new == old
    assert FUSED not in ctx.decisions.entries and ctx.decisions.entries[LEFT]
    if lines is norm_that_is_returned_too:
        check_golden(request, f"fuse_decode__{lines.__name__}", old, new)


def test_every_golden_file_belongs_to_a_case() -> None:
    assert {path.stem for path in GOLDENS.iterdir()} == {
        f"fuse_decode__{name}" for name in (*CASES, norm_that_is_returned_too.__name__)
    }


def test_before_and_after_in_the_docstring_come_from_a_golden() -> None:
    found = re.search(r"^Before:(.+?)^After:(.+?)^Why here:", fuse_decode.__doc__ or "", re.MULTILINE | re.DOTALL)
    assert found is not None
    golden = (GOLDENS / "fuse_decode__layer.txt").read_text().split("---\n")
    for shown, text in zip(found.groups(), golden, strict=True):
        wanted, ops = (re.findall(r"%.* = ([\w.]+)\(", part) for part in (shown, text))
        rest = iter(ops)
        assert wanted and all(op in rest for op in wanted)


@pytest.mark.parametrize("phase", [STEP, CHAIN])
def test_a_pass_that_runs_again_finds_nothing_to_do(phase: Phase) -> None:
    gm, ctx = before(Step(norms_heads=True), phase)
    fuse(gm, ctx)
    once, again, rewrites = fuse(gm, ctx)
    assert rewrites == 0 and again == once


def swap_operands(gm: fx.GraphModule) -> None:
    """Swap the operands of every sum and product."""
    for node in calls(gm, torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor):
        if all(isinstance(operand, fx.Node) for operand in node.args):
            node.args = node.args[::-1]


def test_the_order_of_the_operands_of_sums_and_products_does_not_matter() -> None:
    counts = []
    for edit in (lambda _gm: None, swap_operands):
        gm, ctx = before(Step(bias=True), STEP)
        edit(gm)
        fuse(gm, ctx)
        counts.append({op: number for op, number in count_ops(gm).items() if op.startswith("pcp.")})
    assert counts[0] == counts[1]
    assert {f"pcp.{name}.default": number for name, number in PER_LAYER.items()}.items() <= counts[0].items()


def test_logits_that_only_an_argmax_reads_are_not_made() -> None:
    gm, ctx = before(Step(), CHAIN)
    fuse(gm, ctx)
    counts = count_ops(gm)
    assert counts["pcp.linear_argmax.default"] == 2
    assert counts["pcp.row_argmax.default"] == 1  # of the logits that the caller has
    assert not any(op.startswith("aten.mm") for op in counts)


def greedy(step: Pieces, x: Tensor, _positions: Tensor) -> Any:
    return step.head(x).argmax(-1)


def greedy_with_a_dim_kept(step: Pieces, x: Tensor, _positions: Tensor) -> Any:
    return step.head(x).argmax(-1, keepdim=True)


def most_likely_row(step: Pieces, x: Tensor, _positions: Tensor) -> Any:
    return step.head(x)[0].argmax(0)[None, None]


@pytest.mark.parametrize(("lines", "number"), [(greedy, 1), (greedy_with_a_dim_kept, 0), (most_likely_row, 0)])
def test_argmax_along_the_vocabulary_is_taken_with_the_head(lines: Any, number: int) -> None:
    gm, ctx = before(Pieces(lines), STEP)
    fuse(gm, ctx)
    assert count_ops(gm).get("pcp.linear_argmax.default", 0) == number


def test_no_store_is_left_beside_the_one_that_turns_too() -> None:
    gm, ctx = before(Step(), STEP)
    fuse(gm, ctx)
    assert not list(calls(gm, STORE_KV))


# -- results ---------------------------------------------------------------------------------------------------------

SIZES: Mapping[str, Any] = {
    "vocab_size": NUM_IDS, "hidden_size": 36, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": MAX_LEN,
}  # fmt: skip
MODELS: Mapping[str, Callable[[], Any]] = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "SmolLM2": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "Qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "Qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=6)),
}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}


@cache
def traced_model(name: str, dtype: torch.dtype) -> ModuleTrace:
    """Return the trace of a random model as a function of rows."""
    torch.manual_seed(0)
    target = MODELS[name]()
    target.to(dtype).requires_grad_(False).train(False)
    for weight in target.parameters():
        nn.init.normal_(weight, mean=0.5 if weight.dim() == 1 else 0.0, std=0.2)
    ids = torch.zeros(1, 7, dtype=torch.int64)
    with attention_as_rows(target):
        return trace_module(
            TargetRows(target), (ids, torch.arange(7)[None], torch.zeros(3, dtype=torch.int64)),
            tokens={"input_ids": 1, "position_ids": 1}, other_sizes={"logit_rows": 0},
        )  # fmt: skip


def lower_model(traced: ModuleTrace, *, fused: bool) -> Lowered:
    """Lower a model for decode rows."""
    config = load_config({})
    phase = Phase("decode", is_sharded=False, block_size=BLOCK_SIZE, rows=RowMetadata("position_ids", MAX_LEN))
    passes = passes_for(config, phase)
    return lower(traced.trace, config, phase=phase, passes=(*passes, FuseDecode()) if fused else passes)


def run_model(traced: ModuleTrace, lowered: Lowered, cache_dtype: torch.dtype) -> list[Tensor]:
    """Run three rows over caches that hold something; return hidden states, logits and caches."""
    generator = torch.Generator().manual_seed(1)
    index = {BLOCK_TABLES: torch.tensor([[3, 1, 6], [5, 2, 7], [0, 0, 0]], dtype=torch.int32)}
    for node in lowered.program.graph_module.graph.find_nodes(op="placeholder"):
        role = node.meta.get("index_input", "")
        if "cache" in role:
            shape = (8 * BLOCK_SIZE + 1, *node.meta["val"].shape[1:])
            index[role] = torch.randn(shape, generator=generator, dtype=torch.float64).to(cache_dtype)
    inputs = [torch.tensor([[4, 9, 0]]), torch.tensor([[5, 11, 0]]), torch.tensor([1, 0])]
    with torch.no_grad():
        done = run_lockstep([lowered.program.start([*traced.weights, *inputs], index)])
    hidden, logits = done.outputs[0]
    spare = {role: cache[:-1] for role, cache in index.items() if "cache" in role}  # the last row is nobody's
    return [hidden[:, :2], logits, *spare.values()]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step_gives_the_same_with_the_pass_and_without(name: str, dtype: torch.dtype) -> None:
    traced = traced_model(name, dtype)
    plain, fused = lower_model(traced, fused=False), lower_model(traced, fused=True)
    counts = count_ops(fused.program.graph_module)
    assert {op: counts[f"pcp.{op}.default"] for op in PER_LAYER} == {op: 2 * n for op, n in PER_LAYER.items()}
    for a, b in zip(run_model(traced, plain, dtype), run_model(traced, fused, dtype), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCES[dtype])


def test_decisions_list_what_was_fused_of_each_layer_and_what_was_not() -> None:
    entries = lower_model(traced_model("Qwen3", torch.float32), fused=True).decisions.entries
    assert "rope_store_kv: layer 1" in entries[FUSED]
    for layer in range(2):
        assert f"linear_residual: base_layers_{layer}_mlp_down_proj_weight" in entries[FUSED]
    assert len(entries[FUSED]) == 2 * sum(PER_LAYER.values())
    assert len(entries[LEFT]) == 2 * 2 + 2  # norms of heads, the last norm, the logits
    assert all(re.match(r"\w+: a (norm|product) ", text) for text in entries[LEFT])

"""What holds of every pass, whatever the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from pcp_compiler.errors import UnsupportedGraphError
from pcp_compiler.graph_text import format_graph
from pcp_compiler.pipeline import run_pass
from tests.passes.models import CASES, HEAD_DIM, HIDDEN, Case, build
from tests.passes.support import PASSES, Traced, assert_same, run_on_ranks, run_passes

PCP_SIZES = (1, 2, 3)


def lengths(pcp_size: int) -> set[int]:
    """Return numbers of tokens around which layouts change: ranks without rows, short last rows, full ones."""
    return {1, 2, pcp_size, 2 * pcp_size + 1, 64}


class Reference:
    """A model of CASES, its trace, and what the model itself computes for each length."""

    def __init__(self, name: str, trace: Callable[..., Traced], route: str, example_len: int) -> None:
        self.case: Case = CASES[name]
        self.model = build(name)
        self.traced = trace(self.model, self.case.input_ids(example_len), route=route, **dict(self.case.kwargs))
        self._known: dict[int, tuple[list[object], list[Tensor]]] = {}

    def call(self, num_tokens: int) -> tuple[list[object], list[Tensor]]:
        """Return the graph's inputs and the expected tensors for one length."""
        if num_tokens not in self._known:
            ids = self.case.input_ids(num_tokens)
            with torch.no_grad():
                leaves = pytree.tree_leaves(self.model(ids, **dict(self.case.kwargs)))
            expected = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            self._known[num_tokens] = self.traced.inputs_for(ids), expected
        return self._known[num_tokens]

    def check_all_passes(self, lengths_of: Callable[[int], set[int]]) -> list[str]:
        """Compare the graph after every pass with the model; return the passes that rewrote something."""
        rewrote = []
        for run in run_passes(self.traced, self.traced.context()):
            program = run.program()
            for pcp_size in PCP_SIZES:
                for num_tokens in lengths_of(pcp_size):
                    inputs, expected = self.call(num_tokens)
                    assert_same(run_on_ranks(program, inputs, pcp_size=pcp_size, num_tokens=num_tokens), expected)
            if run.num_rewrites:
                rewrote.append(run.step.name)
        assert len(program.schedule) > 0, "no collective: nothing was sharded"
        return rewrote


@pytest.mark.parametrize("name", CASES)
def test_after_every_pass_virtual_ranks_compute_what_the_model_computes(
    name: str, trace: Callable[..., Traced]
) -> None:
    rewrote = Reference(name, trace, "make_fx", 5).check_all_passes(lengths)
    assert {"infer_placements", "shard_tokens", "gather_kv"} <= set(rewrote)
    assert ("restore_rows" in rewrote) == (name in ("last_logits", "tuples_of_last_rows", "hf_llama_last_logits"))


@pytest.mark.parametrize("num_tokens", [2, HEAD_DIM, HIDDEN, 64])
def test_a_static_graph_whose_length_equals_another_size_is_sharded_like_any_other(
    num_tokens: int, trace: Callable[..., Traced]
) -> None:
    Reference("batch_2", trace, "static", num_tokens).check_all_passes(lambda _pcp_size: {num_tokens})


@pytest.mark.parametrize("name", ["hf_llama_last_logits", "learned_positions"])
def test_graphs_of_dynamo_with_symbols_pass_too(name: str, trace: Callable[..., Traced]) -> None:
    Reference(name, trace, "dynamic", 5).check_all_passes(lambda pcp_size: {2, 2 * pcp_size + 1, 64})


@pytest.mark.parametrize("name", CASES)
def test_a_pass_that_runs_again_finds_nothing_to_do(name: str, trace: Callable[..., Traced]) -> None:
    case = CASES[name]
    traced = trace(build(name), case.input_ids(5), **dict(case.kwargs))
    gm, ctx = traced.trace.copy_graph(), traced.context()
    for step in PASSES:
        gm, _ = run_pass(step, gm, ctx)
        once = format_graph(gm, ctx.seeds)
        gm, again = run_pass(step, gm, ctx)
        assert (step.name, again.num_rewrites) == (step.name, 0)
        assert format_graph(gm, ctx.seeds) == once


def size_of_a_maximum(input_ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    x = F.embedding(input_ids, table)
    return x.view(1, -1, 4, 4), input_ids.new_zeros(torch.sym_max(input_ids.shape[1], 3), 2).view(-1, 1)


def one_causal_mask_and_one_that_is_not(input_ids: Tensor, table: Tensor) -> Tensor:
    x = F.embedding(input_ids, table)[:, None]
    rows = torch.arange(input_ids.shape[1])
    causal, window = rows <= rows[:, None], (rows <= rows[:, None]) & (rows > rows[:, None] - 3)
    x = F.scaled_dot_product_attention(x, x, x, attn_mask=causal)
    return F.scaled_dot_product_attention(x, x, x, attn_mask=window)


def bidirectional_attention(input_ids: Tensor, table: Tensor) -> Tensor:
    x = F.embedding(input_ids, table)[:, None]
    return F.scaled_dot_product_attention(x, x, x)


def mean_of_tokens(input_ids: Tensor, table: Tensor) -> Tensor:
    x = F.embedding(input_ids, table)
    return x.relu() - x.mean(1, keepdim=True)


def all_rows_of_tokens_merged_with_the_batch(input_ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(input_ids, table).view(-1, 16).relu()


@pytest.mark.parametrize(
    ("step", "forward", "batch"),
    [
        ("explicit_shapes", size_of_a_maximum, 1),
        ("canonicalize_attention", one_causal_mask_and_one_that_is_not, 1),
        ("canonicalize_attention", bidirectional_attention, 1),
        ("infer_placements", mean_of_tokens, 1),
        ("shard_tokens", all_rows_of_tokens_merged_with_the_batch, 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_pass_that_refuses_leaves_its_graph_untouched(
    step: str, forward: Callable[..., Any], batch: int, trace: Callable[..., Traced]
) -> None:
    traced = trace(forward, torch.arange(8).expand(batch, 8).contiguous(), torch.ones(16, 16))
    gm, ctx = traced.trace.copy_graph(), traced.context()
    names = [one.name for one in PASSES]
    for earlier in PASSES[: names.index(step)]:
        gm, _ = run_pass(earlier, gm, ctx)
    before = format_graph(gm, ctx.seeds)
    with pytest.raises(UnsupportedGraphError):
        run_pass(PASSES[names.index(step)], gm, ctx)
    assert format_graph(gm, ctx.seeds) == before

"""What each pass does to a few lines of PyTorch, as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pcp_compiler.graph_text import format_graph
from pcp_compiler.pipeline import run_pass
from tests.passes.conftest import GOLDENS
from tests.passes.support import PASSES, PassRun, Route, Traced, run_only

IDS, WEIGHT = torch.arange(8)[None], torch.ones(16, 16)


def view_with_minus_one(input_ids: Tensor, table: Tensor) -> Tensor:
    x = F.embedding(input_ids, table)
    return x.view(1, x.shape[1], -1, 4)


def view_with_numbers(input_ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(input_ids, table).view(1, input_ids.shape[1], 4, 4)


def heads(x: Tensor) -> Tensor:
    return x.view(1, x.shape[1], 4, 4).transpose(1, 2)


def attention_with_mask(input_ids: Tensor, table: Tensor) -> Tensor:
    rows = torch.arange(input_ids.shape[1])
    q = heads(F.embedding(input_ids, table))
    return F.scaled_dot_product_attention(q, q, q, attn_mask=rows[None, None, None, :] <= rows[None, None, :, None])


def causal_attention(input_ids: Tensor, table: Tensor) -> Tensor:
    x = F.embedding(input_ids, table)
    return F.scaled_dot_product_attention(heads(x), heads(x * 2), heads(x * 3), is_causal=True)


def attention_whose_key_is_its_value(input_ids: Tensor, table: Tensor) -> Tensor:
    x = heads(F.embedding(input_ids, table))
    return F.scaled_dot_product_attention(x * 2, x, x, is_causal=True)


def embedding_then_relu(input_ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(input_ids, table).relu()


def cumsum_over_tokens(input_ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(input_ids, table).cumsum(1).relu()


def tokens_as_extent(input_ids: Tensor, table: Tensor) -> Tensor:
    length = input_ids.shape[1]
    x = F.embedding(input_ids, table).view(1, length, 4, 4)
    return x + table[:1, :4].view(1, 1, 1, 4).expand(1, length, 4, 4)


def tokens_as_iota(input_ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(input_ids, table) * torch.arange(input_ids.shape[1])[:, None].cos()


def tokens_as_divisor(input_ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(input_ids, table) / input_ids.shape[1]


def tokens_as_slice_bound(input_ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(input_ids, table) + table[: input_ids.shape[1]]


def last_row(input_ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(input_ids, table).relu()[:, -1]


def last_two_rows(input_ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(input_ids, table).relu()[:, -2:]


def last_row_and_all(input_ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    x = F.embedding(input_ids, table).relu()
    return x[:, -1], x


@dataclass(frozen=True, slots=True)
class Golden:
    """One golden file: which pass, which lines, how they are traced."""

    step: str
    forward: Callable[..., Any]
    route: Route = "make_fx"
    options: tuple[tuple[str, object], ...] = ()

    @property
    def name(self) -> str:
        """The case in the file name."""
        return self.forward.__name__ + ("" if self.route == "make_fx" else f"_{self.route}")

    def run(self, trace: Callable[..., Traced]) -> PassRun:
        """Return what the pass does."""
        return run_only(self.step, trace(self.forward, IDS, WEIGHT, route=self.route), **dict(self.options))


MATCHING = (
    Golden("explicit_shapes", view_with_minus_one),
    Golden("explicit_shapes", view_with_minus_one, route="dynamic"),
    Golden("explicit_shapes", view_with_minus_one, route="static"),
    Golden("canonicalize_attention", attention_with_mask),
    Golden("canonicalize_attention", attention_with_mask, route="static"),
    Golden("infer_placements", embedding_then_relu),
    Golden("infer_placements", cumsum_over_tokens, options=(("on_token_mixing", "gather"),)),
    Golden("shard_tokens", causal_attention),
    Golden("shard_tokens", causal_attention, route="static"),
    Golden("shard_tokens", tokens_as_extent),
    Golden("shard_tokens", tokens_as_iota),
    Golden("shard_tokens", tokens_as_divisor),
    Golden("shard_tokens", tokens_as_slice_bound),
    Golden("shard_tokens", last_row),
    Golden("gather_kv", causal_attention),
    Golden("restore_rows", last_row),
    Golden("restore_rows", last_two_rows, route="static"),
)
NOT_MATCHING = (
    Golden("explicit_shapes", view_with_numbers),
    Golden("canonicalize_attention", causal_attention),
    Golden("gather_kv", attention_whose_key_is_its_value),
    Golden("gather_kv", embedding_then_relu),
    Golden("restore_rows", last_row_and_all),
)
ALWAYS_MATCHING = ("infer_placements", "shard_tokens")
"""Passes that have work on every graph but their own result."""


def _id(golden: Golden) -> str:
    return f"{golden.step}-{golden.name}"


@pytest.mark.parametrize("golden", MATCHING, ids=_id)
def test_a_pass_rewrites_what_it_is_for(
    golden: Golden, trace: Callable[..., Traced], check_golden: Callable[[str, PassRun], None]
) -> None:
    run = golden.run(trace)
    assert run.num_rewrites > 0
    assert run.after != run.before
    check_golden(golden.name, run)


@pytest.mark.parametrize("golden", NOT_MATCHING, ids=_id)
def test_a_pass_leaves_alone_what_it_is_not_for(
    golden: Golden, trace: Callable[..., Traced], check_golden: Callable[[str, PassRun], None]
) -> None:
    run = golden.run(trace)
    assert run.num_rewrites == 0
    assert run.after == run.before
    check_golden(golden.name, run)


@pytest.mark.parametrize("name", ALWAYS_MATCHING)
def test_a_pass_with_work_on_every_graph_leaves_its_own_result_alone(
    name: str, trace: Callable[..., Traced], check_golden: Callable[[str, PassRun], None]
) -> None:
    traced = trace(embedding_then_relu, IDS, WEIGHT)
    ctx = traced.context()
    first = run_only(name, traced)
    gm, stage = run_pass(first.step, first.graph_module, ctx)
    again = PassRun(first.step, first.after, format_graph(gm, ctx.seeds), stage.num_rewrites, gm, ctx.seeds)
    assert again.num_rewrites == 0
    assert again.after == again.before
    check_golden("own_result", again)


def test_every_pass_has_a_golden_that_matches_and_one_that_does_not() -> None:
    names = {step.name for step in PASSES}
    assert {golden.step for golden in MATCHING} == names
    assert {golden.step for golden in NOT_MATCHING} | set(ALWAYS_MATCHING) == names


def test_every_golden_file_belongs_to_a_case() -> None:
    cases = {f"{golden.step}__{golden.name}.txt" for golden in MATCHING + NOT_MATCHING}
    cases |= {f"{name}__own_result.txt" for name in ALWAYS_MATCHING}
    assert {path.name for path in GOLDENS.iterdir()} == cases


def ops_in(text: str) -> list[str]:
    """Return the ops that a graph text calls, in order."""
    return re.findall(r"^\s*%.* = ([\w.]+)\(", text, re.MULTILINE)


def is_subsequence(few: list[str], many: list[str]) -> bool:
    """Return whether `few` comes in `many` in this order, with others between."""
    rest = iter(many)
    return all(item in rest for item in few)


@pytest.mark.parametrize("step", PASSES, ids=lambda step: step.name)
def test_before_and_after_in_the_docstring_of_a_pass_come_from_one_of_its_goldens(step: Any) -> None:
    doc = __import__(type(step).__module__, fromlist=["__doc__"]).__doc__
    found = re.search(r"^Before:\n(.+?)^After:\n(.+?)^Why here:", doc, re.MULTILINE | re.DOTALL)
    assert found is not None
    before, after = ops_in(found[1]), ops_in(found[2])
    assert before and after
    goldens = [path.read_text().split("---\n") for path in GOLDENS.glob(f"{step.name}__*.txt")]
    assert any(is_subsequence(before, ops_in(old)) and is_subsequence(after, ops_in(new)) for old, new in goldens)

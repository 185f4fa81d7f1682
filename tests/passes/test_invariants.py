"""One deliberately broken pass for each invariant; the runner, or `check_values`, has to name it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from pcp_compiler import ops
from pcp_compiler.errors import InvariantError
from pcp_compiler.invariants import INVARIANTS, check_values
from pcp_compiler.pass_api import Pass, PassContext, PassResult, calls
from pcp_compiler.passes.shard_tokens import find_index_input
from pcp_compiler.pipeline import run_pass
from tests.passes.support import Traced, run_only

aten = torch.ops.aten


@dataclass(frozen=True)
class BrokenPass(Pass):
    """A pass that does one wrong thing."""

    break_graph: Callable[[fx.GraphModule], None]
    name: ClassVar[str] = "broken_pass"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        self.break_graph(gm)
        return PassResult(gm, 1)


def use_before_definition(gm: fx.GraphModule) -> None:
    relu = next(calls(gm, aten.relu.default))
    relu.append(next(calls(gm, aten.embedding.default)))


def call_a_method(gm: fx.GraphModule) -> None:
    relu = next(calls(gm, aten.relu.default))
    relu.op, relu.target = "call_method", "relu"


def write_in_place(gm: fx.GraphModule) -> None:
    next(calls(gm, aten.relu.default)).target = aten.relu_.default


def forget_the_value(gm: fx.GraphModule) -> None:
    del next(calls(gm, aten.relu.default)).meta["val"]


def leave_a_node_behind(gm: fx.GraphModule) -> None:
    relu = next(calls(gm, aten.relu.default))
    with gm.graph.inserting_after(relu):
        left = gm.graph.call_function(aten.neg.default, (relu,))
    left.meta["val"] = relu.meta["val"]


def wait_twice(gm: fx.GraphModule) -> None:
    wait = next(calls(gm, ops.GATHER_WAIT))
    with gm.graph.inserting_after(wait):
        again = gm.graph.node_copy(wait)
    second = next(user for user in wait.users if user.args[1] == 1)
    second.replace_input_with(wait, again)


def wait_for_the_tensors_of_another_gather(gm: fx.GraphModule) -> None:
    wait = next(calls(gm, ops.GATHER_WAIT))
    xs = wait.args[1]
    assert isinstance(xs, list)
    wait.update_arg(1, xs[::-1])


def freeze_the_rows(gm: fx.GraphModule) -> None:
    gm.register_buffer("frozen_rows", torch.arange(4))
    shard = next(calls(gm, ops.SHARD))
    with gm.graph.inserting_before(shard):
        constant = gm.graph.get_attr("frozen_rows")
    constant.meta["val"] = shard.args[1].meta["val"]  # type: ignore[union-attr]
    shard.update_arg(1, constant)


def lose_the_source_line(gm: fx.GraphModule) -> None:
    next(calls(gm, ops.ATTENTION)).meta.pop("stack_trace")


def call_a_segment_without_its_argument(gm: fx.GraphModule) -> None:
    relu = next(calls(gm, aten.relu.default))
    graph = fx.Graph()
    taken = graph.placeholder("x")
    taken.meta["val"] = relu.meta["val"]
    graph.output(())
    gm.add_module("segment_0", fx.GraphModule({}, graph))
    with gm.graph.inserting_after(relu):
        gm.graph.call_module("segment_0").meta["val"] = ()


def forward(input_ids: Tensor, table: Tensor) -> Tensor:
    x = F.embedding(input_ids, table).relu().view(1, input_ids.shape[1], 2, 8).transpose(1, 2)
    return F.scaled_dot_product_attention(x, x * 2, x * 3, is_causal=True)


BROKEN = {
    use_before_definition: "well-formed",
    call_a_method: "op-allowed",
    write_in_place: "op-allowed",
    forget_the_value: "has-value",
    leave_a_node_behind: "no-dead-code",
    wait_twice: "collective-paired",
    wait_for_the_tensors_of_another_gather: "collective-paired",
    freeze_the_rows: "index-is-input",
    lose_the_source_line: "source-kept",
    call_a_segment_without_its_argument: "segment-fits",
}


@pytest.fixture
def sharded(trace: Callable[..., Traced]) -> tuple[fx.GraphModule, PassContext]:
    """Return a graph after all passes."""
    traced = trace(forward, torch.arange(8)[None], torch.ones(16, 16))
    return run_only("restore_rows", traced).graph_module, traced.context()


@pytest.mark.parametrize(("fault", "invariant"), BROKEN.items(), ids=lambda value: getattr(value, "__name__", value))
def test_the_runner_names_the_invariant_and_the_pass_that_broke_it(
    fault: Callable[[fx.GraphModule], None], invariant: str, sharded: tuple[fx.GraphModule, PassContext]
) -> None:
    with pytest.raises(InvariantError, match=f"^{invariant} does not hold after broken_pass: "):
        run_pass(BrokenPass(fault), *sharded)


def test_every_invariant_has_a_broken_pass() -> None:
    assert set(BROKEN.values()) == set(INVARIANTS)


def test_a_pass_that_adds_an_input_without_saying_so_is_caught(sharded: tuple[fx.GraphModule, PassContext]) -> None:
    def add_an_input(gm: fx.GraphModule) -> None:
        last = gm.graph.find_nodes(op="placeholder")[-1]
        with gm.graph.inserting_after(last):
            gm.graph.placeholder("another").meta["val"] = last.meta["val"]

    with pytest.raises(InvariantError, match="broken_pass changed the inputs"):
        run_pass(BrokenPass(add_an_input), *sharded)


def note_all_rows(gm: fx.GraphModule) -> None:
    embedding = next(calls(gm, aten.embedding.default))
    restore = find_index_input(gm, "restore")
    assert restore is not None
    size = restore.meta["val"].shape[0]
    embedding.meta["val"] = embedding.meta["val"].new_empty(1, size, 16)


def note_another_dtype(gm: fx.GraphModule) -> None:
    relu = next(calls(gm, aten.relu.default))
    relu.meta["val"] = relu.meta["val"].to(torch.float16)


def note_items_of_another_size(gm: fx.GraphModule) -> None:
    item = next(calls(gm, operator.getitem))
    item.meta["val"] = item.meta["val"].unsqueeze(0)


def note_another_number_of_rows(gm: fx.GraphModule) -> None:
    size = next(calls(gm, aten.sym_size.int))
    size.meta["val"] = size.meta["val"] + 1


@pytest.mark.parametrize(
    "fault", [note_all_rows, note_another_dtype, note_items_of_another_size, note_another_number_of_rows]
)
def test_a_value_that_its_op_does_not_compute_is_named(
    fault: Callable[[fx.GraphModule], None], sharded: tuple[fx.GraphModule, PassContext]
) -> None:
    gm, ctx = sharded
    check_values(gm)
    gm, _ = run_pass(BrokenPass(fault), gm, ctx)  # too costly for every pass: tests call check_values
    with pytest.raises(InvariantError, match=r"^value-matches does not hold: "):
        check_values(gm)

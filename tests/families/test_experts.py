"""Mixture-of-experts layers: rows stay where they are, and padding has no expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pcp_compiler import ops
from pcp_compiler.errors import UnsupportedGraphError
from pcp_compiler.pass_api import calls
from tests.families.support import WIDTH, Tokens, compile_for, make_ids
from tests.matrix.families import FLOAT32, Variant

NUM_EXPERTS, TOP_K = 4, 2


def test_each_row_is_multiplied_by_the_matrix_of_its_expert() -> None:
    x, weight, bias = torch.randn(6, 3).double(), torch.randn(4, 3, 5).double(), torch.randn(4, 5).double()
    expert_ids = torch.tensor([2, 0, 2, 3, 1, 0])
    expected = torch.stack([row @ weight[i] + bias[i] for row, i in zip(x, expert_ids.tolist(), strict=True)])
    torch.testing.assert_close(ops.EXPERTS(x, expert_ids, weight, bias), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        ops.EXPERTS(x, expert_ids, weight, None), expected - bias[expert_ids], rtol=0, atol=1e-12
    )


def test_rows_without_an_expert_are_zero_and_what_they_hold_reaches_no_other_row() -> None:
    x, weight, bias = torch.randn(5, 3), torch.randn(4, 3, 5), torch.ones(4, 5)
    expert_ids = torch.tensor([1, -1, 2, 4, 1])
    poisoned = x.clone()
    poisoned[[1, 3]] = torch.nan
    out = ops.EXPERTS(poisoned, expert_ids, weight, bias)
    assert torch.equal(out[[1, 3]], torch.zeros(2, 5))
    torch.testing.assert_close(out[[0, 2, 4]], ops.EXPERTS(x, expert_ids, weight, bias)[[0, 2, 4]])


@pytest.mark.parametrize("num_rows", [0, 4])
def test_experts_work_without_rows_and_without_tokens_for_an_expert(num_rows: int) -> None:
    out = ops.EXPERTS(torch.ones(num_rows, 3), torch.zeros(num_rows, dtype=torch.int64), torch.ones(4, 3, 5), None)
    assert torch.equal(out, torch.full((num_rows, 5), 3.0))


def test_padding_is_found_in_rows_that_are_merged_with_batch_and_choices() -> None:
    ids = torch.arange(2 * 3 * 2)  # two prompts, three rows of which two are real, two choices a row
    expected = [0, 1, 2, 3, -1, -1, 6, 7, 8, 9, -1, -1]
    assert ops.DROP_PADS(ids, torch.tensor(2), 0, 2, 2).tolist() == expected
    assert ops.DROP_PADS(ids[:0], torch.tensor(0), 0, 2, 2).tolist() == []


# -- experts that a model sorts ----------------------------------------------------------------------------------------


class SortedExperts(Tokens):
    """Experts as transformers' grouped_mm has them, in float32; `between` is done to the sorted rows."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.between = between
        generator = torch.Generator().manual_seed(0)
        self.router = torch.nn.Buffer(torch.randn(WIDTH, NUM_EXPERTS, generator=generator))
        self.weight = torch.nn.Buffer(torch.randn(NUM_EXPERTS, WIDTH, 8, generator=generator))
        self.float()

    def mix(self, x: Tensor) -> Tensor:
        """Route each row to two experts, sorted by expert in between."""
        flat = x.flatten(0, 1)
        scores, chosen = (flat @ self.router).topk(TOP_K)
        sorted_ids, order = chosen.flatten().sort()
        ends = self.ends_of_groups(sorted_ids)
        rows = F.grouped_mm(flat[self.tokens(order)], self.weight, offs=ends)
        if self.between is not None:
            rows = self.between(rows, order)
        rows = rows * scores.flatten()[order].unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
        return rows[inverse].view(*x.shape[:2], TOP_K, -1).sum(2)

    def tokens(self, order: Tensor) -> Tensor:
        """Return which token each sorted row belongs to."""
        return order // TOP_K

    def ends_of_groups(self, sorted_ids: Tensor) -> Tensor:
        """Return where the rows of each expert end."""
        counts = torch.histc(sorted_ids.float(), NUM_EXPERTS, 0, NUM_EXPERTS - 1)
        return counts.cumsum(0, dtype=torch.int32)


def test_a_sort_by_expert_is_taken_out_and_each_rank_multiplies_its_own_rows() -> None:
    compiled = compile_for(SortedExperts(lambda rows, _: F.silu(rows[:, ::2]).clamp(max=2.0)), 3)
    targets = {node.target for node in compiled.graph_module.graph.nodes}
    assert ops.EXPERTS in targets
    assert targets.isdisjoint({torch.ops.aten.sort.default, ops.GROUPED_MM})
    for num_tokens in (2, 5, 7, 64):
        compiled.check(make_ids(num_tokens), tolerance=1e-5)


def test_experts_that_are_sorted_run_on_one_rank_and_in_a_batch_too() -> None:
    model = SortedExperts()
    compile_for(model, 3, batch=2).check(make_ids(7, batch=2), tolerance=1e-5)
    got, _ = compile_for(model, 1).run(make_ids(7))
    torch.testing.assert_close(got, model(make_ids(7)), rtol=0, atol=1e-5)


class WrongTokens(SortedExperts):
    def tokens(self, order: Tensor) -> Tensor:
        return order // 3


class OwnGroups(SortedExperts):
    def ends_of_groups(self, sorted_ids: Tensor) -> Tensor:
        return (sorted_ids[:, None] <= torch.arange(NUM_EXPERTS)).sum(0, dtype=torch.int32)


MIXES = "mixes the rows that were sorted by expert"
MIXING: dict[str, tuple[Callable[[], SortedExperts], str]] = {
    "sum_over_rows": (lambda: SortedExperts(lambda rows, _: rows - rows.mean(0)), MIXES),
    "running_sum": (lambda: SortedExperts(lambda rows, _: rows.cumsum(0)), MIXES),
    "pairs_of_sorted_rows": (
        lambda: SortedExperts(lambda rows, _: rows.view(-1, 2, 8).softmax(1).view(-1, 8)),
        MIXES,
    ),
    "order_as_a_number": (lambda: SortedExperts(lambda rows, order: rows * order.unsqueeze(-1)), MIXES),
    "rows_moved": (lambda: SortedExperts(lambda rows, _: rows.roll(1, 0)), MIXES),
    "tokens_of_three": (WrongTokens, "it has no 3 sorted rows for each of its rows"),
    "groups_of_their_own": (OwnGroups, "its groups of rows are not those of a sort by expert"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_sorted_rows_that_meet_each_other_are_refused_with_the_knob(name: str) -> None:
    make_model, message = MIXING[name]
    with pytest.raises(UnsupportedGraphError, match=f"(?s){message}.*experts_implementation='pcp_spec'"):
        compile_for(make_model(), 2)


def test_sorted_rows_that_are_returned_are_refused() -> None:
    class ReturnsSorted(SortedExperts):
        def mix(self, x: Tensor) -> Tensor:
            sorted_ids, order = (x[0] @ self.router).argmax(-1).sort()
            return F.grouped_mm(x[0][order], self.weight, offs=self.ends_of_groups(sorted_ids))

    with pytest.raises(UnsupportedGraphError, match=MIXES):
        compile_for(ReturnsSorted(), 2)


# -- models of transformers --------------------------------------------------------------------------------------------

FAMILIES = ("GPT-OSS", "Mixtral", "DeepSeek-V3")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("experts", ["pcp_spec", "grouped_mm"])
def test_a_batch_of_equal_lengths_goes_to_the_experts_of_its_rows(family: str, experts: str) -> None:
    dtype, tolerance = (FLOAT32, 1e-5) if experts == "grouped_mm" else (torch.float64, 1e-6)
    variant = Variant(family, "pcp_spec", dtype, experts)
    compiled = compile_for(variant.model(), 3, batch=2)
    compiled.check(make_ids(7, batch=2), variant.reference(), tolerance)
    assert len(list(calls(compiled.graph_module, ops.EXPERTS))) == (2 if family == "DeepSeek-V3" else 4)


class _ExpertIds(TorchDispatchMode):
    """Keeps the expert numbers of every call of `pcp::experts`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ops.EXPERTS:
            self.seen.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("experts", ["pcp_spec", "grouped_mm"])
def test_padding_rows_are_routed_to_no_expert(experts: str) -> None:
    """Five tokens on two ranks are two rows and three: the padding row of rank 0 must cost no expert anything."""
    model = Variant("Mixtral", "pcp_spec", FLOAT32, experts).model()
    compiled = compile_for(model, 2)
    with _ExpertIds() as log:
        _, record = compiled.run(make_ids(5))
    assert (record.rows_per_rank, record.width) == ((2, 3), 3)
    without = sorted(int((ids == -1).sum()) for ids in log.seen)
    assert without == [0] * 4 + [TOP_K] * 4  # two layers of two matrices each, on either rank
    assert all(ids.max() < NUM_EXPERTS for ids in log.seen)


class CapacityRouter(Tokens):
    """Each expert takes the first two tokens that choose it; the others get nothing from it."""

    def mix(self, x: Tensor) -> Tensor:
        """Return x where its expert had room, else zero."""
        chosen = F.one_hot(x[..., :NUM_EXPERTS].argmax(-1), NUM_EXPERTS)
        place = (chosen.cumsum(1) * chosen).sum(-1)
        return torch.where((place <= 2).unsqueeze(-1), x, 0.0)


def test_padding_takes_no_room_of_a_router_with_limited_capacity() -> None:
    """Padding repeats token 0; if it were counted, its expert would be full before its second token comes."""
    with pytest.raises(UnsupportedGraphError, match=r"(?s)cumsum.*place = .*on_token_mixing: gather"):
        compile_for(CapacityRouter(), 2)
    model = CapacityRouter()
    compiled = compile_for(model, 2, on_token_mixing="gather")
    experts = model.embedding.weight[:, :NUM_EXPERTS].argmax(-1).tolist()
    one, other = experts.index(0), experts.index(1)
    got, record = compiled.run(torch.tensor([[one, other, other, other, one]]))
    assert (record.rows_per_rank, record.width) == ((2, 3), 3)
    assert got[0].any(-1).tolist() == [True, True, True, False, True]
    for num_tokens in (2, 5, 7, 64):
        compiled.check(make_ids(num_tokens))

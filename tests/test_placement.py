"""Placement rules against what the ops compute.

A rule that says an op is row-local promises: the op on selected rows equals selected rows of the op on all of them.
A rule that says an op mixes tokens promises that no dim of its result is like that. Sizes repeat on purpose: rows are
never recognised by their number.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from pcp_compiler import kv_ops, ops, placement
from pcp_compiler.errors import ConfigError, UnsupportedGraphError
from pcp_compiler.passes.explicit_shapes import SIZE_ARGUMENT
from pcp_compiler.placement import Call, Layout, Local, Rows, Verdict, find_rule, register_placement
from tests.passes.support import assert_same, run_on_ranks, run_only, run_passes, trace

aten = torch.ops.aten
GENERATOR = torch.Generator().manual_seed(0)


def floats(*shape: int) -> Tensor:
    """Return distinct random numbers."""
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def ids(*shape: int, below: int = 4) -> Tensor:
    """Return random integers."""
    return torch.randint(0, below, shape, generator=GENERATOR)


def flags(*shape: int) -> Tensor:
    """Return random booleans."""
    return ids(*shape, below=2).bool()


@dataclass(frozen=True, slots=True)
class Example:
    """One call of an op on real tensors."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = [list(a.shape) if isinstance(a, Tensor) else a for a in self.args if not isinstance(a, list)]
        return f"{self.op}{shown}"

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the call in order of appearance."""
        parts = [part for arg in self.args for part in (arg if isinstance(arg, (list, tuple)) else [arg])]
        return [part for part in parts if isinstance(part, Tensor)]

    def judge(self, layouts: Sequence[Rows | None], num_tokens: int) -> Verdict | None:
        """Return what the op's rule says when its tensors have these rows."""
        graph, nodes = fx.Graph(), []
        for position, tensor in enumerate(self.tensors):
            nodes.append(graph.placeholder(f"x{position}"))
            nodes[-1].meta["val"] = tensor
        queue = iter(nodes)
        node = graph.call_function(self.op, self._with_tensors(queue), self.kwargs)
        node.meta["val"] = self.op(*self.args, **self.kwargs)
        known = dict(zip(nodes, layouts, strict=True))
        rule = find_rule(self.op)
        assert rule is not None
        return rule(Call(node, _sizes, known.__getitem__, num_tokens))

    def run(
        self, tensors: Sequence[Tensor], sizes: Sequence[int] | None = None, rows: Tensor | None = None
    ) -> list[Tensor]:
        """Run the op on other tensors; `sizes` for a view, `rows` the global rows of an attention's queries."""
        args = list(self._with_tensors(iter(tensors)))
        if sizes is not None:
            args[SIZE_ARGUMENT[self.op]] = list(sizes)
        if self.op is ops.ATTENTION and rows is not None:
            args[4] = rows
        out = self.op(*args, **self.kwargs)
        return list(out) if isinstance(out, (tuple, list)) else [out]

    def _with_tensors(self, values: Iterator[Any]) -> tuple[Any, ...]:
        def put(arg: Any) -> Any:
            if isinstance(arg, (list, tuple)):
                return type(arg)(put(part) for part in arg)
            return next(values) if isinstance(arg, Tensor) else arg

        return tuple(put(arg) for arg in self.args)


def _sizes(node: fx.Node) -> tuple[int, ...]:
    value = node.meta["val"]
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def rows_options(tensor: Tensor, num_tokens: int) -> Iterator[Rows]:
    """Yield every way in which the rows of a batch can lie in a tensor of these sizes."""
    for dim, size in enumerate(tensor.shape):
        for outer in range(1, size // num_tokens + 1):
            if size % (outer * num_tokens) == 0:
                yield Rows(dim, outer, size // (outer * num_tokens))


def select(tensor: Tensor, rows: Rows | None, num_tokens: int, chosen: Tensor) -> Tensor:
    """Return the chosen token rows of a tensor."""
    if rows is None:
        return tensor
    split = tensor.unflatten(rows.dim, (rows.outer, num_tokens, rows.inner))
    picked: Tensor = split.index_select(rows.dim + 1, chosen)
    shape = list(tensor.shape)
    shape[rows.dim] = rows.outer * len(chosen) * rows.inner
    return picked.reshape(shape)


def selections(num_tokens: int) -> list[Tensor]:
    """Return rows that ranks may hold: none, one, some twice."""
    return [
        torch.tensor([], dtype=torch.int64), torch.tensor([num_tokens - 1]),
        torch.arange(num_tokens + 1) % num_tokens, torch.arange(num_tokens - 1),
    ]  # fmt: skip


def is_close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same sizes and almost the same numbers."""
    return a.shape == b.shape and torch.allclose(a, b, equal_nan=True)


def is_row_local(example: Example, verdict: Local, num_tokens: int) -> bool:
    """Return whether the op on selected rows is what a verdict promises, for all selections."""
    whole = example.run(example.tensors)
    layouts: tuple[Layout, ...] = verdict.out if isinstance(verdict.out, tuple) else (verdict.out,)
    for chosen in selections(num_tokens):
        expected = [select(x, rows, num_tokens, chosen) for x, rows in zip(whole, layouts, strict=True)]  # type: ignore[arg-type]
        tensors = [select(x, rows, num_tokens, chosen) for x, rows in zip(example.tensors, verdict.inputs, strict=True)]
        sizes = expected[0].shape if example.op in SIZE_ARGUMENT else None
        try:
            local = example.run(tensors, sizes, chosen)
        except (RuntimeError, IndexError):
            return False
        if len(local) != len(expected) or not all(map(is_close, local, expected)):
            return False
    return True


def check_verdict(example: Example, layouts: tuple[Rows | None, ...], num_tokens: int) -> str:
    """Check one verdict against the numbers and return its kind."""
    verdict = example.judge(layouts, num_tokens)
    if verdict is None:
        return "not covered"
    if isinstance(verdict, Local):
        for given, wanted in zip(layouts, verdict.inputs, strict=True):
            assert given is None or wanted in (given, None), f"{example}: rows at {given}, wants them at {wanted}"
        assert is_row_local(example, verdict, num_tokens), f"{example} with {layouts}, T = {num_tokens}: not {verdict}"
        return "local"
    results = example.run(example.tensors)
    for out, rows in zip(results, verdict.out if isinstance(verdict.out, tuple) else (verdict.out,), strict=False):
        assert rows is None or out.shape[rows.dim] == rows.outer * num_tokens * rows.inner, f"{example}: {verdict}"
    if verdict.mixes is None:
        return "whole"
    merged = {(rows.outer, rows.inner) for rows in layouts if rows is not None}
    claims = [[rows for rows in rows_options(out, num_tokens) if (rows.outer, rows.inner) in merged] for out in results]
    for options in itertools.product(*claims):
        claim = Local(options if len(options) > 1 else options[0], layouts)
        assert not is_row_local(example, claim, num_tokens), f"{example}: {verdict.mixes}, yet {claim} is true"
    return "mixes"


def placements(example: Example) -> Iterator[tuple[tuple[Rows | None, ...], int]]:
    """Yield all ways in which 2, 4 or 8 token rows can lie in the tensors of a call."""
    for num_tokens in (2, 4, 8):
        options = [(None, *rows_options(tensor, num_tokens)) for tensor in example.tensors]
        for layouts in itertools.product(*options):
            if any(layouts):
                yield layouts, num_tokens


X, CUBE = floats(2, 4, 8), floats(4, 4, 4)
LIKE = (
    aten._to_copy, aten.clone, aten.detach, aten.alias, aten.lift_fresh_copy, aten.zeros_like, aten.ones_like,
)  # fmt: skip
DIM_LIST_REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax, aten.amin, aten.logsumexp, aten.nansum)
DIM_REDUCTIONS = (aten.prod.dim_int, aten.max.dim, aten.min.dim, aten.median.dim)
FULL_REDUCTIONS = (
    aten.sum, aten.mean, aten.max, aten.min, aten.prod, aten.std, aten.var, aten.median, aten.count_nonzero,
)  # fmt: skip
SCANS = (aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin, aten.sort, aten.argsort)


def overload(op: Any) -> Any:
    """Return the default overload of a packet, an overload as it is."""
    return op.default if hasattr(op, "default") else op


EXAMPLES: dict[str, list[Example]] = {
    "pointwise": [
        Example(aten.add.Tensor, (X, X * 2)),
        Example(aten.mul.Tensor, (X, floats(8))),
        Example(aten.mul.Tensor, (X, floats(4, 1))),
        Example(aten.mul.Tensor, (CUBE, floats(4))),
        Example(aten.where.self, (flags(4, 1), CUBE, floats(4))),
        Example(aten.relu.default, (X,)),
    ],
    "same shape": [Example(overload(op), (X,)) for op in LIKE]
    + [
        Example(aten.full_like.default, (X, 3)),
        Example(torch.ops.prims.convert_element_type.default, (X, torch.float32)),
    ],
    "shape and dtype only": [
        Example(aten.new_zeros.default, (X, [4])),
        Example(aten.new_ones.default, (X, [4])),
        Example(aten.new_full.default, (X, [4], 2)),
    ],
    "views": [
        Example(op, (x, shape))
        for op in (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
        for x, shape in ((X, [8, 8]), (X, [2, 32]), (X, [64]), (X, [1, 2, 2, 2, 8]), (CUBE, [16, 4]), (CUBE, [4, 2, 8]))
    ],
    "dims": [
        *(Example(aten.unsqueeze.default, (X, dim)) for dim in (0, 1, 3, -1)),
        Example(aten.squeeze.dim, (floats(1, 4, 1, 8), 0)),
        Example(aten.squeeze.dim, (floats(1, 4, 1, 8), 1)),
        Example(aten.squeeze.dims, (floats(1, 4, 1, 8), [0, -2])),
        Example(aten.transpose.int, (X, 0, -1)),
        Example(aten.permute.default, (X, [2, 0, 1])),
        Example(aten.permute.default, (CUBE, [-1, 0, 1])),
        Example(aten.t.default, (floats(4, 8),)),
        Example(aten.expand.default, (floats(4, 1), [2, 4, 8])),
        Example(aten.expand.default, (floats(1, 4, 4), [4, 4, 4])),
    ],
    "repeats": [
        Example(aten.repeat.default, (CUBE, [1, 2, 1])),
        Example(aten.repeat.default, (floats(4, 4), [3, 1, 2])),
    ],
    "pieces": [
        *(
            Example(aten.slice.Tensor, (CUBE, dim, start, end))
            for dim in (0, 1, -1)
            for start, end in ((0, 99), (1, 3))
        ),
        *(Example(aten.slice.Tensor, (CUBE, dim, 0, 4, 2)) for dim in (0, 1, 2)),
        *(Example(aten.select.int, (CUBE, dim, -1)) for dim in (0, 1, -1)),
        *(Example(aten.split.Tensor, (X, 2, dim)) for dim in (0, 1, -1)),
        *(Example(aten.split_with_sizes.default, (CUBE, [1, 3], dim)) for dim in (0, 1, -1)),
        *(Example(aten.chunk.default, (CUBE, 2, dim)) for dim in (0, 1, -1)),
        *(Example(aten.unbind.int, (CUBE, dim)) for dim in (0, 1, -1)),
    ],
    "joins": [
        *(Example(aten.cat.default, ([CUBE, CUBE + 1], dim)) for dim in (0, 1, -1)),
        Example(aten.cat.default, ([CUBE, floats(4, 4, 0)], 2)),
        Example(aten.cat.default, ([floats(0), CUBE], 1)),
        *(Example(aten.stack.default, ([CUBE, CUBE + 1], dim)) for dim in (0, 1, -1)),
    ],
    "reductions": [
        *(
            Example(overload(op), (X, [dim], keep))
            for op in DIM_LIST_REDUCTIONS
            for dim in (0, 1, -1)
            for keep in (True, False)
        ),
        *(Example(overload(op), (X, dim, keep)) for op in DIM_REDUCTIONS for dim in (0, -1) for keep in (True, False)),
        *(Example(aten.argmax.default, (X, dim)) for dim in (0, 1, -1)),
        *(Example(aten.argmin.default, (X, dim)) for dim in (0, 1, -1)),
        *(
            Example(op, (X, [dim]), {"keepdim": True})
            for op in (aten.var.correction, aten.std.correction)
            for dim in (0, -1)
        ),
        *(Example(aten.any.dim, (flags(4, 8), dim)) for dim in (0, -1)),
        *(Example(aten.all.dim, (flags(4, 8), dim, True)) for dim in (0, -1)),
        *(Example(op, (flags(4, 8, 8), [dim])) for op in (aten.any.dims, aten.all.dims) for dim in (0, -1)),
        *(Example(aten.linalg_vector_norm.default, (X, 2, [dim], True)) for dim in (0, 1, -1)),
        *(Example(aten.norm.ScalarOpt_dim, (X, 2, [dim], True)) for dim in (0, -1)),
        *(Example(aten.count_nonzero.dim_IntList, (ids(4, 8), [dim])) for dim in (0, -1)),
        Example(aten.sum.dim_IntList, (CUBE, [0, 2])),
    ],
    "all dims": [
        *(Example(overload(op), (floats(4, 8),)) for op in FULL_REDUCTIONS),
        Example(aten.norm.Scalar, (floats(4, 8),)),
        Example(aten.any.default, (ids(2, 2).bool(),)),
        Example(aten.all.default, (ids(2, 2).bool(),)),
        Example(aten.argmax.default, (floats(4, 8),)),
        Example(aten.sum.dim_IntList, (floats(4, 8), None)),
        Example(aten.roll.default, (CUBE, [1])),
    ],
    "along a dim": [
        *(
            Example(op, (CUBE, dim, False))
            for op in (aten._softmax.default, aten._log_softmax.default)
            for dim in (0, -1)
        ),
        *(Example(op, (CUBE, dim)) for op in (aten.softmax.int, aten.log_softmax.int) for dim in (0, -1)),
        *(Example(overload(op), (floats(4, 8), dim)) for op in SCANS for dim in (0, -1)),
        *(
            Example(op, (floats(4, 8),), {"stable": True, "dim": d})
            for op in (aten.sort.stable, aten.argsort.stable)
            for d in (0, 1)
        ),
        *(Example(aten.flip.default, (CUBE, dims)) for dims in ([0], [1, 2])),
        *(Example(aten.roll.default, (CUBE, [1], [dim])) for dim in (0, 2)),
        *(Example(aten.topk.default, (CUBE, 2, dim)) for dim in (0, -1)),
        Example(aten.topk.default, (CUBE, 4)),
        *(Example(aten.kthvalue.default, (CUBE, 2, dim)) for dim in (0, 1)),
    ],
    "norms": [
        Example(aten.native_layer_norm.default, (X, [8], floats(8), floats(8), 1e-5)),
        Example(aten.native_layer_norm.default, (CUBE, [4, 4], None, None, 1e-5)),
        Example(aten._fused_rms_norm.default, (CUBE, [4], floats(4), 1e-5)),
    ],
    "windows": [
        Example(aten.convolution.default, (floats(2, 4, 8), floats(4, 4, 3), None, [1], [1], [1], False, [0], 1)),
        Example(aten.convolution.default, (floats(2, 4, 8), floats(4, 4, 3), None, [1], [0], [1], False, [0], 1)),
        Example(aten.constant_pad_nd.default, (CUBE, [0, 0, 1, 0])),
        Example(aten.constant_pad_nd.default, (CUBE, [0, 2])),
        Example(aten.constant_pad_nd.default, (X, [0, 0, 0, 0, 1, 1], 2.0)),
    ],
    "matrices": [
        Example(aten.mm.default, (floats(4, 8), floats(8, 4))),
        Example(aten.mm.default, (floats(4, 4), floats(4, 4))),
        Example(aten.bmm.default, (floats(4, 4, 8), floats(4, 8, 2))),
        Example(aten.bmm.default, (CUBE, floats(4, 4, 4))),
        Example(aten.addmm.default, (floats(8), floats(4, 2), floats(2, 8))),
        Example(aten.addmm.default, (floats(4, 4), floats(4, 4), floats(4, 4))),
        Example(aten.linear.default, (CUBE, floats(8, 4), floats(8))),
        Example(aten.linear.default, (CUBE, floats(4, 4))),
    ],
    "lookups": [
        Example(aten.embedding.default, (floats(4, 4), ids(2, 4))),
        Example(aten.gather.default, (floats(4, 8), 1, ids(4, 8))),
        Example(aten.gather.default, (floats(4, 4), 0, ids(4, 4))),
        Example(aten.gather.default, (floats(4, 8), 1, ids(2, 8))),
        Example(aten.scatter.value, (floats(4, 8), 1, ids(4, 2), 3.0)),
        Example(aten.scatter.src, (floats(4, 8), 1, ids(4, 2), floats(4, 2))),
        Example(aten.scatter_add.default, (floats(4, 8), 1, ids(4, 2), floats(4, 2))),
        Example(aten.scatter_add.default, (floats(4, 8), 0, ids(4, 8), floats(4, 8))),
        Example(aten.index.Tensor, (floats(4, 8), [ids(4)])),
        Example(aten.index.Tensor, (CUBE, [ids(2, 4), ids(4)])),
        Example(aten.index.Tensor, (CUBE, [None, ids(4)])),
        Example(aten.index_select.default, (CUBE, 1, ids(4))),
    ],
    "pieces written": [
        Example(aten.copy.default, (X, X * 2)),
        Example(aten.copy.default, (X, floats(8))),
        *(Example(aten.slice_scatter.default, (CUBE, floats(4, 4, 4)[:, :, :2], d, 1, 3)) for d in (-1,)),
        *(Example(aten.slice_scatter.default, (CUBE, floats(4, 2, 4), d, 1, 3)) for d in (1,)),
        *(Example(aten.select_scatter.default, (CUBE, floats(4, 4), dim, 1)) for dim in (0, 1, 2)),
    ],
    "experts": [
        Example(ops.EXPERTS, (floats(4, 8), ids(4), floats(2, 8, 4), None)),
        Example(ops.EXPERTS, (floats(8, 4), ids(8), floats(4, 4, 2), floats(4, 2))),
    ],
    "attention": [
        Example(
            ops.ATTENTION,
            (floats(1, 4, 4, 4), floats(1, 4, 2, 4), floats(1, 4, 2, 4), None, None),
            {"layer": 0, "kind": "full", "scale": 0.5},
        )
    ],
}
MIXING_FAMILIES = {
    "pieces", "joins", "reductions", "all dims", "along a dim", "norms", "windows", "matrices", "lookups", "attention",
    "pieces written",
}  # fmt: skip
ALL_EXAMPLES = [example for family in EXAMPLES.values() for example in family]


@pytest.mark.parametrize("family", EXAMPLES)
def test_rules_promise_what_the_ops_compute(family: str) -> None:
    kinds = {str(e): {check_verdict(e, layouts, t) for layouts, t in placements(e)} for e in EXAMPLES[family]}
    assert all(("local" in of_example) == (family != "all dims") for of_example in kinds.values()), kinds
    assert ("mixes" in set.union(*kinds.values())) == (family in MIXING_FAMILIES)


def test_every_rule_has_an_example() -> None:
    ours = {op for op in placement._RULES if getattr(op, "namespace", "") in ("aten", "prims", "pcp")}
    random_or_uninitialised = {
        aten.empty_like.default, aten.rand_like.default, aten.bernoulli.p, aten.new_empty.default,
        aten._reshape_alias.default,
    }  # fmt: skip
    of_the_runtime = {kv_ops.STORE_KV, kv_ops.PAGED_ATTENTION}  # they read a cache: tests/runtime runs them on ranks
    assert ours - {example.op for example in ALL_EXAMPLES} - random_or_uninitialised - of_the_runtime == set()


SIZES = st.sampled_from([1, 2, 3, 4, 6])


@settings(max_examples=300, deadline=None)
@given(shape=st.lists(SIZES, min_size=1, max_size=4), data=st.data())
def test_a_view_keeps_rows_wherever_no_dim_of_the_result_cuts_them(shape: list[int], data: st.DataObject) -> None:
    num_tokens = data.draw(st.sampled_from([2, 3, 4]))
    numel = torch.Size(shape).numel()
    after: list[int] = []
    rest = numel
    while rest > 1 and len(after) < 5:
        after.append(data.draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0])))
        rest //= after[-1]
    after.append(rest)
    example = Example(aten.view.default, (floats(*shape), after))
    for rows in rows_options(example.tensors[0], num_tokens):
        kind = check_verdict(example, (rows,), num_tokens)
        claims = [Local(claim, (rows,)) for claim in rows_options(example.run(example.tensors)[0], num_tokens)]
        assert (kind == "local") == any(is_row_local(example, claim, num_tokens) for claim in claims)


# ---------------------------------------------------------------------------------------------------------------------
# In a model


class Lines(nn.Module):
    """An embedding, then lines under test."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.eval().double()

    def embedding(self, input_ids: Tensor) -> Tensor:
        """input_ids [1, T] -> [1, T, 8]."""
        return F.embedding(input_ids, self.table.weight)


class Cumsum(Lines):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids).cumsum(1).relu()  # refused


class TokenMean(Lines):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return x - x.mean(1, keepdim=True)  # refused


class ScaleByLargest(Lines):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return x / x.abs().max()  # refused


class Roll(Lines):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return x + torch.roll(x, 1, dims=1)  # refused


class Sort(Lines):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids).sort(dim=1).values * 2  # refused


class DepthwiseConvolution(Lines):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(8, 8, 3, padding=1, groups=8).double()

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.conv1d(self.embedding(input_ids).mT, self.convolution.weight, padding=1, groups=8).mT.relu()  # refused


class WrittenOutAttention(Lines):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return (x @ x.mT).softmax(-1) @ x  # refused


MIXING = [Cumsum, TokenMean, ScaleByLargest, Roll, Sort, DepthwiseConvolution, WrittenOutAttention]


def refused_line(model: type[Lines]) -> int:
    """Return the line of this file that the compiler has to name."""
    lines, first = inspect.getsourcelines(model)
    return first + next(i for i, line in enumerate(lines) if line.endswith("# refused\n"))


@pytest.mark.parametrize("model", MIXING)
def test_an_op_that_mixes_tokens_is_refused_with_the_line_of_the_user(model: type[Lines]) -> None:
    with pytest.raises(UnsupportedGraphError) as error:
        run_only("infer_placements", trace(model(), torch.arange(5)[None]))
    assert f"{__file__}:{refused_line(model)} in forward" in str(error.value)
    knob = "attn_implementation" if model is WrittenOutAttention else "parallel.on_token_mixing: gather"
    assert knob in str(error.value)


@pytest.mark.parametrize("model", MIXING)
def test_with_on_token_mixing_gather_every_pass_leaves_the_result_as_it_was(model: type[Lines]) -> None:
    instance = model()
    traced = trace(instance, torch.arange(5)[None])
    ctx = traced.context(on_token_mixing="gather")
    for run in run_passes(traced, ctx):
        for pcp_size, num_tokens in ((1, 1), (2, 5), (3, 2), (3, 16)):
            tokens = torch.arange(num_tokens)[None]
            results = run_on_ranks(run.program(), traced.inputs_for(tokens), pcp_size=pcp_size, num_tokens=num_tokens)
            with torch.no_grad():
                assert_same(results, [instance(tokens)])
    assert "token mixing" in ctx.decisions.entries


class NoRule(Lines):
    def forward(self, input_ids: Tensor) -> Tensor:
        matrices = self.embedding(input_ids)[..., None] * torch.eye(8).double()
        exponential: Tensor = torch.linalg.matrix_exp(matrices)  # refused
        return exponential


def test_an_op_without_a_rule_is_refused_with_the_line_and_the_function_that_teaches_it() -> None:
    with pytest.raises(UnsupportedGraphError) as error:
        run_only("infer_placements", trace(NoRule(), torch.arange(5)[None]))
    assert f"{__file__}:{refused_line(NoRule)} in forward" in str(error.value)
    assert "pcp_compiler.register_placement" in str(error.value)


def test_users_can_teach_a_rule_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_RULES", dict(placement._RULES))
    register_placement(aten.linalg_matrix_exp.default, lambda call: Local(Rows(1), (Rows(1),)))
    run = run_only("infer_placements", trace(NoRule(), torch.arange(5)[None]))
    assert "Shard(1) = aten.linalg_matrix_exp" in run.after
    with pytest.raises(ConfigError, match="already has a rule"):
        register_placement(aten.linalg_matrix_exp.default, lambda call: None)
    with pytest.raises(ConfigError, match=r"op is 'my_op'; allowed"):
        register_placement("my_op", lambda call: None)


class SqueezeEverything(Lines):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)[:, :, None].squeeze()
        return (x * 2).squeeze(0)


def test_a_squeeze_of_all_dims_keeps_the_rows_of_a_rank_that_has_one() -> None:
    instance, tokens = SqueezeEverything(), torch.arange(5)[None]
    traced = trace(instance, tokens)
    for run in run_passes(traced, traced.context()):
        for num_tokens in (2, 5):  # two tokens on three ranks: one row each
            ids_now = torch.arange(num_tokens)[None]
            results = run_on_ranks(run.program(), traced.inputs_for(ids_now), pcp_size=3, num_tokens=num_tokens)
            with torch.no_grad():
                assert_same(results, [instance(ids_now)])

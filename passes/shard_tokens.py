"""Run every row-local op on this rank's W rows; put a collective where an op needs all T rows.

Before:
    %embedding : f32[1, T, 64] Shard(1) = aten.embedding.default(%weight, %input_ids)
    %attention : f32[1, T, 4, 16] Shard(1) = pcp.attention.default(%q, %k, %v, None, None, layer=0, ...)
After:
    %shard : i64[1, W] = pcp.shard.default(%input_ids, %local_rows, 1)
    %embedding : f32[1, W, 64] = aten.embedding.default(%weight, %shard)
    %unshard : f32[1, T, 2, 16] = pcp.unshard.default(%k, %restore, 1)
    %attention : f32[1, W, 4, 16] = pcp.attention.default(%q, %unshard, %v_unshard, None, %local_rows, layer=0, ...)

Why here: after infer_placements, whose verdicts it carries out; before the passes that make its collectives cheaper.
Leaves alone: values that need no token (weights), and values made of sizes only (positions): these are built for all T
    rows and each rank selects its own.

A node can be wanted in two forms, its local rows or whole. Each form is made when it is first asked for, so nothing
is gathered that nobody reads. A use of T as an *extent* of a sharded dim becomes W, an *iota* is built with T and then
sharded, a *value* (a divisor, a slice bound) stays T.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from pcp_compiler import ops
from pcp_compiler.errors import InvariantError
from pcp_compiler.pass_api import (
    Pass,
    PassContext,
    PassResult,
    add_index_input,
    calls,
    copy_meta,
    erase_unused,
    refuse,
)
from pcp_compiler.passes.explicit_shapes import SIZE_ARGUMENT
from pcp_compiler.placement import REPLAYED_WHOLE, Call, Local, Rows, find_rule, size_numbers, tensor_inputs
from pcp_compiler.sizes import SizeNodes
from pcp_compiler.torch_private import new_row_symbol, size_expression, size_from_expression
from pcp_compiler.trace import num_tokens

aten = torch.ops.aten
LOCAL_ROWS, RESTORE, NUM_ROWS = "local_rows", "restore", "num_rows"
WHOLE_OF, LOCAL_OF = "whole_of", "local_of"
"""Notes on nodes of the sharded graph: the name of the node they stand for; with the rows that they hold of it."""
FILLS: dict[object, int] = {
    aten.new_empty.default: 1,
    aten.new_zeros.default: 1,
    aten.new_ones.default: 1,
    aten.new_full.default: 1,
    aten.empty.memory_format: 0,
    aten.zeros.default: 0,
    aten.ones.default: 0,
    aten.full.default: 0,
}
"""Ops that make a tensor of one value, and which argument is its size."""
_SIZE_POSITIONS: dict[object, int] = FILLS | dict(SIZE_ARGUMENT.items())


@dataclass(frozen=True)
class ShardTokens(Pass):
    """See the module."""

    name: ClassVar[str] = "shard_tokens"
    keeps_signature: ClassVar[bool] = False

    def requires(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        is_sharded = find_index_input(gm, LOCAL_ROWS) is not None
        if not is_sharded and any("verdict" not in n.meta for n in gm.graph.nodes if n.op == "call_function"):
            raise InvariantError("shard_tokens runs after infer_placements")

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        if find_index_input(gm, LOCAL_ROWS) is not None:
            return PassResult(gm, 0)
        rewriter = _Rewriter(gm, ctx)
        gm.graph = rewriter.run()
        erase_unused(gm)
        return PassResult(gm, rewriter.num_rewrites)

    def ensures(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        if find_index_input(gm, LOCAL_ROWS) is None or not list(calls(gm, ops.SHARD)):
            raise InvariantError("no token input was sharded")


def find_index_input(gm: fx.GraphModule, role: str) -> fx.Node | None:
    """Return the placeholder that holds an index tensor of the partition, None when the graph has none."""
    found = (node for node in gm.graph.find_nodes(op="placeholder") if node.meta.get("index_input") == role)
    return next(found, None)


class _Rewriter:
    def __init__(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        self.num_rewrites = 0
        self._gm = gm
        self._ctx = ctx
        self._graph = fx.Graph()
        self._whole: dict[fx.Node, fx.Node] = {}
        self._local: dict[tuple[fx.Node, Rows], fx.Node] = {}
        self._num_rows: fx.Node | None = None
        length = num_tokens(gm, ctx.seeds)
        self._sizes_of, self._tokens = size_numbers(gm.graph, length)
        self._length = length
        self._free: dict[fx.Node, bool] = {}
        self._values: dict[object, Tensor] = {}

    def run(self) -> fx.Graph:
        """Build the sharded graph."""
        nodes = list(self._gm.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        for node in placeholders:
            self._whole[node] = self._copy(node, lambda source: source)
        self._add_index_inputs(placeholders)
        for node in placeholders:
            if node.name in self._ctx.phase.local_inputs:
                self._take_as_local(node)
        for node in nodes[len(placeholders) :]:
            self._emit(node)
        self._note_origins()
        return self._graph

    def _note_origins(self) -> None:
        for node, copied in self._whole.items():
            verdict = node.meta.get("verdict")
            if isinstance(verdict, Local) and isinstance(verdict.out, tuple):
                copied.meta[LOCAL_OF] = (node.name, verdict.out)
            else:
                copied.meta[WHOLE_OF] = node.name
        for (node, rows), copied in self._local.items():
            copied.meta[LOCAL_OF] = (node.name, rows)

    def _add_index_inputs(self, placeholders: list[fx.Node]) -> None:
        device = next(n for n in placeholders if n.name in self._ctx.seeds).meta["val"].device
        fake = next(n.meta["val"] for n in placeholders if isinstance(n.meta["val"], Tensor))
        self._mode, self._width = new_row_symbol(getattr(fake, "fake_mode", None))
        with self._mode:
            rows = torch.empty(self._width, dtype=torch.int64, device=device)
            restore = torch.empty(self._length, dtype=torch.int64, device=device)
        self._local_rows = add_index_input(self._graph, LOCAL_ROWS, rows)
        self._restore = add_index_input(self._graph, RESTORE, restore)
        self._size_nodes = SizeNodes(self._graph)

    def _take_as_local(self, node: fx.Node) -> None:
        """Let an input hold this rank's rows only: what another program left on this rank."""
        rows = node.meta["verdict"].out
        local = self._whole.pop(node)
        local.meta["val"] = self._local_value(node.meta["val"], rows)
        self._local[node, rows] = local

    def _emit(self, node: fx.Node) -> None:
        """Copy one node in the form its verdict says; other forms come when somebody asks."""
        verdict = node.meta.get("verdict")
        if node.op == "output":
            self._graph.output([self._result(i, value) for i, value in enumerate(node.args[0])])  # type: ignore[arg-type]
        elif not isinstance(verdict, Local):
            self._whole[node] = self._copy(node, self.whole)
        elif isinstance(verdict.out, Rows):
            self._local[node, verdict.out] = self._copy_local(node, verdict)
        else:  # several results, or none with rows
            self._whole[node] = self._copy_local(node, verdict)

    def _result(self, position: int, value: object) -> Any:
        """Return a result whole, or as this rank's rows when the phase hands it on like that."""
        if not isinstance(value, fx.Node):
            return value
        rows = getattr(value.meta["verdict"], "out", None)
        return self.local(value, rows) if position in self._ctx.phase.local_outputs and rows else self.whole(value)

    # -- forms of a node -----------------------------------------------------------------------------------------

    def whole(self, node: fx.Node) -> fx.Node:
        """Return the node that holds all T rows of `node`."""
        if node not in self._whole:
            self._whole[node] = self._make_whole(node)
        return self._whole[node]

    def local(self, node: fx.Node, rows: Rows) -> fx.Node:
        """Return the node that holds this rank's rows of `node`, which lie at `rows`."""
        if (node, rows) not in self._local:
            self._local[node, rows] = self._make_local(node, rows)
        return self._local[node, rows]

    def _make_whole(self, node: fx.Node) -> fx.Node:
        verdict = node.meta["verdict"]
        if self._is_free(node) or self._is_replayed(node):
            return self._copy(node, self.whole)
        self._check_plain(node, verdict.out)
        local = self.local(node, verdict.out)
        return self._add(node, ops.UNSHARD, (local, self._restore, verdict.out.dim), node.meta["val"])

    def _is_replayed(self, node: fx.Node) -> bool:
        """Return whether to gather further up: this op makes its complete result from its complete input for free."""
        sharded = [source for source in tensor_inputs(node) if self._has_rows(source)]
        if node.target not in REPLAYED_WHOLE or len(sharded) != 1 or self._numel(sharded[0]) > self._numel(node):
            return False
        source = sharded[0]
        return _is_plain(source.meta["verdict"].out) or self._is_free(source) or self._is_replayed(source)

    def _make_local(self, node: fx.Node, rows: Rows) -> fx.Node:
        verdict = node.meta["verdict"]
        if isinstance(verdict, Local) and verdict.out is not None and node.op != "placeholder":
            raise refuse(node, f"its token rows lie at {verdict.out} and a user needs them at {rows}", "")
        pushed = self._inputs_for(node, rows)
        if pushed is not None:
            return self._copy_local(node, Local(rows, pushed))
        self._check_plain(node, rows)
        return self._add(
            node, ops.SHARD, (self.whole(node), self._local_rows, rows.dim), self._local_value(node.meta["val"], rows)
        )

    def _inputs_for(self, node: fx.Node, wanted: Rows) -> tuple[Rows | None, ...] | None:
        """Find input rows for which the rule of a value made of sizes gives the wanted rows; None: shard it here.

        Shards move up this way to the iota that the value was made of, so that one selection serves all layers; rows
        that were made by repeating a value are repeated W times instead of T.
        """
        inputs = tensor_inputs(node)
        if node.target is aten.expand.default and self._is_repeated(inputs[0], node, wanted):
            return (None,)
        if node.target in FILLS:
            verdict = node.meta["verdict"]
            return verdict.inputs if isinstance(verdict, Local) else (None,) * len(inputs)
        rule = find_rule(node.target)
        if node.op != "call_function" or rule is None or not 1 <= len(inputs) <= 2:
            return None
        options = [
            (None, *(Rows(dim) for dim, size in enumerate(self._sizes_of(source)) if size == self._tokens))
            for source in inputs
        ]
        for chosen in itertools.product(*options):
            rows_of = dict(zip(inputs, chosen, strict=True))
            if not any(chosen) or tuple(rows_of[source] for source in inputs) != chosen:
                continue
            verdict = rule(Call(node, self._sizes_of, lambda n, rows_of=rows_of: rows_of[n], self._tokens))  # type: ignore[misc]
            if isinstance(verdict, Local) and verdict.out == wanted and verdict.inputs == chosen:
                return chosen
        return None

    def _is_repeated(self, source: fx.Node, expanded: fx.Node, rows: Rows) -> bool:
        """Return whether an expand makes its rows by repeating one value."""
        dim = rows.dim - (len(self._sizes_of(expanded)) - len(self._sizes_of(source)))
        return dim < 0 or self._sizes_of(source)[dim] == 1

    def _is_free(self, node: fx.Node) -> bool:
        """Return whether every rank can compute the whole value without a collective or float work on all rows."""
        if node not in self._free:
            is_local_input = node.name in self._ctx.phase.local_inputs
            verdict = node.meta["verdict"]
            if isinstance(verdict, Local) and node.op != "placeholder":
                value = node.meta["val"]
                is_index = isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()
                self._free[node] = is_index and all(self._is_free(source) for source in tensor_inputs(node))
            else:
                self._free[node] = not is_local_input and (
                    node.op in ("placeholder", "get_attr") or all(self._is_free(s) for s in tensor_inputs(node))
                )
        return self._free[node]

    def _has_rows(self, node: fx.Node) -> bool:
        return isinstance(node.meta["verdict"], Local)

    def _numel(self, node: fx.Node) -> int:
        numel = 1
        for size in self._sizes_of(node):
            numel *= size
        return numel

    def _check_plain(self, node: fx.Node, rows: Rows) -> None:
        if not _is_plain(rows):
            raise refuse(
                node, f"token rows are merged with other dims here ({rows}) and cannot be sharded or gathered",
                "keep the token dim on its own where all tokens are needed",
            )  # fmt: skip

    # -- nodes of the new graph ----------------------------------------------------------------------------------

    def _copy(self, node: fx.Node, form: Callable[[fx.Node], fx.Node]) -> fx.Node:
        copied = self._graph.node_copy(node, form)
        for key in ("verdict", "placement"):
            copied.meta.pop(key, None)
        return copied

    def _copy_local(self, node: fx.Node, verdict: Local) -> fx.Node:
        """Copy a row-local op: each tensor input in its form, sizes of the sharded dim W."""
        layouts = iter(verdict.inputs)
        seen = set(tensor_inputs(node))

        def form(value: object) -> Any:
            if isinstance(value, fx.Node):
                rows = next(layouts) if value in seen else None
                return self.whole(value) if rows is None else self.local(value, rows)
            if isinstance(value, (list, tuple)):
                return type(value)(form(item) for item in value)
            return value

        if node.target is operator.getitem:
            assert isinstance(node.args[0], fx.Node)
            args: tuple[Any, ...] = (self._whole[node.args[0]], node.args[1])
            kwargs: dict[str, Any] = {}
        else:
            args = tuple(form(value) for value in node.args)
            kwargs = {name: form(value) for name, value in node.kwargs.items()}
        position = _SIZE_POSITIONS.get(node.target)
        if position is not None and isinstance(verdict.out, Rows):
            sizes = list(args[position])
            sizes[verdict.out.dim] = self._size_nodes.node_for(
                self._with_width(node.meta["val"].shape[verdict.out.dim])
            )
            args = (*args[:position], sizes, *args[position + 1 :])
        if node.target is ops.ATTENTION:
            args = (*args[:4], self._local_rows)
        if node.target is ops.EXPERTS:
            assert isinstance(verdict.out, Rows)
            args = (args[0], self._without_pads(args[1], verdict.out), *args[2:])
        copied = self._add(node, node.target, args, self._local_values(node.meta["val"], verdict.out), kwargs)  # type: ignore[arg-type]
        return copied

    def _without_pads(self, expert_ids: fx.Node, rows: Rows) -> fx.Node:
        """Return expert numbers in which the padding rows of this rank have no expert."""
        if self._num_rows is None:
            with self._mode:
                value = torch.empty((), dtype=torch.int64, device=self._local_rows.meta["val"].device)
            self._num_rows = add_index_input(self._graph, NUM_ROWS, value)
        args = (expert_ids, self._num_rows, rows.dim, rows.outer, rows.inner)
        return self._add(expert_ids, ops.DROP_PADS, args, expert_ids.meta["val"])

    def _add(
        self, origin: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], value: object,
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:  # fmt: skip
        name = origin.name if target is origin.target else None
        node = self._graph.create_node("call_function", target, args, kwargs or {}, name=name)
        copy_meta(origin, node)
        node.meta["val"] = value
        self.num_rewrites += 1
        return node

    def _local_values(self, value: object, layout: Rows | tuple[Rows | None, ...] | None) -> object:
        if isinstance(layout, tuple):
            assert isinstance(value, (tuple, list))
            return type(value)(self._local_values(v, rows) for v, rows in zip(value, layout, strict=True))
        return value if layout is None else self._local_value(value, layout)

    def _local_value(self, value: object, rows: Rows) -> Tensor:
        """Return a value like `value` with W in place of T; one object per shape, they only describe."""
        assert isinstance(value, Tensor)
        strides = value.stride()
        order = tuple(sorted(range(value.dim()), key=lambda dim: -self._number(strides[dim])))
        key = (tuple(map(size_expression, value.shape)), order, value.dtype, value.device, rows.dim)
        if key not in self._values:
            shape: list[int | torch.SymInt] = list(value.shape)
            shape[rows.dim] = self._with_width(shape[rows.dim])
            with self._mode:
                dense = torch.empty([shape[d] for d in order], dtype=value.dtype, device=value.device)
                self._values[key] = dense.permute([order.index(dim) for dim in range(len(order))])
        return self._values[key]

    def _with_width(self, size: int | torch.SymInt) -> int | torch.SymInt:
        width = size_expression(self._width)
        if isinstance(self._length, int):
            assert isinstance(size, int)
            return size_from_expression(self._mode, size // self._length * width)
        return size_from_expression(self._mode, size_expression(size).subs(size_expression(self._length), width))

    def _number(self, stride: int | torch.SymInt) -> int:
        """Return a number that orders strides as they are ordered for long prompts."""
        if isinstance(stride, int):
            return stride
        expression = size_expression(stride)
        return int(expression.subs(dict.fromkeys(expression.free_symbols, self._tokens)))


def _is_plain(rows: Rows | None) -> bool:
    """Return whether the token dim stands on its own, as shard and unshard need it."""
    return rows is None or rows == Rows(rows.dim)

"""Sizes as graph nodes: build the node that computes a size expression from the graph's base symbols."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce

import sympy
import torch
from torch import fx

from pcp_compiler.errors import UnsupportedGraphError
from pcp_compiler.torch_private import size_expression

aten = torch.ops.aten


class SizeNodes:
    """Finds or makes, near the top of one graph, the nodes that hold the sizes a pass needs.

    Base symbols are size placeholders and sizes of placeholder tensors; everything else is an expression of them.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._nodes: dict[sympy.Expr, fx.Node] = {}
        self._last_top: fx.Node | None = None
        for node in graph.find_nodes(op="placeholder"):
            self._last_top = node
            value = node.meta["val"]
            if isinstance(value, torch.SymInt):
                self._nodes.setdefault(size_expression(value), node)

    def node_for(self, size: int | torch.SymInt) -> int | fx.Node:
        """Return the size itself when it is a number, else a node that holds it."""
        expression = size_expression(size)
        if expression.is_Integer:
            return int(expression)
        return self._build(expression, size)

    def _build(self, expression: sympy.Expr, size: int | torch.SymInt | None = None) -> fx.Node:
        if expression not in self._nodes:
            self._nodes[expression] = (
                self._base(expression) if expression.is_Symbol else self._compound(expression, size)
            )
        return self._nodes[expression]

    def _base(self, symbol: sympy.Expr) -> fx.Node:
        for node in self._graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            if isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    if size_expression(size) == symbol:
                        return self._insert(aten.sym_size.int, (node, dim), size)
        raise AssertionError(f"symbol {symbol} is not a size of any input")

    def _compound(self, expression: sympy.Expr, size: int | torch.SymInt | None) -> fx.Node:
        combine: Callable[[object, object], object]
        if expression.is_Add:
            combine = operator.add
        elif expression.is_Mul:
            combine = operator.mul
        elif type(expression).__name__ == "FloorDiv":
            combine = operator.floordiv
        elif type(expression).__name__ in ("Mod", "PythonMod"):
            combine = operator.mod
        else:
            raise UnsupportedGraphError(
                f"a tensor size is {expression}; allowed: sums, products, // and % of input sizes"
            )
        parts = [int(part) if part.is_Integer else self._build(part) for part in expression.args]

        def join(a: object, b: object) -> fx.Node:
            return self._insert(combine, (a, b), None)

        node = reduce(join, parts)
        assert isinstance(node, fx.Node)
        if size is not None:
            node.meta["val"] = size
        return node

    def _insert(self, target: Callable[..., object], args: tuple[object, ...], value: object) -> fx.Node:
        """Add a node behind the last one added here, so that sizes stand together after the placeholders."""
        assert self._last_top is not None
        with self._graph.inserting_after(self._last_top):
            node = self._graph.call_function(target, args)  # type: ignore[arg-type]
        if value is None:
            values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
            value = target(*values)
        node.meta["val"] = value
        self._last_top = node
        return node

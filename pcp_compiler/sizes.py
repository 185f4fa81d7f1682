"""Sizes as graph nodes: build the node that computes a size expression from the graph's base symbols."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from pcp_compiler.torch_private import size_expression, size_from_expression

aten = torch.ops.aten
_OPERATIONS: dict[str, Callable[[object, object], object]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Pow": operator.pow,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
}
"""Sympy's name of an operation on sizes, and the Python operator that computes it."""


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

    def find_obstacle(self, size: int | torch.SymInt) -> str | None:
        """Return why no node can hold a size; None: `node_for` makes one."""
        for part in sympy.preorder_traversal(size_expression(size)):
            if part.is_Symbol and part not in self._nodes and self._find_input(part) is None:
                return f"its size {size} depends on the values of a tensor"
            if not part.is_Symbol and not part.is_Integer and type(part).__name__ not in _OPERATIONS:
                return f"its size is {size}; allowed: sums, products, // and % of input sizes"
        return None

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
        found = self._find_input(symbol)
        assert found is not None, f"symbol {symbol} is not a size of any input"
        node, dim = found
        return self._insert(aten.sym_size.int, found, node.meta["val"].shape[dim])

    def _find_input(self, symbol: sympy.Expr) -> tuple[fx.Node, int] | None:
        """Return an input tensor and the dim of it that a symbol is the size of."""
        for node in self._graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            if isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    if size_expression(size) == symbol:
                        return node, dim
        return None

    def _compound(self, expression: sympy.Expr, size: int | torch.SymInt | None) -> fx.Node:
        combine = _OPERATIONS[type(expression).__name__]
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


def replace_symbol(value: Any, old: sympy.Expr, new: sympy.Expr, mode: FakeTensorMode) -> Any:
    """Return a node's value with another size in the place of one symbol, in all its sizes."""

    def replace(size: int | torch.SymInt) -> int | torch.SymInt:
        expression = size_expression(size)
        return size_from_expression(mode, expression.subs(old, new)) if old in expression.free_symbols else size

    if isinstance(value, (tuple, list)):
        return type(value)(replace_symbol(part, old, new, mode) for part in value)
    if isinstance(value, torch.SymInt):
        return replace(value)
    if not isinstance(value, Tensor) or not any(old in size_expression(size).free_symbols for size in value.shape):
        return value
    shape, stride = [replace(size) for size in value.shape], [replace(step) for step in value.stride()]
    with mode:
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)

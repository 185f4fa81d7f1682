"""The one text form of a graph, used by dumps, goldens and messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import sympy
import torch
from torch import Tensor, fx

from pcp_compiler.torch_private import size_expression

_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def format_graph(gm: fx.GraphModule, seeds: Mapping[str, int] | None = None) -> str:
    """Return one line per node: name, type, sizes, placement, call; then the same for each segment that it calls.

    Symbols are renamed: T for the number of tokens, W for the rows of a rank, s0, s1, ... for others in order of use.
    """
    names = SymbolNames(gm, seeds or {})
    lines = [_format_node(node, names) for node in gm.graph.nodes]
    for name, segment in find_segments(gm).items():
        lines += ["", f"{name}:", *(f"    {_format_node(node, names)}" for node in segment.graph.nodes)]
    return "\n".join(lines) + "\n"


def find_segments(gm: fx.GraphModule) -> dict[str, fx.GraphModule]:
    """Return the segments that a graph calls by name, each once, in the order of their first calls."""
    found = {str(node.target): getattr(gm, str(node.target), None) for node in gm.graph.find_nodes(op="call_module")}
    return {name: module for name, module in found.items() if isinstance(module, fx.GraphModule)}


class SymbolNames:
    """Names of size symbols."""

    def __init__(self, gm: fx.GraphModule, seeds: Mapping[str, int]) -> None:
        self._names: dict[sympy.Expr, sympy.Symbol] = {}
        self._texts: dict[sympy.Expr, str] = {}  # a graph has thousands of sizes and a few expressions
        for node in gm.graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            if isinstance(value, Tensor) and node.name in seeds:
                self._name(value.shape[seeds[node.name]], "T")
            if isinstance(value, Tensor) and node.meta.get("index_input") == "local_rows":
                self._name(value.shape[0], "W")

    def text(self, size: int | torch.SymInt) -> str:
        """Return a size in the new names."""
        if isinstance(size, int):
            return str(size)
        expression = size_expression(size)
        if expression not in self._texts:
            self._texts[expression] = self._text(expression)
        return self._texts[expression]

    def _text(self, expression: sympy.Expr) -> str:
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self._names:
                self._names[symbol] = sympy.Symbol(f"s{sum(n.name.startswith('s') for n in self._names.values())}")
        return str(expression.subs(self._names))

    def _name(self, size: int | torch.SymInt, name: str) -> None:
        expression = size_expression(size)
        if expression.is_Symbol:
            self._names.setdefault(expression, sympy.Symbol(name))


def _format_node(node: fx.Node, names: SymbolNames) -> str:
    if node.op == "output":
        return f"return {_format_argument(node.args[0])}"
    kind = format_value(node.meta.get("val"), names)
    placement = f" {node.meta['placement']}" if "placement" in node.meta and node.op != "get_attr" else ""
    head = f"%{node.name}{' : ' + kind if kind else ''}{placement}"
    if node.op == "placeholder":
        return f"{head} = input"
    if node.op == "get_attr":
        return f"{head} = constant {node.target}"
    arguments = [_format_argument(value) for value in node.args]
    arguments += [f"{name}={_format_argument(value)}" for name, value in node.kwargs.items()]
    return f"{head} = {target_text(node.target)}({', '.join(arguments)})"


def target_text(target: object) -> str:
    """Return a call target as people write it: aten.mm.default, operator.add."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = str(getattr(target, "__module__", "")).removeprefix("_")
    name = getattr(target, "__name__", str(target))
    return f"{module}.{name}" if module else name


def format_value(value: object, names: SymbolNames) -> str:
    """Return dtype and sizes of a node's value, "" when it has none."""
    if isinstance(value, Tensor):
        return f"{_DTYPES.get(value.dtype, str(value.dtype))}[{', '.join(names.text(size) for size in value.shape)}]"
    if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
        return names.text(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(format_value(item, names) for item in value)})"
    return ""


def _format_argument(value: object) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_format_argument(item) for item in value)}]"
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return str(value).removeprefix("torch.")
    return repr(value)


def count_ops(gm: fx.GraphModule) -> dict[str, int]:
    """Return how often each call target runs, inside segments too, and how often each segment does."""
    counts = Counter(target_text(node.target) for node in _call_nodes(gm))
    runs = Counter(str(node.target) for node in gm.graph.find_nodes(op="call_module"))
    for name, segment in find_segments(gm).items():
        for node in _call_nodes(segment):
            counts[target_text(node.target)] += runs[name]
    return dict(counts + runs)


def _call_nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    return (node for node in gm.graph.nodes if node.op == "call_function")

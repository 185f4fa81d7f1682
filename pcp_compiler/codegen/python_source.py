"""A graph as a Python generator function: what executors run and what dumps print is the same text."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import jinja2
import torch
from torch import Tensor, fx

from pcp_compiler import ops
from pcp_compiler.errors import UnsupportedGraphError
from pcp_compiler.graph_text import SymbolNames, format_value
from pcp_compiler.trace import num_tokens, source_line

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class SourceInput:
    """One parameter of the printed program."""

    name: str
    type: str
    dtype: str
    sizes: list[int | str]
    role: str | None
    bound: int | None
    """Integer inputs hold values below this (rows of the embedding they look up)."""


def print_program(
    gm: fx.GraphModule, seeds: Mapping[str, int], *, pcp_size: int, title: str, filename: str = "final.py"
) -> str:
    """Return a Python module with one generator function `program(*inputs)` for a lowered graph.

    Raises:
        UnsupportedGraphError: a call target has no importable name.
    """
    names = SymbolNames(gm, seeds)
    length = num_tokens(gm, seeds)
    inputs = [_source_input(node, names, seeds) for node in gm.graph.find_nodes(op="placeholder")]
    body = list(_body(gm, names))
    output = next(iter(gm.graph.find_nodes(op="output")))
    return _template().render(
        title=title,
        description=f"{sum(n.op == 'call_function' for n in gm.graph.nodes)} calls, "
        f"{sum(n.target in ops.COLLECTIVES for n in gm.graph.nodes)} collectives.",
        pcp_size=pcp_size,
        filename=filename,
        namespaces=sorted({"aten", "pcp"} | {n for node in gm.graph.nodes if (n := _namespace(node.target))}),
        constants=[(_constant_name(n), _constant(gm, n)) for n in _unique_constants(gm)],
        inputs=inputs,
        results=", ".join(
            format_value(n.meta.get("val"), names) if isinstance(n, fx.Node) else repr(n) for n in output.args[0]
        ),
        body=body,
        num_tokens=length if isinstance(length, int) else 64,
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pcp_compiler.codegen"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template("program.py.jinja")


def _source_input(node: fx.Node, names: SymbolNames, seeds: Mapping[str, int]) -> SourceInput:
    value = node.meta["val"]
    is_tensor = isinstance(value, Tensor)
    sizes = [_size(size, names) for size in value.shape] if is_tensor else [_size(value, names)]
    return SourceInput(
        name=node.name,
        type=format_value(value, names),
        dtype=str(value.dtype) if is_tensor else "None",
        sizes=sizes,
        role=node.meta.get("index_input"),
        bound=_lookup_bound(node, set()) if is_tensor and not value.is_floating_point() else None,
    )


def _size(size: int | torch.SymInt, names: SymbolNames) -> int | str:
    return size if isinstance(size, int) else format_value(size, names)


def _lookup_bound(node: fx.Node, seen: set[fx.Node]) -> int | None:
    """Return the rows of the table that integers of this node index, None when they index none."""
    for user in node.users:
        if user.target is aten.embedding.default and user.args[1] is node:
            table = user.args[0]
            assert isinstance(table, fx.Node)
            return int(table.meta["val"].shape[0])
        if user not in seen and user.target in (
            ops.SHARD,
            aten.view.default,
            aten._to_copy.default,
            aten.clone.default,
        ):
            seen.add(user)
            bound = _lookup_bound(user, seen)
            if bound is not None:
                return bound
    return None


def _body(gm: fx.GraphModule, names: SymbolNames) -> Iterator[str]:
    last_use = _last_uses(gm)
    where = ""
    if not any(node.target in ops.COLLECTIVES for node in gm.graph.nodes):
        yield "yield from ()  # no collective, but a generator like every program"
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            yield f"return {_argument(list(node.args[0]))}"
            continue
        if node.op == "call_function" and node.meta.get("stack_trace") and (line := source_line(node)) != where:
            where = line
            yield f"# {line}"
        yield from _statement(node, names, last_use.get(node, []))


def _statement(node: fx.Node, names: SymbolNames, dying: list[fx.Node]) -> Iterator[str]:
    """Print one node; values that nobody reads any more are freed before the ranks meet."""
    release = f"; del {', '.join(n.name for n in dying)}" if dying else ""
    comment = f"  # {text}" if (text := format_value(node.meta.get("val"), names)) else ""
    if node.op == "get_attr":
        yield f"{node.name} = {_constant_name(node)}"
        return
    arguments = ", ".join(
        [_argument(a) for a in node.args] + [f"{key}={_argument(a)}" for key, a in node.kwargs.items()]
    )
    if node.target in ops.COLLECTIVES:
        yield f"request = Collective({_target(node.target)}, {node.name!r}, ({arguments},)){release}"
        yield f"{node.name} = yield request{comment}"
        yield "del request"
    else:
        yield f"{node.name} = {_target(node.target)}({arguments}){release}{comment}"


def _last_uses(gm: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """Return for each node the values that it reads last."""
    seen: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(gm.graph.nodes):
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                if node.op != "output" and source.op != "placeholder":
                    last.setdefault(node, []).append(source)
    return last


def _unique_constants(gm: fx.GraphModule) -> list[fx.Node]:
    found: dict[object, fx.Node] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        found.setdefault(node.target, node)
    return list(found.values())


def _constant_name(node: fx.Node) -> str:
    return f"CONSTANT_{node.target}".replace(".", "_")


def _constant(gm: fx.GraphModule, node: fx.Node) -> str:
    value = getattr(gm, str(node.target))
    if not isinstance(value, Tensor):
        raise UnsupportedGraphError(
            f"{node.name}: constant {node.target} is a {type(value).__name__}; allowed: tensors"
        )
    return f"torch.tensor({value.tolist()!r}, dtype={value.dtype}, device={str(value.device)!r})"


def _namespace(target: object) -> str | None:
    return target.namespace if isinstance(target, torch._ops.OpOverload) else None


def _target(target: object) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__name__", "")
    if getattr(operator, name, None) is target:
        return f"operator.{name}"
    if getattr(math, name, None) is target or getattr(torch, name, None) is target:
        return f"torch.{name}" if getattr(torch, name, None) is target else f"__import__('math').{name}"
    raise UnsupportedGraphError(
        f"call target {target!r} cannot be printed as Python; allowed: torch ops, operator, math"
    )


def _argument(value: object) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(item) for item in value)}]"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)

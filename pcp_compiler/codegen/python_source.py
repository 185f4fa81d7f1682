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
from pcp_compiler.graph_text import SymbolNames, find_segments, format_value
from pcp_compiler.trace import num_tokens, source_line

aten = torch.ops.aten
_NO_COLLECTIVE = "yield from ()  # no collective, but a generator like every program"


@dataclass(frozen=True, slots=True)
class SourceSegment:
    """One function that the printed program calls."""

    name: str
    num_calls: int
    inputs: list[tuple[str, str]]
    """Name and type."""
    results: str
    body: list[str]


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

    A graph that was cut calls its segments, which are functions beside it, as `run(number of the call, function,
    arguments)`; `program(*inputs, run=...)` takes another `run`.

    Raises:
        UnsupportedGraphError: a call target has no importable name.
    """
    names = SymbolNames(gm, seeds)
    length = num_tokens(gm, seeds)
    inputs = [_source_input(node, names, seeds) for node in gm.graph.find_nodes(op="placeholder")]
    has_collectives = any(node.target in ops.COLLECTIVES for node in gm.graph.nodes)
    segments = [_source_segment(gm, name, names) for name in find_segments(gm)]
    nodes = [node for part in (gm, *find_segments(gm).values()) for node in part.graph.nodes]
    return _template().render(
        title=title,
        description=_description(gm),
        pcp_size=pcp_size,
        filename=filename,
        namespaces=sorted({"aten", "pcp"} | {n for node in nodes if (n := _namespace(node.target))}),
        constants=[(_constant_name(n), _constant(gm, n)) for n in _unique_constants(gm)],
        inputs=inputs,
        results=_results(gm, names),
        segments=segments,
        body=[*([] if has_collectives else [_NO_COLLECTIVE]), *_body(gm, names)],
        num_tokens=length if isinstance(length, int) else 64,
    )


def _description(gm: fx.GraphModule) -> str:
    calls = sum(node.op == "call_function" for node in gm.graph.nodes)
    collectives = sum(node.target in ops.COLLECTIVES for node in gm.graph.nodes)
    segments = gm.graph.find_nodes(op="call_module")
    cut = f", {len(segments)} calls of {len(find_segments(gm))} segments" if segments else ""
    return f"{calls} calls, {collectives} collectives{cut}."


def _results(gm: fx.GraphModule, names: SymbolNames) -> str:
    results = gm.graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    return ", ".join(format_value(n.meta.get("val"), names) if isinstance(n, fx.Node) else repr(n) for n in results)


def _source_segment(gm: fx.GraphModule, name: str, names: SymbolNames) -> SourceSegment:
    segment = find_segments(gm)[name]
    inputs = [(n.name, format_value(n.meta["val"], names)) for n in segment.graph.find_nodes(op="placeholder")]
    num_calls = len(gm.graph.find_nodes(op="call_module", target=name))
    return SourceSegment(name, num_calls, inputs, _results(segment, names), list(_body(segment, names)))


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
        if user.op == "call_module":
            inputs = getattr(user.graph.owning_module, str(user.target)).graph.find_nodes(op="placeholder")
            inner = [inputs[position] for position, source in enumerate(user.args) if source is node]
            bound = next((found for n in inner if (found := _lookup_bound(n, seen)) is not None), None)
            if bound is not None:
                return bound
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
    where, num_calls = "", 0
    for node in gm.graph.nodes:
        if node.op == "placeholder" or _is_result_of_segment(node):
            continue
        if node.op == "call_module":
            yield _segment_call(node, num_calls, names, last_use.get(node, []))
            where, num_calls = "", num_calls + 1
            continue
        if node.op == "output":
            yield f"return {_argument(list(node.args[0]))}"
            continue
        if node.op == "call_function" and node.meta.get("stack_trace") and (line := source_line(node)) != where:
            where = line
            yield f"# {line}"
        yield from _statement(node, names, last_use.get(node, []))


def _is_result_of_segment(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    return node.target is operator.getitem and isinstance(source, fx.Node) and source.op == "call_module"


def _segment_call(node: fx.Node, number: int, names: SymbolNames, dying: list[fx.Node]) -> str:
    """Print a call of a segment, whose results get their names at once."""
    results = [item.name for item in sorted(node.users, key=lambda item: item.args[1])]  # type: ignore[arg-type, return-value]
    targets = f"({', '.join(results)},) = " if len(results) == 1 else f"{', '.join(results)} = " if results else ""
    arguments = "".join(f"{_argument(value)}, " for value in node.args).rstrip()
    return f"{targets}run({number}, {node.target}, ({arguments})){_release(dying)}{_comment(node, names)}"


def _release(dying: list[fx.Node]) -> str:
    return f"; del {', '.join(n.name for n in dying)}" if dying else ""


def _comment(node: fx.Node, names: SymbolNames) -> str:
    return f"  # {text}" if (text := format_value(node.meta.get("val"), names)) else ""


def _statement(node: fx.Node, names: SymbolNames, dying: list[fx.Node]) -> Iterator[str]:
    """Print one node; values that nobody reads any more are freed before the ranks meet."""
    release, comment = _release(dying), _comment(node, names)
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
                if node.op != "output" and source.op not in ("placeholder", "call_module"):
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

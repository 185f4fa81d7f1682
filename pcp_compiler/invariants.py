"""What must hold of every graph between two passes; each check has the short name that messages and tests use."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, fx

from pcp_compiler import ops
from pcp_compiler.errors import InvariantError
from pcp_compiler.graph_text import format_graph
from pcp_compiler.pass_api import calls, unused_nodes

Check = Callable[[fx.GraphModule], str | None]


def _well_formed(gm: fx.GraphModule) -> str | None:
    try:
        gm.graph.lint()
    except RuntimeError as fault:
        return str(fault)
    return None


def _op_allowed(gm: fx.GraphModule) -> str | None:
    for node in gm.graph.nodes:
        if node.op in ("call_method", "call_module"):
            return f"{node.name} is a {node.op}"
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return f"{node.name} changes a tensor in place ({node.target})"
    return None


def _has_value(gm: fx.GraphModule) -> str | None:
    missing = [node.name for node in gm.graph.nodes if node.op not in ("output", "get_attr") and "val" not in node.meta]
    return f"{missing[0]} has no value" if missing else None


def _no_dead_code(gm: fx.GraphModule) -> str | None:
    unused = unused_nodes(gm)
    return f"{unused[0].name} is unused" if unused else None


def _collective_paired(gm: fx.GraphModule) -> str | None:
    for start in calls(gm, ops.GATHER_START):
        waits = [user for user in start.users if user.target is ops.GATHER_WAIT]
        if len(waits) != 1 or len(start.users) != 1:
            return f"{start.name} has {len(waits)} waits and {len(start.users)} users"
    for wait in calls(gm, ops.GATHER_WAIT):
        start = wait.args[0]
        if not isinstance(start, fx.Node) or start.target is not ops.GATHER_START or start.args[0] != wait.args[1]:
            return f"{wait.name} does not wait for a gather of its own tensors"
    return None


def _index_is_input(gm: fx.GraphModule) -> str | None:
    """Index tensors change with every batch: as constants they would freeze one partition."""
    position = {ops.SHARD: 1, ops.UNSHARD: 1, ops.GATHER_WAIT: 2, ops.RESTORE_ROWS: 1, ops.ATTENTION: 4}
    for node in calls(gm, *position):
        index = node.args[position[node.target]]  # type: ignore[index]
        while isinstance(index, fx.Node) and index.op == "call_function" and index.args:
            index = index.args[0]
        if index is None and node.target is ops.ATTENTION:
            continue
        if not isinstance(index, fx.Node) or "index_input" not in index.meta:
            return f"{node.name} reads its rows from {index}"
    return None


def _source_kept(gm: fx.GraphModule) -> str | None:
    for node in calls(gm, *ops.COLLECTIVES, ops.ATTENTION):
        if not node.meta.get("stack_trace") and any(n.meta.get("stack_trace") for n in node.all_input_nodes):
            return f"{node.name} lost its source line"
    return None


INVARIANTS: Mapping[str, Check] = {
    "well-formed": _well_formed,
    "op-allowed": _op_allowed,
    "has-value": _has_value,
    "no-dead-code": _no_dead_code,
    "collective-paired": _collective_paired,
    "index-is-input": _index_is_input,
    "source-kept": _source_kept,
}


def check_invariants(gm: fx.GraphModule, after: str) -> None:
    """Raise InvariantError with the graph when one does not hold after a pass."""
    for name, check in INVARIANTS.items():
        fault = check(gm)
        if fault is not None:
            raise InvariantError(f"{name} does not hold after {after}: {fault}\n{format_graph(gm)}")


def check_values(gm: fx.GraphModule) -> None:
    """Raise InvariantError when a node's noted value differs from what its op computes (`value-matches`).

    Runs every op on fake tensors, which costs about a millisecond each: tests call it, the pipeline does not.
    """
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if not isinstance(node.meta["val"], Tensor):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: _value_of(gm, source))
        mode = node.meta["val"].fake_mode
        with mode, mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env else torch.no_grad():
            value = node.target(*args, **kwargs)
        noted = node.meta["val"]
        if str(tuple(value.shape)) != str(tuple(noted.shape)) or value.dtype != noted.dtype:
            raise InvariantError(
                f"value-matches does not hold: {node.name} is noted as {noted.dtype}{tuple(noted.shape)} and is "
                f"{value.dtype}{tuple(value.shape)}"
            )


def _value_of(gm: fx.GraphModule, node: fx.Node) -> object:
    return getattr(gm, str(node.target)) if node.op == "get_attr" else node.meta["val"]

"""Checking placement rules with numbers: is what they call row-local really so?

A rule says that each row of a result needs only the same row of some inputs. Here every such call of a model runs twice
on real values: in the unsharded graph on all T rows, and as `shard_tokens` wrote it on some of them. A wrong rule gives
other numbers. Each call gets its inputs from the unsharded run, so a fault is seen at the call that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pcp_compiler import ops
from pcp_compiler.compare import find_difference
from pcp_compiler.config import Config
from pcp_compiler.errors import UnsupportedGraphError
from pcp_compiler.pass_api import refuse
from pcp_compiler.passes.infer_placements import InferPlacements
from pcp_compiler.passes.shard_tokens import LOCAL_OF, LOCAL_ROWS, NUM_ROWS, WHOLE_OF, ShardTokens
from pcp_compiler.pipeline import CANONICAL_PASSES, make_context, run_pass
from pcp_compiler.placement import Layout
from pcp_compiler.trace import Trace

KNOB = "correct its rule; pcp_compiler.register_placement gives the rules of your own ops"


def check_rows(trace: Trace, config: Config, inputs: Sequence[object]) -> int:
    """Run every row-local call of a model on some rows alone, and compare with the same rows of the unsharded run.

    Args:
        inputs: real values for the trace's inputs. Half of their T rows are taken, never row 0: what only mixes earlier
            rows would pass on a prefix.
    Returns:
        How many calls were compared; 0 when T < 2.
    Raises:
        UnsupportedGraphError: a call is not row-local; names node, source line, difference.
    """
    ctx = make_context(trace, config)
    gm = trace.copy_graph()
    for step in (*CANONICAL_PASSES, InferPlacements()):
        gm, _ = run_pass(step, gm, ctx)
    unsharded = gm.graph
    gm, _ = run_pass(ShardTokens(), gm, ctx)
    given = {entry.name: value for entry, value in zip(trace.inputs, inputs, strict=True)}
    name, dim = next(iter(trace.seeds.items()))
    tokens = given[name]
    assert isinstance(tokens, Tensor)
    if tokens.shape[dim] < 2:
        return 0
    with torch.no_grad():
        return _RowCheck(gm, given, tokens.shape[dim], tokens.device).run(unsharded)


class _RowCheck:
    """The unsharded run, value by value, and the calls of the sharded graph beside it."""

    def __init__(self, sharded: fx.GraphModule, given: Mapping[str, object], num_tokens: int, device: torch.device):
        self._sharded = sharded
        self._given = given
        self._num_tokens = num_tokens
        shuffled = torch.randperm(num_tokens - 1, generator=torch.Generator().manual_seed(0))
        self._rows = (shuffled[: num_tokens // 2].sort().values + 1).to(device)
        self._index: dict[str, Tensor] = {
            LOCAL_ROWS: self._rows, NUM_ROWS: torch.tensor(len(self._rows), device=device),
        }  # fmt: skip
        self._unsharded: dict[str, object] = {}
        self._sizes: dict[fx.Node, object] = {}
        self._local: dict[str, list[fx.Node]] = {}
        for node in sharded.graph.nodes:
            if LOCAL_OF in node.meta and node.op == "call_function" and node.target is not ops.SHARD:
                self._local.setdefault(node.meta[LOCAL_OF][0], []).append(node)

    def run(self, unsharded: fx.Graph) -> int:
        """Compute the unsharded graph; after each node compare its row-local forms. Values die with their last user."""
        last_user = {source: node for node in unsharded.nodes for source in node.all_input_nodes}
        num_checked = 0
        for node in unsharded.nodes:
            if node.op == "output":
                continue
            self._unsharded[node.name] = self._compute(node, lambda source: self._unsharded[source.name])
            for local in self._local.get(node.name, ()):
                self._check(node, local)
                num_checked += 1
            for source in node.all_input_nodes:
                if last_user[source] is node:
                    del self._unsharded[source.name]
        return num_checked

    def _check(self, node: fx.Node, local: fx.Node) -> None:
        try:
            found = self._compute(local, self._value)
        except (RuntimeError, IndexError, ValueError, TypeError) as fault:
            raise self._not_local(node, f"fails: {fault}") from fault
        expected = self._select(self._unsharded[node.name], local.meta[LOCAL_OF][1])
        for value, wanted in zip(_as_tuple(found), _as_tuple(expected), strict=True):
            assert isinstance(value, Tensor) and isinstance(wanted, Tensor)
            difference = find_difference(value, wanted, None, None)
            if difference is not None:
                raise self._not_local(node, f"differs from the same rows of the unsharded run {difference}")

    def _not_local(self, node: fx.Node, fault: str) -> UnsupportedGraphError:
        rows = f"{len(self._rows)} of {self._num_tokens} rows"
        return refuse(node, f"is not row-local, as its placement rule says: run on {rows} alone it {fault}", KNOB)

    def _value(self, node: fx.Node) -> object:
        """Return the value of a node of the sharded graph, from the unsharded run where that has it."""
        if node.meta.get(WHOLE_OF) in self._unsharded:
            return self._unsharded[node.meta[WHOLE_OF]]
        name, layout = node.meta.get(LOCAL_OF, ("", None))
        if name in self._unsharded:
            return self._select(self._unsharded[name], layout)
        if node not in self._sizes:
            self._sizes[node] = self._compute(node, self._value)
        return self._sizes[node]

    def _compute(self, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> object:
        if node.op == "placeholder":
            role = node.meta.get("index_input")
            return self._given[node.name] if role is None else self._index[role]
        if node.op == "get_attr":
            return getattr(self._sharded, str(node.target))
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _select(self, value: object, layout: Layout) -> object:
        """Return the sampled rows of an unsharded value."""
        if isinstance(layout, tuple):
            assert isinstance(value, (tuple, list))
            return tuple(self._select(item, rows) for item, rows in zip(value, layout, strict=True))
        if layout is None:
            return value
        assert isinstance(value, Tensor)
        apart = value.unflatten(layout.dim, (layout.outer, self._num_tokens, layout.inner))
        return apart.index_select(layout.dim + 1, self._rows).flatten(layout.dim, layout.dim + 2)


def _as_tuple(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)

"""Make one graph of a whole proposal: draw the first token from given logits, then K-1 times run the step and draw.

Before: a step, rows of tokens to hidden states and logits of picked rows
    %embedding : f32[1, T, 32] = aten.embedding.default(%weight, %next_ids)
    %build_metadata : (i64[T, 4], i64[T]) = pcp.build_metadata.default(%positions, %block_tables, ...)
    %index_select : f32[s0, 32] = aten.index_select.default(%select, 0, %logit_rows)
    %mm : f32[s0, 64] = aten.mm.default(%index_select, %t)
After: tokens [T, K] from %logits, %hidden, %positions, a row per request; here K = 2
    %argmax : i64[T] = pcp.row_argmax.default(%logits)
    %unsqueeze : i64[1, T] = aten.unsqueeze.default(%argmax, 0)
    %embedding : f32[1, T, 32] = aten.embedding.default(%weight, %unsqueeze)
    %build_metadata : (i64[T, 4], i64[T]) = pcp.build_metadata.default(%positions, %block_tables, ...)
    %mm : f32[T, 64] = aten.mm.default(%select, %t)
    %argmax_1 : i64[T] = pcp.row_argmax.default(%mm)
    %stack : i64[T, 2] = aten.stack.default([%argmax, %argmax_1], 1)

Why here: after attach_kv, so that all copies of the step share the caches; before hoist_prologue, which looks for what
    the copies have in common.
Leaves alone: graphs of other phases. What depends on no input of the step (transposed weights, constants) is there
    once.

Step number s runs at the given positions + s - 1, made by adding 1 each time. Its tokens are those drawn before it, its
hidden states those of the step before. Sampled proposals take %temperature [T] and %keys [K, T] and return the
distributions too, [T, K, V].
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx

from pcp_compiler.errors import InvariantError
from pcp_compiler.pass_api import (
    DraftChain,
    Pass,
    PassContext,
    PassResult,
    Phase,
    add_call,
    copy_meta,
    erase_unused,
    refuse,
)
from pcp_compiler.sampling_ops import ROW_ARGMAX, SAMPLE_DRAFT
from pcp_compiler.sizes import SizeNodes, replace_symbol
from pcp_compiler.torch_private import size_expression

aten = torch.ops.aten
LOGITS, TEMPERATURE, KEYS = "logits", "temperature", "keys"


@dataclass(frozen=True)
class UnrollDraft(Pass):
    """See the module."""

    name: ClassVar[str] = "unroll_draft"
    keeps_signature: ClassVar[bool] = False
    keeps_numerics: ClassVar[bool] = False

    def requires(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        chain = _chain_of(gm, ctx.phase)
        if chain is None:
            return
        rows = _find_input(gm.graph, chain.row_input)
        for user in rows.users:
            if not _picks_rows(user, rows) and user.target is not aten.sym_size.int:
                raise refuse(
                    user, f"it uses {chain.row_input} otherwise than to select rows",
                    "return hidden states and logits of hidden.index_select(0, rows)",
                )  # fmt: skip

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        chain = _chain_of(gm, ctx.phase)
        if chain is None:
            return PassResult(gm, 0)
        gm.graph = _Unroller(gm, chain, ctx.phase).run()
        erase_unused(gm)
        ctx.decisions.add("draft chain", f"{chain.num_draft_tokens} draws, {chain.num_draft_tokens - 1} steps")
        return PassResult(gm, chain.num_draft_tokens)

    def ensures(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        if _chain_of(gm, ctx.phase) is not None:
            raise InvariantError("the step still takes its tokens from outside")


class _StepInputs(NamedTuple):
    tokens: fx.Node
    hidden: fx.Node
    positions: fx.Node


def _chain_of(gm: fx.GraphModule, phase: Phase) -> DraftChain | None:
    """Return what the phase says of the chain, None when there is none or the graph is one already."""
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    return phase.chain if phase.chain is not None and phase.chain.token_input in names else None


def _find_input(graph: fx.Graph, name: str) -> fx.Node:
    found: fx.Node = next(node for node in graph.find_nodes(op="placeholder") if node.name == name)
    return found


def _picks_rows(node: fx.Node, rows: fx.Node) -> bool:
    """Return whether a node selects the rows that get logits: in a chain all rows do."""
    return node.target is aten.index_select.default and node.args[2] is rows


class _Unroller:
    def __init__(self, gm: fx.GraphModule, chain: DraftChain, phase: Phase) -> None:
        assert phase.rows is not None
        self._old = gm.graph
        self._chain = chain
        self._graph = fx.Graph()
        names = (chain.token_input, chain.hidden_input, phase.rows.position_input)
        self._step_inputs = _StepInputs(*(_find_input(gm.graph, name) for name in names))
        self._row_input = _find_input(gm.graph, chain.row_input)
        positions = self._step_inputs.positions.meta["val"]
        self._mode, self._num_rows = positions.fake_mode, positions.shape[1]
        self._picked = size_expression(self._row_input.meta["val"].shape[0])
        self._kept: dict[fx.Node, fx.Node] = {}  # what every step shares: inputs, and what is made of them alone
        self._varying = _depend_on({*self._step_inputs, self._row_input})

    def run(self) -> fx.Graph:
        """Build the graph of a proposal."""
        output = next(iter(self._old.find_nodes(op="output")))
        _, step_logits = output.args[0]
        logits, temperature, keys = self._add_inputs(step_logits)
        self._sizes = SizeNodes(self._graph)
        hidden, positions = (self._kept[source] for source in self._step_inputs[1:])
        tokens: list[fx.Node] = []
        probs: list[fx.Node] = []
        for number in range(self._chain.num_draft_tokens):
            if number:
                step = _StepInputs(self._call(aten.unsqueeze.default, tokens[-1], 0), hidden, positions)
                picked, logits = self._copy_step(step, number)
                hidden = self._call(aten.unsqueeze.default, picked, 0)
                positions = self._call(aten.add.Tensor, positions, 1)
            token, chances = self._draw(logits, temperature, keys, number)
            copy_meta(step_logits, token)
            tokens.append(token)
            probs += [chances] if chances else []
        results = [self._call(aten.stack.default, many, 1) for many in (tokens, probs) if many]
        self._graph.output(results)
        return self._graph

    def _add_inputs(self, step_logits: fx.Node) -> tuple[fx.Node, fx.Node | None, fx.Node | None]:
        """Add the inputs: logits in the place of the tokens, nothing in that of the row numbers."""
        sampling: list[fx.Node] = []
        for node in self._old.find_nodes(op="placeholder"):
            if node is self._step_inputs.tokens:
                sampling = self._add_sampling_inputs(step_logits.meta["val"])
            elif node is not self._row_input:
                self._kept[node] = self._graph.node_copy(node)
        logits, temperature, keys = (*sampling, None, None)[:3]
        assert logits is not None
        return logits, temperature, keys

    def _add_sampling_inputs(self, logits: Tensor) -> list[fx.Node]:
        values = {LOGITS: self._in_new_sizes(logits)}
        if not self._chain.is_greedy:
            shape = (self._chain.num_draft_tokens, self._num_rows)
            with self._mode:
                values[TEMPERATURE] = torch.empty(self._num_rows, dtype=torch.float32, device=logits.device)
                values[KEYS] = torch.empty(shape, dtype=torch.int64, device=logits.device)
        nodes = []
        for name, value in values.items():
            nodes.append(self._graph.placeholder(name))
            nodes[-1].meta["val"] = value
        return nodes

    def _copy_step(self, inputs: _StepInputs, number: int) -> tuple[fx.Node, fx.Node]:
        """Add one step; return hidden states [N, H] and logits [N, V]."""
        copies = dict(zip(self._step_inputs, inputs, strict=True))

        def find(source: fx.Node) -> fx.Node:
            return copies[source] if source in copies else self._kept[source]

        for node in self._old.nodes:
            if node.op == "output":
                picked, logits = node.args[0]
                return find(picked), find(logits)
            if node.op == "placeholder" or node in self._kept:
                continue
            if isinstance(node.meta.get("val"), torch.SymInt):
                size = self._sizes.node_for(self._in_new_sizes(node.meta["val"]))
                assert isinstance(size, fx.Node)
                self._kept[node] = size
            elif _picks_rows(node, self._row_input):
                copies[node] = find(node.args[0])
            elif node in self._varying:
                copies[node] = self._copy(node, find, f"{node.name}_step{number}")
            else:
                self._kept[node] = self._copy(node, find, node.name)
        raise AssertionError("a graph without results")

    def _draw(
        self, logits: fx.Node, temperature: fx.Node | None, keys: fx.Node | None, number: int
    ) -> tuple[fx.Node, fx.Node | None]:
        """Add a draw of one token a row; return the tokens [N] and, unless greedy, the distributions [N, V]."""
        if temperature is None or keys is None:
            return self._call(ROW_ARGMAX, logits), None
        mine = self._call(aten.select.int, keys, 0, number)
        drawn = self._call(SAMPLE_DRAFT, logits, temperature, mine)
        token, chances = (self._call(operator.getitem, drawn, position) for position in range(2))
        return token, chances

    def _copy(self, node: fx.Node, find: Callable[[fx.Node], fx.Node], name: str) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), find)
        copied = self._graph.create_node(node.op, node.target, args, kwargs, name=name)
        copied.meta = dict(node.meta)
        if "val" in node.meta:
            copied.meta["val"] = self._in_new_sizes(node.meta["val"])
        return copied

    def _call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        return add_call(self._graph, target, args)

    def _in_new_sizes(self, value: Any) -> Any:
        """Return a value with N in place of the number of picked rows."""
        return replace_symbol(value, self._picked, size_expression(self._num_rows), self._mode)


def _depend_on(sources: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes that are made of the contents of some inputs, in one or more calls; sizes are not contents."""
    found = set(sources)
    for node in next(iter(sources)).graph.nodes:
        if not isinstance(node.meta.get("val"), torch.SymInt) and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found

"""Decide for every node whether a rank can compute it from its own token rows, and note it as a placement.

Before:
    %embedding : f32[1, T, 64] = aten.embedding.default(%weight, %input_ids)
    %cumsum : f32[1, T, 64] = aten.cumsum.default(%embedding, 1)
After:
    %embedding : f32[1, T, 64] Shard(1) = aten.embedding.default(%weight, %input_ids)
    %cumsum : f32[1, T, 64] Replicate() = aten.cumsum.default(%embedding, 1)      # refused unless on_token_mixing: gather

Why here: after canonicalize_attention, before shard_tokens, which only carries out what is decided here.
Leaves alone: the graph; it only adds notes. Refuses ops that mix tokens and ops without a placement rule.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from pcp_compiler.pass_api import Pass, PassContext, PassResult, refuse
from pcp_compiler.placement import (
    MATMUL_ATTENTION,
    Call,
    Local,
    Rows,
    Verdict,
    Whole,
    find_rule,
    size_numbers,
    tensor_inputs,
)
from pcp_compiler.trace import num_tokens

MIXING_KNOB = (
    "set parallel.on_token_mixing: gather to run this op on all tokens of every rank, or teach a row-local op with "
    "pcp_compiler.register_placement"
)
ATTENTION_KNOB = "load the model with attn_implementation='sdpa' or 'pcp_spec', or call pcp_compiler.attention"


@dataclass(frozen=True)
class InferPlacements(Pass):
    """See the module."""

    name: ClassVar[str] = "infer_placements"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        rewrites = 0
        for node, verdict in infer(gm, ctx).items():
            placement = placement_text(verdict)
            rewrites += node.meta.get("placement") != placement
            node.meta["placement"] = placement
            node.meta["verdict"] = verdict
        return PassResult(gm, rewrites)


def placement_text(verdict: Verdict) -> str:
    """Return a verdict in torch's words: Shard(dim) or Replicate()."""
    layouts = verdict.out if isinstance(verdict.out, tuple) else (verdict.out,)
    rows = next((rows for rows in layouts if rows is not None), None)
    return f"Shard({rows.dim})" if isinstance(verdict, Local) and rows is not None else "Replicate()"


def infer(gm: fx.GraphModule, ctx: PassContext) -> dict[fx.Node, Verdict]:
    """Return a verdict for each node that holds tensors.

    Raises:
        UnsupportedGraphError: an op mixes tokens, or rows reach an op without a rule, and on_token_mixing is refuse.
    """
    sizes, tokens = size_numbers(gm.graph, num_tokens(gm, ctx.seeds))
    verdicts: dict[fx.Node, Verdict] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.name in ctx.seeds:
            verdicts[node] = Local(Rows(ctx.seeds[node.name]), ())
        elif node.op in ("placeholder", "get_attr"):
            verdicts[node] = Whole(None)
        elif node.op == "call_function":
            verdicts[node] = _judge(node, verdicts, sizes, tokens, ctx)
    return verdicts


def _judge(
    node: fx.Node, verdicts: Mapping[fx.Node, Verdict], sizes: Callable[[fx.Node], tuple[int, ...]], tokens: int,
    ctx: PassContext,
) -> Verdict:  # fmt: skip
    inputs = tensor_inputs(node)
    if node.target is operator.getitem and isinstance(verdicts[inputs[0]].out, tuple):
        return _item(verdicts[inputs[0]], node.args[1])
    if node.target is torch.ops.aten.sym_size.int or all(verdicts[source].out is None for source in inputs):
        return Whole(None)
    rule = find_rule(node.target)
    verdict = rule(Call(node, sizes, lambda n: verdicts[n].out, tokens)) if rule else None
    if verdict is None:
        value = node.meta["val"]
        missing = "no placement rule knows how token rows pass through this op with these arguments"
        verdict = Whole((None,) * len(value) if isinstance(value, (tuple, list)) else None, missing)
    if isinstance(verdict, Whole) and verdict.mixes is not None:
        if ctx.config.parallel.on_token_mixing == "refuse":
            raise refuse(node, verdict.mixes, ATTENTION_KNOB if verdict.mixes is MATMUL_ATTENTION else MIXING_KNOB)
        ctx.decisions.add("token mixing", f"{node.name} ({node.target}) runs on all tokens: {verdict.mixes}")
    return verdict


def _item(producer: Verdict, index: object) -> Verdict:
    assert isinstance(producer.out, tuple) and isinstance(index, int)
    out = producer.out[index]
    return Local(out, (out,)) if isinstance(producer, Local) else Whole(out)

"""Write every size of a view as a number or an expression of input sizes, never as -1 or as another tensor's size.

A squeeze likewise names only the dims that it removes.

Before:
    %sym_size : T = aten.sym_size.int(%mul, 1)
    %view : f32[1, T, 4, 16] = aten.view.default(%mul, [1, %sym_size, -1, 16])
After:
    %sym_size : T = aten.sym_size.int(%input_ids, 1)
    %view : f32[1, T, 4, 16] = aten.view.default(%mul, [1, %sym_size, 4, 16])

Why here: first on every graph. A rank without rows has W = 0, and -1 has no answer for zero elements; a size read off
    a tensor that gets sharded would be W where the model meant T; a squeeze of all dims would remove the rows of a
    rank that has one.
Leaves alone: sizes that are already numbers or input sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from pcp_compiler.errors import InvariantError
from pcp_compiler.pass_api import Pass, PassContext, PassResult, calls, erase_unused, refuse
from pcp_compiler.sizes import SizeNodes
from pcp_compiler.torch_private import is_surely_equal

aten = torch.ops.aten
SIZE_ARGUMENT = {
    aten.view.default: 1,
    aten._unsafe_view.default: 1,
    aten.reshape.default: 1,
    aten.expand.default: 1,
}
"""Ops whose result size is an argument, and which one."""
SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


@dataclass(frozen=True)
class ExplicitShapes(Pass):
    """See the module."""

    name: ClassVar[str] = "explicit_shapes"

    def requires(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        sizes = SizeNodes(gm.graph)
        needed = [(node, node.meta["val"]) for node in _sizes_of_results(gm)]
        needed += [(node, size) for node in calls(gm, *SIZE_ARGUMENT) for size in _inferred_sizes(node).values()]
        for node, size in needed:
            obstacle = sizes.find_obstacle(size)
            if obstacle is not None:
                raise refuse(node, obstacle, "compute with tensors whose sizes follow from the sizes of the inputs")

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        sizes = SizeNodes(gm.graph)
        read_off = _sizes_of_results(gm)
        for node in read_off:
            _replace_size(node, sizes.node_for(node.meta["val"]))
        views = [node for node in calls(gm, *SIZE_ARGUMENT) if _inferred_sizes(node)]
        for node in views:
            _write_out(node, sizes)
        squeezes = [node for node in calls(gm, *SQUEEZES) if _kept_dims(node)]
        for node in squeezes:
            _name_dims(node)
        erase_unused(gm)
        return PassResult(gm, len(read_off) + len(views) + len(squeezes))

    def ensures(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        for node in calls(gm, *SIZE_ARGUMENT):
            if -1 in node.args[SIZE_ARGUMENT[node.target]]:  # type: ignore[operator, index]
                raise InvariantError(f"{node.name} still has a size of -1")


def _replace_size(node: fx.Node, size: int | fx.Node) -> None:
    """Let the users of a size node read `size` instead."""
    for user in list(node.users):
        user.args = _swap(user.args, node, size)
        user.kwargs = _swap(user.kwargs, node, size)


def _swap(value, old: fx.Node, new: object):  # type: ignore[no-untyped-def]
    if isinstance(value, dict):
        return {key: _swap(item, old, new) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_swap(item, old, new) for item in value)
    return new if value is old else value


def _sizes_of_results(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that read a size off a tensor that is not an input."""
    return [node for node in calls(gm, aten.sym_size.int) if node.args[0].op != "placeholder"]  # type: ignore[union-attr]


def _inferred_sizes(node: fx.Node) -> dict[int, int | torch.SymInt]:
    """Return the sizes that a view leaves to be inferred, by dim."""
    given = node.args[SIZE_ARGUMENT[node.target]]  # type: ignore[index]
    assert isinstance(given, (list, tuple))
    return {dim: node.meta["val"].shape[dim] for dim, size in enumerate(given) if size == -1}


def _write_out(node: fx.Node, sizes: SizeNodes) -> None:
    """Replace each -1 in the sizes of a view."""
    position = SIZE_ARGUMENT[node.target]  # type: ignore[index]
    written = list(node.args[position])  # type: ignore[arg-type]
    for dim, size in _inferred_sizes(node).items():
        written[dim] = sizes.node_for(size)
    node.update_arg(position, written)


def _asked_dims(node: fx.Node) -> list[int]:
    """Return the dims that a squeeze removes if their size is 1, counted from the front."""
    ndim = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    asked = range(ndim) if len(node.args) == 1 else node.args[1]
    return [dim % ndim for dim in ([asked] if isinstance(asked, int) else asked)]  # type: ignore[union-attr]


def _kept_dims(node: fx.Node) -> list[int]:
    """Return the dims that a squeeze is asked to remove and keeps, since their size is not 1."""
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    return [dim for dim in _asked_dims(node) if not is_surely_equal(shape[dim], 1)]


def _name_dims(node: fx.Node) -> None:
    """Let a squeeze ask for the dims that it removes only."""
    kept = _kept_dims(node)
    node.target = aten.squeeze.dims
    node.args = (node.args[0], [dim for dim in _asked_dims(node) if dim not in kept])

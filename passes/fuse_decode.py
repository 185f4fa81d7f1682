"""Compute a layer of few rows in five launches beside attention, where the graph has one for every ATen call.

Before:
    %pow_1 : f32[1, T, 32] = aten.pow.Tensor_Scalar(%embedding, 2)            # mean, add, rsqrt, two mul: RMSNorm
    %mul_4 : f32[1, T, 32] = aten.mul.Tensor(%input_layernorm_weight, %mul_3)
    %mm : f32[T, 32] = aten.mm.default(%view, %t)                              # and q, k and v of it
    %cat_2 : f32[1, 4, T, 8] = aten.cat.default([%neg_2, %slice_4], -1)        # slice, neg, mul, add: rotary embedding
    %store_kv : f32[0] = pcp.store_kv.default(%transpose_4, %transpose_5, %slots, %k_cache_0, %v_cache_0, layer=0)
    %paged_attention : f32[1, T, 4, 8] = pcp.paged_attention.default(%transpose_3, %store_kv, ...)
    %mm_3 : f32[T, 32] = aten.mm.default(%view_7, %t_3)
    %add_5 : f32[1, T, 32] = aten.add.Tensor(%embedding, %_unsafe_view_3)
    %silu : f32[1, T, 48] = aten.silu.default(%_unsafe_view_4)
After:
    %rms_norm_linear : (f32[1, T, 32], ...) = pcp.rms_norm_linear.default(%embedding, %weight, [%q, ...], ..., eps=0.1)
    %rope_store_kv : (f32[1, T, 4, 8], f32[0]) = pcp.rope_store_kv.default(%view_1, ..., %k_cache_0, ..., layer=0)
    %paged_attention : f32[1, T, 4, 8] = pcp.paged_attention.default(%getitem_3, %getitem_4, ...)
    %linear_residual : f32[1, T, 32] = pcp.linear_residual.default(%view_6, %weight, None, %embedding)
    %rms_norm_swiglu : f32[1, T, 48] = pcp.rms_norm_swiglu.default(%linear_residual, %weight, %gate, %up, ..., eps=0.1)

Why here: last; unroll_draft and hoist_prologue look for the calls that disappear here. Only for phases of decode rows:
    with many rows a matrix multiplication of its own is faster.
Leaves alone: a norm, a projection or a rotation of which any part is read elsewhere too; norms in another type than
    float32, with another mean than that of the last dim, or that no projection reads (those of heads); projections
    whose weights are computed; rotations that are not half-split or not of the queries and keys of one layer; logits
    that anything but one argmax reads. `decisions` lists both.

Matching follows the data flow and takes the operands of additions and products in either order. What is fused rounds
less than before: the results are not the same bits.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from pcp_compiler import decode_ops, kv_ops
from pcp_compiler.pass_api import Pass, PassContext, PassResult, add_call, calls, copy_meta, erase_unused
from pcp_compiler.sampling_ops import ROW_ARGMAX
from pcp_compiler.torch_private import is_surely_equal

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
FUSED, LEFT = "fused decode rows", "not fused"


@dataclass(frozen=True)
class FuseDecode(Pass):
    """See the module."""

    name: ClassVar[str] = "fuse_decode"
    keeps_numerics: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        found, edit = _find(gm), _Edit(gm.graph)
        for fusion in found.fusions:
            fusion.rewrite(edit)
            ctx.decisions.add(FUSED, fusion.describe())
        for text in found.left:
            ctx.decisions.add(LEFT, text)
        erase_unused(gm)
        return PassResult(gm, len(found.fusions))


class _Norm(NamedTuple):
    """gamma * x / sqrt(mean(x^2) + eps)."""

    x: fx.Node
    gamma: fx.Node
    eps: float
    out: fx.Node


class _Linear(NamedTuple):
    """x @ weight^T + bias; `out` has the leading dims of `x`."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    product: fx.Node
    out: fx.Node


class _Turn(NamedTuple):
    """Heads turned by angles: x [1, N, H, D], cos and sin [1, N, D], `out` [1, N, H, D]."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    out: fx.Node


# ---------------------------------------------------------------------------------------------------------------------
# What is put in


@dataclass(frozen=True)
class _Edit:
    """Adds and replaces nodes; what was found before an edit may name nodes that were replaced since."""

    graph: fx.Graph
    replaced: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        return add_call(self.graph, target, fx.map_arg(args, lambda node: self.replaced.get(node, node)), kwargs)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        copy_meta(old, new)
        old.replace_all_uses_with(new)
        self.replaced[old] = new


@dataclass(frozen=True)
class _NormLinears:
    norm: _Norm
    linears: tuple[_Linear, ...]

    def rewrite(self, edit: _Edit) -> None:
        first = self.linears[0].product
        weights, biases = [linear.weight for linear in self.linears], [linear.bias for linear in self.linears]
        with edit.graph.inserting_before(first):
            args = (self.norm.x, self.norm.gamma, weights, biases)
            fused = edit.call(decode_ops.RMS_NORM_LINEAR, args, {"eps": self.norm.eps})
            items = [edit.call(operator.getitem, (fused, number)) for number in range(len(weights))]
        copy_meta(first, fused)
        for linear, item in zip(self.linears, items, strict=True):
            edit.replace(linear.out, item)

    def describe(self) -> str:
        names = ", ".join(linear.weight.name for linear in self.linears)
        return f"rms_norm_linear: {self.norm.gamma.name} with {names}"


@dataclass(frozen=True)
class _NormSwiglu:
    norm: _Norm
    gate: _Linear
    up: _Linear
    out: fx.Node

    def rewrite(self, edit: _Edit) -> None:
        args = (self.norm.x, self.norm.gamma, self.gate.weight, self.up.weight, self.gate.bias, self.up.bias)
        with edit.graph.inserting_before(self.out):
            fused = edit.call(decode_ops.RMS_NORM_SWIGLU, args, {"eps": self.norm.eps})
        edit.replace(self.out, fused)

    def describe(self) -> str:
        return f"rms_norm_swiglu: {self.norm.gamma.name} with {self.gate.weight.name}, {self.up.weight.name}"


@dataclass(frozen=True)
class _LinearResidual:
    linear: _Linear
    residual: fx.Node
    out: fx.Node

    def rewrite(self, edit: _Edit) -> None:
        args = (self.linear.x, self.linear.weight, self.linear.bias, self.residual)
        with edit.graph.inserting_before(self.out):
            fused = edit.call(decode_ops.LINEAR_RESIDUAL, args)
        edit.replace(self.out, fused)

    def describe(self) -> str:
        return f"linear_residual: {self.linear.weight.name}"


@dataclass(frozen=True)
class _RopeStore:
    q: _Turn
    k: _Turn
    store: fx.Node

    def rewrite(self, edit: _Edit) -> None:
        _, v, *others = self.store.args
        args = (self.q.x, self.k.x, _without_round_trip(v), self.q.cos, self.q.sin, *others)
        with edit.graph.inserting_before(self.store):
            fused = edit.call(decode_ops.ROPE_STORE_KV, args, dict(self.store.kwargs))
            turned, stored = (edit.call(operator.getitem, (fused, number)) for number in range(2))
        copy_meta(self.store, fused)
        edit.replace(self.store, stored)
        edit.replace(self.q.out, turned)
        edit.graph.erase_node(self.store)  # it has an effect: nobody else erases it

    def describe(self) -> str:
        return f"rope_store_kv: layer {self.store.kwargs['layer']}"


@dataclass(frozen=True)
class _LinearArgmax:
    linear: _Linear
    argmax: fx.Node

    def rewrite(self, edit: _Edit) -> None:
        with edit.graph.inserting_before(self.argmax):
            fused = edit.call(decode_ops.LINEAR_ARGMAX, (self.linear.x, self.linear.weight, self.linear.bias))
            ids = edit.call(operator.getitem, (fused, 0))
        copy_meta(self.argmax, fused)
        edit.replace(self.argmax, ids)

    def describe(self) -> str:
        return f"linear_argmax: {self.linear.weight.name}"


_Fusion = _NormLinears | _NormSwiglu | _LinearResidual | _RopeStore | _LinearArgmax


# ---------------------------------------------------------------------------------------------------------------------
# Find


@dataclass(slots=True)
class _Found:
    fusions: list[_Fusion] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    products: set[fx.Node] = field(default_factory=set)
    """Multiplications that belong to a fusion."""

    def add(self, fusion: _Fusion, *linears: _Linear) -> None:
        self.fusions.append(fusion)
        self.products.update(linear.product for linear in linears)


def _find(gm: fx.GraphModule) -> _Found:
    found = _Found()
    order = {node: number for number, node in enumerate(gm.graph.nodes)}
    for end in calls(gm, aten.mul.Tensor, aten._to_copy.default):
        norm = _match_norm(end)
        if norm is not None:
            _add_norm(found, norm, order)
    free = [node for node in calls(gm, aten.mm.default, aten.addmm.default) if node not in found.products]
    linears = {linear.out: linear for node in free if (linear := _match_linear(node)) is not None}
    for node in calls(gm, aten.add.Tensor):
        _add_residual(found, node, linears)
    for node in calls(gm, aten.argmax.default, ROW_ARGMAX):
        _add_argmax(found, node, linears)
    for store in calls(gm, kv_ops.STORE_KV):
        _add_rope(found, store, order)
    for node in free:
        if node not in found.products:
            found.left.append(f"{node.name}: a product with no norm, residual or argmax that could go with it")
    return found


def _add_norm(found: _Found, norm: _Norm, order: dict[fx.Node, int]) -> None:
    users = list(_behind_views(norm.out))
    matched = [linear for user in users if (linear := _match_linear(user)) is not None]
    linears = [linear for linear in matched if linear.x is norm.out]
    stored = [node for linear in linears for node in (linear.weight, linear.bias) if node is not None]
    if not linears:
        found.left.append(f"{norm.out.name}: a norm that no projection with a stored weight reads")
    elif len(linears) < len(users):
        found.left.append(f"{norm.out.name}: a norm that is read by more than projections with stored weights")
    elif any(order[node] > order[linears[0].product] for node in stored):
        found.left.append(f"{norm.out.name}: a norm whose projections need what comes after the first of them")
    else:
        found.add(_match_swiglu(norm, linears) or _NormLinears(norm, tuple(linears)), *linears)


def _match_swiglu(norm: _Norm, linears: list[_Linear]) -> _NormSwiglu | None:
    if len(linears) != 2 or linears[0].weight.meta["val"].shape != linears[1].weight.meta["val"].shape:
        return None
    for gate, up in (linears, reversed(linears)):
        silu = _only_user(gate.out, aten.silu.default)
        product = None if silu is None else _only_user(silu, aten.mul.Tensor)
        if product is not None and _only_user(up.out, aten.mul.Tensor) is product:
            return _NormSwiglu(norm, gate, up, product)
    return None


def _add_residual(found: _Found, add: fx.Node, linears: dict[fx.Node, _Linear]) -> None:
    for out, residual in _pairs(add):
        linear = linears.get(out)
        if linear is not None and isinstance(residual, fx.Node) and len(out.users) == 1 and _is_alike(out, residual):
            found.add(_LinearResidual(linear, residual, add), linear)
            return


def _add_argmax(found: _Found, argmax: fx.Node, linears: dict[fx.Node, _Linear]) -> None:
    logits, *dims = _args(argmax)
    linear = linears.get(logits)
    is_along_last = argmax.target is ROW_ARGMAX or dims in ([-1], [logits.meta["val"].dim() - 1])
    if linear is not None and is_along_last and not argmax.kwargs and len(logits.users) == 1:
        found.add(_LinearArgmax(linear, argmax), linear)


def _add_rope(found: _Found, store: fx.Node, order: dict[fx.Node, int]) -> None:
    fusion = _match_rope(store, order)
    if isinstance(fusion, str):
        found.left.append(f"{store.name}: {fusion}")
    else:
        found.add(fusion)


def _match_rope(store: fx.Node, order: dict[fx.Node, int]) -> _RopeStore | str:
    """Return the fusion around a store, or why there is none."""
    attention = _only_user(store, kv_ops.PAGED_ATTENTION)
    if attention is None:
        return "more than one attention reads what it stores"
    q, k = _match_turn(_args(attention)[0]), _match_turn(_args(store)[0])
    if q is None or k is None:
        return f"its {'keys' if k is None else 'queries'} are not turned in halves, or parts of them are read elsewhere"
    if len(q.out.users) != 1 or len(k.out.users) != 1:
        return "its turned keys or queries are read elsewhere"
    if (q.cos, q.sin) != (k.cos, k.sin):
        return "its keys and queries are turned by different angles"
    if order[q.x] > order[store]:
        return "its queries are made after the keys are stored"
    return _RopeStore(q, k, store)


# ---------------------------------------------------------------------------------------------------------------------
# Match


def _match_norm(end: fx.Node) -> _Norm | None:
    """Match gamma * (x * rsqrt(mean(x^2) + eps)), computed in float32 and cast before or after gamma."""
    product = _uncast(end)
    if product.target is not aten.mul.Tensor:
        return None
    for gamma, scaled in _pairs(product):
        if not isinstance(gamma, fx.Node) or not isinstance(scaled, fx.Node) or gamma.meta["val"].dim() != 1:
            continue
        found = _match_scaled(_uncast(scaled))
        if found is None:
            continue
        wide, eps, inner = found
        x = _uncast(wide)
        if wide.meta["val"].dtype != torch.float32 or x.meta["val"].dtype != end.meta["val"].dtype:
            return None
        inner |= {product, scaled} | ({wide} if wide is not x else set())
        return _Norm(x, gamma, eps, end) if _is_closed(inner - {end}, end) else None
    return None


def _match_scaled(scaled: fx.Node) -> tuple[fx.Node, float, set[fx.Node]] | None:
    """Match x * rsqrt(mean(x^2, last dim) + eps); return x, eps and the nodes between."""
    if scaled.target is not aten.mul.Tensor:
        return None
    for x, root in _pairs(scaled):
        if not _is_call(root, aten.rsqrt.default):
            continue
        (shifted,) = _args(root)
        if not _is_call(shifted, aten.add.Tensor) and not _is_call(shifted, aten.add.Scalar):
            continue
        for mean, eps in _pairs(shifted):
            square = _match_mean(mean)
            if square is not None and isinstance(eps, float) and _is_square(square, x):
                return x, eps, {scaled, root, shifted, mean, square}
    return None


def _match_mean(mean: object) -> fx.Node | None:
    """Return what is averaged over the last dim, which is kept with size 1."""
    if not isinstance(mean, fx.Node) or mean.target is not aten.mean.dim or len(mean.args) != 3 or mean.kwargs:
        return None
    source, dims, keeps = _args(mean)
    return source if keeps is True and dims in ([-1], [source.meta["val"].dim() - 1]) else None


def _is_square(node: fx.Node, x: object) -> bool:
    if node.target is aten.pow.Tensor_Scalar:
        return _args(node) == (x, 2)
    return node.target is aten.mul.Tensor and _args(node) == (x, x)


def _match_linear(product: fx.Node) -> _Linear | None:
    """Match a multiplication by a stored weight, with the views around it that only regroup the rows."""
    if product.target not in (aten.mm.default, aten.addmm.default) or product.kwargs:
        return None
    bias, rows, turned = (None, *_args(product)) if product.target is aten.mm.default else _args(product)
    weight = _transposed(turned)
    if weight is None or not _is_stored(weight):
        return None
    if bias is not None and not (_is_stored(bias) and bias.meta["val"].dim() == 1):
        return None
    outs, xs = [product], [rows]
    while (view := _only_user(outs[-1], *VIEWS)) is not None and _keeps_last_dim(view):
        outs.append(view)
    while xs[-1].target in VIEWS and _keeps_last_dim(xs[-1]):
        xs.append(_args(xs[-1])[0])
    pairs = ((x, out) for x in reversed(xs) for out in outs if _has_same_rows(x, out))
    return next((_Linear(x, weight, bias, product, out) for x, out in pairs), None)


def _match_turn(node: fx.Node) -> _Turn | None:
    """Match x * cos + cat(-x[half:], x[:half]) * sin, on [1, N, H, D] or on [1, H, N, D] transposed there and back."""
    inside = _swapped(node)
    total = node if inside is None else inside
    if total.target is not aten.add.Tensor:
        return None
    for straight, crossed in _pairs(total):
        found = _match_halves(straight, crossed)
        if found is None:
            continue
        x, cos, sin, inner = found
        cos, sin = (_unsqueezed(angles, 2 if inside is None else 1) for angles in (cos, sin))
        source = x if inside is None else _swapped(x)
        if source is None or cos is None or sin is None or not _is_closed((inner | {total}) - {node}, node):
            return None
        fits = _is_angle(cos, source) and _is_angle(sin, source)
        return _Turn(source, cos, sin, node) if fits and source.meta["val"].dtype == node.meta["val"].dtype else None
    return None


def _is_angle(angle: fx.Node, heads: fx.Node) -> bool:
    """Return whether there is one [1, N, D] row of angles for each row of [1, N, H, D]."""
    wanted = [size for dim, size in enumerate(heads.meta["val"].shape) if dim != 2]
    shape = angle.meta["val"].shape
    return len(shape) == 3 and all(is_surely_equal(a, b) for a, b in zip(shape, wanted, strict=True))


def _match_halves(straight: Any, crossed: Any) -> tuple[fx.Node, Any, Any, set[fx.Node]] | None:
    """Match straight = x * cos, crossed = cat(-x[half:], x[:half]) * sin; return x, cos, sin and the nodes between."""
    if not _is_call(straight, aten.mul.Tensor) or not _is_call(crossed, aten.mul.Tensor):
        return None
    for turned, sin in _pairs(crossed):
        if not _is_call(turned, aten.cat.default) or _args(turned)[1:] not in ((-1,), (3,)):
            continue
        parts = _args(turned)[0]
        if len(parts) != 2 or not _is_call(parts[0], aten.neg.default):
            continue
        negated, first = parts
        for x, cos in _pairs(straight):
            halves = _match_split(first, _args(negated)[0], x)
            if halves is not None:
                return x, cos, sin, {straight, crossed, turned, negated} | halves
    return None


def _match_split(first: fx.Node, second: fx.Node, x: object) -> set[fx.Node] | None:
    """Return the nodes that make the halves of the last dim of x [.., D]; None when these are none."""
    if not isinstance(x, fx.Node) or not isinstance(x.meta["val"].shape[-1], int):
        return None
    size, last = x.meta["val"].shape[-1], (-1, x.meta["val"].dim() - 1)
    if first.target is aten.slice.Tensor and second.target is aten.slice.Tensor:
        (of, dim, *low), (of_too, dim_too, *high) = _args(first), _args(second)
        is_x = of is x and of_too is x and dim in last and dim_too in last
        is_half = low == [0, size // 2] and len(high) == 2 and high[0] == size // 2 and high[1] >= size
        return {first, second} if is_x and is_half and size % 2 == 0 else None
    if first.target is operator.getitem and second.target is operator.getitem:
        (split, number), (split_too, number_too) = _args(first), _args(second)
        if split is not split_too or (number, number_too) != (0, 1) or split.target is not aten.split.Tensor:
            return None
        of, width, *dims = _args(split)
        is_half = of is x and 2 * width == size and len(dims) == 1 and dims[0] in last
        return {first, second, split} if is_half else None
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Small questions about nodes


def _args(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a node as what the op makes of them, which their declared type does not say."""
    return node.args


def _is_call(node: object, target: object) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def _pairs(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Yield the two operands of a commutative op in both orders; nothing when it has more arguments."""
    if len(node.args) == 2 and not node.kwargs:
        a, b = node.args
        yield a, b
        yield b, a


def _only_user(node: fx.Node, *targets: object) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target in targets else None


def _is_closed(inner: set[fx.Node], end: fx.Node) -> bool:
    """Return whether nobody but `end` and each other uses the nodes between."""
    return all(user in inner or user is end for node in inner for user in node.users)


def _is_stored(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _uncast(node: fx.Node) -> fx.Node:
    """Return what a change of type is made from; the node itself when it is none."""
    is_cast = node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"}
    return _args(node)[0] if is_cast else node


def _transposed(node: fx.Node) -> fx.Node | None:
    """Return the matrix that a node is the transpose of."""
    is_swap = (
        node.target is aten.t.default
        or (node.target is aten.transpose.int and sorted(_dims(node)) == [0, 1])
        or (node.target is aten.permute.default and _args(node)[1] in ([1, 0], [-1, -2], [-1, 0], [1, -2]))
    )
    return _args(node)[0] if is_swap else None


def _dims(transpose: fx.Node) -> list[int]:
    return [dim % transpose.meta["val"].dim() for dim in _args(transpose)[1:]]


def _swapped(node: fx.Node) -> fx.Node | None:
    """Return the [1, N, H, D] that a [1, H, N, D] is a transpose of, or the other way round."""
    is_swap = node.target is aten.transpose.int and node.meta["val"].dim() == 4 and sorted(_dims(node)) == [1, 2]
    return _args(node)[0] if is_swap else None


def _without_round_trip(node: Any) -> fx.Node:
    """Return what a node is that was transposed to [1, H, N, D] and back."""
    inner = _swapped(node)
    source = None if inner is None else _swapped(inner)
    return node if source is None else source


def _unsqueezed(node: object, dim: int) -> fx.Node | None:
    """Return what a node adds a dim for heads to."""
    if not isinstance(node, fx.Node) or node.target is not aten.unsqueeze.default:
        return None
    source, given = _args(node)
    return source if given == dim else None


def _behind_views(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the users of a node; behind views that only regroup its rows, their users."""
    for user in node.users:
        if user.target in VIEWS and _keeps_last_dim(user):
            yield from _behind_views(user)
        else:
            yield user


def _keeps_last_dim(view: fx.Node) -> bool:
    before, after = _args(view)[0].meta["val"].shape, view.meta["val"].shape
    return len(before) > 1 and len(after) > 1 and isinstance(before[-1], int) and before[-1] == after[-1]


def _has_same_rows(a: fx.Node, b: fx.Node) -> bool:
    """Return whether all dims but the last are the same."""
    rows, others = a.meta["val"].shape[:-1], b.meta["val"].shape[:-1]
    return len(rows) == len(others) and all(is_surely_equal(x, y) for x, y in zip(rows, others, strict=True))


def _is_alike(a: fx.Node, b: fx.Node) -> bool:
    """Return whether two values have the same shape and type."""
    a_value, b_value = a.meta["val"], b.meta["val"]
    if a_value.dtype != b_value.dtype or a_value.dim() != b_value.dim():
        return False
    return is_surely_equal(a_value.shape[-1], b_value.shape[-1]) and _has_same_rows(a, b)

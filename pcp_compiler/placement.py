"""Where token rows lie in a tensor, and how every op moves them.

A rule looks at one call and at the rows of its inputs, and says how the op can run on a rank that holds some of the
rows: `Local` (each output row needs only the same row of the inputs it names) or `Whole` (it needs all rows).
Rules know dims only. No rule may ask whether a size equals the number of tokens: a prompt of 64 tokens is as long as
a head is wide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from pcp_compiler import kv_ops, ops
from pcp_compiler.errors import ConfigError
from pcp_compiler.torch_private import size_expression

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Rows:
    """Dim `dim` of a tensor counts token rows: its size is outer * T * inner, the token index in the middle.

    outer > 1 after a batch was flattened into the rows, inner > 1 after features (top-k choices) were.
    """

    dim: int
    outer: int = 1
    inner: int = 1


Layout = Rows | None | tuple["Rows | None", ...]
"""Rows of a value; None: it has none. A tuple for an op with several results."""


@dataclass(frozen=True, slots=True)
class Local:
    """The op runs on the rows of one rank. `inputs`: where each tensor input must have its rows; None: complete."""

    out: Layout
    inputs: tuple[Rows | None, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """The op needs all rows. `out`: rows of its complete result; `mixes`: why, when it couples tokens."""

    out: Layout
    mixes: str | None = None


Verdict = Local | Whole


@dataclass(frozen=True, slots=True)
class Call:
    """One op call as a rule sees it: bound arguments, sizes as numbers, rows of the inputs."""

    node: fx.Node
    sizes: Callable[[fx.Node], tuple[int, ...]]
    rows_of: Callable[[fx.Node], Layout]
    num_tokens: int

    @property
    def tensors(self) -> tuple[fx.Node, ...]:
        """The tensor inputs in order of appearance, lists included."""
        return tensor_inputs(self.node)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the result."""
        return self.sizes(self.node)

    def arg(self, index: int, name: str, default: object = None) -> object:
        """Return an argument given by position or by name."""
        if index < len(self.node.args):
            return self.node.args[index]
        return self.node.kwargs.get(name, default)

    def tensor(self, index: int) -> fx.Node:
        """Return the argument at `index`, which the op's schema says is a tensor."""
        value = self.node.args[index]
        assert isinstance(value, fx.Node)
        return value

    def dim(self, index: int, name: str, ndim: int, default: int | None = None) -> int:
        """Return a dim argument, counted from the front."""
        value = self.arg(index, name, default)
        assert isinstance(value, int)
        return value % max(ndim, 1)

    def rows(self, node: fx.Node) -> Rows | None:
        """Return the rows of one tensor."""
        layout = self.rows_of(node)
        assert not isinstance(layout, tuple), f"{node} has several results"
        return layout


Rule = Callable[[Call], Verdict | None]
"""None: the rule does not cover this call; it is refused like an op without a rule."""

FirstRule = Callable[[Call, fx.Node, Rows], Verdict | None]

_RULES: dict[object, Rule] = {}


def register_placement(op: object, rule: Rule) -> None:
    """Teach the compiler how token rows pass through an op of your own.

    Args:
        op: an OpOverload (torch.ops.my_lib.my_op.default) or another call target of the graph.
        rule: takes a `Call`, returns `Local`, `Whole`, or None when it does not cover the call.
    Raises:
        ConfigError: the op already has a rule, or is not callable.
    """
    if not callable(op):
        raise ConfigError(f"register_placement: op is {op!r}; allowed: an op overload such as torch.ops.x.y.default")
    if op in _RULES:
        raise ConfigError(f"register_placement: {op} already has a rule")
    _RULES[op] = rule


def find_rule(target: object) -> Rule | None:
    """Return the rule of a call target; ops that torch tags as pointwise need none of their own."""
    rule = _RULES.get(target)
    if rule is None and torch.Tag.pointwise in getattr(target, "tags", ()):
        return pointwise
    return rule


def tensor_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the inputs of a node that hold tensors (or several), each once per appearance."""
    found: list[fx.Node] = []

    def visit(value: object) -> None:
        if isinstance(value, fx.Node):
            if not isinstance(value.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
                found.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)

    visit(node.args)
    visit(tuple(node.kwargs.values()))
    return tuple(found)


def size_numbers(graph: fx.Graph, num_tokens: int | torch.SymInt) -> tuple[Callable[[fx.Node], tuple[int, ...]], int]:
    """Return a function giving the sizes of a node as numbers, and the number that stands for T.

    Symbols are replaced by distinct primes above a million, so that products of sizes keep their factors apart.
    """
    values: dict[object, int] = {}

    def number(size: int | torch.SymInt) -> int:
        if isinstance(size, int):
            return size
        expression = size_expression(size)
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in values:
                values[symbol] = sympy.nextprime(max(values.values(), default=1_000_000))
        return int(expression.subs(values))

    memo: dict[fx.Node, tuple[int, ...]] = {}

    def sizes(node: fx.Node) -> tuple[int, ...]:
        if node not in memo:
            value = node.meta["val"]
            memo[node] = tuple(number(size) for size in value.shape) if isinstance(value, torch.Tensor) else ()
        return memo[node]

    return sizes, number(num_tokens)


# ---------------------------------------------------------------------------------------------------------------------
# Rules


def _rule(*targets: object) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for target in targets:
            _RULES[target] = rule
        return rule

    return register


def _first_rule(*targets: object) -> Callable[[FirstRule], FirstRule]:
    """Register a rule for ops whose first tensor alone can hold rows; it gets that tensor and its rows."""

    def register(rule: FirstRule) -> FirstRule:
        def on_call(call: Call) -> Verdict | None:
            node = call.tensors[0]
            rows = call.rows(node)
            return None if rows is None else rule(call, node, rows)

        for target in targets:
            _RULES[target] = on_call
        return rule

    return register


def _overloads(*names: str) -> Iterable[object]:
    """Yield the aten overloads "op.overload" that this torch has."""
    for name in names:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None)
        if op is not None:
            yield op


@_rule(*_overloads("copy"))
def pointwise(call: Call) -> Verdict | None:
    """Each output element needs the broadcast-aligned element of every input."""
    ndim = len(call.shape)
    found: Rows | None = None
    for node in call.tensors:
        rows = call.rows(node)
        if rows is None:
            continue
        aligned = Rows(rows.dim + ndim - len(call.sizes(node)), rows.outer, rows.inner)
        if found not in (None, aligned):
            return None
        found = aligned
    if found is None:
        return Whole(None)
    return Local(found, tuple(_aligned_input(found, call.sizes(node), ndim) for node in call.tensors))


def _aligned_input(out: Rows, shape: Sequence[int], ndim: int) -> Rows | None:
    """Return where an input of a broadcasting op must have its rows: None when it is broadcast along them."""
    dim = out.dim - (ndim - len(shape))
    return None if dim < 0 or shape[dim] == 1 else Rows(dim, out.outer, out.inner)


@_first_rule(*_overloads(
    "_to_copy", "clone", "detach", "alias", "lift_fresh_copy", "zeros_like", "ones_like", "full_like", "empty_like",
), torch.ops.prims.convert_element_type.default)  # fmt: skip
def same_shape(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """One input, a result of the same shape."""
    return Local(rows, (rows,))


@_first_rule(*_overloads("new_zeros", "new_ones", "new_empty", "new_full"))
def metadata_only(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """Reads only dtype and device of its input."""
    return Local(None, (rows,))


@_first_rule(*_overloads("view", "_unsafe_view", "reshape", "_reshape_alias"))
def view(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """Rows stay rows as long as no dim of the result cuts the token index in two."""
    out = _viewed_rows(rows, call.sizes(node), call.shape, call.num_tokens)
    return None if out is None else Local(out, (rows,))


def _viewed_rows(rows: Rows, before: tuple[int, ...], after: tuple[int, ...], num_tokens: int) -> Rows | None:
    """Find the dim of `after` that holds outer' * T * inner' with the same element order as before.

    The token index has `ahead` elements before it and `behind` after it in row-major order. The dim that keeps it
    whole starts at or before it (its prefix product divides `ahead`) and reaches at or past its end.
    """
    ahead = rows.outer
    for size in before[: rows.dim]:
        ahead *= size
    prefix = 1
    for dim, size in enumerate(after):
        if prefix and ahead % prefix == 0 and size and (prefix * size) % (ahead * num_tokens) == 0:
            return Rows(dim, ahead // prefix, prefix * size // (ahead * num_tokens))
        prefix *= size
    return None


@_first_rule(*_overloads("unsqueeze"))
def unsqueeze(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """A new dim of size 1 moves the rows behind it by one."""
    at = call.dim(1, "dim", len(call.sizes(node)) + 1)
    return Local(Rows(rows.dim + (at <= rows.dim), rows.outer, rows.inner), (rows,))


@_first_rule(*_overloads("squeeze.dim", "squeeze.dims"))
def squeeze(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """Dims of size 1 before the rows vanish; the rows themselves may not be asked for, a rank may have one."""
    shape = call.sizes(node)
    dims = {d % len(shape) for d in _as_list(call.arg(1, "dim"))}
    if rows.dim in dims:
        return None
    gone = sum(1 for d in dims if d < rows.dim and shape[d] == 1)
    return Local(Rows(rows.dim - gone, rows.outer, rows.inner), (rows,))


@_first_rule(*_overloads("transpose.int", "permute", "t"))
def permute(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """The rows move with their dim."""
    ndim = len(call.sizes(node))
    order = list(range(ndim))
    if call.node.target is aten.permute.default:
        order = [d % ndim for d in _as_list(call.arg(1, "dims"))]
    else:
        a, b = (0, ndim - 1) if call.node.target is aten.t.default else (call.dim(1, "", ndim), call.dim(2, "", ndim))
        order[a], order[b] = order[b], order[a]
    return Local(Rows(order.index(rows.dim), rows.outer, rows.inner), (rows,))


@_first_rule(*_overloads("expand"))
def expand(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """New dims come in front."""
    return Local(Rows(rows.dim + len(call.shape) - len(call.sizes(node)), rows.outer, rows.inner), (rows,))


@_first_rule(*_overloads("repeat"))
def repeat(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """New dims come in front; the rows themselves may not be repeated."""
    times = _as_list(call.arg(1, "repeats"))
    dim = rows.dim + len(times) - len(call.sizes(node))
    return Local(Rows(dim, rows.outer, rows.inner), (rows,)) if times[dim] == 1 else None


@_first_rule(*_overloads("slice.Tensor", "select.int"))
def select_rows(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """Along another dim the rows stay; along the rows some of all rows are picked."""
    dim = call.dim(1, "dim", len(call.sizes(node)), default=0)
    is_select = call.node.target is aten.select.int
    if dim == rows.dim:
        keeps_all = not is_select and _is_full_slice(call, node)
        return Local(rows, (rows,)) if keeps_all else Whole(None)
    return Local(Rows(rows.dim - (is_select and dim < rows.dim), rows.outer, rows.inner), (rows,))


def _is_full_slice(call: Call, node: fx.Node) -> bool:
    dim = call.dim(1, "dim", len(call.sizes(node)), default=0)
    start, step = call.arg(2, "start"), call.arg(4, "step", 1)
    return start in (None, 0) and step == 1 and call.sizes(node)[dim] == call.shape[dim]


@_rule(*_overloads("cat"))
def cat(call: Call) -> Verdict | None:
    """Along another dim as pointwise; along the rows only when all other parts are empty (a fresh HF cache)."""
    dim = call.dim(1, "dim", len(call.shape), default=0)
    with_rows = [rows for node in call.tensors if (rows := call.rows(node)) is not None]
    if not with_rows:
        return Whole(None)
    rows = with_rows[0]
    if any(other != rows for other in with_rows):
        return None
    parts = [node for node in call.tensors if not _is_nothing(call.sizes(node), dim, rows)]
    if dim == rows.dim and len(parts) > 1:
        return Whole(None, "joins tensors along the tokens")
    return Local(rows, tuple(rows if node in parts else None for node in call.tensors))


def _is_nothing(shape: tuple[int, ...], dim: int, rows: Rows) -> bool:
    """Return whether a part of a cat adds nothing to any number of rows."""
    return shape == (0,) or (dim == rows.dim and shape[dim] == 0)


@_rule(*_overloads("slice_scatter", "select_scatter"))
def write_piece(call: Call) -> Verdict | None:
    """As pointwise along another dim; a piece of the rows cannot be written by a rank that may not have them."""
    whole, piece = call.tensor(0), call.tensor(1)
    dim = call.dim(2, "dim", len(call.sizes(whole)), default=0)
    is_select = call.node.target is aten.select_scatter.default
    rows, piece_rows = call.rows(whole), call.rows(piece)
    if piece_rows is not None and is_select and piece_rows.dim >= dim:
        piece_rows = Rows(piece_rows.dim + 1, piece_rows.outer, piece_rows.inner)
    if rows not in (None, piece_rows) and piece_rows is not None:
        return None
    rows = rows or piece_rows
    if rows is None:
        return Whole(None)
    if rows.dim == dim:
        return Whole(None, "writes into some of the tokens")
    return Local(rows, (rows, Rows(rows.dim - (is_select and rows.dim > dim), rows.outer, rows.inner)))


@_rule(*_overloads("stack"))
def stack(call: Call) -> Verdict | None:
    """As cat along a new dim."""
    with_rows = [rows for node in call.tensors if (rows := call.rows(node)) is not None]
    if not with_rows:
        return Whole(None)
    rows = with_rows[0]
    if any(other != rows for other in with_rows):
        return None
    at = call.dim(1, "dim", len(call.shape), default=0)
    return Local(Rows(rows.dim + (at <= rows.dim), rows.outer, rows.inner), (rows,) * len(call.tensors))


@_first_rule(*_overloads("split.Tensor", "split_with_sizes", "chunk", "unbind.int"))
def split(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """Every piece has the rows; cutting along them is refused."""
    is_unbind = call.node.target is aten.unbind.int
    dim = call.dim(1 if is_unbind else 2, "dim", len(call.sizes(node)), default=0)
    pieces = len(call.node.meta["val"])
    if dim == rows.dim:
        return Whole((None,) * pieces, "splits the tokens")
    piece = Rows(rows.dim - (is_unbind and dim < rows.dim), rows.outer, rows.inner)
    return Local((piece,) * pieces, (rows,))


_REDUCTIONS = _overloads(
    "sum.dim_IntList", "mean.dim", "amax", "amin", "var.correction", "std.correction", "prod.dim_int", "any.dim",
    "any.dims", "all.dim", "all.dims", "argmax", "argmin", "max.dim", "min.dim", "logsumexp",
    "linalg_vector_norm", "norm.ScalarOpt_dim", "median.dim", "nansum", "count_nonzero.dim_IntList", "kthvalue",
)  # fmt: skip


def _dims_worked_on(call: Call, node: fx.Node) -> set[int]:
    """Return the dims, counted from the front, that argument dim or dims names; none named means all."""
    ndim = len(call.sizes(node))
    named = _as_list(_call_argument(call, "dim")) or _as_list(_call_argument(call, "dims"))
    return {dim % ndim for dim in named} or set(range(ndim))


def _call_argument(call: Call, name: str) -> object:
    """Return an argument by its name in the op's schema: as given, else its default, None if the op has none."""
    for position, argument in enumerate(call.node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return call.arg(position, name, argument.default_value)
    return None


@_first_rule(*_REDUCTIONS)
def reduction(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """Over other dims the rows stay; over the rows it mixes tokens."""
    dims = _dims_worked_on(call, node)
    keepdim = _call_argument(call, "keepdim")
    results = len(call.node.meta["val"]) if isinstance(call.node.meta["val"], (tuple, list)) else 0
    if rows.dim in dims:
        return Whole((None,) * results if results else None, "reduces over the tokens")
    gone = 0 if keepdim else sum(1 for d in dims if d < rows.dim)
    out = Rows(rows.dim - gone, rows.outer, rows.inner)
    return Local((out,) * results if results else out, (rows,))


@_first_rule(*_overloads(
    "sum", "mean", "max", "min", "prod", "any", "all", "std", "var", "norm.Scalar", "median", "count_nonzero",
))  # fmt: skip
def full_reduction(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """Reduces over everything, so over the tokens too."""
    return Whole(None, "reduces over the tokens")


@_first_rule(*_overloads(
    "_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "sort.stable",
    "argsort", "argsort.stable", "flip", "roll", "softmax.int", "log_softmax.int",
))  # fmt: skip
def along_dim(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """Works along one dim and keeps the shape: fine along another one, mixes tokens along the rows."""
    dims = _dims_worked_on(call, node)
    results = len(call.node.meta["val"]) if isinstance(call.node.meta["val"], (tuple, list)) else 0
    out: Layout = (rows,) * results if results else rows
    if rows.dim in dims:
        return Whole(out, f"{call.node.target} works along the tokens")
    return Local(out, (rows,))


@_first_rule(*_overloads("topk"))
def topk(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """Along another dim each row picks its own."""
    if call.dim(2, "dim", len(call.sizes(node)), default=-1) == rows.dim:
        return Whole((None, None), "picks among the tokens")
    return Local((rows, rows), (rows,))


@_first_rule(*_overloads("native_layer_norm", "_fused_rms_norm"))
def trailing_norm(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """Normalises over the trailing dims."""
    results = len(call.node.meta["val"])
    trailing = len(_as_list(call.arg(1, "normalized_shape")))
    if rows.dim >= len(call.sizes(node)) - trailing:
        return Whole((rows,) + (None,) * (results - 1), "normalises over the tokens")
    return Local((rows,) * results, (rows,) + (None,) * (len(call.tensors) - 1))


@_first_rule(*_overloads("convolution"))
def convolution(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """A batch of rows stays; along a spatial dim it mixes neighbours, and the rows survive when the length does."""
    if rows.dim == 0:
        return Local(rows, (rows,) + (None,) * (len(call.tensors) - 1))
    if rows.dim == 1:
        return Whole(None, "contracts over the tokens")
    keeps = call.sizes(node)[rows.dim] == call.shape[rows.dim]
    return Whole(rows if keeps else None, "convolves over the tokens")


@_first_rule(*_overloads("constant_pad_nd"))
def pad(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """Padding another dim keeps the rows."""
    widths = _as_list(call.arg(1, "pad"))
    first_padded = len(call.sizes(node)) - len(widths) // 2
    if rows.dim >= first_padded and any(widths[2 * (len(call.shape) - 1 - rows.dim) :][:2]):
        return Whole(None, "pads the tokens")
    return Local(rows, (rows,))


@_rule(*_overloads("mm"))
def mm(call: Call) -> Verdict | None:
    """[M, K] x [K, N]."""
    return _matmul(call, call.tensor(0), call.tensor(1), ())


@_rule(*_overloads("bmm"))
def bmm(call: Call) -> Verdict | None:
    """[b, M, K] x [b, K, N]."""
    return _matmul(call, call.tensor(0), call.tensor(1), ())


@_rule(*_overloads("addmm"))
def addmm(call: Call) -> Verdict | None:
    """[N] or [M, N] + [M, K] x [K, N]."""
    return _matmul(call, call.tensor(1), call.tensor(2), (call.tensor(0),))


@_first_rule(*_overloads("linear"))
def linear(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """[.., K] x [N, K] + [N]: rows of the input, never of the weight."""
    if any(call.rows(other) is not None for other in call.tensors[1:]):
        return Whole(None, "multiplies by a matrix of tokens")
    if rows.dim == len(call.sizes(node)) - 1:
        return Whole(None, "contracts over the tokens")
    return Local(rows, (rows,) + (None,) * (len(call.tensors) - 1))


MATMUL_ATTENTION = "multiplies tokens by tokens, as attention written with matmul and softmax does"


def _matmul(call: Call, a: fx.Node, b: fx.Node, addends: tuple[fx.Node, ...]) -> Verdict | None:
    ndim = len(call.sizes(a))
    ra, rb = call.rows(a), call.rows(b)
    row, column = ndim - 2, ndim - 1
    if ra is None and rb is None:
        return Whole(None) if not any(call.rows(node) for node in addends) else None
    if ra is not None and rb is not None and ra.dim == row and rb.dim == column:
        return Whole(None, MATMUL_ATTENTION)
    if (ra is not None and ra.dim == column) or (rb is not None and rb.dim == row):
        return Whole(None, "contracts over the tokens")
    if (ra is not None and ra.dim == row) and rb is None:
        out, need_a, need_b = ra, ra, None
    elif (rb is not None and rb.dim == column) and ra is None:
        out, need_a, need_b = rb, None, rb
    elif ndim == 3 and all(rows is None or rows.dim == 0 for rows in (ra, rb)) and (ra is None or rb in (None, ra)):
        batch = ra or rb
        assert batch is not None
        out, need_a, need_b = batch, batch, batch
    else:
        return None
    need = {a: need_a, b: need_b}
    for node in addends:
        need[node] = _aligned_input(out, call.sizes(node), ndim)
        if call.rows(node) not in (None, need[node]):
            return None
    return Local(out, tuple(need[node] for node in call.tensors))


@_rule(*_overloads("embedding"))
def embedding(call: Call) -> Verdict | None:
    """weight [V, H], indices [.., T] -> [.., T, H]."""
    weight, indices = call.tensor(0), call.tensor(1)
    rows, table_rows = call.rows(indices), call.rows(weight)
    if table_rows is not None:
        return Whole(None, "looks tokens up in a table of tokens") if table_rows.dim == 0 else None
    return Local(rows, (None, rows))


@_rule(*_overloads("gather", "scatter.value", "scatter.src", "scatter_add"))
def along_rows(call: Call) -> Verdict | None:
    """Indexes within a row when its dim is not the rows'; a gather may also look rows up in a complete table."""
    with_rows = [rows for node in call.tensors if (rows := call.rows(node)) is not None]
    if not with_rows:
        return Whole(None)
    rows = with_rows[0]
    if any(other != rows for other in with_rows):
        return None
    if call.dim(1, "dim", len(call.sizes(call.tensors[0]))) == rows.dim:
        is_lookup = call.node.target is aten.gather.default and call.rows(call.tensors[0]) is None
        return Local(rows, (None, rows)) if is_lookup else Whole(None, "indexes among the tokens")
    if len({call.sizes(node)[rows.dim] for node in call.tensors}) > 1:
        return None
    return Local(rows, (rows,) * len(call.tensors))


@_rule(*_overloads("index.Tensor", "index_select"))
def index(call: Call) -> Verdict | None:
    """Looking rows up in a complete table is local; picking some of all rows needs all of them."""
    source = call.tensor(0)
    rows = call.rows(source)
    if call.node.target is aten.index_select.default:
        position = call.dim(1, "dim", len(call.sizes(source)))
        indices = [call.tensor(2)]
    else:
        given = _as_list(call.arg(1, "indices"))
        indices = [node for node in given if isinstance(node, fx.Node)]
        position = next(i for i, node in enumerate(given) if node is not None)
        if any(node is None for node in given[position : position + len(indices)]):
            return None
    index_rows = [call.rows(node) for node in indices]
    if rows is not None:
        picks_rows = position <= rows.dim < position + len(indices) and not any(index_rows)
        return Whole(None) if picks_rows else None
    ndim = max(len(call.sizes(node)) for node in indices)
    aligned = {
        Rows(r.dim + ndim - len(call.sizes(node)), r.outer, r.inner)
        for node, r in zip(indices, index_rows, strict=True)
        if r is not None
    }
    if not aligned:
        return Whole(None)
    if len(aligned) > 1:
        return None
    lookup = aligned.pop()
    needs = tuple(_aligned_input(lookup, call.sizes(node), ndim) for node in indices)
    return Local(Rows(position + lookup.dim, lookup.outer, lookup.inner), (None, *needs))


@_rule(ops.ATTENTION)
def attention(call: Call) -> Verdict | None:
    """Query rows stay; keys and values must be complete."""
    rows = call.rows(call.tensor(0))
    if rows is None:
        return Whole(None, "attends from a complete query to sharded keys" if _any_rows(call) else None)
    if rows != Rows(1) or any(call.rows(call.tensor(i)) not in (Rows(1), None) for i in (1, 2)):
        return None
    return Local(rows, (rows,) + (None,) * (len(call.tensors) - 1))


@_rule(ops.EXPERTS)
def experts(call: Call) -> Verdict | None:
    """Rows stay, with the number of their expert; the weights are complete."""
    rows = call.rows(call.tensor(0)) or call.rows(call.tensor(1))
    if rows is None or rows.dim != 0 or any(call.rows(node) not in (rows, None) for node in call.tensors[:2]):
        return None
    if any(call.rows(node) is not None for node in call.tensors[2:]):
        return None
    return Local(rows, (rows, rows) + (None,) * (len(call.tensors) - 2))


@_rule(kv_ops.STORE_KV)
def store_kv(call: Call) -> Verdict | None:
    """Keys and values of all rows go to the cache."""
    return Whole(None)


@_first_rule(kv_ops.PAGED_ATTENTION)
def paged_attention(call: Call, node: fx.Node, rows: Rows) -> Verdict | None:
    """Query rows stay; the cache holds everything else."""
    return Local(rows, (rows,) + (None,) * (len(call.tensors) - 1)) if rows == Rows(1) else None


def _any_rows(call: Call) -> bool:
    return any(call.rows(node) is not None for node in call.tensors)


def _as_list(value: object) -> list:  # type: ignore[type-arg]
    """Return an int-or-list argument as a list; None (all dims) as an empty one."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


REPLAYED_WHOLE: Mapping[object, None] = dict.fromkeys(
    _overloads(
        "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims", "transpose.int",
        "permute", "t", "expand", "slice.Tensor", "clone", "detach", "alias", "cat",
    )
)  # fmt: skip
"""Ops that move no data worth a collective: their complete result is made from their complete input."""

"""The `pcp::` custom ops: schema, shape function and reference for each.

All schemas are pure. Collectives are marked as having a side effect, so that no dead-code elimination can drop one on
one rank only. A collective cannot run on its own: an executor runs it for all ranks (see `pcp_compiler/ranks.py`);
its kernel here only explains that.

Layouts: attention works on [B, T, H, D]. "Expanded" rows are rank-major: rank 0's W rows, rank 1's W rows, ...
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_lib = torch.library.Library("pcp", "DEF")  # lives as long as the process

ATTENTION_KINDS = ("full", "sliding_window")
"""Attention kinds that can be sharded. Traces also hold the kinds below, which a pass has to resolve first."""
UNRESOLVED_KINDS = {
    "masked": "a mask that was not proven to be the causal one",
    "padded": "causal with the caller's padding flags [B, T], not yet required to be all ones",
    "bidirectional": "attention without a causal mask",
}

_lib.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? q_rows, *, int layer, str kind, float scale,"
    " int? window=None, float? soft_cap=None, Tensor? sinks=None) -> Tensor"
)
_lib.define("shard(Tensor x, Tensor local_rows, int dim) -> Tensor")
_lib.define("unshard(Tensor x, Tensor restore, int dim) -> Tensor")
_lib.define("gather_start(Tensor[] xs, int[] dims) -> Tensor")
_lib.define("gather_wait(Tensor expanded, Tensor[] xs, Tensor restore, int[] dims) -> Tensor[]")
_lib.define("restore_rows(Tensor x, Tensor sources, Tensor rank, int dim) -> Tensor")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    q_rows: Tensor | None,
    *,
    layer: int,
    kind: str,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of query rows over all key rows; the reference of `pcp::attention`.

    Args:
        q: [B, W, Hq, D]. k: [B, T, Hkv, D]. v: [B, T, Hkv, Dv]; Hq is a multiple of Hkv.
        mask: kind "masked": what the model gave to SDPA, broadcastable to [B, Hq, W, T]; kind "padded": [B, T] flags.
        q_rows: [W] int64, the global row of each query row; None: query row i is global row i (W = T).
        layer: number of the layer, for messages. scale: factor on q.k.
        window: rows that a row sees, itself included; None: all before it.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap).
        sinks: [Hq] scores of a key without a value, one a head.
    Returns:
        [B, W, Hq, Dv]. Row r = q_rows[i] sees the keys max(0, r - window + 1)..r.
    """
    if q.shape[1] == 0:
        return q.new_empty(*q.shape[:3], v.shape[3])
    is_plain = q_rows is None and window is None and kind in ("full", "masked", "bidirectional")
    seen = mask if is_plain else _seen_keys(q, k, q_rows, window, mask)
    if soft_cap is not None or sinks is not None:
        if seen is None:
            seen = _seen_keys(q, k, q_rows, window, None)
        return _scored_attention(q, k, v, seen, scale, soft_cap, sinks)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=seen,
        is_causal=kind == "full" and seen is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2).contiguous()


def _seen_keys(q: Tensor, k: Tensor, q_rows: Tensor | None, window: int | None, padding: Tensor | None) -> Tensor:
    """Return which keys a query row sees: [W, T], or [B, 1, W, T] with padding flags [B, T]."""
    columns = torch.arange(k.shape[1], device=q.device)
    rows = (columns if q_rows is None else q_rows)[:, None]
    seen = columns <= rows
    if window is not None:
        seen = seen & (columns > rows - window)
    return seen if padding is None else seen & padding.bool()[:, None, None, :]


def _scored_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, soft_cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention with the scores in hand, for soft caps and sinks; softmax in float32 or wider, as transformers does."""
    batch, _, kv_heads, _ = k.shape
    group = q.shape[2] // kv_heads
    grouped = q.transpose(1, 2).unflatten(1, (kv_heads, group))
    scores = torch.matmul(grouped, k.transpose(1, 2).unsqueeze(2).transpose(-1, -2)) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    hidden = ~(seen if seen.dim() == 2 else seen.unsqueeze(2))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        columns = sinks.reshape(1, kv_heads, group, 1, 1).expand(batch, -1, -1, q.shape[1], 1).to(scores.dtype)
        scores = torch.cat([scores, columns], dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(q.dtype)[..., : k.shape[1]]
    out = torch.matmul(weights, v.transpose(1, 2).unsqueeze(2))
    return out.flatten(1, 2).transpose(1, 2).contiguous()


def shard(x: Tensor, local_rows: Tensor, dim: int) -> Tensor:
    """Return this rank's rows of a tensor that every rank holds: x [.., T, ..], local_rows [W] -> [.., W, ..]."""
    return x.index_select(dim, local_rows)


def pack_rows(xs: Sequence[Tensor], dims: Sequence[int]) -> Tensor:
    """Lay the rows of several tensors side by side: xs[i] with W rows in dims[i] -> [W, C], C the elements per row."""
    rows = [x.movedim(dim, 0) for x, dim in zip(xs, dims, strict=True)]
    return torch.cat([x.reshape(x.shape[0], _row_numel(x)) for x in rows], dim=1)


def gather_wait(expanded: Tensor, xs: Sequence[Tensor], restore: Tensor, dims: Sequence[int]) -> list[Tensor]:
    """Bring gathered rows back to global order: expanded [P*W, C], restore [T] -> xs[i] with T rows in dims[i]."""
    restored = expanded.index_select(0, restore)
    sizes = [_row_numel(x.movedim(dim, 0)) for x, dim in zip(xs, dims, strict=True)]
    pieces = restored.split(sizes, dim=1)
    return [_unpack_rows(p, x, dim) for p, x, dim in zip(pieces, xs, dims, strict=True)]


def owned_rows(x: Tensor, sources: Tensor, rank: Tensor, dim: int) -> Tensor:
    """Return the wanted rows that this rank owns, zeros for the others: x [.., W, ..], sources [S] -> [.., S, ..].

    The sum over ranks is exact, since every row has one owner and x + 0 is x. `sources` are expanded row numbers
    (owner * W + local row). `where` and not a product: a row of another rank may hold NaN.
    """
    width = max(x.shape[dim], 1)
    picked = x.index_select(dim, sources % width)
    mine = (sources // width == rank).reshape([-1 if i == dim else 1 for i in range(x.ndim)])
    return torch.where(mine, picked, torch.zeros((), dtype=x.dtype, device=x.device))


def _row_numel(rows_first: Tensor) -> int:
    """Return the elements in one row of a tensor whose dim 0 counts rows, also when it has none."""
    numel = 1
    for size in rows_first.shape[1:]:
        numel *= size
    return numel


def _unpack_rows(rows: Tensor, like: Tensor, dim: int) -> Tensor:
    """Undo `pack_rows` for one tensor: rows [T, C] -> the shape of `like` with T at `dim`, contiguous."""
    shape = list(like.movedim(dim, 0).shape)
    return rows.reshape(rows.shape[0], *shape[1:]).movedim(0, dim).contiguous()


def _needs_ranks(*_args: object, **_kwargs: object) -> Tensor:
    raise RuntimeError(
        "a pcp collective runs for all ranks at once: run the graph with pcp_compiler.ranks.run_lockstep"
    )


def _with_rows(x: Tensor, dim: int, num_rows: int | torch.SymInt) -> Tensor:
    shape: list[int | torch.SymInt] = list(x.shape)
    shape[dim] = num_rows
    return x.new_empty(shape)


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *_args: object, **_kwargs: object) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _unshard_fake(x: Tensor, restore: Tensor, dim: int) -> Tensor:
    return _with_rows(x, dim, restore.shape[0])


def _gather_start_fake(xs: Sequence[Tensor], dims: Sequence[int]) -> Tensor:
    rows = [x.movedim(dim, 0) for x, dim in zip(xs, dims, strict=True)]
    return xs[0].new_empty(rows[0].shape[0], sum(_row_numel(x) for x in rows))  # of one rank: P is not in the graph


def _gather_wait_fake(_expanded: Tensor, xs: Sequence[Tensor], restore: Tensor, dims: Sequence[int]) -> list[Tensor]:
    return [_with_rows(x, dim, restore.shape[0]) for x, dim in zip(xs, dims, strict=True)]


def _restore_rows_fake(x: Tensor, sources: Tensor, _rank: Tensor, dim: int) -> Tensor:
    return _with_rows(x, dim, sources.shape[0])


for _name, _kernel, _fake in (
    ("attention", attention, _attention_fake),
    ("shard", shard, lambda x, local_rows, dim: _with_rows(x, dim, local_rows.shape[0])),
    ("unshard", _needs_ranks, _unshard_fake),
    ("gather_start", _needs_ranks, _gather_start_fake),
    ("gather_wait", gather_wait, _gather_wait_fake),
    ("restore_rows", _needs_ranks, _restore_rows_fake),
):
    _lib.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pcp::{_name}", _fake, lib=_lib)

ATTENTION = torch.ops.pcp.attention.default
SHARD = torch.ops.pcp.shard.default
UNSHARD = torch.ops.pcp.unshard.default
GATHER_START = torch.ops.pcp.gather_start.default
GATHER_WAIT = torch.ops.pcp.gather_wait.default
RESTORE_ROWS = torch.ops.pcp.restore_rows.default
COLLECTIVES = (UNSHARD, GATHER_START, RESTORE_ROWS)
"""Ops that every rank has to run, in the same order."""

for _op in COLLECTIVES:
    torch.fx.node.has_side_effect(_op)

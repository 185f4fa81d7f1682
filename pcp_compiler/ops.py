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
_lib.define("experts(Tensor x, Tensor expert_ids, Tensor weight, Tensor? bias) -> Tensor")
_lib.define("grouped_mm(Tensor x, Tensor weight, Tensor offsets) -> Tensor")
_lib.define("drop_pads(Tensor expert_ids, Tensor num_rows, int dim, int outer, int inner) -> Tensor")
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
        kind "masked" leaves all of it to the mask; `window` then is only what the model said its mask does.
    Returns:
        [B, W, Hq, Dv]. Row r = q_rows[i] sees the keys max(0, r - window + 1)..r.
    """
    if q.shape[1] == 0:
        return q.new_empty(*q.shape[:3], v.shape[3])
    is_scored = soft_cap is not None or sinks is not None
    is_plain = kind == "full" and q_rows is None and not is_scored
    seen = mask
    if kind not in ("masked", "bidirectional") and not is_plain:
        seen = _seen_keys(q, k, q_rows, window, mask)
    if is_scored:
        return _scored_attention(q, k, v, seen, scale, soft_cap, sinks)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=seen,
        is_causal=is_plain,
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
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, soft_cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention with the scores in hand, for soft caps and sinks; softmax in float32 or wider, as transformers does.

    Args:
        seen: which keys a row sees, or what is added to its scores; broadcastable to [B, Hq, W, T].
    """
    per_kv_head = (k.shape[2], q.shape[2] // k.shape[2])
    scores = q.transpose(1, 2).unflatten(1, per_kv_head) @ k.permute(0, 2, 3, 1).unsqueeze(2)
    scores = scores.flatten(1, 2) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf")) if seen.dtype == torch.bool else scores + seen
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(q.dtype)[..., : k.shape[1]]
    out: Tensor = weights.unflatten(1, per_kv_head) @ v.transpose(1, 2).unsqueeze(2)
    return out.flatten(1, 2).transpose(1, 2).contiguous()


def experts(x: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply each row by the matrix of its expert; the reference of `pcp::experts`.

    Args:
        x: [S, I]. expert_ids: [S] integers; a row whose number is not one of 0..E-1 has no expert.
        weight: [E, I, O]. bias: [E, O] or None.
    Returns:
        [S, O]; zeros for rows without an expert, whatever they hold. A row's result depends on no other row.
    """
    out = x.new_zeros(x.shape[0], weight.shape[2])
    for expert in range(weight.shape[0]):
        rows = (expert_ids == expert).nonzero().squeeze(1)
        if rows.numel():
            picked = x.index_select(0, rows) @ weight[expert]
            out[rows] = picked if bias is None else picked + bias[expert]
    return out


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply runs of rows by one matrix each, as `torch.nn.functional.grouped_mm` does for any dtype.

    Stands in traces for that function, which fake tensors know for bfloat16 only; canonicalize_experts replaces it.

    Args:
        x: [S, I], sorted by expert. weight: [E, I, O]. offsets: [E], where each expert's run of rows ends.
    Returns:
        [S, O]; zeros behind the last run.
    """
    rows = torch.arange(x.shape[0], device=x.device)
    return experts(x, torch.searchsorted(offsets, rows, right=True), weight, None)


def drop_pads(expert_ids: Tensor, num_rows: Tensor, dim: int, outer: int, inner: int) -> Tensor:
    """Send padding rows to no expert.

    Args:
        expert_ids: integers; dim `dim` has size outer * W * inner, and of the W rows the first `num_rows` [] are real.

    Returns:
        `expert_ids` with -1 for padding.
    """
    size = expert_ids.shape[dim]
    width = max(size // (outer * inner), 1)
    row = torch.arange(size, device=expert_ids.device) // inner % width
    is_real = (row < num_rows).reshape([-1 if i == dim else 1 for i in range(expert_ids.ndim)])
    return torch.where(is_real, expert_ids, -1)


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
    (owner * W + local row). `where` and not a product: a row of another rank may hold NaN. On a CUDA device it is one
    launch where nothing lies before the rows, which is everywhere in a batch of 1.
    """
    if x.is_cuda and x.is_floating_point() and x.dtype.itemsize > 1 and x.shape[:dim].numel() == 1:
        return _owned_rows_cuda(x, sources, rank, dim)
    width = max(x.shape[dim], 1)
    picked = x.index_select(dim, sources % width)
    mine = (sources // width == rank).reshape([-1 if i == dim else 1 for i in range(x.ndim)])
    return torch.where(mine, picked, torch.zeros((), dtype=x.dtype, device=x.device))


def _owned_rows_cuda(x: Tensor, sources: Tensor, rank: Tensor, dim: int) -> Tensor:
    """`owned_rows` of x [1, .., W, ..] in one launch."""
    from pcp_compiler.kernels import kv_rows

    rows = x.movedim(dim, 0)
    rows = rows.reshape(rows.shape[0], _row_numel(rows))
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return kv_rows.restore_rows(rows, sources, rank).view(*x.shape[:dim], len(sources), *x.shape[dim + 1 :])


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
    ("experts", experts, lambda x, _expert_ids, weight, _bias: x.new_empty(x.shape[0], weight.shape[2])),
    ("grouped_mm", grouped_mm, lambda x, weight, _offsets: x.new_empty(x.shape[0], weight.shape[2])),
    ("drop_pads", drop_pads, lambda expert_ids, *_sizes: torch.empty_like(expert_ids)),
    ("shard", shard, lambda x, local_rows, dim: _with_rows(x, dim, local_rows.shape[0])),
    ("unshard", _needs_ranks, _unshard_fake),
    ("gather_start", _needs_ranks, _gather_start_fake),
    ("gather_wait", gather_wait, _gather_wait_fake),
    ("restore_rows", _needs_ranks, _restore_rows_fake),
):
    _lib.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pcp::{_name}", _fake, lib=_lib)

ATTENTION = torch.ops.pcp.attention.default
EXPERTS = torch.ops.pcp.experts.default
GROUPED_MM = torch.ops.pcp.grouped_mm.default
DROP_PADS = torch.ops.pcp.drop_pads.default
SHARD = torch.ops.pcp.shard.default
UNSHARD = torch.ops.pcp.unshard.default
GATHER_START = torch.ops.pcp.gather_start.default
GATHER_WAIT = torch.ops.pcp.gather_wait.default
RESTORE_ROWS = torch.ops.pcp.restore_rows.default
COLLECTIVES = (UNSHARD, GATHER_START, RESTORE_ROWS)
"""Ops that every rank has to run, in the same order."""

for _op in COLLECTIVES:
    torch.fx.node.has_side_effect(_op)

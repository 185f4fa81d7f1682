"""Fused ops of steps of few rows, which `fuse_decode` puts in the place of ATen calls: schema, shapes, reference.

The references make the same roundings as the calls they stand for. On a CUDA device up to 64 rows of a type in
`kernels.decode_rows.DTYPES` go to the kernels there, which round less; other rows go to the references.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pcp_compiler import kv_ops

_lib = torch.library.Library("pcp", "FRAGMENT")  # lives as long as the process

_lib.define("rms_norm_linear(Tensor x, Tensor gamma, Tensor[] weights, Tensor?[] biases, *, float eps) -> Tensor[]")
_lib.define(
    "rms_norm_swiglu(Tensor x, Tensor gamma, Tensor gate, Tensor up, Tensor? gate_bias=None, Tensor? up_bias=None, *,"
    " float eps) -> Tensor"
)
_lib.define("linear_residual(Tensor x, Tensor weight, Tensor? bias, Tensor residual) -> Tensor")
_lib.define(
    "rope_store_kv(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor slots, Tensor k_cache, Tensor v_cache,"
    " *, int layer) -> (Tensor, Tensor)"
)
_lib.define("linear_argmax(Tensor x, Tensor weight, Tensor? bias=None) -> (Tensor, Tensor)")


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Return x [.., H] with rows of unit mean square, times gamma [H]; the mean in float32, whatever the type of x."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide.to(x.dtype) * gamma).to(x.dtype)


def rms_norm_linear(
    x: Tensor, gamma: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, eps: float
) -> list[Tensor]:
    """Return rmsnorm(x) @ w^T + b for each weight: x [.., K], w [O, K], b [O] or None -> [.., O] each."""
    normed = rms_norm(x, gamma, eps)
    return [F.linear(normed, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def rms_norm_swiglu(
    x: Tensor, gamma: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None, *, eps: float,
) -> Tensor:  # fmt: skip
    """Return silu(n @ gate^T) * (n @ up^T), n = rmsnorm(x): x [.., K], gate and up [O, K] -> [.., O]."""
    normed = rms_norm(x, gamma, eps)
    return F.silu(F.linear(normed, gate, gate_bias)) * F.linear(normed, up, up_bias)


def linear_residual(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Return x @ weight^T + bias + residual: x [.., K], weight [O, K], residual [.., O] -> [.., O]."""
    return F.linear(x, weight, bias) + residual


def rope_store_kv(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor, *,
    layer: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Turn queries and keys by their positions and write keys and values to their slots, as `kv_ops.store_kv` does.

    Args:
        q: [1, N, Hq, D]. k: [1, N, Hkv, D]. v: [1, N, Hkv, Dv]. cos, sin: [1, N, D]; a pair is half a head apart.
        slots, k_cache, v_cache: see `kv_ops.store_kv`; caches of any form of `kv_formats`.
    Returns:
        The turned queries [1, N, Hq, D], and an empty tensor for those who have to run after the write.
    """
    return _turned(q, cos, sin), kv_ops.store_kv(_turned(k, cos, sin), v, slots, k_cache, v_cache, layer=layer)


def linear_argmax(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the number of the largest of the logits x @ weight^T + bias of each row, and that logit.

    Args:
        x: [.., K]. weight: [V, K]. bias: [V].
    Returns:
        ids [..], int64, the lowest of equal ones, and logits [..]; NaN counts as +inf.
    """
    logits = F.linear(x, weight, bias)
    logits = logits.masked_fill(logits.isnan(), float("inf"))
    ids = logits.argmax(-1)
    return ids, logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(2) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(2)


# ---------------------------------------------------------------------------------------------------------------------
# CUDA devices: the kernels where they are faster; imported late, since there is no triton without a GPU

LARGE_WEIGHT = 1 << 22
"""Numbers of a weight from which on, with several rows, torch's matrix multiplication is the faster one: on an H200
Llama-3-8B took 9.7 ms a step of 8 rows with our kernels and 7.9 ms with torch's, SmolLM2-135M 0.9 and 3.3 ms."""


def _fits_kernels(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    from pcp_compiler.kernels import decode_rows

    num_rows = x.numel() // max(x.shape[-1], 1)
    are_rows = all(weight.dtype == x.dtype and weight.stride(1) == 1 for weight in weights)
    are_dense = all(bias is None or bias.is_contiguous() for bias in biases)
    return num_rows <= decode_rows.MAX_ROWS and x.dtype in decode_rows.DTYPES and are_rows and are_dense


def _gains_from_kernels(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    """Return whether the kernels of a layer apply and are faster; a head's argmax has no counterpart in torch."""
    is_small = x.numel() == x.shape[-1] or all(weight.numel() < LARGE_WEIGHT for weight in weights)
    return is_small and _fits_kernels(x, weights, biases)


def _rms_norm_linear_cuda(
    x: Tensor, gamma: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, eps: float
) -> list[Tensor]:
    from pcp_compiler.kernels import decode_rows

    if not _gains_from_kernels(x, weights, [*biases, gamma]):
        normed = F.rms_norm(x, gamma.shape, gamma, eps)
        return [F.linear(normed, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    outs = decode_rows.rms_norm_linear(_rows(x), gamma, weights, biases, eps=eps)
    return [_like_rows(x, out) for out in outs]


def _rms_norm_swiglu_cuda(
    x: Tensor, gamma: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None, *, eps: float,
) -> Tensor:  # fmt: skip
    from pcp_compiler.kernels import decode_rows

    if not _gains_from_kernels(x, (gate, up), (gate_bias, up_bias, gamma)):
        normed = F.rms_norm(x, gamma.shape, gamma, eps)
        return F.silu(F.linear(normed, gate, gate_bias)).mul_(F.linear(normed, up, up_bias))
    return _like_rows(x, decode_rows.rms_norm_swiglu(_rows(x), gamma, gate, up, gate_bias, up_bias, eps=eps))


def _linear_residual_cuda(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    from pcp_compiler.kernels import decode_rows

    if not _gains_from_kernels(x, (weight,), (bias,)):
        added = residual if bias is None else residual + bias
        return _like_rows(x, torch.addmm(_rows(added), _rows(x), weight.t()))
    return _like_rows(x, decode_rows.linear_residual(_rows(x), weight, bias, _rows(residual)))


def _rope_store_kv_cuda(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor, *,
    layer: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from pcp_compiler.kernels import decode_rows

    if q.dtype not in decode_rows.DTYPES or not (k_cache.is_floating_point() and v_cache.is_floating_point()):
        return rope_store_kv(q, k, v, cos, sin, slots, k_cache, v_cache, layer=layer)
    turned = decode_rows.rope_store_kv(q[0], k[0], v[0], cos[0], sin[0], slots, k_cache, v_cache)
    return turned[None], k.new_empty(0)


def _linear_argmax_cuda(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    from pcp_compiler.kernels import decode_rows

    if not _fits_kernels(x, (weight,), (bias,)):
        return linear_argmax(x, weight, bias)
    ids, best = decode_rows.linear_argmax(_rows(x), weight, bias)
    return ids.view(x.shape[:-1]), best.view(x.shape[:-1])


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _like_rows(x: Tensor, out: Tensor) -> Tensor:
    return out.view(*x.shape[:-1], out.shape[-1])


# ---------------------------------------------------------------------------------------------------------------------
# Shapes


def _rms_norm_linear_fake(
    x: Tensor, _gamma: Tensor, weights: Sequence[Tensor], _biases: Sequence[Tensor | None], *, eps: float
) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


def _rope_store_kv_fake(q: Tensor, k: Tensor, *_args: object, **_kwargs: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(0)


def _linear_argmax_fake(x: Tensor, _weight: Tensor, _bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape[:-1], dtype=torch.int64, device=x.device), x.new_empty(x.shape[:-1])


for _name, _reference, _kernel, _fake in (
    ("rms_norm_linear", rms_norm_linear, _rms_norm_linear_cuda, _rms_norm_linear_fake),
    ("rms_norm_swiglu", rms_norm_swiglu, _rms_norm_swiglu_cuda,
     lambda x, _gamma, gate, *_args, **_kwargs: x.new_empty(*x.shape[:-1], gate.shape[0])),
    ("linear_residual", linear_residual, _linear_residual_cuda,
     lambda _x, _weight, _bias, residual: residual.new_empty(residual.shape)),
    ("rope_store_kv", rope_store_kv, _rope_store_kv_cuda, _rope_store_kv_fake),
    ("linear_argmax", linear_argmax, _linear_argmax_cuda, _linear_argmax_fake),
):  # fmt: skip
    _lib.impl(_name, _reference, "CompositeExplicitAutograd")
    _lib.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"pcp::{_name}", _fake, lib=_lib)

RMS_NORM_LINEAR = torch.ops.pcp.rms_norm_linear.default
RMS_NORM_SWIGLU = torch.ops.pcp.rms_norm_swiglu.default
LINEAR_RESIDUAL = torch.ops.pcp.linear_residual.default
ROPE_STORE_KV = torch.ops.pcp.rope_store_kv.default
LINEAR_ARGMAX = torch.ops.pcp.linear_argmax.default
torch.fx.node.has_side_effect(ROPE_STORE_KV)

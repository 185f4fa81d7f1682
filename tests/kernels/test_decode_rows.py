"""Kernels for few rows against float64: on a CUDA device when there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcp_compiler import decode_ops
from pcp_compiler.kernels import decode_rows
from pcp_compiler.kernels.decode_rows import DTYPES, MAX_ROWS, Tile, pick_tile
from pcp_compiler.kv_formats import FP8, cache_shape, read_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5
TILE = Tile(16, 16, 4, 2)
"""Small, so that small shapes have several tiles, and parts of them."""
ROWS = st.sampled_from((1, 2, 5, 16, 17, 40))
few = settings(max_examples=12, deadline=None)


def draw(seed: int, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    """Return random numbers that `dtype` can hold, with rows further apart than they are long and NaN between them."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
    padded = torch.full((*shape[:-1], shape[-1] + 16), float("nan"), dtype=dtype, device=DEVICE)
    padded[..., : shape[-1]] = values
    return padded[..., : shape[-1]]


def check_error(kernel: Any, torch_op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Check that a kernel's results are within twice torch's own error of the same computation in float64.

    Of few numbers torch's error can be none by luck: a rounding of the result and some in float32 are always allowed.
    """
    wide = torch.utils._pytree.tree_map_only(Tensor, Tensor.double, (args, kwargs))
    results, own, exact = (
        torch.utils._pytree.tree_leaves(out)
        for out in (kernel(*args, **kwargs, tile=TILE), torch_op(*args, **kwargs), torch_op(*wide[0], **wide[1]))
    )
    for result, torchs, wanted in zip(results, own, exact, strict=True):
        assert (result.shape, result.dtype) == (torchs.shape, torchs.dtype)
        allowed = 2 * (torchs - wanted).abs().max() if wanted.numel() else 0.0
        roundings = torch.finfo(result.dtype).eps + 4 * torch.finfo(torch.float32).eps
        floor = roundings * (wanted.abs().max() if wanted.numel() else 0.0)
        assert ((result - wanted).abs() <= max(allowed, floor)).all()


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Return the norm, in float64 for rows of float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return ((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * gamma).to(x.dtype)


@pytest.fixture(autouse=True)
def norm_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the references keep float64, which their norm does not."""
    monkeypatch.setattr(decode_ops, "rms_norm", rms_norm)


@few
@given(st.integers(0, 9), ROWS, st.sampled_from(DTYPES), st.lists(st.integers(1, 40), min_size=1, max_size=4),
       st.integers(1, 70), st.booleans())  # fmt: skip
def test_norm_and_projections_are_as_exact_as_torch(
    seed: int, num_rows: int, dtype: torch.dtype, sizes: list[int], num_inputs: int, has_bias: bool
) -> None:
    x, gamma = draw(seed, dtype, num_rows, num_inputs, scale=3.0), draw(seed + 1, dtype, num_inputs)
    weights = [draw(seed + size, dtype, size, num_inputs, scale=num_inputs**-0.5) for size in sizes]
    biases = [draw(seed, dtype, size) if has_bias else None for size in sizes]
    check_error(decode_rows.rms_norm_linear, decode_ops.rms_norm_linear, x, gamma, weights, biases, eps=EPS)


@few
@given(st.integers(0, 9), ROWS, st.sampled_from(DTYPES), st.integers(1, 40), st.integers(1, 70), st.booleans())
def test_norm_and_gated_projections_are_as_exact_as_torch(
    seed: int, num_rows: int, dtype: torch.dtype, size: int, num_inputs: int, has_bias: bool
) -> None:
    x, gamma = draw(seed, dtype, num_rows, num_inputs, scale=3.0), draw(seed + 1, dtype, num_inputs)
    gate, up = (draw(seed + step, dtype, size, num_inputs, scale=num_inputs**-0.5) for step in (2, 3))
    biases = [draw(seed + step, dtype, size) for step in (4, 5)] if has_bias else [None, None]
    check_error(decode_rows.rms_norm_swiglu, decode_ops.rms_norm_swiglu, x, gamma, gate, up, *biases, eps=EPS)


@few
@given(st.integers(0, 9), ROWS, st.sampled_from(DTYPES), st.integers(1, 40), st.integers(1, 70), st.booleans())
def test_projection_and_residual_are_as_exact_as_torch(
    seed: int, num_rows: int, dtype: torch.dtype, size: int, num_inputs: int, has_bias: bool
) -> None:
    x, residual = draw(seed, dtype, num_rows, num_inputs), draw(seed + 1, dtype, num_rows, size)
    weight, bias = draw(seed + 2, dtype, size, num_inputs), draw(seed + 3, dtype, size) if has_bias else None
    check_error(decode_rows.linear_residual, decode_ops.linear_residual, x, weight, bias, residual)


def test_large_float16_rows_do_not_overflow_before_they_are_normalised() -> None:
    x, gamma = draw(0, torch.float16, 3, 48, scale=9000.0), draw(1, torch.float16, 48, scale=50.0)
    weight = draw(2, torch.float16, 8, 48)
    check_error(decode_rows.rms_norm_linear, decode_ops.rms_norm_linear, x, gamma, [weight], [None], eps=EPS)


def test_columns_that_are_not_dense_and_a_gamma_of_another_type_are_taken() -> None:
    x = draw(0, torch.bfloat16, 40, 6).t()
    gamma, weight = draw(1, torch.float32, 40), draw(2, torch.bfloat16, 8, 40)
    (out,) = decode_rows.rms_norm_linear(x, gamma, [weight], [None], eps=EPS)
    (wanted,) = decode_ops.rms_norm_linear(x.double(), gamma.double(), [weight.double()], [None], eps=EPS)
    torch.testing.assert_close(out.double(), wanted, rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_give_no_results(dtype: torch.dtype) -> None:
    x, gamma, weight = draw(0, dtype, 0, 8), draw(1, dtype, 8), draw(2, dtype, 5, 8)
    (out,) = decode_rows.rms_norm_linear(x, gamma, [weight], [None], eps=EPS)
    assert out.shape == decode_rows.rms_norm_swiglu(x, gamma, weight, weight, eps=EPS).shape == (0, 5)
    assert decode_rows.linear_residual(x, weight, None, out).shape == (0, 5)
    assert [tuple(part.shape) for part in decode_rows.linear_argmax(x, weight)] == [(0,), (0,)]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads [N, H, D] in float64."""
    first, second = x.double().chunk(2, dim=-1)
    crossed = torch.cat([-second, first], dim=-1)
    return x.double() * cos.double()[:, None] + crossed * sin.double()[:, None]


@few
@given(st.integers(0, 9), st.integers(0, 5), st.sampled_from(DTYPES), st.sampled_from(((4, 2), (9, 3), (20, 10))),
       st.sampled_from((2, 6, 16, 20)), st.integers(1, 18))  # fmt: skip
def test_rope_turns_queries_and_writes_keys_and_values_to_their_slots_only(
    seed: int, num_rows: int, dtype: torch.dtype, heads: tuple[int, int], width: int, v_width: int
) -> None:
    q, k = (draw(seed + number, dtype, num_rows, size, width) for number, size in enumerate(heads))
    v = draw(seed + 2, dtype, num_rows, heads[1], v_width)
    cos, sin = (draw(seed + number, dtype, num_rows, width).clamp(-1, 1) for number in (3, 4))
    slots = torch.randperm(9, generator=torch.Generator().manual_seed(seed))[:num_rows].add(3).to(DEVICE)
    slots[num_rows // 2 :: 3] = -1
    caches = [torch.full((13, heads[1], size), float("nan"), dtype=dtype, device=DEVICE) for size in (width, v_width)]
    out = decode_rows.rope_store_kv(q, k, v, cos, sin, slots, *caches)
    eps = 4 * torch.finfo(dtype).eps
    assert out.shape == q.shape and out.is_contiguous()
    torch.testing.assert_close(out.double(), turned(q, cos, sin), rtol=eps, atol=eps)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            torch.testing.assert_close(caches[0][slot].double(), turned(k, cos, sin)[row], rtol=eps, atol=eps)
            assert torch.equal(caches[1][slot], v[row])
    untouched = [slot for slot in range(13) if slot not in slots.tolist()]
    assert all(cache[untouched].isnan().all() for cache in caches)


def test_rope_takes_heads_of_transposed_views_and_caches_that_lie_side_by_side() -> None:
    q, k, v = (draw(seed, torch.float32, 2, 3, 8).transpose(0, 1) for seed in range(3))  # heads first in memory
    cos, sin = (draw(seed, torch.float32, 3, 8) for seed in (3, 4))
    both = torch.zeros(5, 2, 2, 8, device=DEVICE)
    out = decode_rows.rope_store_kv(q, k, v, cos, sin, torch.tensor([4, -1, 1], device=DEVICE), both[:, 0], both[:, 1])
    torch.testing.assert_close(out.double(), turned(q, cos, sin))
    torch.testing.assert_close(both[[4, 1], 0].double(), turned(k, cos, sin)[[0, 2]])
    assert torch.equal(both[[4, 1], 1], v[[0, 2]]) and not both[[0, 2, 3]].any()


def test_rope_stores_in_the_type_of_the_cache_what_it_has_rounded_to_the_type_of_the_keys() -> None:
    q, k, v = (draw(seed, torch.float32, 2, 2, 8) for seed in range(3))
    cos, sin = (draw(seed, torch.float32, 2, 8) for seed in (3, 4))
    slots = torch.tensor([1, 2], device=DEVICE)
    caches = [torch.zeros(4, 2, 8, dtype=torch.bfloat16, device=DEVICE) for _ in range(4)]
    decode_rows.rope_store_kv(q, k, v, cos, sin, slots, caches[0], caches[1])
    decode_ops.rope_store_kv(q[None], k[None], v[None], cos[None], sin[None], slots, caches[2], caches[3], layer=0)
    assert all(torch.equal(caches[number], caches[number + 2]) for number in range(2))


@few
@given(st.integers(0, 9), ROWS, st.sampled_from(DTYPES), st.integers(1, 100), st.integers(1, 40), st.booleans())
def test_argmax_is_that_of_the_logits_and_its_logit_is_returned(
    seed: int, num_rows: int, dtype: torch.dtype, vocab_size: int, num_inputs: int, has_bias: bool
) -> None:
    x, weight = draw(seed, dtype, num_rows, num_inputs), draw(seed + 1, dtype, vocab_size, num_inputs)
    bias = draw(seed + 2, dtype, vocab_size) if has_bias else None
    ids, best = decode_rows.linear_argmax(x, weight, bias, tile=TILE)
    logits = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    chosen = logits.gather(1, ids[:, None])[:, 0]
    slack = 4 * torch.finfo(dtype).eps * logits.abs().amax(1) + 1e-5
    assert ((logits.amax(1) - chosen) <= slack).all()
    assert ((best.double() - chosen).abs() <= slack).all() and best.dtype == dtype


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("equal", [[5, 30, 31], [16, 17], [63, 0]])
def test_argmax_takes_the_lowest_id_of_equal_logits_also_of_other_tiles(num_rows: int, equal: list[int]) -> None:
    x, weight = torch.ones(num_rows, 8, device=DEVICE), draw(0, torch.float32, 64, 8).abs().clamp(max=2.0)
    weight[equal] = 3.0
    ids, best = decode_rows.linear_argmax(x, weight, tile=TILE)
    assert ids.tolist() == [min(equal)] * num_rows and best.tolist() == [24.0] * num_rows


def test_argmax_of_logits_without_a_number_stays_in_the_vocabulary() -> None:
    x, weight = torch.ones(4, 8, device=DEVICE), draw(0, torch.float32, 40, 8)
    x[1] = float("nan")
    weight[21] = float("nan")
    ids, best = decode_rows.linear_argmax(x, weight, tile=TILE)
    wanted = decode_ops.linear_argmax(x, weight)
    assert ids.tolist() == wanted[0].tolist() == [21, 0, 21, 21]
    assert torch.equal(best, wanted[1])
    ids, _ = decode_rows.linear_argmax(x[:1], torch.full((5, 8), float("-inf"), device=DEVICE), tile=TILE)
    assert ids.tolist() == [0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 33, MAX_ROWS])
def test_there_is_a_tile_for_every_number_of_rows_and_outputs(num_rows: int, dtype: torch.dtype) -> None:
    for num_outputs in (1, 960, 2048, 2049, 28672, 128256, 1 << 20):
        tile = pick_tile(num_rows, num_outputs, dtype)
        assert all(size & (size - 1) == 0 for size in tile[:3])
        assert num_rows == 1 or min(tile.block_o, tile.block_k) >= 16


def test_results_are_the_same_bits_every_time_and_for_a_row_among_others() -> None:
    x, weight = draw(0, torch.bfloat16, 7, 64), draw(1, torch.bfloat16, 24, 64)
    residual = draw(2, torch.bfloat16, 7, 24)
    out = decode_rows.linear_residual(x, weight, None, residual, tile=TILE)
    again = decode_rows.linear_residual(x[2:5], weight, None, residual[2:5], tile=TILE)
    assert torch.equal(out[2:5], again)


# -- the ops as they run on a CUDA device -----------------------------------------------------------------------------


def noting(launched: list[object], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that is noted when it is called."""

    def run(*args: Any, **kwargs: Any) -> Any:
        launched.append(kernel)
        return kernel(*args, **kwargs)

    return run


@pytest.mark.parametrize(("dtype", "num_rows"), [(torch.float32, 3), (torch.float32, 70), (torch.float64, 3)])
def test_ops_run_kernels_on_rows_with_a_batch_dim_and_the_references_on_what_no_kernel_takes(
    dtype: torch.dtype, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[object] = []
    for name in ("rms_norm_linear", "rms_norm_swiglu", "linear_residual", "linear_argmax"):
        monkeypatch.setattr(decode_rows, name, noting(launched, getattr(decode_rows, name)))
    x, gamma, bias = draw(0, dtype, 1, num_rows, 12), draw(1, dtype, 12).contiguous(), draw(2, dtype, 12).contiguous()
    weights = [draw(seed, dtype, 12, 12) for seed in (3, 4)]
    pairs: list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = [
        (decode_ops._rms_norm_linear_cuda, decode_ops.rms_norm_linear, (x, gamma, weights, [None, bias]), {"eps": EPS}),
        (decode_ops._rms_norm_swiglu_cuda, decode_ops.rms_norm_swiglu, (x, gamma, *weights, bias), {"eps": EPS}),
        (decode_ops._linear_residual_cuda, decode_ops.linear_residual, (x, weights[0], None, x * 2), {}),
        (decode_ops._linear_argmax_cuda, decode_ops.linear_argmax, (x, weights[0], bias), {}),
    ]
    for on_cuda, reference, args, options in pairs:
        results, wanted = (torch.utils._pytree.tree_leaves(run(*args, **options)) for run in (on_cuda, reference))
        for a, b in zip(results, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert len(launched) == (4 if num_rows <= MAX_ROWS and dtype in DTYPES else 0)


@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8])
def test_rope_op_runs_the_kernel_for_float_caches_and_the_reference_for_eight_bits(cache_dtype: torch.dtype) -> None:
    q, k, v = (draw(seed, torch.float32, 1, 2, 2, 8) for seed in range(3))
    cos, sin = (draw(seed, torch.float32, 1, 2, 8) for seed in (3, 4))
    slots = torch.tensor([2, -1], device=DEVICE)
    shape, stored = cache_shape((2, 8), cache_dtype)
    caches = [torch.zeros(4, *shape, dtype=stored, device=DEVICE) for _ in range(4)]
    a, done = decode_ops._rope_store_kv_cuda(q, k, v, cos, sin, slots, caches[0], caches[1], layer=0)
    b, _ = decode_ops.rope_store_kv(q, k, v, cos, sin, slots, caches[2], caches[3], layer=0)
    torch.testing.assert_close(a, b)
    assert done.shape == (0,)
    for cache, wanted in zip(caches[:2], caches[2:], strict=True):
        rows, wanted_rows = (read_rows(either, slots[:1], torch.float32) for either in (cache, wanted))
        torch.testing.assert_close(rows, wanted_rows)

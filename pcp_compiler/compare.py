"""Comparing the results of two runs of one model, for `check.mode: shadow`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from pcp_compiler.config_sections import CheckConfig
from pcp_compiler.errors import CallError

RELATIVE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Difference that another order of the same sums makes; float64 models of transformers norm in float32."""


def check_equal(results: Sequence[object], expected: Sequence[object], check: CheckConfig, other: str) -> None:
    """Raise CallError at the first result that differs from what the other run gave.

    Args:
        results, expected: flat results, in order.
        check: tolerances; a value may differ by atol + rtol * |expected|. None: `RELATIVE_TOLERANCE` of the dtype, and
            that times the largest expected value.
        other: what `expected` was computed by, for the message.
    """
    names = [f"result {position}" for position in range(len(expected))]
    _check_all(names, results, expected, check, other)


def check_equal_trees(result: object, expected: object, check: CheckConfig, other: str) -> None:
    """Do the same for results in the structure that a model returns; names are paths such as `['logits']`."""
    leaves, spec = pytree.tree_flatten_with_path(expected)
    found, found_spec = pytree.tree_flatten(result)
    if spec != found_spec:
        raise CallError(f"check.mode shadow: the results have another structure than {other} gives")
    names = [f"result{pytree.keystr(path)}" for path, _ in leaves]
    _check_all(names, found, [leaf for _, leaf in leaves], check, other)


def _check_all(
    names: Sequence[str], results: Sequence[object], expected: Sequence[object], check: CheckConfig, other: str
) -> None:
    for name, value, wanted in zip(names, results, expected, strict=True):
        if isinstance(value, Tensor) and isinstance(wanted, Tensor):
            fault = find_difference(value, wanted, check.rtol, check.atol)
            if fault is not None:
                raise CallError(f"check.mode shadow: {name} differs from what {other} gives: {fault}")


def find_difference(value: Tensor, wanted: Tensor, rtol: float | None, atol: float | None) -> str | None:
    """Return how a tensor differs from the wanted one, None when it does not.

    Args:
        rtol, atol: a value may differ by atol + rtol * |wanted|. None: see `check_equal`. Integers must be equal.
    Returns:
        Largest difference, its position, both values, number of values over the limit.
    """
    if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
        return f"{value.dtype}{list(value.shape)} instead of {wanted.dtype}{list(wanted.shape)}"
    if value.numel() == 0:
        return None
    is_exact = not (wanted.is_floating_point() or wanted.is_complex())
    relative = RELATIVE_TOLERANCE.get(wanted.dtype, 1e-4) if rtol is None else rtol
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    a, b = value.to(wide), wanted.to(wide)
    size = b.abs().nan_to_num(0.0, 0.0, 0.0)
    allowed = torch.zeros(()) if is_exact else (relative * size.max() if atol is None else atol) + relative * size
    is_same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(is_same, 0.0, (a - b).abs()).nan_to_num(torch.inf, torch.inf)
    num_over = int((difference > allowed).sum())
    if num_over == 0:
        return None
    position = torch.unravel_index((difference - allowed).argmax(), difference.shape)
    at = tuple(int(index) for index in position)
    return (
        f"by {float(difference[at]):.3g} at {list(at)} ({value[at].item()} instead of {wanted[at].item()}); "
        f"{num_over} of {value.numel()} values differ by more than allowed "
        f"(check.rtol {relative:g}, check.atol {'by size' if atol is None else f'{atol:g}'})"
    )

"""Capture sizes and context buckets: the default lists, and how a user's lists are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from pcp_compiler.errors import ConfigError

FIRST_BUCKET: Final = 2048
BUCKET_FACTOR: Final = 4


def default_sizes(max_rows: int, dense_rows: int) -> tuple[int, ...]:
    """Return default capture sizes, ascending; the last is `max_rows` >= 1."""
    sizes = [size for size in (1, 2, 4) if size < max_rows]
    size = 8
    while size < max_rows:
        sizes.append(size)
        step = _step_after(size, dense_rows)
        size = (size // step + 1) * step
    return (*sizes, max_rows)


def default_context_buckets(max_model_len: int) -> tuple[int, ...]:
    """Return default context buckets, ascending; the last is `max_model_len`."""
    buckets, bucket = [], FIRST_BUCKET
    while bucket < max_model_len:
        buckets.append(bucket)
        bucket *= BUCKET_FACTOR
    return (*buckets, max_model_len)


def check_list(field: str, values: Sequence[int], limit: int, bound: str, notes: list[str]) -> tuple[int, ...]:
    """Return the list sorted and without duplicates; if it was not, `notes` gets a line.

    Args:
        limit: largest value allowed. bound: the config keys that it comes from.
    Raises:
        ConfigError: no list, or an entry that is no integer from 1 to `limit`.
    """
    hint = "leave it out for the default list, [] is off"
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ConfigError(f"{field}: got {values!r}; allowed: a list of integers; {hint}")
    for value in values:
        is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not is_integer or not 1 <= value <= limit:
            raise ConfigError(
                f"{field}: got {value!r} in {list(values)}; allowed: integers from 1 to {limit} ({bound}); {hint}"
            )
    clean = tuple(sorted({int(value) for value in values}))
    if clean != tuple(values):
        notes.append(f"{field}: {list(values)} is read as {list(clean)}")
    return clean


def pick_context_buckets(
    values: Sequence[int] | None, max_model_len: int, windows: Iterable[int], notes: list[str]
) -> tuple[int, ...]:
    """Return the context buckets, ascending; the last is the whole context, `max_model_len`.

    Args:
        values: the user's, None: the default ones, []: the whole context only.
        windows: lengths of sliding windows, which are added: what is no longer than its window is not cut.
    """
    if values is None:
        chosen = default_context_buckets(max_model_len)
    else:
        bound = f"limits.max_model_len {max_model_len}"
        chosen = check_list("capture.context_buckets", values, max_model_len, bound, notes)
        if not chosen:
            return (max_model_len,)
    edges = {window for window in windows if window < max_model_len} - set(chosen)
    if edges:
        notes.append(f"capture.context_buckets: sliding windows {sorted(edges)} are added")
    return tuple(sorted({*chosen, *edges, max_model_len}))


def _step_after(size: int, dense_rows: int) -> int:
    if size < dense_rows:
        return 8 if size < 256 else 16
    return max(8, (1 << size.bit_length()) // 8)  # a quarter of the power of two below: at most a fifth is padding

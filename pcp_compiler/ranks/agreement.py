"""What ranks must share, as short texts that can be compared, and the message when they do not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Statement = Mapping[str, Mapping[str, str]]
"""Topic to name to value."""

ADVICE = {
    "versions": "install the same versions on every rank",
    "config": "give every rank the same options",
    "parameters": "load the same weights on every rank",
    "collectives": "compile the same model on every rank",
    "shapes": "give every rank the same batch",
    "token ids": "give every rank the same batch",
}
"""Topics in the order in which they are compared, and what to do when ranks differ."""

SAMPLES_PER_DIM = 16
"""Elements per dim that go into a parameter's hash by value; its sum has them all."""
SUM_CHUNK = 1 << 22
"""Elements summed at a time, so that the wide copies which a sum makes stay small."""
SHOWN = 4
"""Differences that a message shows."""


def digests(statement: Statement) -> dict[str, str]:
    """Return a short hash for each topic."""
    return {topic: _sha(json.dumps(entries, sort_keys=True).encode()) for topic, entries in statement.items()}


def find_difference(stated: Sequence[Mapping[str, str]]) -> str | None:
    """Return the first topic on which the digests of all ranks differ; a topic that a rank left out is not compared."""
    for topic in ADVICE:
        if all(topic in one for one in stated) and len({one[topic] for one in stated}) > 1:
            return topic
    return None


def describe_difference(topic: str, entries: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    """Return one message, the same on every rank: what differs, on which ranks, and what to do.

    Args:
        entries: each rank's entries of the topic. names: what messages call each rank.
    """
    keys = dict.fromkeys(key for one in entries for key in one)
    lines = [_describe_entry(key, [one.get(key, "missing") for one in entries], names) for key in keys]
    found = [line for line in lines if line]
    rest = [f"... and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return "\n  ".join([f"ranks differ in their {topic}; {ADVICE[topic]}", *found[:SHOWN], *rest])


def _describe_entry(key: str, values: Sequence[str], names: Sequence[str]) -> str | None:
    ranks: dict[str, list[str]] = {}
    for value, name in zip(values, names, strict=True):
        ranks.setdefault(value, []).append(name)
    if len(ranks) == 1:
        return None
    return f"{key}: " + "; ".join(f"{value} on {', '.join(holders)}" for value, holders in ranks.items())


def describe_config(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the dotted keys and values of a config; `dump` may differ between ranks, since no result depends on it."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(describe_config(value, f"{prefix}{name}."))
        elif not prefix.startswith("dump."):
            flat[prefix + name] = str(value)
    return flat


def describe_shape(value: object) -> str:
    """Return what all ranks must share about an input on every call: `int64[1, 33] on cpu`, or a number."""
    if not isinstance(value, Tensor):
        return str(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device.type}"


def hash_values(tensor: Tensor) -> str:
    """Return a hash of all elements."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return _sha(flat.view(torch.uint8).numpy().tobytes())


def hash_parameter(tensor: Tensor) -> str:
    """Return a hash that any changed element changes: all bits added up, and a coarse grid of elements by value."""
    tensor = tensor.detach()
    grid = tensor[tuple(slice(None, None, max(1, size // SAMPLES_PER_DIM)) for size in tensor.shape)]
    return f"{describe_shape(tensor)} {_sha(f'{_sum_of_bits(tensor)} {hash_values(grid)}'.encode())}"


def _sum_of_bits(tensor: Tensor) -> int:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    chunks = tensor.reshape(-1).split(SUM_CHUNK) if tensor.numel() else ()
    sums = [chunk.view(integers).sum(dtype=torch.int64) for chunk in chunks]
    return int(torch.stack(sums).sum()) if sums else 0


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]

"""Reading a drafter's folder: config.json and safetensors files, with one message per thing that does not fit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pcp_compiler.errors import ConfigError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_FAULTS = 20  # lines of one message: a wrong layer number would else list every tensor of a model

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, known by its header."""

    file: Path
    shape: Shape
    dtype: str
    """Type as safetensors spells it, such as BF16."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return the fields of a drafter's config.json.

    Raises:
        ConfigError: no such folder or file, or the file does not hold a JSON object.
    """
    if not folder.is_dir():
        raise ConfigError(f"draft.model: {folder} is not a folder; allowed: a local folder with {CONFIG} and {WEIGHTS}")
    return _read_json(folder / CONFIG)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"draft.model: {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"draft.model: {path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"draft.model: {path} holds a {type(data).__name__}; allowed: a JSON object")
    return data


def read_int(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a size from a config: an integer >= 1.

    Raises:
        ConfigError: missing without a default, of another type, or below 1.
    """
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{CONFIG}: {name}: got {value!r}; allowed: integer >= 1")
    return value


def read_number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a number > 0 from a config.

    Raises:
        ConfigError: missing without a default, of another type, or not above 0.
    """
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{CONFIG}: {name}: got {value!r}; allowed: number > 0")
    return float(value)


def read_choice(config: Mapping[str, Any], name: str, allowed: Sequence[object]) -> Any:
    """Return a field of a config that takes few values; the first one is the default.

    Raises:
        ConfigError: any other value.
    """
    value = config.get(name, allowed[0])
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise ConfigError(f"{CONFIG}: {name}: got {value!r}; allowed: {', '.join(map(repr, allowed))}")
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Does the config fit the target


def rope_bases(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the rope base under every field that states one: `rope_parameters.rope_theta`, `rope_theta`."""
    nested = config.get("rope_parameters")
    stated = {f"rope_parameters.{name}": value for name, value in nested.items()} if isinstance(nested, dict) else {}
    stated["rope_theta"] = config.get("rope_theta")
    fields = ("rope_parameters.rope_theta", "rope_theta")
    return {name: read_number(stated, name) for name in fields if stated.get(name) is not None}


def check_fit(config: Mapping[str, Any], target: Mapping[str, Any], fields: Iterable[str]) -> None:
    """Check that a drafter's config states the same sizes and rope base as its target's config.

    Args:
        fields: names that must be equal in both; the rope base is always compared.
    Raises:
        ConfigError: one line per field that differs, with both values.
    """
    faults = [_misfit(name, config.get(name), target.get(name)) for name in fields
              if config.get(name) != target.get(name)]  # fmt: skip
    wanted = next(iter(rope_bases(target).values()), None)
    if wanted is not None:
        faults += [_misfit(name, base, wanted) for name, base in rope_bases(config).items() if base != wanted]
    if faults:
        raise ConfigError("\n".join(faults))


def _misfit(name: str, found: object, wanted: object) -> str:
    values = f"{found!r} in the drafter and {wanted!r} in the target"
    return f"draft.model: {CONFIG}: {name} is {values}; allowed: equal values"


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


def list_files(folder: Path) -> dict[str, Path]:
    """Return the name of every tensor of a checkpoint and the file that holds it.

    Raises:
        ConfigError: no checkpoint, or one that cannot be read. ImportError: safetensors is not installed.
    """
    if (folder / INDEX).exists():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ConfigError(f"draft.model: {folder / INDEX}: weight_map: allowed: an object of tensor name to file")
        return {name: folder / file for name, file in weight_map.items()}
    with _open(folder / WEIGHTS) as file:
        return dict.fromkeys(file.keys(), folder / WEIGHTS)


def read_headers(files: Mapping[str, Path]) -> dict[str, StoredTensor]:
    """Return shape and type of tensors, without their data; `files` maps their names to files.

    Raises:
        ConfigError: a file cannot be read, or lacks a tensor that the index places in it.
    """
    headers = {}
    for path in sorted(set(files.values())):
        with _open(path) as file:
            held = set(file.keys())
            for name in (name for name, place in files.items() if place == path):
                if name not in held:
                    raise ConfigError(f"draft.model: {name}: {INDEX} places it in {path}, which does not hold it")
                part = file.get_slice(name)
                headers[name] = StoredTensor(path, tuple(part.get_shape()), part.get_dtype())
    return headers


def read_tensors(headers: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Return the data of tensors, on the CPU, in the types they are stored in."""
    tensors = {}
    for path in sorted({header.file for header in headers.values()}):
        with _open(path) as file:
            tensors.update({name: file.get_tensor(name) for name, header in headers.items() if header.file == path})
    return tensors


def check_tensors(
    found: Mapping[str, StoredTensor], wanted: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None
) -> None:
    """Check names, shapes and types of the tensors of a drafter.

    Args:
        wanted: shape of each tensor that must be there. optional: of those that may be there.
    Raises:
        ConfigError: one line per tensor that is missing, is not known, is no float, or has another shape.
    """
    shapes = {**(optional or {}), **wanted}
    faults = [f"{name}: missing; wanted: shape {list(shape)}" for name, shape in wanted.items() if name not in found]
    faults += [fault for name, header in found.items() if (fault := _describe_fault(name, header, shapes.get(name)))]
    if faults:
        hidden = len(faults) - MAX_FAULTS
        lines = [f"draft.model: {fault}" for fault in faults[:MAX_FAULTS]]
        raise ConfigError("\n".join(lines + ([f"and {hidden} more"] if hidden > 0 else [])))


def _describe_fault(name: str, header: StoredTensor, wanted: Shape | None) -> str | None:
    found = f"shape {list(header.shape)} found"
    if wanted is None:
        return f"{name}: not a tensor of this drafter; {found}"
    if header.shape != wanted:
        transposed = " (transposed)" if header.shape == wanted[::-1] else ""
        return f"{name}: {found}{transposed}, {list(wanted)} wanted"
    if header.dtype not in ("F64", "F32", "F16", "BF16"):
        return f"{name}: type {header.dtype} found; allowed: F64, F32, F16, BF16"
    return None


def _open(path: Path) -> Any:
    """Return an open safetensors file, a context manager; its own module has no types."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(f"drafters need the extra `hf` ({error}): pip install 'pcp-compiler[hf]'") from error
    if not path.is_file():
        raise ConfigError(f"draft.model: {path} does not exist")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"draft.model: {path} cannot be read: {error}") from None


def cast(tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device,
         keep_float32: Sequence[str] = ()) -> dict[str, Tensor]:  # fmt: skip
    """Return tensors in one type on one device; names that end in one of `keep_float32` become float32."""
    ends = tuple(keep_float32)
    return {
        name: value.to(device, torch.float32 if ends and name.endswith(ends) else dtype)
        for name, value in tensors.items()
    }

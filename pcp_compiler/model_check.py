"""What is refused before a model is read: wrappers that split a model, and tensors that are no plain arrays.

torch itself fails on these too, later, with errors that name no tensor; or it leaves the original model to run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pcp_compiler import torch_private
from pcp_compiler.errors import CallError, UnsupportedGraphError

_WHOLE = "pcp_spec shares out the tokens of a call and needs every weight and input whole on each rank"
_WRAPPERS = {
    "DistributedDataParallel": "it only averages gradients; compile its .module",
    "DataParallel": "compile its .module; option parallel.pcp_size says how many ranks run it",
    "FullyShardedDataParallel": f"{_WHOLE}; load the model without FSDP",
    "FSDPModule": f"{_WHOLE}; load the model without fully_shard",
}
"""Classes of torch by name (importing all of them takes seconds), and what to do instead."""
_TENSOR_KNOBS = {
    "DTensor": f"{_WHOLE}; call .full_tensor() and use its result",
    "NestedTensor": "one call serves prompts of one length; call the model for each prompt",
}
_OTHER_TENSOR_KNOB = "allowed: torch.Tensor and torch.nn.Parameter; convert it, or call .as_subclass(torch.Tensor)"


def check_module(model: object) -> None:
    """Raise UnsupportedGraphError when a model or a part of it is wrapped for another kind of parallelism."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        for cls in type(module).__mro__:
            if cls.__name__ in _WRAPPERS and cls.__module__.startswith("torch."):
                raise UnsupportedGraphError(
                    f"{name or 'the model'} is of class {cls.__name__}: {_WRAPPERS[cls.__name__]}"
                )


def check_weights(model: object) -> None:
    """Raise UnsupportedGraphError when a parameter or buffer of a model is no plain tensor, or has no values."""
    for name, tensor in named_weights(model):
        check_weight(name, tensor)
        check_has_values(name, tensor)


def named_weights(model: object) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by name, tied ones once; nothing for a function."""
    if isinstance(model, nn.Module):
        yield from model.named_parameters()
        yield from model.named_buffers()


def check_weight(name: str, tensor: Tensor) -> None:
    """Raise UnsupportedGraphError when a parameter or buffer is not one plain array.

    Subclasses that change nothing of how torch's ops see the tensor are fine.
    """
    if torch_private.overrides_dispatch(tensor):
        raise UnsupportedGraphError(f"{name} is of class {_describe_class(tensor)}")
    if tensor.layout is not torch.strided:
        raise UnsupportedGraphError(
            f"{name} has layout {tensor.layout}; allowed: torch.strided; call .to_dense() and use its result"
        )


def check_input(name: str, tensor: Tensor) -> None:
    """Raise CallError when an input of a call is not one plain array."""
    if type(tensor) not in (Tensor, nn.Parameter):
        raise CallError(f"input {name} is of class {_describe_class(tensor)}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "is nested" if tensor.is_nested else f"has layout {tensor.layout}"
        raise CallError(f"input {name} {kind}; allowed: one array of layout torch.strided; pass a dense tensor")


def check_has_values(name: str, tensor: Tensor) -> None:
    """Raise UnsupportedGraphError for a tensor on device meta, which has a shape only."""
    if tensor.device.type == "meta":
        raise UnsupportedGraphError(
            f"{name} is on device meta, which holds no values; allowed: a device that does; move inputs and load "
            "weights there, or look at the model with pcp_compiler.inspect"
        )


def check_not_empty(name: str, shape: torch.Size, token_dim: int) -> None:
    """Raise CallError when a token input is known to hold no token, or no prompt."""
    if 0 in [size for size in shape[: token_dim + 1] if torch_private.is_number(size)]:
        what = f"1 token in dim {token_dim}" if shape[token_dim] == 0 else "1 prompt"
        raise CallError(f"{name} has shape {tuple(shape)}; allowed: at least {what}")


def describe_devices(model: object, inputs: dict[str, Tensor]) -> str:
    """Return which devices hold what: `cpu: embedding.weight and 2 more; meta: head.weight`."""
    devices: dict[torch.device, list[str]] = {}
    for name, tensor in [*named_weights(model), *inputs.items()]:
        devices.setdefault(tensor.device, []).append(name)
    return "; ".join(
        f"{device}: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        for device, names in devices.items()
    )


def _describe_class(tensor: Tensor) -> str:
    name = type(tensor).__name__
    return f"{name}: {_TENSOR_KNOBS.get(name, _OTHER_TENSOR_KNOB)}"

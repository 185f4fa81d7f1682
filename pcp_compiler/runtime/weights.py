"""Noticing that a model's weights are no longer those that its cached keys and values were made with."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import Tensor, nn

from pcp_compiler.errors import CallError


class WeightWatch:
    """Remembers the weights of some modules by address and version; no value is read.

    In-place writes count up a tensor's version, `.data = ` changes its address, and a new Parameter is another object.
    Writes through `.data` or a NumPy view leave no trace and are not seen.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._owners: list[tuple[str, str, dict[str, Tensor | None]]] = []
        for module in modules:
            for path, part in module.named_modules():
                for owner in (part._parameters, part._buffers):
                    self._owners += [(f"{path}.{name}", name, owner) for name in owner]
        self._forms = [_form(owner[name]) for _, name, owner in self._owners]
        self._remember()

    def has_changed(self) -> bool:
        """Return whether a weight changed since the last call.

        Raises:
            CallError: a weight has another shape, type or device, which the compiled programs do not serve.
        """
        weights = self._weights()
        if all(map(operator.is_, weights, self._seen)) and self._marks() == self._seen_marks:
            return False
        for (path, name, owner), form in zip(self._owners, self._forms, strict=True):
            if _form(owner[name]) != form:
                raise CallError(
                    f"weight {path}: is {_form(owner[name])} now and was {form} when the decoder was built; "
                    "build a new SpeculativeDecoder"
                )
        self._remember()
        return True

    def _remember(self) -> None:
        self._seen = self._weights()
        given = [weight for weight in self._seen if weight is not None]
        self._given, self._versioned = given, [weight for weight in given if not weight.is_inference()]
        self._seen_marks = self._marks()

    def _weights(self) -> list[Tensor | None]:
        return [owner[name] for _, name, owner in self._owners]

    def _marks(self) -> tuple[list[int], list[int]]:
        """Return addresses and versions of the weights seen last; called in every step, so it is kept short."""
        return [weight.data_ptr() for weight in self._given], [weight._version for weight in self._versioned]


def _form(weight: Tensor | None) -> object:
    return None if weight is None else (tuple(weight.shape), weight.dtype, weight.device)

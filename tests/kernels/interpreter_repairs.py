"""Three repairs of triton 3.6's interpreter, without which bfloat16 kernels with loops do not run on a CPU.

1. Loop bounds from tensors: it turns arrays of one element into numbers by `int`, which numpy >= 2.4 refuses.
2. bfloat16 lies in arrays of uint16, and `tl.dot` multiplies these numbers.
3. float32 to bfloat16 cuts off the last bits; the compiled kernel rounds to nearest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def repaired_interpreter() -> Iterator[None]:
    """Repair the interpreter while the context is open."""
    builder = interpreter.InterpreterBuilder
    patch_tensor, create_dot, cast = interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl
    convert = builder.create_fp_to_fp

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return create_dot(self, a, b, *rest)

    def rounding_cast(self: Any, x: Any, dtype: Any) -> Any:
        return _round(x) if _is_rounding(x, dtype) else cast(self, x, dtype)

    def rounding_convert(self: Any, x: Any, dtype: Any, rounding: Any) -> Any:
        return _round(x) if _is_rounding(x, dtype) else convert(self, x, dtype, rounding)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
        patch.setattr(builder, "create_dot", dot)
        patch.setattr(builder, "create_fp_to_fp", rounding_convert)
        for name in ("cast_impl", "create_fp_trunc"):
            patch.setattr(builder, name, rounding_cast)
        yield


def _is_rounding(x: Any, dtype: Any) -> bool:
    return bool(x.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16)


def _round(x: Any) -> Any:
    rounded = torch.from_numpy(x.data.copy()).bfloat16().view(torch.uint16).numpy()
    return interpreter.TensorHandle(rounded, tl.bfloat16)

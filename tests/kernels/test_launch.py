"""Launches that fail: the error names kernel, variant, arguments and knob, and nothing else runs in its place."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from pcp_compiler import kernels
from pcp_compiler.errors import KernelError, PcpError
from pcp_compiler.kernels import decode_rows, kv_rows, metadata, paged_attention, sampling
from pcp_compiler.kernels.launch import NO_KNOB, NamedKernel, named_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@named_kernel("set something: else")
@triton.jit  # type: ignore[untyped-decorator]
def _picky_kernel(x_N, y_N, num_rows, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.static_assert(TILE <= 8, "tiles of more than eight rows")
    rows = tl.arange(0, TILE)
    mask = rows < num_rows
    tl.store(y_N + rows, tl.load(x_N + rows, mask=mask, other=0) + 1, mask=mask)


def launch(tile: int) -> Tensor:
    x, y = torch.arange(3, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    _picky_kernel[(1,)](x, y, 3, TILE=tile, num_warps=2)
    return y


def test_a_kernel_that_compiles_runs() -> None:
    assert launch(4).tolist() == [1, 2, 3]


def test_a_kernel_that_cannot_be_compiled_is_named_with_its_variant() -> None:
    with pytest.raises(KernelError) as caught:
        launch(16)
    message, cause = str(caught.value), caught.value.__cause__
    assert isinstance(caught.value, PcpError) and isinstance(caught.value, ValueError)
    assert message.startswith(f"kernel _picky_kernel ({__name__}) cannot be compiled or launched\n")
    assert "\n  variant: TILE=16, num_warps=2\n" in message
    assert "\n  arguments: x_N=int64[3], y_N=int64[3], num_rows=3\n" in message
    assert "\n  set something: else\n" in message
    assert cause is not None and f"\n  {type(cause).__name__}: " in message
    assert launch(4).tolist() == [1, 2, 3]


class Failing:
    """A kernel whose launches raise."""

    def __init__(self, kernel: Any, fault: Exception) -> None:
        self.fn = kernel.fn
        self._fault = fault

    def run(self, *args: object, **options: object) -> None:
        """Fail."""
        raise self._fault


def fail_with(monkeypatch: pytest.MonkeyPatch, kernel: Any, fault: Exception) -> None:
    monkeypatch.setattr(kernel, "_kernel", Failing(kernel._kernel, fault))


def call_attention() -> None:
    q = torch.zeros(2, 4, 16, device=DEVICE)
    spans, tables = torch.tensor([[0, 0, 2, 2]], device=DEVICE), torch.ones(1, 1, dtype=torch.int32, device=DEVICE)
    cache = torch.zeros(9, 2, 16, device=DEVICE)
    paged_attention.paged_attention(q, cache, cache, spans, tables, block_size=4, kv_bound=4, scale=1.0)


def call_norm() -> None:
    x = torch.zeros(1, 16, dtype=torch.bfloat16, device=DEVICE)
    decode_rows.rms_norm_linear(x, x[0], [torch.zeros(8, 16, dtype=torch.bfloat16, device=DEVICE)], [None], eps=1e-5)


def call_metadata() -> None:
    tables = torch.ones(2, 1, dtype=torch.int32, device=DEVICE)
    metadata.build_metadata(torch.zeros(1, 2, dtype=torch.int64, device=DEVICE), tables, block_size=4, max_model_len=4)


def call_write() -> None:
    cache = torch.zeros(5, 2, 8, device=DEVICE)
    kv_rows.store_gathered_kv(torch.zeros(3, 32, device=DEVICE), torch.arange(3, device=DEVICE), cache, cache.clone())


def call_argmax() -> None:
    sampling.row_argmax(torch.zeros(2, 7, device=DEVICE))


CALLS = [
    (paged_attention._attention_kernel, call_attention, "attention.backend", "q_ptr=float32[2, 4, 16], k_ptr=float32["),
    (decode_rows._norm_linear_kernel, call_norm, "numerics: exact", "=bfloat16[1, 16], "),
    (metadata._build_metadata_kernel, call_metadata, NO_KNOB, "tables_NB=int32[2, 1]"),
    (kv_rows._store_kv_kernel, call_write, NO_KNOB, "k_NHD=float32[3, 2, 8]"),
    (sampling._stats_kernel, call_argmax, NO_KNOB, "logits_NV=float32[2, 7], draft_probs_DV=None"),
]


@pytest.mark.parametrize(("kernel", "call", "knob", "argument"), CALLS, ids=[entry[1].__name__ for entry in CALLS])
def test_a_wrapper_whose_launch_fails_names_kernel_sizes_and_knob(
    kernel: NamedKernel, call: Callable[[], None], knob: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = OutOfResources(300_000, 232_448, "shared memory")
    fail_with(monkeypatch, kernel, fault)
    with pytest.raises(KernelError) as caught:
        call()
    message = str(caught.value)
    assert caught.value.__cause__ is fault
    assert knob in message and argument in message
    assert re.search(r"\n  variant: ([A-Z_a-z0-9]+=\w+(, |\n))+  arguments: ", message)
    assert "OutOfResources: out of resource: shared memory, Required: 300000" in message


@pytest.mark.parametrize("text", ["device-side assert triggered", "operation not permitted when stream is capturing"])
def test_what_an_earlier_kernel_or_a_capture_did_is_not_blamed_on_this_one(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, kv_rows._store_kv_kernel, RuntimeError(f"Triton Error [CUDA]: {text}"))
    with pytest.raises(RuntimeError, match=text):
        call_write()


def test_a_descriptor_shows_the_tensor_that_it_describes(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, _picky_kernel, OutOfResources(1, 0, "registers"))
    x = torch.zeros(4, 8, dtype=torch.float16, device=DEVICE)
    with pytest.raises(KernelError, match=r"arguments: x_N=float16\[4, 8\], y_N=None, num_rows=3"):
        _picky_kernel[(1,)](TensorDescriptor(x, [4, 8], [8, 1], [2, 8]), None, 3, TILE=4)


def test_every_kernel_that_is_launched_is_a_named_one() -> None:
    names = [f"pcp_compiler.kernels.{module.name}" for module in pkgutil.iter_modules(kernels.__path__)]
    modules = [importlib.import_module(name) for name in names]
    found = {name: value for m in modules for name, value in vars(m).items() if name.endswith("_kernel")}
    assert len(found) > 20
    assert {name for name, value in found.items() if not isinstance(value, NamedKernel)} == {"named_kernel"}

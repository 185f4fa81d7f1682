"""Ops of the user's own, taught with `register_placement`: quantised linears, with a scale per token or per tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pcp_compiler import register_placement
from pcp_compiler.errors import ConfigError, UnsupportedGraphError
from pcp_compiler.placement import Call, Local, Verdict, Whole
from tests.families.support import WIDTH, Tokens, compile_for, make_ids

_lib = torch.library.Library("pcp_tests", "DEF")
_lib.define("int8_linear(Tensor x, Tensor weight, Tensor scales, bool per_tensor) -> Tensor")
_lib.define("unknown(Tensor x) -> Tensor")


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor, per_tensor: bool) -> Tensor:
    """x [.., I] rounded to 8 bits, times weight [O, I] int8 with a scale for each output [O]."""
    largest = x.abs().max() if per_tensor else x.abs().amax(-1, keepdim=True)
    step = largest.clamp(min=1e-12) / 127
    return (x / step).round() @ weight.to(x.dtype).t() * step * scales


_lib.impl("int8_linear", int8_linear, "CompositeExplicitAutograd")
_lib.impl("unknown", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake(
    "pcp_tests::int8_linear", lambda x, weight, *_: x.new_empty(*x.shape[:-1], weight.shape[0]), lib=_lib
)
torch.library.register_fake("pcp_tests::unknown", torch.empty_like, lib=_lib)
INT8_LINEAR = torch.ops.pcp_tests.int8_linear.default


def int8_linear_rows(call: Call) -> Verdict | None:
    """A row needs itself only, unless one scale is computed for all of them."""
    rows = call.rows(call.tensor(0))
    if rows is None:
        return Whole(None)
    if call.arg(3, "per_tensor"):
        return Whole(rows, "computes one scale for all tokens")
    return Local(rows, (rows, None, None))


register_placement(INT8_LINEAR, int8_linear_rows)


class Quantised(Tokens):
    """Two quantised linears."""

    def __init__(self, per_tensor: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.per_tensor = per_tensor
        self.weight = torch.nn.Buffer(torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8, generator=generator))
        self.scales = torch.nn.Buffer(torch.rand(WIDTH, dtype=torch.float64, generator=generator) / 1000)

    def mix(self, x: Tensor) -> Tensor:
        """x [B, T, WIDTH] -> the same shape."""
        hidden: Tensor = INT8_LINEAR(x, self.weight, self.scales, self.per_tensor)
        out: Tensor = INT8_LINEAR(hidden.relu(), self.weight, self.scales, self.per_tensor)
        return out


def test_a_linear_with_a_scale_for_each_token_runs_on_the_rows_of_a_rank() -> None:
    compiled = compile_for(Quantised(per_tensor=False), 3)
    shapes = [node.meta["val"].shape for node in compiled.graph_module.graph.nodes if node.target is INT8_LINEAR]
    assert len(shapes) == 2
    assert all("u" in str(shape[1]) for shape in shapes)  # W, not T
    for num_tokens in (2, 5, 64):
        compiled.check(make_ids(num_tokens))


def test_a_linear_with_one_scale_for_all_tokens_is_refused_or_runs_on_all_of_them() -> None:
    """A rank that took the largest value of its own rows would round by another step than the others."""
    with pytest.raises(
        UnsupportedGraphError, match=r"(?s)computes one scale for all tokens.*hidden: Tensor = INT8_LINEAR"
    ):
        compile_for(Quantised(per_tensor=True), 3)
    compiled = compile_for(Quantised(per_tensor=True), 3, on_token_mixing="gather")
    for num_tokens in (2, 5, 64):
        compiled.check(make_ids(num_tokens))


class Scaled(Tokens):
    """Values divided by the largest of all tokens."""

    def mix(self, x: Tensor) -> Tensor:
        """x [B, T, WIDTH] -> the same shape."""
        return x.relu() / x.abs().max()


def test_a_scale_over_tokens_that_torch_computes_is_refused_with_its_line() -> None:
    with pytest.raises(
        UnsupportedGraphError, match=r"(?s)max.*reduces over the tokens.*return x.relu\(\) / x.abs\(\).max"
    ):
        compile_for(Scaled(), 3)
    compiled = compile_for(Scaled(), 3, on_token_mixing="gather")
    compiled.check(make_ids(5))


def test_an_op_without_a_rule_is_refused_with_the_function_that_teaches_it() -> None:
    class Unknown(Tokens):
        def mix(self, x: Tensor) -> Tensor:
            out: Tensor = torch.ops.pcp_tests.unknown(x)
            return out

    with pytest.raises(UnsupportedGraphError, match=r"(?s)no placement rule knows.*pcp_compiler.register_placement"):
        compile_for(Unknown(), 2)


def test_a_second_rule_for_one_op_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pcp_tests.int8_linear.default already has a rule"):
        register_placement(INT8_LINEAR, int8_linear_rows)

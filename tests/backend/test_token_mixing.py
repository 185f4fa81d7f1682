"""Ops that mix tokens are refused with the user's line and the knob, or run on all tokens when the user says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pcp_compiler
from pcp_compiler.errors import UnsupportedGraphError
from tests.backend.support import TokenModel, check_equal, make_ids, options, torch_compile

Function = Callable[[Tensor], Tensor]
_convolution = nn.Conv1d(16, 16, 3, padding=2, groups=16).double().requires_grad_(False)


def token_cumsum(x: Tensor) -> Tensor:
    return x.cumsum(1)


def token_convolution(x: Tensor) -> Tensor:
    return _convolution(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)  # type: ignore[no-any-return]


def scale_of_all_tokens(x: Tensor) -> Tensor:
    return x / x.abs().max()


def token_mean(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def token_roll(x: Tensor) -> Tensor:
    return torch.roll(x, 1, dims=1)


def token_sort(x: Tensor) -> Tensor:
    return x.sort(dim=1).values


def split_heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], 2, 8).transpose(1, 2)


def matmul_softmax_attention(x: Tensor) -> Tensor:
    heads, num_tokens = split_heads(x), x.shape[1]
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    weights = (heads @ heads.mT).masked_fill(future, float("-inf")).softmax(-1)
    return (weights @ heads).transpose(1, 2).flatten(2)


MIXING = [token_cumsum, token_convolution, scale_of_all_tokens, token_mean, token_roll, token_sort]
OPS = ["cumsum", "convolution", "max", "mean", "roll", "sort"]
LENGTHS = [2, 3, 9, 16, 33]


def refusal(model: nn.Module, config: dict[str, Any]) -> str:
    """Return the message with which a model is refused; `inspect` refuses it too, naming the same knob."""
    with torch.no_grad(), pytest.raises(UnsupportedGraphError) as caught:
        torch_compile(model, options=config)(make_ids(9))
    with pytest.raises(UnsupportedGraphError) as by_inspect:
        pcp_compiler.inspect(model, (make_ids(9),), config)
    message = str(caught.value).split("\n\n")[0]  # Dynamo adds a hint behind it
    assert str(by_inspect.value).splitlines()[-1] == message.splitlines()[-1]
    return message


def line_in(function: Function) -> str:
    """Return a pattern for "path:line in function", the line being one of the function's."""
    first = function.__code__.co_firstlineno
    last = max(line for _, _, line in function.__code__.co_lines() if line is not None)
    numbers = "|".join(map(str, range(first, last + 1)))
    return rf"{re.escape(function.__code__.co_filename)}:({numbers}) in {function.__name__}: "


@pytest.mark.parametrize(("function", "op"), list(zip(MIXING, OPS, strict=True)))
def test_a_token_mixing_op_is_refused_with_the_users_line_and_the_knob(function: Function, op: str) -> None:
    message = refusal(TokenModel(function), options(2))
    assert re.search(line_in(function), message)
    assert f"aten.{op}" in message
    assert "set parallel.on_token_mixing: gather" in message


@pytest.mark.parametrize(("function", "op"), list(zip(MIXING, OPS, strict=True)))
def test_a_token_mixing_op_equals_eager_on_gathered_tokens_and_is_listed(function: Function, op: str) -> None:
    model = TokenModel(function)
    compiled = pcp_compiler.compile(model, options(3, on_token_mixing="gather"))
    check_equal(compiled, model, LENGTHS, 3)
    (decision,) = pcp_compiler.compilations(compiled)[0].decisions["token mixing"]
    assert f"aten.{op}" in decision
    assert "runs on all tokens" in decision


def test_a_model_that_mixes_nothing_has_no_such_decision() -> None:
    model = TokenModel(torch.tanh)
    compiled = pcp_compiler.compile(model, options(2, on_token_mixing="gather"))
    check_equal(compiled, model, LENGTHS, 2)
    assert "token mixing" not in pcp_compiler.compilations(compiled)[0].decisions


def test_mixing_the_features_of_a_token_is_no_mixing_of_tokens() -> None:
    model = TokenModel(lambda x: x.cumsum(-1) + x.softmax(-1) + x.mean(-1, keepdim=True) + x.sort(-1).values)
    check_equal(pcp_compiler.compile(model, options(2)), model, LENGTHS, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def test_attention_by_matmul_and_softmax_is_refused_with_the_attention_knob() -> None:
    message = refusal(TokenModel(matmul_softmax_attention), options(2))
    assert re.search(line_in(matmul_softmax_attention), message)
    assert "attn_implementation='sdpa' or 'pcp_spec', or call pcp_compiler.attention" in message


def test_attention_by_matmul_and_softmax_equals_eager_on_gathered_tokens() -> None:
    model = TokenModel(matmul_softmax_attention)
    check_equal(pcp_compiler.compile(model, options(2, on_token_mixing="gather")), model, LENGTHS, 2)


def bidirectional(x: Tensor) -> Tensor:
    heads = split_heads(x)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


def flex(x: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    heads = split_heads(x)
    out = flex_attention(heads, heads, heads, score_mod=lambda score, b, h, q, k: torch.where(q >= k, score, -1e9))
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("on_token_mixing", ["refuse", "gather"])
def test_bidirectional_attention_is_refused_with_the_attention_knob(on_token_mixing: str) -> None:
    message = refusal(TokenModel(bidirectional), options(2, on_token_mixing=on_token_mixing))
    assert re.search(line_in(bidirectional), message)
    assert "attention without a causal mask: rows would see later rows" in message
    assert "is_causal=True, attn_implementation='sdpa' or 'pcp_spec', or pcp_compiler.attention" in message


def test_flex_attention_is_refused_with_the_attention_knob() -> None:
    with torch.no_grad(), pytest.raises(UnsupportedGraphError, match="attention kernel was called directly") as caught:
        torch_compile(TokenModel(flex))(make_ids(9))
    assert re.search(line_in(flex), str(caught.value))
    assert "is_causal=True, attn_implementation='sdpa' or 'pcp_spec', or pcp_compiler.attention" in str(caught.value)


def with_mask(make_mask: Callable[[int], Tensor]) -> Function:
    """Return attention with the mask that `make_mask` makes for a number of tokens."""

    def attend(x: Tensor) -> Tensor:
        heads = split_heads(x)
        out = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=make_mask(x.shape[1]))
        return out.transpose(1, 2).flatten(2)

    return attend


def bool_causal(num_tokens: int) -> Tensor:
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()


def compared_rows(num_tokens: int) -> Tensor:
    rows = torch.arange(num_tokens)
    return (rows[None, :] <= rows[:, None])[None, None]


def additive_infinity(num_tokens: int) -> Tensor:
    return torch.full((num_tokens, num_tokens), float("-inf"), dtype=torch.float64).triu(1)


def additive_minimum(num_tokens: int) -> Tensor:
    return torch.full((num_tokens, num_tokens), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1)


@pytest.mark.parametrize("make_mask", [bool_causal, compared_rows, additive_infinity, additive_minimum])
def test_a_causal_mask_given_as_a_tensor_is_proven_and_equals_eager(make_mask: Callable[[int], Tensor]) -> None:
    model = TokenModel(with_mask(make_mask))
    compiled = pcp_compiler.compile(model, options(2))
    check_equal(compiled, model, LENGTHS, 2)
    (decision,) = pcp_compiler.compilations(compiled)[0].decisions["masks"]
    assert decision.endswith("proven causal")


def sliding_window(num_tokens: int) -> Tensor:
    rows = torch.arange(num_tokens)
    return bool_causal(num_tokens) & (rows[:, None] - rows[None, :] < 4)


def test_a_sliding_window_mask_is_not_taken_for_the_causal_one() -> None:
    model = TokenModel(with_mask(sliding_window))
    compiled = pcp_compiler.compile(model, options(2))
    check_equal(compiled, model, LENGTHS, 2)
    (decision,) = pcp_compiler.compilations(compiled)[0].decisions["masks"]
    assert decision.endswith("proven causal with window 4")


def prefix_lm(num_tokens: int) -> Tensor:
    return bool_causal(num_tokens) | (torch.arange(num_tokens) < 3)


def anti_causal(num_tokens: int) -> Tensor:
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu()


def soft_causal(num_tokens: int) -> Tensor:
    return torch.full((num_tokens, num_tokens), -5.0, dtype=torch.float64).triu(1)


@pytest.mark.parametrize("make_mask", [prefix_lm, anti_causal, soft_causal])
@pytest.mark.parametrize("on_token_mixing", ["refuse", "gather"])
def test_another_mask_is_refused_with_a_length_at_which_it_differs(
    make_mask: Callable[[int], Tensor], on_token_mixing: str
) -> None:
    model = TokenModel(with_mask(make_mask))
    message = r"(?s)its mask is not the causal one.* at \d+ tokens.*pcp_compiler\.attention"
    with pytest.raises(UnsupportedGraphError, match=message):
        pcp_compiler.inspect(model, (make_ids(9),), options(2, on_token_mixing=on_token_mixing))


def test_a_prefix_mask_is_refused_with_the_users_line() -> None:
    message = refusal(TokenModel(with_mask(prefix_lm)), options(2))
    assert re.search(r"test_token_mixing\.py:\d+ in attend: ", message)
    assert "is not the causal one" in message


def test_our_attention_function_equals_sdpa_compiled_or_not() -> None:
    def ours(x: Tensor) -> Tensor:
        heads = split_heads(x).transpose(1, 2)
        return pcp_compiler.attention(heads, heads, heads, layer=0).flatten(2)

    model, reference = TokenModel(ours), TokenModel(with_mask(bool_causal))
    torch.testing.assert_close(model(make_ids(9)), reference(make_ids(9)), rtol=0, atol=1e-12)
    check_equal(pcp_compiler.compile(model, options(2)), reference, LENGTHS, 2)


def test_our_attention_function_refuses_a_kind_it_cannot_shard() -> None:
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(UnsupportedGraphError, match="kind is 'bidirectional'; allowed: full"):
        pcp_compiler.attention(q, q, q, layer=0, kind="bidirectional")

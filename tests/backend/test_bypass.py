"""Whenever the original model, or a part of it, would run instead of our program, the user gets an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pcp_compiler
import pcp_compiler.integrations.transformers
from pcp_compiler.errors import BypassError, ConfigError, UnsupportedGraphError
from tests.backend.support import TokenModel, make_ids, make_llama, make_tiny, options, torch_compile

THIS_FILE = r"test_bypass\.py"


class RanUncompiled(AssertionError):
    """Python of the model ran outside Dynamo until its end."""


class BrokenModel(nn.Module):
    """A model with something in its forward that Dynamo cannot take; its end must never be reached uncompiled."""

    def __init__(self, body: Callable[[BrokenModel, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = make_tiny()
        self.body = body
        self.eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        out = self.body(self, input_ids)
        if not torch.compiler.is_compiling():
            raise RanUncompiled
        return out


def print_between(model: BrokenModel, input_ids: Tensor) -> Tensor:
    x = model.inner.embedding(input_ids)
    print("between")
    out: Tensor = model.inner.linear(x)
    return out


def print_first(model: BrokenModel, input_ids: Tensor) -> Tensor:
    print("first")
    out: Tensor = model.inner(input_ids)
    return out


def print_last(model: BrokenModel, input_ids: Tensor) -> Tensor:
    out: Tensor = model.inner(input_ids)
    print("last")
    return out


def read_a_value(model: BrokenModel, input_ids: Tensor) -> Tensor:
    first = input_ids[0, 0].item()
    out: Tensor = model.inner(input_ids) + first
    return out


def branch_on_a_value(model: BrokenModel, input_ids: Tensor) -> Tensor:
    out: Tensor = model.inner(input_ids)
    return out if out.sum() > 0 else -out


class BreakingContext:
    """A context manager that Dynamo can neither enter nor resume in."""

    def __enter__(self) -> None:
        torch._dynamo.graph_break()

    def __exit__(self, *_args: object) -> None:
        pass


def enter_an_unresumable_context(model: BrokenModel, input_ids: Tensor) -> Tensor:
    with BreakingContext():
        out: Tensor = model.inner(input_ids)
    return out


def break_in_a_try_block(model: BrokenModel, input_ids: Tensor) -> Tensor:
    try:
        print("cannot resume here")
        out: Tensor = model.inner(input_ids)
    finally:
        input_ids.numel()
    return out


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (print_between, r"graph break at .*test_bypass\.py:\d+ in print_between: print\(\"between\"\)"),
        (print_last, r"graph break at .*test_bypass\.py:\d+ in print_last: print\(\"last\"\)"),
        (read_a_value, r"graph break at .*test_bypass\.py:\d+ in read_a_value: first = input_ids\[0, 0\]\.item\(\)"),
        (branch_on_a_value, r"graph break at .*test_bypass\.py:\d+ in branch_on_a_value: return out if"),
    ],
)
def test_a_graph_break_names_the_users_line(body: Callable[[BrokenModel, Tensor], Tensor], line: str) -> None:
    with torch.no_grad(), pytest.raises(BypassError, match=line):
        torch_compile(BrokenModel(body))(make_ids(9))


@pytest.mark.parametrize("body", [print_first, enter_an_unresumable_context, break_in_a_try_block])
def test_a_frame_that_runs_uncompiled_around_compiled_ones_is_named(
    body: Callable[[BrokenModel, Tensor], Tensor],
) -> None:
    with torch.no_grad(), pytest.raises(BypassError, match=rf"only a part .*{THIS_FILE}:\d+ in \w+ runs uncompiled"):
        torch_compile(BrokenModel(body))(make_ids(9))


def test_a_hook_that_breaks_the_graph_is_refused() -> None:
    model = make_tiny()
    model.linear.register_forward_hook(lambda module, args, out: print("hook"))
    with torch.no_grad(), pytest.raises(BypassError, match=rf"graph break at .*{THIS_FILE}:\d+ in <lambda>"):
        torch_compile(model)(make_ids(9))


def test_fullgraph_gives_torchs_own_error() -> None:
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported, match="print"):
        torch_compile(BrokenModel(print_between), fullgraph=True)(make_ids(9))


# ---------------------------------------------------------------------------------------------------------------------
# Recompiling


@torch.no_grad()
def test_the_last_recompile_slot_is_refused_each_time_and_earlier_variants_are_still_served() -> None:
    model = make_tiny()
    compiled = torch_compile(model, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=3):
        for num_tokens in (5, 6):
            compiled(make_ids(num_tokens))
        for num_tokens in (7, 8, 9, 7):
            with pytest.raises(BypassError, match=r"variant 3 .*, the last .*dynamic=True.*recompile_limit"):
                compiled(make_ids(num_tokens))
        torch.testing.assert_close(compiled(make_ids(5)), model(make_ids(5)), rtol=0, atol=1e-12)
    compiled(make_ids(7))
    pcp_compiler.assert_sharded(compiled, calls=4, pcp_size=2)


@torch.no_grad()
def test_suppressed_errors_still_reach_the_user() -> None:
    compiled = torch_compile(make_tiny())
    with torch._dynamo.config.patch(suppress_errors=True):
        for _ in range(2):
            with pytest.raises(BypassError, match=r"suppress_errors is True.*set it to False"):
                compiled(make_ids(9))
    torch.compiler.reset()
    compiled(make_ids(9))
    pcp_compiler.assert_sharded(compiled, calls=1, pcp_size=2)


def test_equal_options_reuse_the_compilation_of_another_wrapper() -> None:
    model, ids = make_tiny(), make_ids(9)
    with torch.no_grad():
        for _ in range(3):
            compiled = torch_compile(model, options=options(2))
            compiled(ids)
    assert len(pcp_compiler.compilations(compiled)) == 1
    pcp_compiler.assert_sharded(compiled, calls=3, pcp_size=2)


def test_reset_forgets_the_compilations_and_the_next_call_compiles_again() -> None:
    model, ids = make_tiny(), make_ids(9)
    compiled = torch_compile(model)
    with torch.no_grad():
        compiled(ids)
        for _ in range(2):
            torch.compiler.reset()
            with pytest.raises(BypassError, match="nothing was compiled: call the model first"):
                pcp_compiler.compilations(compiled)
        compiled(ids)
    pcp_compiler.assert_sharded(compiled, calls=1, pcp_size=2)


# ---------------------------------------------------------------------------------------------------------------------
# At run time


@torch.no_grad()
def test_attention_of_the_interface_that_runs_untraced_below_a_compiled_model_raises() -> None:
    model, ids = make_llama("pcp_spec"), make_ids(9)
    compiled = torch_compile(model)
    with torch.compiler.set_stance("force_eager"), pytest.raises(BypassError, match="LlamaAttention runs uncompiled"):
        compiled(ids)
    expected = model(ids).logits  # a plain call stays legal
    torch.testing.assert_close(compiled(ids).logits, expected, rtol=0, atol=1e-5)
    pcp_compiler.assert_sharded(compiled, calls=1, pcp_size=2)


@torch.no_grad()
def test_attention_of_the_interface_in_a_disabled_forward_raises() -> None:
    model = make_llama("pcp_spec")
    model.forward = torch.compiler.disable(model.forward)
    with pytest.raises(BypassError, match="LlamaAttention runs uncompiled"):
        torch_compile(model)(make_ids(9))


@torch.no_grad()
def test_attention_of_the_interface_runs_below_other_backends() -> None:
    model, ids = make_llama("pcp_spec"), make_ids(9)
    model.forward = torch.compiler.disable(model.forward)
    assert torch.equal(torch.compile(model, backend="eager")(ids).logits, make_llama()(ids).logits)


# ---------------------------------------------------------------------------------------------------------------------
# Options


def test_mode_is_refused() -> None:
    compiled = torch.compile(make_tiny(), backend="pcp_spec", mode="max-autotune")
    with torch.no_grad(), pytest.raises(ConfigError, match=r"mode='max-autotune' is not used .*allowed: options="):
        compiled(make_ids(9))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"paralel": {"pcp_size": 2}}, "paralel is not a config key; did you mean parallel?"),
        ({"parallel": {"pcp_sise": 2}}, "parallel.pcp_sise is not a config key; did you mean parallel.pcp_size?"),
        ({"parallel": {"pcp_size": 0}}, "parallel.pcp_size"),
    ],
)
def test_a_wrong_option_is_refused_by_torch_compile_and_at_once_by_ours(wrong: dict[str, Any], message: str) -> None:
    with torch.no_grad(), pytest.raises(ConfigError) as from_torch:
        torch_compile(make_tiny(), options=wrong)(make_ids(9))
    with pytest.raises(ConfigError) as from_ours:
        pcp_compiler.compile(make_tiny(), wrong)
    assert message in str(from_torch.value)
    assert message in str(from_ours.value)


def test_errors_are_value_errors_with_a_traceback_that_starts_at_our_code() -> None:
    with torch.no_grad(), pytest.raises(ValueError) as caught:
        torch_compile(make_tiny().train())(make_ids(9))
    frames = [frame.path.name for frame in caught.traceback]  # type: ignore[union-attr]
    assert "output_graph.py" not in frames
    assert frames[-1] == "pcp_spec.py"


# ---------------------------------------------------------------------------------------------------------------------
# What is compiled


@torch.no_grad()
def test_a_plain_function_is_compiled_and_its_path_proven() -> None:
    model = make_tiny()

    def double(input_ids: Tensor) -> Tensor:
        out: Tensor = 2 * model(input_ids)
        return out

    compiled = torch_compile(double)
    for num_tokens in (9, 4):
        ids = make_ids(num_tokens)
        torch.testing.assert_close(compiled(ids), 2 * model(ids), rtol=0, atol=1e-12)
    pcp_compiler.assert_sharded(compiled, calls=2, pcp_size=2)


@torch.no_grad()
def test_a_module_that_compiled_itself_is_proven_too() -> None:
    model = make_tiny()
    expected = model(make_ids(9))
    model.compile(backend="pcp_spec", options=options(2))
    torch.testing.assert_close(model(make_ids(9)), expected, rtol=0, atol=1e-12)
    pcp_compiler.assert_sharded(model, calls=1, pcp_size=2)


def test_a_module_that_was_never_compiled_has_no_compilations() -> None:
    with pytest.raises(BypassError, match="TokenModel was not compiled with backend='pcp_spec'"):
        pcp_compiler.compilations(make_tiny())


@torch.no_grad()
def test_the_second_step_of_generate_is_refused_since_it_continues_from_a_kv_cache() -> None:
    model = make_llama()
    model.compile(backend="pcp_spec", options=options(2), dynamic=True)
    message = r"is a KV cache: this call continues from one; .*SpeculativeDecoder, or pass use_cache=False"
    with pytest.raises(UnsupportedGraphError, match=message):
        model.generate(make_ids(9), max_new_tokens=2, do_sample=False)
    pcp_compiler.assert_sharded(model, calls=1, pcp_size=2)  # the prefill


# ---------------------------------------------------------------------------------------------------------------------
# Training


def test_training_mode_is_refused() -> None:
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedGraphError, match=r"TokenModel is in training mode; call model\.eval"),
    ):
        torch_compile(make_tiny().train())(make_ids(9))


def functional_dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.1)


def channel_dropout(x: Tensor) -> Tensor:
    return F.dropout1d(x, 0.1)


def noise(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


@pytest.mark.parametrize("function", [functional_dropout, channel_dropout, noise, nn.Dropout(0.1)])
def test_a_model_that_draws_random_numbers_is_refused_with_its_line(function: Callable[[Tensor], Tensor]) -> None:
    model = TokenModel(function)
    if isinstance(function, nn.Module):
        function.train()
    message = r"(?s)draws random numbers, as active dropout does.* at .*\.py:\d+ in .*call model\.eval\(\)"
    with torch.no_grad(), pytest.raises(UnsupportedGraphError, match=message):
        torch_compile(model)(make_ids(9))
    with pytest.raises(UnsupportedGraphError, match=message):
        pcp_compiler.inspect(model, (make_ids(9),), options(2))


def attention_dropout(x: Tensor) -> Tensor:
    heads = x[:, None]
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True, dropout_p=0.1)[:, 0]


def test_dropout_of_attention_is_refused() -> None:
    with torch.no_grad(), pytest.raises(UnsupportedGraphError, match=r"dropout_p is 0\.1; .*call model\.eval\(\)"):
        torch_compile(TokenModel(attention_dropout))(make_ids(9))


def test_dropout_in_eval_mode_is_fine() -> None:
    model, ids = TokenModel(nn.Dropout(0.1)), make_ids(9)
    with torch.no_grad():
        torch.testing.assert_close(torch_compile(model)(ids), model(ids), rtol=0, atol=1e-12)


def test_an_input_that_requires_grad_is_refused() -> None:
    model = nn.Identity().eval()
    compiled = torch_compile(lambda x: model(x) * 2, options={**options(2), "tokens": {"x": 1}})
    with pytest.raises(UnsupportedGraphError, match="input x requires grad; allowed: inference; detach it first"):
        compiled(torch.randn(1, 9, 4, requires_grad=True))


def test_parameters_that_require_grad_work_and_say_once_that_results_are_detached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="pcp_compiler"), torch.enable_grad():
        for function in (torch.tanh, torch.sigmoid):
            model, ids = TokenModel(function).requires_grad_(), make_ids(9)
            compiled = torch_compile(model, dynamic=False)
            got = compiled(ids)
            assert not got.requires_grad
            torch.testing.assert_close(got, model(ids).detach(), rtol=0, atol=1e-12)
            pcp_compiler.assert_sharded(compiled, calls=1, pcp_size=2)
    warnings = [record.message for record in caplog.records if record.name.startswith("pcp_compiler")]
    assert warnings == ["parameters require grad, but pcp_spec runs without gradients: results are detached"]

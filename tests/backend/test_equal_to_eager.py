"""Compiled models equal eager ones at all positions, and the sharded program is what ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import pcp_compiler
import pcp_compiler.integrations.transformers
from pcp_compiler.backends.compilation import Compilation
from pcp_compiler.config import load_config
from pcp_compiler.errors import BypassError, CallError, UnsupportedGraphError
from pcp_compiler.trace import trace_module
from tests.backend.plain_decoder import DecoderConfig, make_decoder
from tests.backend.support import check_equal, make_ids, make_llama, make_tiny, options, sharded_lengths, torch_compile

ONE_LAYER = DecoderConfig(num_layers=1)
PCP_SIZES = (1, 2, 3, 4, 8)
ATTENTIONS = ("sdpa", "pcp_spec")


def all_tensors(out: CausalLMOutputWithPast) -> list[Tensor]:
    """Return logits, K and V of a transformers result."""
    assert out.logits is not None and out.past_key_values is not None
    kv = [tensor for layer in out.past_key_values.layers for tensor in (layer.keys, layer.values)]
    return [out.logits, *kv]


def logits(out: CausalLMOutputWithPast) -> Sequence[Tensor]:
    assert out.logits is not None
    return [out.logits]


# ---------------------------------------------------------------------------------------------------------------------
# A plain decoder in float64


@pytest.mark.parametrize("threshold", [None, 0])
@pytest.mark.parametrize("pcp_size", PCP_SIZES)
def test_a_plain_decoder_equals_eager_at_all_positions_with_one_compilation(
    pcp_size: int, threshold: int | None
) -> None:
    model, lengths = make_decoder(), sharded_lengths(pcp_size)
    compiled = pcp_compiler.compile(model, options(pcp_size, min_tokens_to_shard=threshold))
    shortest = 2 if threshold == 0 else 2 * pcp_size
    records = check_equal(compiled, model, lengths, pcp_size, replicated=sum(n < shortest for n in lengths))
    assert len(pcp_compiler.compilations(compiled)) == 1
    for record in records:
        assert record.is_sharded == (pcp_size > 1 and record.num_tokens >= shortest)


def test_torch_compile_with_dynamic_compiles_once_for_all_lengths_from_two_up() -> None:
    model = make_decoder(ONE_LAYER)
    compiled = torch_compile(model, 4)
    check_equal(compiled, model, [2, 3, 4, 8, 9, 64, 129], 4)
    assert len(pcp_compiler.compilations(compiled)) == 1


def test_torch_compile_with_dynamic_serves_one_token_by_a_program_of_its_own() -> None:
    model = make_decoder(ONE_LAYER)
    compiled = torch_compile(model, 2)
    check_equal(compiled, model, [1, 2, 1, 7], 2, replicated=2)
    assert [(entry.num_calls, entry.num_sharded) for entry in pcp_compiler.compilations(compiled)] == [(2, 0), (2, 2)]


def test_a_call_without_dynamic_works_for_its_first_length_and_traces_again_for_the_second() -> None:
    model = make_decoder(ONE_LAYER)
    compiled = torch_compile(model, 2, dynamic=None)
    check_equal(compiled, model, [9], 2)
    with torch.no_grad():
        for num_tokens in (12, 5):
            ids = make_ids(num_tokens)
            torch.testing.assert_close(compiled(ids), model(ids), rtol=0, atol=1e-12)
    pcp_compiler.assert_sharded(compiled, calls=3, pcp_size=2)
    assert len(pcp_compiler.compilations(compiled)) == 2


def test_a_tied_head_equals_eager() -> None:
    model = make_decoder(DecoderConfig(num_layers=1, is_tied=True))
    check_equal(pcp_compiler.compile(model, options(3)), model, [7, 20], 3)


def test_prompts_of_64_tokens_and_heads_of_64_are_told_apart() -> None:
    model = make_decoder(DecoderConfig(head_dim=64, num_heads=2, num_kv_heads=1, num_layers=1))
    check_equal(torch_compile(model, 2, dynamic=False), model, [64], 2)


def test_a_batch_of_equal_lengths_equals_eager() -> None:
    model = make_decoder(ONE_LAYER)
    compiled = pcp_compiler.compile(model, options(3))
    for num_tokens in (9, 4, 2):
        ids = make_ids(num_tokens, batch=2)
        torch.testing.assert_close(compiled(ids), model(ids), rtol=0, atol=1e-12)
    pcp_compiler.assert_sharded(compiled, calls=3, pcp_size=3)


class HiddenStatesModel(nn.Module):
    """Takes hidden states [B, T, 16] instead of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, dtype=torch.float64)
        self.eval().requires_grad_(False)

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        out: Tensor = self.linear(inputs_embeds).sigmoid()
        return out


@pytest.mark.parametrize("by_name", [True, False])
def test_a_float_input_is_sharded_with_one_compilation_when_option_tokens_names_it(by_name: bool) -> None:
    model = HiddenStatesModel()
    compiled = pcp_compiler.compile(model, {**options(2), "tokens": {"inputs_embeds": 1}})
    for num_tokens in (9, 4, 17):
        x = torch.randn(1, num_tokens, 16, dtype=torch.float64)
        got = compiled(inputs_embeds=x) if by_name else compiled(x)
        torch.testing.assert_close(got, model(x), rtol=0, atol=1e-12)
    pcp_compiler.assert_sharded(compiled, calls=3, pcp_size=2)
    assert len(pcp_compiler.compilations(compiled)) == 1


def test_a_call_without_tokens_is_refused() -> None:
    compiled = pcp_compiler.compile(HiddenStatesModel(), {**options(2), "tokens": {"inputs_embeds": 1}})
    with pytest.raises(CallError, match=r"inputs_embeds has shape \(1, 0, 16\); allowed: at least 1 token"):
        compiled(torch.randn(1, 0, 16, dtype=torch.float64))


# ---------------------------------------------------------------------------------------------------------------------
# A test of equality is worth nothing when it cannot fail


def test_the_equality_check_fails_when_no_program_was_ever_compiled() -> None:
    model = make_tiny()
    with torch.compiler.set_stance("force_eager"), pytest.raises(BypassError, match="nothing was compiled"):
        check_equal(torch_compile(model), model, [9], 2)


def test_the_equality_check_fails_when_one_call_runs_the_original_model() -> None:
    model = make_tiny()
    compiled = torch_compile(model)
    with torch.no_grad():
        compiled(make_ids(9))
        with torch.compiler.set_stance("force_eager"):
            compiled(make_ids(9))
    with pytest.raises(AssertionError, match=r"ran 1 times for 2 calls: the original model ran"):
        pcp_compiler.assert_sharded(compiled, calls=2, pcp_size=2)


def test_the_equality_check_fails_when_the_forward_is_disabled() -> None:
    model = make_tiny()
    model.forward = torch.compiler.disable(model.forward)  # type: ignore[method-assign]
    with pytest.raises(BypassError, match=r"nothing was compiled.*disabled"):
        check_equal(torch_compile(model), model, [9], 2)


def test_the_equality_check_fails_when_another_backend_runs_the_model() -> None:
    model = make_tiny()
    with pytest.raises(BypassError, match="was not compiled with backend='pcp_spec'"):
        check_equal(torch.compile(model, backend="eager"), model, [9], 2)


def test_the_equality_check_fails_when_calls_that_should_be_sharded_are_replicated() -> None:
    model = make_tiny()
    with pytest.raises(AssertionError, match="0 of 1 calls ran sharded, expected 1"):
        check_equal(torch_compile(model, options=options(2, min_tokens_to_shard=10)), model, [9], 2)


# ---------------------------------------------------------------------------------------------------------------------
# transformers


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_llama_with_its_kv_cache_equals_eager(attention: str) -> None:
    model, eager, lengths = make_llama(attention, num_layers=2), make_llama(num_layers=2), sharded_lengths(4)
    compiled = pcp_compiler.compile(model, options(4))
    long = [n for n in lengths if n > 1]
    check_equal(compiled, eager, long, 4, atol=1e-5, select=all_tensors)
    assert len(pcp_compiler.compilations(compiled)) == 1
    one = make_ids(1)
    torch.testing.assert_close(compiled(one).logits, eager(one).logits.detach(), rtol=0, atol=1e-5)
    pcp_compiler.assert_sharded(compiled, calls=len(lengths), pcp_size=4, replicated=1)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_one_trace_of_a_llama_equals_eager_on_every_number_of_ranks(attention: str) -> None:
    model, eager = make_llama(attention), make_llama()
    kwargs: dict[str, Any] = {"use_cache": False, "return_dict": True}
    traced = trace_module(model, (make_ids(8),), kwargs)
    for pcp_size in PCP_SIZES:
        compilation = Compilation(load_config(options(pcp_size)), traced.trace)
        for num_tokens in sharded_lengths(pcp_size):
            ids = make_ids(num_tokens)
            got = traced.rebuild(compilation.run(traced.flat_inputs((ids,), kwargs)))
            torch.testing.assert_close(got.logits, eager(ids).logits.detach(), rtol=0, atol=1e-5)
            assert compilation.calls[-1].is_sharded == (pcp_size > 1 and num_tokens > 1)


def test_torch_compile_of_a_llama_with_its_defaults_restores_k_and_v() -> None:
    model = make_llama()
    compiled = torch_compile(model, options={"parallel": {"pcp_size": 4}})
    records = check_equal(compiled, model, [20, 33], 4, atol=1e-5, select=all_tensors)
    assert all(record.width < record.num_tokens for record in records)


def test_a_batch_of_prompts_through_a_llama_equals_eager() -> None:
    model = make_llama()
    compiled = pcp_compiler.compile(model, options(2))
    ids = make_ids(9, batch=2)
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits.detach(), rtol=0, atol=1e-5)
    pcp_compiler.assert_sharded(compiled, calls=1, pcp_size=2)


@pytest.mark.parametrize(("attention", "dtype"), [("sdpa", torch.int64), ("pcp_spec", torch.bool)])
def test_a_padding_mask_of_ones_works_and_one_that_hides_a_token_is_refused(attention: str, dtype: torch.dtype) -> None:
    model, ids = make_llama(attention), make_ids(12)
    compiled = pcp_compiler.compile(model, options(2))
    flags = torch.ones_like(ids).to(dtype)
    got = compiled(ids, attention_mask=flags).logits
    torch.testing.assert_close(got, make_llama()(ids).logits.detach(), rtol=0, atol=1e-5)
    flags[0, 0] = 0
    with pytest.raises(CallError, match="attention_mask: a padding mask that hides tokens is not supported; allowed"):
        compiled(ids, attention_mask=flags)
    pcp_compiler.assert_sharded(compiled, calls=1, pcp_size=2)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_packed_positions_are_refused_when_the_mask_depends_on_them(attention: str) -> None:
    model, ids = make_llama(attention), make_ids(12)
    compiled = pcp_compiler.compile(model, options(2))
    positions = torch.arange(12)[None]
    got = compiled(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, make_llama()(ids).logits.detach(), rtol=0, atol=1e-5)
    packed = torch.cat([positions[:, :6], positions[:, :6]], dim=1)
    with pytest.raises(CallError, match=r"position_ids: .*proven causal.*; allowed: consecutive positions"):
        compiled(ids, position_ids=packed, use_cache=False)


def test_positions_with_gaps_equal_eager_when_no_mask_depends_on_them() -> None:
    model, ids = make_llama(), make_ids(12)
    compiled = pcp_compiler.compile(model, options(2))
    positions = 3 * torch.arange(12)[None]
    got, expected = compiled(ids, position_ids=positions), model(ids, position_ids=positions)
    torch.testing.assert_close(got.logits, expected.logits.detach(), rtol=0, atol=1e-5)
    pcp_compiler.assert_sharded(compiled, calls=1, pcp_size=2)


def test_logits_of_the_last_row_are_fetched_without_gathering_all_rows() -> None:
    model = make_llama()
    compiled = pcp_compiler.compile(model, options(2))
    for num_tokens in (12, 17, 5):
        ids = make_ids(num_tokens)
        got, expected = compiled(ids, logits_to_keep=1, use_cache=False), model(ids, logits_to_keep=1)
        torch.testing.assert_close(got.logits, expected.logits.detach(), rtol=0, atol=1e-5)
    records = pcp_compiler.assert_sharded(compiled, calls=3, pcp_size=2)
    assert [collective.op for collective in records[-1].collectives] == ["gather_start", "restore_rows"]


# ---------------------------------------------------------------------------------------------------------------------
# The attention interface outside a compiled region is plain attention


def test_uncompiled_generation_with_the_interface_equals_sdpa() -> None:
    ids = make_ids(7)
    tokens = [make_llama(name).generate(ids, max_new_tokens=5, do_sample=False) for name in ATTENTIONS]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("is_bool", [True, False])
def test_a_whole_mask_reaches_the_attention_of_the_interface(is_bool: bool) -> None:
    ids = make_ids(6)
    prefix = torch.ones(6, 6, dtype=torch.bool).tril() | (torch.arange(6) < 3)
    mask = prefix if is_bool else torch.zeros(6, 6).masked_fill(~prefix, float("-inf"))
    got, expected = (make_llama(name)(ids, attention_mask=mask[None, None]).logits for name in ATTENTIONS)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_packed_prompts_through_the_uncompiled_interface_do_not_see_each_other() -> None:
    ids, positions = make_ids(8), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    got, expected = (make_llama(name)(ids, position_ids=positions, use_cache=False).logits for name in ATTENTIONS)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def make_encoder_like_llama() -> LlamaForCausalLM:
    model = make_llama("pcp_spec")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


def test_a_layer_that_says_it_is_not_causal_is_refused() -> None:
    compiled = pcp_compiler.compile(make_encoder_like_llama(), options(2))
    with pytest.raises(UnsupportedGraphError, match="attention without a causal mask"):
        compiled(make_ids(9))


@pytest.mark.parametrize("attention", ["sdpa", "pcp_spec"])
def test_one_token_after_longer_prompts_equals_eager(attention: str) -> None:
    model = make_llama(attention)
    compiled = pcp_compiler.compile(model, options(2))
    lengths = [5, 1, 2, 1, 9]
    for num_tokens in lengths:
        ids = make_ids(num_tokens)
        with torch.no_grad():
            expected = model(ids).logits
        assert (compiled(ids).logits - expected).abs().max() <= 1e-5
    pcp_compiler.assert_sharded(compiled, calls=len(lengths), pcp_size=2, replicated=lengths.count(1))

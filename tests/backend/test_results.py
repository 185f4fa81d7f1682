"""What a compiled model returns, and which weights and inputs it reads."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pcp_compiler
from tests.backend.plain_decoder import DecoderConfig, make_decoder
from tests.backend.support import TokenModel, check_equal, make_ids, make_tiny, options, torch_compile


def assert_equal(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pcp_size", [1, 2])
def test_results_and_their_views_are_not_overwritten_by_later_calls(pcp_size: int) -> None:
    model = make_tiny()
    compiled = pcp_compiler.compile(model, options(pcp_size))
    results = [compiled(make_ids(9)), compiled(make_ids(9).flip(1)), compiled(make_ids(5))]
    kept, views = [result.clone() for result in results], [result[:, -1:] for result in results]
    for num_tokens in (9, 5, 9):
        compiled(make_ids(num_tokens).roll(1))
    for result, copy, view in zip(results, kept, views, strict=True):
        assert torch.equal(result, copy)
        assert torch.equal(view, copy[:, -1:])


def test_a_result_that_the_caller_changes_does_not_reach_later_calls() -> None:
    model, ids = make_tiny(), make_ids(9)
    compiled = pcp_compiler.compile(model, options(2))
    compiled(ids).zero_()
    assert_equal(compiled(ids), model(ids))


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def test_tied_weights_are_one_input() -> None:
    inputs = {}
    for is_tied in (True, False):
        model = make_decoder(DecoderConfig(num_layers=1, is_tied=is_tied))
        compiled = torch_compile(model, dynamic=False)
        check_equal(compiled, model, [9], 2)
        trace = pcp_compiler.compilations(compiled)[0].trace
        inputs[is_tied] = [entry.name for entry in trace.inputs if entry.kind == "weight"]
    assert set(inputs[False]) - set(inputs[True]) == {"head_weight"}
    assert len(inputs[True]) == len(set(inputs[True])) == len(inputs[False]) - 1


def test_untying_weights_is_seen() -> None:
    model, ids = make_decoder(DecoderConfig(num_layers=1, is_tied=True)), make_ids(9)
    compiled = pcp_compiler.compile(model, options(2))
    assert_equal(compiled(ids), model(ids))
    model.head.weight = nn.Parameter(2 * model.head.weight, requires_grad=False)
    assert_equal(compiled(ids), model(ids))


def test_a_weight_changed_in_place_is_seen_without_another_compilation() -> None:
    model, ids = make_tiny(), make_ids(9)
    compiled = pcp_compiler.compile(model, options(2))
    before = compiled(ids)
    model.linear.weight.mul_(2)
    after = compiled(ids)
    assert not torch.allclose(before, after)
    assert_equal(after, model(ids))
    assert len(pcp_compiler.compilations(compiled)) == 1


def test_a_weight_replaced_by_another_of_its_shape_is_seen_without_another_compilation() -> None:
    model, ids = make_tiny(), make_ids(9)
    compiled = pcp_compiler.compile(model, options(2))
    before = compiled(ids)
    model.linear.weight = nn.Parameter(model.linear.weight.flip(0), requires_grad=False)
    after = compiled(ids)
    assert not torch.allclose(before, after)
    assert_equal(after, model(ids))
    assert len(pcp_compiler.compilations(compiled)) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Structure


class StructuredModel(nn.Module):
    """Returns tensors in containers, beside values that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TokenModel(torch.tanh)
        self.eval()

    def forward(self, input_ids: Tensor) -> dict[str, Any]:
        x = self.inner(input_ids)
        return {
            "pair": (x, [x * 2]), "nothing": None, "number": 3, "text": "t", "ids": input_ids, "last": x[:, -1],
            "same": x, "num_tokens": input_ids.shape[1],
        }  # fmt: skip


def test_dicts_tuples_lists_and_values_that_are_no_tensors_keep_their_structure() -> None:
    model = StructuredModel()
    compiled = torch_compile(model)
    for num_tokens in (9, 4):
        ids = make_ids(num_tokens)
        got, expected = compiled(ids), model(ids)
        assert list(got) == list(expected)
        assert isinstance(got["pair"], tuple)
        assert isinstance(got["pair"][1], list)
        assert_equal(got["pair"][0], expected["pair"][0])
        assert_equal(got["pair"][1][0], expected["pair"][1][0])
        assert_equal(got["last"], expected["last"])
        assert [got[name] for name in ("nothing", "number", "text", "num_tokens")] == [None, 3, "t", num_tokens]
        assert got["same"] is got["pair"][0]
        assert got["ids"] is ids
    pcp_compiler.assert_sharded(compiled, calls=2, pcp_size=2)


def test_a_traced_module_rebuilds_the_structure_too() -> None:
    from pcp_compiler.trace import trace_module

    model, ids = StructuredModel(), make_ids(9)
    model.forward = lambda input_ids: {"pair": (model.inner(input_ids), None), "text": "t"}  # type: ignore[method-assign]
    traced = trace_module(model, (ids,))
    compilation = pcp_compiler.inspect(model, (ids,), options(2))
    got = traced.rebuild(compilation.run(traced.flat_inputs((ids,), {})))
    assert_equal(got["pair"][0], model.inner(ids))
    assert (got["pair"][1], got["text"]) == (None, "t")


# ---------------------------------------------------------------------------------------------------------------------
# Inputs


def transposed_ids(num_tokens: int) -> Tensor:
    return make_ids(2 * num_tokens).view(num_tokens, 2).t()


def sliced_ids(num_tokens: int) -> Tensor:
    return make_ids(2 * num_tokens)[:, ::2]


def expanded_ids(num_tokens: int) -> Tensor:
    return make_ids(num_tokens).expand(3, num_tokens)


@pytest.mark.parametrize("make", [transposed_ids, sliced_ids, expanded_ids])
@pytest.mark.parametrize("is_ours", [True, False])
def test_ids_of_any_strides_equal_eager(make: Any, is_ours: bool) -> None:
    model = make_tiny()
    compiled = pcp_compiler.compile(model, options(2)) if is_ours else torch_compile(model)
    for num_tokens in (9, 4):
        ids = make(num_tokens)
        assert_equal(compiled(ids), model(ids))
    pcp_compiler.assert_sharded(compiled, calls=2, pcp_size=2)


def test_ids_of_another_integer_type_equal_eager() -> None:
    model = make_tiny()
    compiled = pcp_compiler.compile(model, options(2))
    ids = make_ids(9).int()
    assert_equal(compiled(ids), model(ids))
    pcp_compiler.assert_sharded(compiled, calls=1, pcp_size=2)


# ---------------------------------------------------------------------------------------------------------------------
# Several compiled models


def test_two_models_with_one_forward_alternate_and_each_counts_its_own_calls() -> None:
    models = [make_tiny(), make_tiny()]
    models[1].linear.weight.mul_(2)
    compiled = [torch_compile(model) for model in models]
    for num_tokens in (9, 4, 9):
        ids = make_ids(num_tokens)
        got = [each(ids) for each in compiled]
        assert not torch.allclose(*got)
        for result, model in zip(got, models, strict=True):
            assert_equal(result, model(ids))
    compiled[1](make_ids(4))
    for each, calls in zip(compiled, (3, 4), strict=True):
        pcp_compiler.assert_sharded(each, calls=calls, pcp_size=2)


def test_compilations_of_one_model_for_several_rank_counts_are_told_apart() -> None:
    model, ids = make_tiny(), make_ids(20)
    compiled = {pcp_size: pcp_compiler.compile(model, options(pcp_size)) for pcp_size in (1, 2, 3, 4)}
    for _ in range(2):
        for each in compiled.values():
            assert_equal(each(ids), model(ids))
    for pcp_size, each in compiled.items():
        records = pcp_compiler.assert_sharded(each, calls=2, pcp_size=pcp_size)
        assert {len(record.rows_per_rank) for record in records} == {pcp_size}


def test_a_compiled_model_is_freed_with_its_compilations() -> None:
    import weakref

    model = make_tiny()
    compiled = torch_compile(model)
    compiled(make_ids(9))
    watched = weakref.ref(pcp_compiler.compilations(compiled)[0]), weakref.ref(model)
    del model, compiled
    torch.compiler.reset()
    gc.collect()
    assert [ref() for ref in watched] == [None, None]

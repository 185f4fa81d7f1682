"""Every private name of torch that we use does what we use it for; a new torch release fails here first."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from functorch.compile import aot_module_simplified, make_boxed_func
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from pcp_compiler import torch_private
from pcp_compiler.backends.pcp_spec import backend

Probe = Callable[[fx.GraphModule], object]


class Model(nn.Module):
    """x [T, 4] -> [T, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def scale(x: Tensor) -> Tensor:
    return x * 2


def print_between(x: Tensor) -> Tensor:
    y = x * 2
    print("between")
    return y + 1


def probe(target: Any, *inputs: Tensor, look: Probe, **arguments: Any) -> list[Any]:
    """Compile a target with a backend that looks and runs the graph as it is; return what it saw at each compile."""
    seen: list[Any] = []

    def looking_backend(gm: fx.GraphModule, _inputs: Sequence[object]) -> Callable[..., Any]:
        seen.append(look(gm))
        return gm.forward

    compiled: Any = torch.compile(target, backend=looking_backend, **arguments)
    compiled(*inputs)
    return seen


# ---------------------------------------------------------------------------------------------------------------------
# Where a compile comes from


def test_graph_break_names_the_line_of_a_piece_and_nothing_for_a_whole_frame() -> None:
    assert probe(scale, torch.ones(3), look=torch_private.graph_break) == [None]
    first, second = probe(print_between, torch.ones(3), look=torch_private.graph_break)
    assert (first.filename, first.name, first.line) == (__file__, "print_between", 'print("between")')
    assert second is None


def test_graph_break_of_a_graph_that_no_dynamo_made_is_none() -> None:
    assert torch_private.graph_break(fx.symbolic_trace(scale)) is None


def test_compile_frame_names_the_compiled_module_or_function() -> None:
    model = Model()
    for target in (model, scale):
        (frame,) = probe(target, torch.ones(3, 4), look=lambda gm: torch_private.compile_frame())
        assert (frame.target, frame.foreign) == (target, None)


def test_compile_frame_names_a_module_of_torchs_own_files() -> None:
    linear = nn.Linear(4, 4)
    (frame,) = probe(linear, torch.ones(3, 4), look=lambda _: torch_private.compile_frame())
    assert frame.target is linear


def test_compile_frame_names_what_runs_uncompiled_in_between() -> None:
    def outer(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return scale(x)

    model = Model()
    model.forward = lambda x: outer(x)  # type: ignore[method-assign]
    (frame,) = probe(model, torch.ones(3, 4), look=lambda gm: torch_private.compile_frame())
    assert frame.target is model
    assert frame.foreign.filename == __file__


def test_compile_frame_finds_the_caller_of_compiled_code_that_another_model_shares() -> None:
    seen: list[object] = []

    def watching_backend(gm: fx.GraphModule, _inputs: Sequence[object]) -> Callable[..., Any]:
        def run(*args: object) -> Any:
            frame = torch_private.compile_frame()
            assert frame is not None
            seen.append(frame.target)
            return gm.forward(*args)

        return run

    models = [Model(), Model()]
    for model in models:
        torch.compile(model, backend=watching_backend)(torch.ones(3, 4))
    assert len(seen) == 2
    assert [got is model for got, model in zip(seen, models, strict=True)] == [True, True]


def test_compile_frame_outside_of_torch_compile_is_none() -> None:
    assert torch_private.compile_frame() is None


# ---------------------------------------------------------------------------------------------------------------------
# What torch.compile was given


def compile_itself(model: nn.Module, **arguments: Any) -> nn.Module:
    model.compile(**arguments)
    return model


def test_compiled_target_of_modules_functions_and_bound_methods() -> None:
    model = Model()
    assert torch_private.compiled_target(torch.compile(model, backend="pcp_spec")) is model
    assert torch_private.compiled_target(torch.compile(scale, backend="pcp_spec")) is scale
    assert torch_private.compiled_target(torch.compile(model.forward, backend="pcp_spec")) is model
    assert torch_private.compiled_target(compile_itself(model, backend="pcp_spec")) is model
    linear = nn.Linear(4, 4)  # of torch's own files, which Dynamo wraps
    assert torch_private.compiled_target(torch.compile(linear, backend="pcp_spec")) is linear


def test_compiled_target_of_what_was_not_compiled_is_none() -> None:
    assert [torch_private.compiled_target(thing) for thing in (Model(), scale, 3)] == [None] * 3


def test_compiled_options_are_those_given_to_our_backend() -> None:
    options: dict[str, Any] = {"parallel": {"pcp_size": 2}}
    for compiled in (
        torch.compile(Model(), backend="pcp_spec", options=options),
        torch.compile(scale, backend="pcp_spec", options=options),
        compile_itself(Model(), backend="pcp_spec", options=options),
    ):
        assert torch_private.compiled_options(compiled) == options
    assert torch_private.compiled_options(torch.compile(scale, backend="pcp_spec")) == {}


def test_compiled_options_of_other_backends_and_of_what_was_not_compiled_are_none() -> None:
    others = [torch.compile(scale, backend="eager"), torch.compile(Model(), backend="eager"), scale, Model(), 3]
    assert [torch_private.compiled_options(other) for other in others] == [None] * 5


def test_the_entry_point_gives_the_one_backend_object() -> None:
    assert "pcp_spec" in torch.compiler.list_backends()
    assert torch._dynamo.lookup_backend("pcp_spec") is backend


def test_runs_untraced_under_tells_our_wrapper_from_others() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(torch_private.runs_untraced_under("pcp_spec"))
        return x

    disabled: Callable[[Tensor], Tensor] = torch.compiler.disable(look)

    def outer(x: Tensor) -> Tensor:
        return disabled(x)

    outer(torch.ones(3))
    torch.compile(outer, backend="eager")(torch.ones(3))
    torch.compile(outer, backend="pcp_spec")(torch.ones(3))
    assert seen == [False, False, True]


# ---------------------------------------------------------------------------------------------------------------------
# Dynamo's settings


def test_is_last_recompile_at_the_compile_that_fills_the_cache() -> None:
    seen: list[bool] = []

    def looking_backend(gm: fx.GraphModule, _inputs: Sequence[object]) -> Callable[..., Any]:
        seen.append(torch_private.is_last_recompile())
        return gm.forward

    compiled = torch.compile(scale, backend=looking_backend, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=3):
        for size in (3, 4, 5, 6, 7):
            compiled(torch.ones(size))
    assert seen == [False, False, True]  # the compiles after it never reach a backend


def test_is_last_recompile_outside_of_a_compile_is_false() -> None:
    assert not torch_private.is_last_recompile()


def test_recompile_limit_and_suppressed_errors_are_read_when_asked() -> None:
    with torch._dynamo.config.patch(recompile_limit=5, suppress_errors=True):
        assert torch_private.recompile_limit() == 5
        assert torch_private.errors_are_suppressed()
    assert torch_private.recompile_limit() == torch._dynamo.config.recompile_limit != 5
    assert not torch_private.errors_are_suppressed()


# ---------------------------------------------------------------------------------------------------------------------
# Placeholders


def test_source_name_and_example_of_weights_inputs_and_sizes() -> None:
    model, x = Model(), torch.ones(3, 4)
    torch._dynamo.mark_dynamic(x, 0)

    def look(gm: fx.GraphModule) -> dict[str, object]:
        placeholders = gm.graph.find_nodes(op="placeholder")
        return {torch_private.source_name(node): torch_private.source_example(node) for node in placeholders}

    (found,) = probe(model, x, look=look)
    assert found["L['x']"] is x
    assert found["L['self']._parameters['weight']"] is model.weight
    (size,) = set(found) - {"L['x']", "L['self']._parameters['weight']"}
    assert ".size()[0]" in size
    assert not isinstance(found[size], Tensor)


def test_a_placeholder_without_a_source_has_its_own_name() -> None:
    node = fx.symbolic_trace(scale).graph.find_nodes(op="placeholder")[0]
    assert (torch_private.source_name(node), torch_private.source_example(node)) == ("x", None)


# ---------------------------------------------------------------------------------------------------------------------
# Fake tensors and symbols


def test_real_tensors_switches_a_fake_mode_off_and_on_again() -> None:
    with torch_private.fake_mode_with_symbols():
        with torch_private.real_tensors():
            assert torch.ones(3).sum().item() == 3
        assert isinstance(torch.ones(3), torch._subclasses.FakeTensor)


def test_one_trace_settings_serve_lengths_from_one_up_with_one_compile() -> None:
    graphs: list[fx.GraphModule] = []

    def looking_backend(gm: fx.GraphModule, _inputs: Sequence[object]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(Model(), backend=looking_backend)
    for size in (1, 4, 2, 700):
        x = torch.ones(size, 4)
        torch_private.mark_dynamic(x, 0)
        with torch_private.one_trace_settings():
            compiled(x)
    assert len(graphs) == 1


def test_one_trace_settings_end_with_their_block() -> None:
    before = torch._dynamo.config.specialize_float, torch.fx.experimental._config.use_duck_shape
    with torch_private.one_trace_settings():
        assert torch._dynamo.config.specialize_float
        assert not torch.fx.experimental._config.use_duck_shape
    assert (torch._dynamo.config.specialize_float, torch.fx.experimental._config.use_duck_shape) == before


def test_fake_inputs_have_symbols_at_dynamic_dims_also_for_sizes_of_one_and_equal_sizes() -> None:
    mode = torch_private.fake_mode_with_symbols()
    first = torch_private.fake_input(mode, torch.ones(1, 5), frozenset({0, 1}), "first")
    second = torch_private.fake_input(mode, torch.ones(5, 3), frozenset({0}), "second")
    symbols = [torch_private.size_expression(size) for size in (*first.shape, second.shape[0])]
    assert all(symbol.is_Symbol for symbol in symbols)
    assert len(set(symbols)) == 3
    assert second.shape[1] == 3
    fixed = torch_private.fake_input(mode, torch.ones(5, 3), frozenset(), "fixed")
    assert [type(size) for size in fixed.shape] == [int, int]


def test_a_fake_input_keeps_its_tensor_alive_no_longer_than_itself() -> None:
    mode, tensor = torch_private.fake_mode_with_symbols(), torch.ones(5)
    fake = torch_private.fake_input(mode, tensor, frozenset({0}), "x")
    watched = weakref.ref(tensor)
    del tensor
    assert watched() is None
    assert fake.dtype == torch.float32


@pytest.mark.parametrize("has_mode", [True, False])
def test_a_new_row_symbol_stands_for_any_number_from_zero_up(has_mode: bool) -> None:
    given = torch_private.fake_mode_with_symbols() if has_mode else None
    mode, width = torch_private.new_row_symbol(given)
    assert given is None or mode is given
    assert torch_private.size_expression(width).is_Symbol
    with mode:
        assert torch.empty(width, 4).view(width, 2, 2).shape[1:] == (2, 2)
    assert not torch_private.is_at_most_one(width)
    assert not torch_private.is_surely_equal(width, 3)


def test_is_at_most_one_knows_numbers_and_symbols() -> None:
    mode = torch_private.fake_mode_with_symbols()
    size = torch_private.fake_input(mode, torch.ones(5), frozenset({0}), "x").shape[0]
    assert [torch_private.is_at_most_one(n) for n in (0, 1, 2)] == [True, True, False]
    assert not torch_private.is_at_most_one(size)


def test_is_surely_equal_knows_numbers_and_symbols() -> None:
    mode = torch_private.fake_mode_with_symbols()
    a, b, c = (torch_private.fake_input(mode, torch.ones(n), frozenset({0}), f"x{n}").shape[0] for n in (5, 6, 7))
    assert torch_private.is_surely_equal(3, 3)
    assert not torch_private.is_surely_equal(3, 4)
    assert torch_private.is_surely_equal(a, a)
    assert not torch_private.is_surely_equal(b, c)


def test_size_expressions_go_to_sympy_and_back() -> None:
    mode = torch_private.fake_mode_with_symbols()
    size = torch_private.fake_input(mode, torch.ones(5), frozenset({0}), "x").shape[0]
    symbol = torch_private.size_expression(size)
    assert torch_private.size_expression(2 * size + 1) == 2 * symbol + 1
    assert torch_private.size_expression(7) == sympy.Integer(7)
    assert torch_private.size_from_expression(mode, sympy.Integer(7)) == 7
    back = torch_private.size_from_expression(mode, 3 * symbol)
    assert isinstance(back, torch.SymInt)
    assert torch_private.size_expression(back) == 3 * symbol


def test_size_now_is_the_value_of_the_traced_call() -> None:
    mode = torch_private.fake_mode_with_symbols()
    size = torch_private.fake_input(mode, torch.ones(5), frozenset({0}), "x").shape[0]
    assert [torch_private.size_now(value) for value in (size, 2 * size, 7)] == [5, 10, 7]
    assert [torch_private.is_number(value) for value in (size, 2 * size, 7)] == [False, False, True]
    _, width = torch_private.new_row_symbol(mode)
    assert torch_private.size_now(width) is width


def test_a_class_that_handles_ops_itself_is_told_from_one_that_does_not() -> None:
    class Named(Tensor):
        pass

    plain = torch.ones(3)
    assert not any(map(torch_private.overrides_dispatch, (plain, nn.Parameter(plain), plain.as_subclass(Named))))
    assert torch_private.overrides_dispatch(torch_private.fake_mode_with_symbols().from_tensor(plain))


def test_inputs_that_are_written_in_place_are_known_inside_an_aot_compiler() -> None:
    seen: list[list[int]] = []

    def watching_compiler(gm: fx.GraphModule, _inputs: Sequence[object]) -> Callable[..., Any]:
        seen.append(torch_private.mutated_inputs())
        return make_boxed_func(gm.forward)  # type: ignore[no-any-return]

    def add_to_second(x: Tensor, y: Tensor) -> Tensor:
        y += x
        return x * 2

    def watching_backend(gm: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., Any]:
        return aot_module_simplified(gm, inputs, fw_compiler=watching_compiler)  # type: ignore[no-any-return]

    for function in (scale, add_to_second):
        arguments = [torch.ones(3) for _ in signature(function).parameters]
        torch.compile(function, backend=watching_backend)(*arguments)
    assert [len(positions) for positions in seen] == [0, 1]


def traced_fault(function: Callable[[Tensor], object], x: Tensor) -> BaseException:
    """Return what tracing a function raises."""
    mode = torch_private.fake_mode_with_symbols()
    with pytest.raises(Exception) as caught, mode:
        make_fx(function)(mode.from_tensor(x))
    return caught.value


def test_faults_of_tracing_are_told_apart() -> None:
    value = traced_fault(lambda x: x if x.sum() > 0 else -x, torch.ones(3))
    devices = traced_fault(lambda x: x @ torch.ones(3, 2, device="meta"), torch.ones(4, 3))
    other = traced_fault(lambda x: x.view(5), torch.ones(3))
    assert [torch_private.value_was_read(fault) for fault in (value, devices, other)] == [True, False, False]
    assert [torch_private.devices_differ(fault) for fault in (value, devices, other)] == [False, True, False]


def test_an_active_profiler_is_seen() -> None:
    assert not torch_private.profiler_is_active()
    with torch.profiler.profile():
        assert torch_private.profiler_is_active()
    assert not torch_private.profiler_is_active()


def test_an_artifact_reaches_the_structured_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    trace_log = torch._logging._internal.trace_log
    monkeypatch.setattr(trace_log, "handlers", [])
    assert not torch_private.is_structured_trace_on()
    monkeypatch.setattr(trace_log, "handlers", [handler])
    assert torch_private.is_structured_trace_on()
    torch_private.add_trace_artifact("pcp.01.x.after", "the graph")
    assert [record.payload for record in records] == ["the graph"]  # type: ignore[attr-defined]
    assert records[0].metadata["artifact"] == {"name": "pcp.01.x.after", "encoding": "string"}  # type: ignore[attr-defined]


def test_a_torch_without_structured_traces_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._logging, "trace_structured")
    with pytest.warns(UserWarning, match="TORCH_TRACE: torch .* does not take pcp.01.x.after"):
        torch_private.add_trace_artifact("pcp.01.x.after", "the graph")


def test_composite_ops_keep_sizes_symbolic_while_a_module_is_traced() -> None:
    mode = torch_private.fake_mode_with_symbols()
    x = torch_private.fake_input(mode, torch.zeros(1, 5, 8), frozenset({1}), "x")
    weight = torch_private.fake_input(mode, torch.zeros(4, 8), frozenset(), "weight")
    with mode, torch_private.symbolic_composite_ops():
        out = torch.nn.functional.linear(x, weight)
    assert not torch_private.is_number(out.shape[1])


def test_grouped_matmuls_are_known_by_every_name() -> None:
    assert torch_private.is_grouped_mm(torch._grouped_mm)
    assert not torch_private.is_grouped_mm(torch.mm)


def test_every_function_of_the_module_is_named_in_a_test() -> None:
    functions = [
        name for name, value in vars(torch_private).items()
        if getattr(value, "__module__", "") == torch_private.__name__ and callable(value) and name.islower()
    ]  # fmt: skip
    source = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("*.py"))
    untested = [name for name in functions if name[0] != "_" and f"torch_private.{name}" not in source]
    assert untested == []
    assert len(functions) > 20

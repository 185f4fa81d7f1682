"""`trace_module`: what a forward writes in place, and the source lines of the graph."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pcp_compiler.errors import UnsupportedGraphError
from pcp_compiler.trace import paused_gc, source_line, trace_module

Lines = Callable[..., Tensor]
"""model, ids [B, T], embedded ids [B, T, 8] -> [B, T, 8]."""


class Writer(nn.Module):
    """An embedding, some lines that write in place, a linear layer."""

    count: Tensor
    plain: Tensor

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(8))
        self.plain = torch.ones(8)
        self.lines: Lines = lines
        self.eval().requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> [B, T, 8]."""
        out: Tensor = self.linear(self.lines(self, ids, self.embedding(ids)))
        return out


def add_in_place(_model: Writer, _ids: Tensor, x: Tensor) -> Tensor:
    x += 1
    return x


def write_views(_model: Writer, _ids: Tensor, x: Tensor) -> Tensor:
    x[..., :4].mul_(2)
    x[:, :, 1] = 0
    return x


def put_by_index(_model: Writer, _ids: Tensor, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[..., torch.tensor([1, 3])] = x[..., :2]
    return y


def write_out(_model: Writer, _ids: Tensor, x: Tensor) -> Tensor:
    torch.mul(x, 2, out=x)
    return x


@pytest.mark.parametrize("lines", [add_in_place, write_views, put_by_index, write_out])
def test_writes_to_intermediate_values_are_traced_without_mutation(lines: Lines) -> None:
    model = Writer(lines)
    traced = trace_module(model, (torch.tensor([[1, 2, 3]]),))
    calls = [node for node in traced.trace.graph_module.graph.nodes if node.op == "call_function"]
    assert not [n for n in calls if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable]
    ids = torch.tensor([[1, 7, 9, 10, 2]])
    result = traced.rebuild(traced.trace.graph_module(*traced.flat_inputs((ids,), {})))
    assert torch.equal(result, model(ids))
    assert any("test_trace.py" in source_line(node) for node in calls), "the second trace lost the source lines"


def count_calls(model: Writer, _ids: Tensor, x: Tensor) -> Tensor:
    model.count += 1
    return x + model.count


def write_buffer_view(model: Writer, _ids: Tensor, x: Tensor) -> Tensor:
    model.count.chunk(2)[0].add_(1)
    return x


def write_weight(model: Writer, _ids: Tensor, x: Tensor) -> Tensor:
    model.linear.weight.t().mul_(2)
    return x


def write_input(_model: Writer, ids: Tensor, x: Tensor) -> Tensor:
    ids.clamp_(max=5)
    return x


def write_input_as_out(_model: Writer, ids: Tensor, x: Tensor) -> Tensor:
    torch.add(ids, 1, out=ids)
    return x


def write_constant(model: Writer, _ids: Tensor, x: Tensor) -> Tensor:
    model.plain.add_(1)
    return x + model.plain


@pytest.mark.parametrize(
    ("lines", "name", "code"),
    [
        (count_calls, "count", "model.count += 1"),
        (write_buffer_view, "count", "model.count.chunk(2)[0].add_(1)"),
        (write_weight, "linear.weight", "model.linear.weight.t().mul_(2)"),
        (write_input, "ids", "ids.clamp_(max=5)"),
        (write_input_as_out, "ids", "torch.add(ids, 1, out=ids)"),
        (write_constant, "_tensor_constant0", "model.plain.add_(1)"),
    ],
)
def test_a_write_to_an_input_a_weight_or_a_constant_is_refused_with_its_line(
    lines: Lines, name: str, code: str
) -> None:
    with pytest.raises(UnsupportedGraphError) as caught:
        trace_module(Writer(lines), (torch.tensor([[1, 2, 3]]),))
    message = str(caught.value)
    assert message.startswith(f"{name}: the module writes into this tensor in place\n  at ")
    assert message.splitlines()[1].endswith(f": {code}")
    assert message.endswith("return the new value instead")


def assign_buffer(model: Writer, _ids: Tensor, x: Tensor) -> Tensor:
    model.count = model.count + 1
    return x


def assign_attribute(model: Writer, _ids: Tensor, x: Tensor) -> Tensor:
    model.plain = x.mean((0, 1))
    return x


@pytest.mark.parametrize(("lines", "name"), [(assign_buffer, "count"), (assign_attribute, "plain")])
def test_an_assigned_tensor_is_refused_and_the_model_stays_as_it_was(lines: Lines, name: str) -> None:
    model = Writer(lines)
    before = getattr(model, name)
    with pytest.raises(UnsupportedGraphError, match=f"^{name}: the module assigns .* in forward, which would be lost"):
        trace_module(model, (torch.tensor([[1, 2, 3]]),))
    assert getattr(model, name) is before


def test_every_op_knows_the_line_of_the_model_that_called_it() -> None:
    traced = trace_module(Writer(lambda _model, _ids, x: x * x), (torch.tensor([[1, 2, 3]]),))
    lines = {str(n.target): source_line(n) for n in traced.trace.graph_module.graph.nodes if n.op == "call_function"}
    assert "lambda _model, _ids, x: x * x" in lines["aten.mul.Tensor"]
    assert "self.linear(self.lines" in lines["aten.addmm.default"]
    assert "self.linear(self.lines" in lines["aten.embedding.default"]


def test_two_threads_that_pause_the_collector_leave_it_on() -> None:
    assert gc.isenabled()
    inside, done = threading.Barrier(2), threading.Barrier(2)

    def pause() -> None:
        with paused_gc():
            inside.wait(5)
            assert not gc.isenabled()
            done.wait(5)

    threads = [threading.Thread(target=pause) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

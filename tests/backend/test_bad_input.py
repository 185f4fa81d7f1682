"""Bad models and bad calls: one clear error, the same by torch.compile and by us, and the next good call works.

Options are in tests/test_config.py, graph breaks and training in test_bypass.py, masks and positions in
test_token_mixing.py and test_equal_to_eager.py, dump folders in test_dump.py.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

import pcp_compiler
from pcp_compiler.errors import CallError, UnsupportedGraphError
from pcp_compiler.trace import trace_module
from tests.backend.support import TokenModel, causal_attention, make_ids, make_llama, make_tiny, options, torch_compile

Route = Callable[[Any], Any]


def our_compile(model: Any) -> Any:
    return pcp_compiler.compile(model, options(2))


def inspecting(model: Any) -> Callable[..., Any]:
    return lambda *args: pcp_compiler.inspect(model, args, options(2))


BOTH = pytest.mark.parametrize("route", [torch_compile, our_compile])
ALL = pytest.mark.parametrize("route", [torch_compile, our_compile, inspecting])


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, which wrappers of torch.distributed need."""
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    dist.destroy_process_group()


def check_good_call(compiled: Any, model: nn.Module, *, calls: int = 1) -> None:
    """Check that a call equals eager and ran sharded; `calls` is how many have worked, this one included."""
    ids = make_ids(11)
    torch.testing.assert_close(compiled(ids), model(ids), rtol=0, atol=1e-12)
    pcp_compiler.assert_sharded(compiled, calls=calls, pcp_size=2)


# ---------------------------------------------------------------------------------------------------------------------
# Token inputs


class TwoInputs(TokenModel):
    """Two embedded inputs of one length, added."""

    def forward(self, input_ids: Tensor, type_ids: Tensor | None = None) -> Tensor:
        """input_ids [B, T], type_ids [B, T] -> [B, T, 16]."""
        out: Tensor = super().forward(input_ids)
        if type_ids is None:
            return out
        types = self.embedding(type_ids)
        return out + types if types.shape == out.shape else torch.cat([out, types], dim=1)


@ALL
def test_token_inputs_of_different_length_are_named_with_their_lengths(route: Route) -> None:
    model = TwoInputs(causal_attention)
    compiled = route(model)
    with pytest.raises(UnsupportedGraphError, match=r"different lengths: input_ids has 9, type_ids has 7; .*tokens"):
        compiled(make_ids(9), make_ids(7))
    if route is not inspecting:
        check_good_call(compiled, model)


@BOTH
def test_token_inputs_that_differ_in_a_later_call_are_refused_too(route: Route) -> None:
    model = TwoInputs(causal_attention)
    compiled = route(model)
    torch.testing.assert_close(compiled(make_ids(9), make_ids(9)), model(make_ids(9), make_ids(9)), rtol=0, atol=1e-12)
    with pytest.raises(UnsupportedGraphError, match="different lengths: input_ids has 9, type_ids has 7"):
        compiled(make_ids(9), make_ids(7))
    check_good_call(compiled, model, calls=2)


class ApartInputs(TokenModel):
    """Two embedded inputs that never meet."""

    def forward(self, input_ids: Tensor, type_ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """input_ids [B, T], type_ids [B, T] -> two times [B, T, 16]."""
        return super().forward(input_ids), self.embedding(type_ids)


def test_a_trace_without_guards_checks_the_lengths_of_a_call_and_keeps_inputs_apart() -> None:
    model, ids = ApartInputs(causal_attention), make_ids(9)
    traced = trace_module(model, (ids, ids))  # one tensor twice is still two inputs
    compilation = pcp_compiler.inspect(model, (ids, ids), options(2))
    with pytest.raises(CallError, match="different lengths: input_ids has 9, type_ids has 7; allowed: one length"):
        compilation.run(traced.flat_inputs((ids, make_ids(7)), {}))
    got = compilation.run(traced.flat_inputs((ids, ids.flip(1)), {}))
    torch.testing.assert_close(got, list(model(ids, ids.flip(1))), rtol=0, atol=1e-12)


class Weight(nn.Module):
    """A model without inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.eval()

    def forward(self) -> Tensor:
        """Nothing -> [3]."""
        return self.weight * 2


@ALL
@pytest.mark.parametrize(
    ("make", "inputs", "listing"),
    [
        (lambda: nn.Linear(16, 16).eval(), (torch.ones(1, 9, 16),), r"\w+ \(1, \w+, 16\) torch.float32"),
        (lambda: nn.Softmax(dim=-1).eval(), (torch.ones(1, 9, dtype=torch.int32),), r"\w+ \(1, \w+\) torch.int32"),
        (Weight, (), "none"),
    ],
)
def test_a_model_without_token_input_is_refused_and_its_inputs_listed(
    route: Route, make: Callable[[], nn.Module], inputs: tuple[Tensor, ...], listing: str
) -> None:
    with pytest.raises(UnsupportedGraphError, match=f"no token input found: .*inputs are: {listing}; name the input"):
        route(make())(*inputs)


@BOTH
def test_a_function_without_tokens_is_refused(route: Route) -> None:
    with pytest.raises(UnsupportedGraphError, match=r"no token input found: .*inputs are: x \("):
        route(lambda x: x.sin())(torch.ones(3, 4))


@ALL
def test_a_call_without_tokens_is_refused_first_or_later(route: Route) -> None:
    model = make_tiny()
    compiled = route(model)
    for calls in (1, 2):
        with pytest.raises(CallError, match=r"input_ids has shape \(1, 0\); allowed: at least 1 token in dim 1"):
            compiled(make_ids(9)[:, :0])
        if route is not inspecting:
            check_good_call(compiled, model, calls=calls)


@ALL
def test_a_call_without_prompts_is_refused_first_or_later(route: Route) -> None:
    model = make_tiny()
    compiled = route(model)
    for calls in (1, 2):
        with pytest.raises(CallError, match=r"input_ids has shape \(0, .*\); allowed: at least 1 prompt"):
            compiled(make_ids(9)[:0])
        if route is not inspecting:
            check_good_call(compiled, model, calls=calls)


def test_a_llama_refuses_a_call_without_tokens_as_it_does_uncompiled() -> None:
    model, nothing = make_llama(), make_ids(9)[:, :0]
    with pytest.raises(RuntimeError) as uncompiled:
        model(nothing)
    with pytest.raises(RuntimeError) as compiled_by_torch:
        torch_compile(model)(nothing)
    assert str(uncompiled.value) in str(compiled_by_torch.value)
    with pytest.raises(CallError, match=r"input_ids has shape \(1, 0\); allowed: at least 1 token in dim 1"):
        our_compile(model)(nothing)


# ---------------------------------------------------------------------------------------------------------------------
# What the inputs look like


class WithPositions(TokenModel):
    """Hidden states and positions as inputs: [B, T, 16], [B, T] -> [B, T, 16]."""

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
        """Add embedded positions."""
        out: Tensor = self.linear(self.function(hidden + self.embedding(position_ids)))
        return out


def transposed_hidden(num_tokens: int) -> Tensor:
    return torch.randn(16, num_tokens, 2, dtype=torch.float64).permute(2, 1, 0)


def sliced_hidden(num_tokens: int) -> Tensor:
    return torch.randn(2, 2 * num_tokens, 32, dtype=torch.float64)[:, 1::2, ::2]


def expanded_hidden(num_tokens: int) -> Tensor:
    return torch.randn(1, num_tokens, 16, dtype=torch.float64).expand(2, num_tokens, 16)


@pytest.mark.parametrize("make_hidden", [transposed_hidden, sliced_hidden, expanded_hidden])
@pytest.mark.parametrize("is_ours", [True, False])
def test_hidden_states_of_any_strides_and_expanded_positions_equal_eager(
    make_hidden: Callable[[int], Tensor], is_ours: bool
) -> None:
    model = WithPositions(causal_attention)
    settings = {**options(2), "tokens": {"hidden": 1, "position_ids": 1}}
    compiled = pcp_compiler.compile(model, settings) if is_ours else torch_compile(model, options=settings)
    for num_tokens in (9, 4):
        inputs = make_hidden(num_tokens), torch.arange(num_tokens).expand(2, num_tokens)
        torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=0, atol=1e-12)
    pcp_compiler.assert_sharded(compiled, calls=2, pcp_size=2)


class NamedTensor(Tensor):
    """A subclass that changes nothing."""


def as_subclass(ids: Tensor) -> Tensor:
    return ids.as_subclass(NamedTensor)


def as_wrapper(ids: Tensor) -> Tensor:
    pair: Tensor = TwoTensor(ids, ids)
    return pair


@ALL
@pytest.mark.parametrize(("wrap", "name"), [(as_subclass, "NamedTensor"), (as_wrapper, "TwoTensor")])
def test_an_input_of_a_tensor_subclass_is_refused(route: Route, wrap: Callable[[Tensor], Tensor], name: str) -> None:
    model = make_tiny()
    compiled = route(model)
    with pytest.raises(CallError, match=rf"input input_ids is of class {name}: allowed: torch.Tensor"):
        compiled(wrap(make_ids(9)))
    if route is not inspecting:
        check_good_call(compiled, model)


@pytest.mark.parametrize("route", [our_compile, inspecting])
def test_sparse_and_nested_inputs_are_refused(route: Route) -> None:
    compiled = route(make_tiny())
    with pytest.raises(CallError, match=r"input input_ids has layout torch.sparse_coo; allowed: .*strided"):
        compiled(make_ids(9).to_sparse())
    nested = torch.nested.nested_tensor([make_ids(5)[0], make_ids(7)[0]], layout=torch.jagged)
    with pytest.raises(CallError, match=r"input_ids is of class NestedTensor: .*call the model for each prompt"):
        compiled(nested)


# ---------------------------------------------------------------------------------------------------------------------
# Wrapped models


def data_parallel(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model).eval()


def distributed_data_parallel(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model.requires_grad_(True)).eval()


def fully_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def fully_sharded_head(model: TokenModel) -> nn.Module:
    fully_sharded(model.linear)
    return model


@ALL
@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (distributed_data_parallel, r"the model is of class DistributedDataParallel: .*compile its .module"),
        (
            fully_sharded,
            r"the model is of class FSDPModule: .*every weight .*whole on each rank; load .*without fully_shard",
        ),
        (fully_sharded_head, "linear is of class FSDPModule: "),
    ],
)
def test_a_model_wrapped_for_other_ranks_is_refused_by_name(
    route: Route, wrap: Callable[[Any], nn.Module], message: str, process_group: None
) -> None:
    with pytest.raises(UnsupportedGraphError, match=message):
        route(wrap(make_tiny()))(make_ids(9))


@pytest.mark.parametrize("route", [our_compile, inspecting])
def test_data_parallel_is_refused_by_name(route: Route) -> None:
    with pytest.raises(
        UnsupportedGraphError, match=r"the model is of class DataParallel: compile its .module; .*pcp_size"
    ):
        route(data_parallel(make_tiny()))(make_ids(9))


@BOTH
def test_the_module_of_a_refused_wrapper_works(route: Route, process_group: None) -> None:
    wrapped = distributed_data_parallel(make_tiny())
    with pytest.raises(UnsupportedGraphError, match=r"compile its .module"):
        route(wrapped)(make_ids(9))
    inner = wrapped.module
    assert isinstance(inner, TokenModel)
    check_good_call(route(inner), inner)


@pytest.mark.parametrize("route", [our_compile, inspecting])
def test_a_dtensor_weight_is_refused_by_name_and_its_full_tensor_works(route: Route, process_group: None) -> None:
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    model = make_tiny()
    whole = model.linear.weight
    spread = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Replicate()])
    model.linear.weight = nn.Parameter(spread, requires_grad=False)
    compiled = route(model)
    with pytest.raises(UnsupportedGraphError, match=r"linear.weight is of class DTensor: .*call .full_tensor\(\)"):
        compiled(make_ids(9))
    assert isinstance(model.linear.weight, DTensor)
    model.linear.weight = nn.Parameter(model.linear.weight.full_tensor(), requires_grad=False)
    if route is not inspecting:
        check_good_call(compiled, model)


@ALL
def test_a_weight_of_a_tensor_subclass_that_handles_ops_itself_is_refused_by_name(route: Route) -> None:
    model = make_tiny()
    model.linear.weight = nn.Parameter(as_wrapper(model.linear.weight), requires_grad=False)
    with pytest.raises(UnsupportedGraphError, match=r"linear.weight is of class TwoTensor: allowed: torch.Tensor"):
        route(model)(make_ids(9))


@BOTH
def test_a_weight_of_a_subclass_that_changes_nothing_works(route: Route) -> None:
    model = make_tiny()
    model.linear.weight = nn.Parameter(model.linear.weight.as_subclass(NamedTensor), requires_grad=False)
    assert isinstance(model.linear.weight, NamedTensor)
    check_good_call(route(model), model)


class LoraLinear(nn.Module):
    """A linear layer with a low-rank addition."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(4, base.out_features, bias=False, dtype=base.weight.dtype)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., H] -> [.., H]."""
        out: Tensor = self.base(x) + 0.5 * self.up(self.down(self.dropout(x)))
        return out


class Adapted(nn.Module):
    """A wrapper that passes calls and unknown attributes on, as those of adapter libraries do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever the wrapped model takes and returns."""
        return self.base_model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)


@BOTH
@pytest.mark.parametrize("by_name", [True, False])
def test_a_model_wrapped_with_low_rank_adapters_works(route: Route, by_name: bool) -> None:
    inner: Any = make_tiny()
    inner.linear = LoraLinear(inner.linear)
    model = Adapted(inner)
    compiled = route(model)
    for num_tokens in (9, 6):
        ids = make_ids(num_tokens)
        got = compiled(input_ids=ids) if by_name else compiled(ids)
        torch.testing.assert_close(got, model(ids), rtol=0, atol=1e-12)
    pcp_compiler.assert_sharded(compiled, calls=2, pcp_size=2)
    assert len(pcp_compiler.compilations(compiled)) == 1


# ---------------------------------------------------------------------------------------------------------------------
# What a forward does


class Stateful(TokenModel):
    """A model with a buffer and a plain attribute that its function may change."""

    count: Tensor
    latest: Tensor | None = None

    def __init__(self, change: Callable[[Stateful, Tensor], None]) -> None:
        super().__init__(causal_attention)
        self.register_buffer("count", torch.zeros(16, dtype=torch.float64))
        self.change = change

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [B, T] -> [B, T, 16]."""
        self.change(self, input_ids)
        out: Tensor = super().forward(input_ids)
        return out + self.count


def add_to_buffer(model: Stateful, _ids: Tensor) -> None:
    model.count += 1


def write_view_of_buffer(model: Stateful, _ids: Tensor) -> None:
    model.count[2:4].zero_()


def write_weight(model: Stateful, _ids: Tensor) -> None:
    model.linear.weight.mul_(1)


def write_input(_model: Stateful, ids: Tensor) -> None:
    ids.clamp_(max=5)


@ALL
@pytest.mark.parametrize(
    ("change", "name", "code"),
    [
        (add_to_buffer, "count", r"model\.count \+= 1"),
        (write_view_of_buffer, "count", r"model\.count\[2:4\]\.zero_\(\)"),
        (write_weight, "linear.weight", r"model\.linear\.weight\.mul_\(1\)"),
        (write_input, "input_ids", r"ids\.clamp_\(max=5\)"),
    ],
)
def test_a_model_that_writes_a_buffer_or_input_is_refused_with_its_line_and_unchanged(
    route: Route, change: Callable[[Stateful, Tensor], None], name: str, code: str
) -> None:
    model, ids = Stateful(change), make_ids(9)
    message = rf"{name}: the module writes into this tensor in place\n  at .*test_bad_input\.py:\d+ in \w+: {code}\n"
    with pytest.raises(UnsupportedGraphError, match=message):
        route(model)(ids)
    assert torch.equal(model.count, torch.zeros_like(model.count))
    assert torch.equal(ids, make_ids(9))


def assign_buffer(model: Stateful, _ids: Tensor) -> None:
    model.count = model.count + 1


def assign_attribute(model: Stateful, ids: Tensor) -> None:
    model.latest = model.embedding(ids)


@BOTH
@pytest.mark.parametrize("change", [assign_buffer, assign_attribute])
def test_what_a_compiled_model_assigns_to_itself_is_what_it_assigns_uncompiled(
    route: Route, change: Callable[[Stateful, Tensor], None]
) -> None:
    model, oracle = Stateful(change), Stateful(change)
    compiled = route(model)
    for num_tokens in (9, 9, 9):
        ids = make_ids(num_tokens)
        torch.testing.assert_close(compiled(ids), oracle(ids), rtol=0, atol=1e-12)
        assert torch.equal(model.count, oracle.count)
        torch.testing.assert_close(model.latest, oracle.latest, rtol=0, atol=1e-12)
    pcp_compiler.assert_sharded(compiled, calls=3, pcp_size=2)


class Branching(TokenModel):
    """A model that branches on a value, after it has kept something."""

    latest: Tensor | None = None

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [B, T] -> [B, T, 16]."""
        self.latest = out = super().forward(input_ids)
        return out if out.sum() > 0 else -out


def test_inspecting_a_model_that_branches_on_a_value_names_the_line_and_leaves_the_model_as_it_was() -> None:
    model = Branching(causal_attention)
    with pytest.raises(
        UnsupportedGraphError, match=r"Branching asks for the value of a tensor.*\n  at .*out\.sum\(\) > 0"
    ):
        pcp_compiler.inspect(model, make_ids(9), options(2))
    assert model.latest is None
    assert "latest" not in vars(model)
    assert type(model(make_ids(9))) is Tensor


# ---------------------------------------------------------------------------------------------------------------------
# Devices and dtypes


@pytest.mark.parametrize("route", [torch_compile, our_compile])
def test_a_model_or_input_without_values_is_refused(route: Route) -> None:
    with pytest.raises(UnsupportedGraphError, match=r"embedding.weight is on device meta, which holds no values"):
        route(make_tiny().to("meta"))(make_ids(9).to("meta"))
    model = make_tiny()
    compiled = route(model)
    with pytest.raises(UnsupportedGraphError, match="input_ids is on device meta, which holds no values"):
        compiled(make_ids(9).to("meta"))
    check_good_call(compiled, model)


def test_weights_on_two_devices_are_named() -> None:
    model = make_tiny()
    model.linear.to("meta")
    with pytest.raises(UnsupportedGraphError, match=r"linear.weight is on device meta"):
        our_compile(model)(make_ids(9))
    with pytest.raises(UnsupportedGraphError) as caught:
        inspecting(model)(make_ids(9))
    assert "(cpu: embedding.weight and 1 more; meta: linear.weight and 1 more)\n  at " in str(caught.value)
    assert "move model and inputs to one device" in str(caught.value)
    with pytest.raises(RuntimeError, match="at least two devices, cpu and meta"):
        torch_compile(model)(make_ids(9))


def test_a_model_without_values_can_be_inspected() -> None:
    compilation = pcp_compiler.inspect(make_tiny().to("meta"), make_ids(9).to("meta"), options(2))
    assert compilation.programs["prefill", 0].schedule


@BOTH
def test_dtypes_that_do_not_fit_give_the_models_own_error_with_node_and_line(route: Route) -> None:
    model = make_tiny()
    model.linear.half()
    compiled = route(model)
    with pytest.raises(RuntimeError) as uncompiled:
        model(make_ids(9))
    with pytest.raises(RuntimeError, match="dtype") as caught:
        compiled(make_ids(9))
    assert type(caught.value) is type(uncompiled.value)
    (note,) = caught.value.__notes__
    assert note.startswith("in addmm (aten.addmm.default) of the compiled program\n  at ")
    assert "self.linear(" in note
    model.linear.double()
    check_good_call(compiled, model)


class MixedModel(TokenModel):
    """A float64 body and a float32 head that fit."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [B, T] -> [B, T, 16]."""
        out: Tensor = self.linear(self.function(self.embedding(input_ids)).float())
        return out


@BOTH
def test_several_dtypes_that_fit_work(route: Route) -> None:
    model = MixedModel(causal_attention)
    model.linear.float()
    check_good_call(route(model), model)


@BOTH
def test_an_id_beyond_the_vocabulary_gives_the_models_own_error_with_node_and_line(route: Route) -> None:
    model = make_tiny()
    compiled = route(model)
    with pytest.raises(IndexError, match="index out of range") as caught:
        compiled(torch.full((1, 9), 1000))
    (note,) = caught.value.__notes__
    assert note.startswith("in embedding (aten.embedding.default) of the compiled program\n  at ")
    check_good_call(compiled, model)


# ---------------------------------------------------------------------------------------------------------------------
# Threads


def in_threads(num_threads: int, work: Callable[[int], None]) -> None:
    """Run `work(number)` in threads that start together and often take turns; re-raise what one raises."""
    faults: list[BaseException] = []
    start = threading.Barrier(num_threads)

    def run(number: int) -> None:
        try:
            start.wait(60)
            with torch.no_grad():  # a setting of the thread
                work(number)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num_threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads)
    if faults:
        raise faults[0]


@BOTH
@pytest.mark.parametrize("is_warm", [True, False])
def test_two_threads_that_call_one_model_get_their_own_results_and_every_call_is_counted(
    route: Route, is_warm: bool
) -> None:
    model = make_tiny()
    compiled = route(model)
    lengths = [(9, 30), (17, 5)]
    expected = {num_tokens: model(make_ids(num_tokens)) for pair in lengths for num_tokens in pair}
    if is_warm:
        compiled(make_ids(8))

    def call(number: int) -> None:
        for _ in range(20):
            for num_tokens in lengths[number]:
                got = compiled(make_ids(num_tokens))
                torch.testing.assert_close(got, expected[num_tokens], rtol=0, atol=1e-12)

    in_threads(2, call)
    records = pcp_compiler.assert_sharded(compiled, calls=80 + is_warm, pcp_size=2)
    assert {record.num_tokens for record in records} <= {5, 8, 9, 17, 30}
    assert all(sum(record.rows_per_rank) == record.num_tokens for record in records)


@BOTH
def test_threads_with_models_of_their_own_count_their_own_calls(route: Route) -> None:
    models = [make_tiny() for _ in range(2)]
    models[1].linear.weight.mul_(2)
    compiled = [route(model) for model in models]

    def call(number: int) -> None:
        for num_tokens in (9, 17, 9, 5):
            ids = make_ids(num_tokens)
            torch.testing.assert_close(compiled[number](ids), models[number](ids), rtol=0, atol=1e-12)

    in_threads(2, call)
    for each in compiled:
        pcp_compiler.assert_sharded(each, calls=4, pcp_size=2)

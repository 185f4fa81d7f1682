"""Looking at what the compiler did: inspect, logs, traces, profiler ranges, and the checks that run the model twice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

import pcp_compiler
from pcp_compiler import placement
from pcp_compiler.compare import find_difference
from pcp_compiler.config import load_config
from pcp_compiler.errors import CallError, ConfigError, UnsupportedGraphError
from pcp_compiler.placement import Call, Local, Verdict
from pcp_compiler.ranks import Collective
from pcp_compiler.row_check import check_rows
from pcp_compiler.trace import trace_module
from tests.backend.support import (
    TokenModel,
    causal_attention,
    make_ids,
    make_llama,
    make_tiny,
    options,
    torch_compile,
)

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import torch
import pcp_compiler
from tests.backend.support import make_ids, make_tiny, options
pcp_compiler.inspect(make_tiny(), make_ids(9), options(2))
"""


# --- inspect -------------------------------------------------------------------------------------------------------


def test_inspect_takes_a_tensor_a_tuple_or_keywords_and_gives_one_program() -> None:
    model = make_tiny()
    examples: list[Any] = [make_ids(9), (make_ids(9),), [make_ids(9)], {"input_ids": make_ids(9)}]
    sources = {pcp_compiler.inspect(model, example, options(2)).programs["prefill", 0].source for example in examples}
    assert len(sources) == 1


def test_inspect_leaves_the_cache_of_transformers_out_unless_asked_for() -> None:
    model = make_llama()
    assert len(pcp_compiler.inspect(model, make_ids(9), options(2)).programs) == 2
    with pytest.raises(UnsupportedGraphError, match="use_cache=False"):
        pcp_compiler.inspect(model, {"input_ids": make_ids(9), "use_cache": True}, options(2))


def test_inspect_keeps_the_graph_after_every_pass() -> None:
    compilation = pcp_compiler.inspect(make_tiny(), make_ids(9), options(2))
    texts = {stage.name: stage.text(compilation.trace.seeds) for stage in compilation.stages}
    assert "pcp.unshard" in texts["shard_tokens"]
    assert "pcp.unshard" not in texts["infer_placements"]
    assert "Shard(1)" in texts["infer_placements"]
    assert compilation.num_calls == 0


def test_inspect_refuses_an_example_that_is_no_call() -> None:
    with pytest.raises(ConfigError, match="example_inputs: got int; allowed: a tensor, a tuple of"):
        pcp_compiler.inspect(make_tiny(), 9, options(2))  # type: ignore[arg-type]


# --- logs and traces -----------------------------------------------------------------------------------------------


def run_script(**environment: str) -> str:
    """Run the script in a process of its own, since torch reads these variables when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, **environment, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pcp_compiler.pipeline", "pcp_compiler.passes"])
def test_torch_logs_shows_each_pass_with_its_rewrites_and_time(name: str) -> None:
    lines = [line for line in run_script(TORCH_LOGS=f"+{name}").splitlines() if "pipeline.py" in line]
    shown = [line for line in lines if "shard_tokens: " in line]
    assert len(shown) == 1
    assert " rewrites, " in shown[0] and " ms" in shown[0]
    assert len([line for line in lines if " rewrites, " in line]) >= 7


@pytest.mark.slow
def test_torch_trace_holds_the_graph_before_and_after_each_pass(tmp_path: Path) -> None:
    run_script(TORCH_TRACE=str(tmp_path))
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    names = [stage.name for stage in pcp_compiler.inspect(make_tiny(), make_ids(9), options(2)).stages[1:]]
    for number, name in enumerate(names, 1):
        assert f'"pcp.{number:02}.{name}.before"' in text
        assert f'"pcp.{number:02}.{name}.after"' in text
    assert "pcp.unshard.default" in text


# --- profiler ranges -----------------------------------------------------------------------------------------------


def test_a_profiler_sees_a_range_for_each_stretch_between_collectives() -> None:
    compiled = torch_compile(make_tiny(), 2)
    expected = compiled(make_ids(9))
    with profile() as recorded:
        result = compiled(make_ids(9))
    assert torch.equal(result, expected)
    counts = {event.key: event.count for event in recorded.key_averages() if event.key.startswith("pcp.")}
    num_collectives = len(pcp_compiler.compilations(compiled)[0].lowered.program.schedule)
    assert counts == {f"pcp.prefill.{number:02}": 2 for number in range(num_collectives + 1)}


def test_without_a_profiler_the_program_runs_bare(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch_compile(make_tiny(), 2)
    compiled(make_ids(9))
    monkeypatch.setattr("pcp_compiler.program.record_function", None)
    compiled(make_ids(9))
    assert pcp_compiler.compilations(compiled)[0].num_sharded == 2


# --- shadow --------------------------------------------------------------------------------------------------------


def shadow_options(**check: Any) -> dict[str, Any]:
    return {**options(2), "check": {"mode": "shadow", **check}}


@pytest.mark.parametrize("compile_with", [pcp_compiler.compile, None])
def test_shadow_accepts_a_right_model_and_still_proves_the_path(compile_with: Any) -> None:
    model = make_tiny()
    config = shadow_options()
    compiled = compile_with(model, config) if compile_with else torch_compile(model, options=config)
    for num_tokens in (9, 13):
        compiled(make_ids(num_tokens))
    pcp_compiler.assert_sharded(compiled, calls=2, pcp_size=2)


def spoil(compiled: Any) -> None:
    """Let the sharded program of a compiled model add 0.5 to one value of its result."""
    program = pcp_compiler.compilations(compiled)[0].lowered.program
    real = program.function

    def spoiled(*inputs: Any) -> Generator[Collective, Any, Sequence[Any]]:
        (out,) = yield from real(*inputs)
        out = out.clone()
        out[0, 4, 7] += 0.5
        return [out]

    object.__setattr__(program, "function", spoiled)


def test_shadow_names_result_difference_and_position_of_a_wrong_program() -> None:
    compiled = torch_compile(make_tiny(), options=shadow_options())
    wanted = compiled(make_ids(9))[0, 4, 7].item()
    spoil(compiled)
    with pytest.raises(CallError) as caught:
        compiled(make_ids(9))
    message = str(caught.value)
    assert "result 0 differs from what the unsharded program gives: by 0.5 at [0, 4, 7]" in message
    assert f"({wanted + 0.5} instead of {wanted}); 1 of 144 values" in message


def test_shadow_takes_the_tolerances_of_the_config() -> None:
    compiled = torch_compile(make_tiny(), options=shadow_options(rtol=0.0, atol=0.6))
    expected = compiled(make_ids(9))
    spoil(compiled)
    assert (compiled(make_ids(9)) - expected).abs().max().item() == pytest.approx(0.5)


def test_shadow_of_pcp_compile_compares_with_the_original_model() -> None:
    model = TokenModel(lambda x: causal_attention(x) + float(torch.compiler.is_compiling()))
    torch_compile(model, options=shadow_options())(make_ids(9))  # the unsharded program computes the same
    with pytest.raises(CallError, match=r"result differs from what the original model gives: by [0-9.]+ at \[0, "):
        pcp_compiler.compile(model, shadow_options())(make_ids(9))


@pytest.mark.parametrize(
    ("value", "wanted", "rtol", "fault"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), 0.0, None),
        (torch.tensor([1.0, 2.0001]), torch.tensor([1.0, 2.0]), None, None),
        (torch.tensor([1.0, 2.1]), torch.tensor([1.0, 2.0]), None, "by 0.1 at [1]"),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), 0.0, None),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), 1.0, "by inf at [0] (nan instead of 1.0)"),
        (torch.tensor([float("-inf")]), torch.tensor([float("-inf")]), 0.0, None),
        (torch.tensor([1.0]), torch.tensor([float("-inf")]), 1.0, "by inf at [0]"),
        (torch.tensor([3]), torch.tensor([4]), 1.0, "by 1 at [0] (3 instead of 4)"),
        (torch.tensor([True]), torch.tensor([False]), None, "by 1 at [0] (True instead of False)"),
        (torch.ones(2), torch.ones(3), None, "torch.float32[2] instead of torch.float32[3]"),
        (torch.ones(0), torch.ones(0), None, None),
        (torch.tensor([1.0 + 1j]), torch.tensor([1.0 + 2j]), None, "by 1 at [0]"),
    ],
)
def test_differences_are_found_and_described(value: Tensor, wanted: Tensor, rtol: float | None, fault: str) -> None:
    found = find_difference(value, wanted, rtol, None)
    assert found is None if fault is None else found is not None and found.startswith(fault)


# --- rows ----------------------------------------------------------------------------------------------------------


def claim_row_local(call: Call) -> Verdict:
    """Say that an op keeps its first input's rows apart, whether it does or not."""
    rows = call.rows(call.tensors[0])
    return Local(rows, (rows,))


WRONG_RULES = {
    torch.ops.aten.cumsum.default: lambda x: x.cumsum(1),
    torch.ops.aten.roll.default: lambda x: x.roll(1, 1),
    torch.ops.aten.flip.default: lambda x: x.flip(1),
}


@pytest.mark.parametrize("op", WRONG_RULES, ids=str)
def test_a_wrong_placement_rule_is_found_with_the_call_and_its_line(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(placement._RULES, op, claim_row_local)
    model = TokenModel(lambda x: causal_attention(WRONG_RULES[op](x)))
    pcp_compiler.inspect(model, make_ids(9), options(2))  # nothing else notices
    with pytest.raises(UnsupportedGraphError) as caught:
        pcp_compiler.inspect(model, make_ids(9), options(2), check_rows=True)
    message = str(caught.value)
    assert f"({op}): is not row-local, as its placement rule says: run on 4 of 9 rows alone it differs" in message
    assert "lambda x: x." in message
    with pytest.raises(UnsupportedGraphError, match="is not row-local"):
        torch_compile(model, options={**options(2), "check.rows": True})(make_ids(9))


def test_right_models_pass_the_row_check_and_it_is_noted() -> None:
    compilation = pcp_compiler.inspect(make_llama(num_layers=2), make_ids(13), options(2), check_rows=True)
    (note,) = compilation.decisions["row checks"]
    assert int(note.split()[0]) > 60


def test_the_row_check_of_a_compiled_model_runs_at_its_first_sharded_call_only() -> None:
    compiled = torch_compile(make_tiny(), options={**options(2), "check.rows": True})
    for num_tokens in (9, 13):
        compiled(make_ids(num_tokens))
    assert len(pcp_compiler.compilations(compiled)[0].decisions["row checks"]) == 1


def test_one_row_cannot_be_checked() -> None:
    traced = trace_module(make_tiny(), (make_ids(9),))
    assert check_rows(traced.trace, load_config(options(2)), traced.flat_inputs((make_ids(9),), {})) > 10
    assert check_rows(traced.trace, load_config(options(2)), traced.flat_inputs((make_ids(1),), {})) == 0

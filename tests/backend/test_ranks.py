"""Virtual ranks: in step or stopped, one copy of the weights, and a record of every collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pcp_compiler import ops
from pcp_compiler.backends.compilation import CallRecord, Compilation
from pcp_compiler.config import load_config
from pcp_compiler.errors import InvariantError
from pcp_compiler.plan.partition import partition_batch
from pcp_compiler.ranks import Collective, Program, index_tensors, run_lockstep
from pcp_compiler.trace import trace_module
from tests.backend.plain_decoder import make_decoder
from tests.backend.support import make_ids, options

ORDER = torch.arange(4)


def gather(x: Tensor, name: str = "gather", dim: int = 0) -> Collective:
    return Collective(ops.UNSHARD, name, (x, torch.arange(2 * x.shape[dim]), dim))


def program(*requests: Collective) -> Program:
    """Yield the requests in order; return the answers."""
    answers = []
    for request in requests:
        answers.append((yield request))
    return answers


def test_rows_are_laid_in_rank_order_and_restored() -> None:
    parts = [torch.tensor([[0.0], [3.0]]), torch.tensor([[1.0], [2.0]])]
    restore = torch.tensor([0, 2, 3, 1])
    done = run_lockstep([program(Collective(ops.UNSHARD, "x", (part, restore, 0))) for part in parts])
    assert [outputs[0].flatten().tolist() for outputs in done.outputs] == [[0, 1, 2, 3]] * 2


def test_restored_rows_are_exact_and_read_nothing_of_other_ranks() -> None:
    parts = [torch.tensor([[0.1], [float("nan")]]), torch.tensor([[float("inf")], [0.3]])]
    sources = torch.tensor([3, 0])  # row 1 of rank 1, row 0 of rank 0
    done = run_lockstep(
        [program(Collective(ops.RESTORE_ROWS, "x", (p, sources, torch.tensor(r), 0))) for r, p in enumerate(parts)]
    )
    assert torch.equal(done.outputs[0][0], torch.tensor([[0.3], [0.1]]))


def test_k_and_v_are_packed_into_one_gather() -> None:
    k, v = torch.arange(6.0).view(1, 2, 3), torch.arange(4.0).view(2, 2)
    request = [Collective(ops.GATHER_START, "kv", ([k + r, v + r], [1, 0])) for r in (0, 10)]
    done = run_lockstep([program(r) for r in request])
    assert done.outputs[0][0].shape == (4, 5)
    xs = ops.gather_wait(done.outputs[0][0], [k, v], torch.tensor([2, 0, 1, 3]), [1, 0])
    torch.testing.assert_close(xs[0], torch.cat([k + 10, k, k + 10], 1)[:, [0, 2, 3, 5]])
    torch.testing.assert_close(xs[1], torch.stack([v[0] + 10, v[0], v[1], v[1] + 10]))


def test_the_record_names_each_collective_with_its_shape_and_bytes() -> None:
    parts = [torch.zeros(2, 3, dtype=torch.float64) for _ in range(3)]
    restore = torch.arange(6)
    done = run_lockstep(
        [program(*(Collective(ops.UNSHARD, name, (part, restore, 0)) for name in "ab")) for part in parts]
    )
    assert [(c.name, c.op, c.shape, c.dtype) for c in done.collectives] == [
        ("a", "unshard", (2, 3), torch.float64), ("b", "unshard", (2, 3), torch.float64)
    ]  # fmt: skip
    assert {c.received_bytes for c in done.collectives} == {2 * 6 * 8}


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that get out of step


def test_ranks_at_different_collectives_are_an_error_that_names_them() -> None:
    x = torch.zeros(2, 1)
    with pytest.raises(InvariantError, match=r"different .*: rank 0 a \(pcp.unshard.*, rank 1 b \(pcp.unshard"):
        run_lockstep([program(gather(x, "a")), program(gather(x, "b"))])


def test_ranks_at_different_ops_of_one_name_are_an_error() -> None:
    x = torch.zeros(2, 1)
    with pytest.raises(InvariantError, match=r"rank 0 a \(pcp.unshard\..*, rank 1 a \(pcp.gather_start\."):
        run_lockstep([program(gather(x, "a")), program(Collective(ops.GATHER_START, "a", ([x], [0])))])


@pytest.mark.parametrize("other", [torch.zeros(3, 1), torch.zeros(2, 2), torch.zeros(2, 1, dtype=torch.float64)])
def test_parts_of_different_shape_or_dtype_are_an_error(other: Tensor) -> None:
    with pytest.raises(InvariantError, match=r"a: ranks send different shapes: rank 0 torch.float32\(2, 1\), rank 1 "):
        run_lockstep([program(gather(torch.zeros(2, 1), "a")), program(gather(other, "a"))])


def test_a_rank_that_ends_early_is_an_error_that_names_it() -> None:
    a, b = (gather(torch.zeros(2, 1), name) for name in "ab")
    with pytest.raises(InvariantError, match=r"ranks \[1\] ended while 2 wait at b"):
        run_lockstep([program(a, b), program(a), program(a, b)])


def test_the_error_of_a_rank_reaches_the_caller() -> None:
    def fails() -> Program:
        yield gather(torch.zeros(2, 1), "a")
        raise ArithmeticError("rank 1")

    with pytest.raises(ArithmeticError, match="rank 1"):
        run_lockstep([program(gather(torch.zeros(2, 1), "a")), fails()])


def test_a_collective_cannot_run_on_its_own() -> None:
    with pytest.raises(RuntimeError, match=r"run the graph with pcp_compiler\.ranks\.run_lockstep"):
        torch.ops.pcp.unshard(torch.zeros(2, 1), ORDER, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Programs of a model


class Traced:
    """A decoder traced once, and its programs for any number of ranks."""

    def __init__(self) -> None:
        self.model = make_decoder()
        self._trace = trace_module(self.model, (make_ids(9),))

    def compile(self, pcp_size: int) -> Compilation:
        """Return a compilation without calls."""
        return Compilation(load_config(options(pcp_size)), self._trace.trace)

    def run(self, compilation: Compilation, num_tokens: int) -> tuple[Tensor, CallRecord]:
        """Run a prompt; return its logits [1, T, V] and the record of the call."""
        (logits,) = compilation.run(self._trace.flat_inputs((make_ids(num_tokens),), {}))
        assert isinstance(logits, Tensor)
        return logits, compilation.calls[-1]


@pytest.fixture(scope="module")
def traced() -> Traced:
    return Traced()


@pytest.mark.parametrize("pcp_size", [2, 4])
def test_the_executed_collectives_are_the_scheduled_ones(traced: Traced, pcp_size: int) -> None:
    compilation = traced.compile(pcp_size)
    _, record = traced.run(compilation, 21)
    executed = record.collectives
    assert tuple((collective.name, collective.op) for collective in executed) == compilation.lowered.program.schedule
    assert [collective.op for collective in executed] == ["gather_start", "gather_start", "unshard"]
    width, kv_size, vocab = record.width, 2 * 2 * 8, 61
    assert [collective.shape for collective in executed] == [(width, kv_size), (width, kv_size), (width, vocab)]
    assert executed[0].received_bytes == (pcp_size - 1) * width * kv_size * 8


def test_a_program_that_runs_other_collectives_than_scheduled_is_an_error(traced: Traced) -> None:
    compilation = traced.compile(2)
    object.__setattr__(compilation.lowered.program, "schedule", compilation.lowered.program.schedule[:-1])
    with pytest.raises(InvariantError, match="scheduled were"):
        traced.run(compilation, 9)


@pytest.mark.parametrize("num_tokens", [2, 3, 5])
def test_a_rank_without_rows_still_joins_the_gather(traced: Traced, num_tokens: int) -> None:
    logits, record = traced.run(traced.compile(8), num_tokens)
    torch.testing.assert_close(logits, traced.model(make_ids(num_tokens)), rtol=0, atol=1e-12)
    assert 0 in record.rows_per_rank
    assert sum(record.rows_per_rank) == num_tokens
    assert [collective.shape[0] for collective in record.collectives] == [record.width] * 3


class LookupsByTable(TorchDispatchMode):
    """Counts embedding look-ups by the address of the table and by their number of rows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tables: Counter[int] = Counter()
        self.rows: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.embedding.default:
            self.tables[args[0].data_ptr()] += 1
            self.rows.append(args[1].numel())
        return func(*args, **(kwargs or {}))


def test_all_ranks_compute_with_one_copy_of_the_weights(traced: Traced) -> None:
    compilation = traced.compile(4)
    with LookupsByTable() as seen:
        _, record = traced.run(compilation, 21)
    assert seen.tables == {traced.model.embedding.weight.data_ptr(): 4}
    assert seen.rows == [record.width] * 4


def test_each_rank_runs_its_share_of_the_rows_of_a_long_prompt(traced: Traced) -> None:
    _, record = traced.run(traced.compile(4), 128)
    assert record.rows_per_rank == (32, 32, 32, 32)
    assert record.width == 32


def test_index_tensors_of_all_ranks_cover_every_row_once() -> None:
    partition = partition_batch([13], [True], pcp_size=3, shard_decode=False)
    tensors = [index_tensors(partition, rank, torch.device("cpu")) for rank in range(3)]
    expanded = torch.cat([each["local_rows"] for each in tensors])
    assert torch.equal(expanded[tensors[0]["restore"]], torch.arange(13))
    assert all(torch.equal(each["restore"], tensors[0]["restore"]) for each in tensors)
    assert [int(each["rank"]) for each in tensors] == [0, 1, 2]
    assert {tensor.dtype for each in tensors for tensor in each.values()} == {torch.int64}

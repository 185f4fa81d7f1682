"""What the tests of distributed ranks run on every rank; each scenario leaves the group usable for the next one.

Spawned processes import torch for seconds, so one spawn runs all of them: `run_all` returns each one's outcome.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import pcp_compiler
from pcp_compiler.backends.compilation import CallRecord, Compilation
from pcp_compiler.errors import CallError, PcpError, RankError
from pcp_compiler.ranks import Program
from tests.backend.plain_decoder import DecoderConfig, make_decoder
from tests.backend.support import VOCAB_SIZE, make_ids, options

WORLD_SIZE = 4
ODD = 1
"""The rank that differs from the others in the scenarios where one does."""
LENGTHS = (1, 2, 3, 5, 8, 9, 33)
SLOW_S, STEP_S = 3.0, 1.5
"""How late a lagging rank comes, and how long the others wait for it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that a call raised, how long the call took, and whether a following good call equalled eager."""

    kind: str
    message: str
    seconds: float
    recovered: bool


class OneAttention(nn.Module):
    """The least that needs other ranks: input_ids [B, T] -> [B, T, V], or [B, 1, V] of the last token only."""

    def __init__(self, *, last_row_only: bool = False) -> None:
        super().__init__()
        self.last_row_only = last_row_only
        self.embedding = nn.Embedding(VOCAB_SIZE, 16)
        self.head = nn.Linear(16, VOCAB_SIZE)

    def forward(self, input_ids: Tensor) -> Tensor:
        """One head of attention over the embedded tokens."""
        x = self.embedding(input_ids)
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        out: Tensor = self.head(x[:, -1:] if self.last_row_only else x)
        return out


def make_model(*, last_row_only: bool = False, dtype: torch.dtype = torch.float64) -> OneAttention:
    torch.manual_seed(0)
    return OneAttention(last_row_only=last_row_only).to(dtype).eval().requires_grad_(False)


def settings(**parallel: Any) -> dict[str, Any]:
    """Return options for four ranks; every prompt of two tokens or more is sharded."""
    return options(WORLD_SIZE, **{"timeout_s": {"start": 60, "step": 20}, **parallel})


def compile_model(**parallel: Any) -> tuple[Any, OneAttention]:
    model = make_model()
    return pcp_compiler.compile(model, settings(**parallel)), model


def attempt(call: Callable[[], Any], good_call: Callable[[], bool]) -> Failure:
    """Make a call that must fail, then one that must not."""
    started = time.monotonic()
    try:
        call()
    except (PcpError, RuntimeError, MemoryError) as fault:
        seconds = time.monotonic() - started
        kind, message = type(fault).__name__, str(fault)
    else:
        raise AssertionError("the call raised nothing")
    return Failure(kind, message, seconds, good_call())


def equals_eager(compiled: Any, model: nn.Module, num_tokens: int = 21) -> bool:
    ids = make_ids(num_tokens)
    return bool(torch.allclose(compiled(ids), model(ids), rtol=0, atol=1e-12))


# --- right results ---------------------------------------------------------------------------------------------------


def equality(rank: int) -> tuple[list[float], list[float], list[CallRecord], list[CallRecord]]:
    """Differences to eager and to virtual ranks for each length, and the records of both."""
    model = make_decoder(DecoderConfig(num_layers=1))
    compiled = pcp_compiler.compile(model, settings())
    virtual = pcp_compiler.compile(model, settings(ranks="virtual"))
    to_eager, to_virtual = [], []
    for num_tokens in LENGTHS:
        ids = make_ids(num_tokens)
        logits = compiled(ids)
        to_eager.append((logits - model(ids)).abs().max().item())
        to_virtual.append((logits - virtual(ids)).abs().max().item())
    ours = pcp_compiler.assert_sharded(compiled, len(LENGTHS), WORLD_SIZE, replicated=1)
    theirs = pcp_compiler.assert_sharded(virtual, len(LENGTHS), WORLD_SIZE, replicated=1)
    return to_eager, to_virtual, ours, theirs


def low_precision(rank: int) -> list[bool]:
    """Whether bfloat16 results are those of virtual ranks, bit for bit: all rows, and one row by a sum over ranks."""
    same = []
    for last_row_only in (False, True):
        model = make_model(last_row_only=last_row_only, dtype=torch.bfloat16)
        compiled = pcp_compiler.compile(model, settings())
        virtual = pcp_compiler.compile(model, settings(ranks="virtual"))
        same.append(torch.equal(compiled(make_ids(33)), virtual(make_ids(33))))
        pcp_compiler.assert_sharded(compiled, 1, WORLD_SIZE)
    return same


def short_prompts(rank: int) -> tuple[list[CallRecord], Failure]:
    """Prompts below min_tokens_to_shard, then one whose length differs on one rank."""
    compiled, model = compile_model(min_tokens_to_shard=8)
    assert equals_eager(compiled, model, 7)
    assert equals_eager(compiled, model, 3)
    records = pcp_compiler.assert_sharded(compiled, 2, WORLD_SIZE, replicated=2)
    failure = attempt(lambda: compiled(make_ids(6 if rank == ODD else 7)), lambda: equals_eager(compiled, model, 7))
    return records, failure


def own_groups(rank: int) -> list[tuple[int, int | None]]:
    """(P, own rank) of calls over half of the processes: a process group, an axis of a mesh, a mesh of one dim."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pcp", "tp"))
    found = []
    for group in (halves[rank // 2], mesh, mesh["tp"]):
        model = make_model()
        given = {**options(2, timeout_s={"start": 60, "step": 20}), "group": group}
        compiled = torch.compile(model, backend="pcp_spec", dynamic=True, options=given)
        again = torch.compile(model, backend="pcp_spec", dynamic=True, options=dict(given))
        with torch.no_grad():
            assert equals_eager(compiled, model) and equals_eager(again, model)
        records = pcp_compiler.assert_sharded(compiled, 2, 2)
        assert len(pcp_compiler.compilations(again)) == 1, "equal options with the same group were compiled twice"
        found.append((len(records[0].rows_per_rank), records[0].rank))
    return found


def dumps(rank: int, folder: str) -> list[str]:
    """All ranks write at once into one folder that does not exist yet; the folders with a whole dump."""
    model = make_model()
    compiled = pcp_compiler.compile(model, {**settings(), "dump": {"dir": folder}})
    assert equals_eager(compiled, model)
    dist.barrier()
    return sorted(path.parent.name for path in Path(folder).glob("*/final.py"))


# --- ranks differ ----------------------------------------------------------------------------------------------------


def another_batch(rank: int) -> Failure:
    """Other ids of the same shape, in the first call."""
    compiled, model = compile_model()
    return attempt(lambda: compiled(own_ids(rank)), lambda: equals_eager(compiled, model))


def another_batch_later(rank: int) -> Failure:
    """Other ids of the same shape, in the second call, under check.mode: inputs."""
    model = make_model()
    compiled = pcp_compiler.compile(model, {**settings(), "check": {"mode": "inputs"}})
    assert equals_eager(compiled, model)
    return attempt(lambda: compiled(own_ids(rank)), lambda: equals_eager(compiled, model))


def own_ids(rank: int) -> Tensor:
    return make_ids(21).flip(1) if rank == ODD else make_ids(21)


def another_shape(rank: int) -> Failure:
    """Another length, in the second call."""
    compiled, model = compile_model()
    assert equals_eager(compiled, model)
    return attempt(lambda: compiled(make_ids(20 + (rank == ODD))), lambda: equals_eager(compiled, model))


def another_weight(rank: int) -> Failure:
    """One element of one parameter."""
    compiled, model = compile_model()
    model.head.weight[7, 13] += 1e-9 * (rank == ODD)
    return attempt(lambda: compiled(make_ids(21)), fresh_call)


def another_config(rank: int) -> Failure:
    """Another threshold."""
    compiled, _ = compile_model(min_tokens_to_shard=5 if rank == ODD else 6)
    return attempt(lambda: compiled(make_ids(21)), fresh_call)


def another_size(rank: int) -> Failure:
    """Another pcp_size, which does not fit the group."""
    parallel = {**settings()["parallel"], "pcp_size": 3 if rank == ODD else WORLD_SIZE}
    compiled = pcp_compiler.compile(make_model(), {"parallel": parallel})
    return attempt(lambda: compiled(make_ids(21)), fresh_call)


def another_schedule(rank: int) -> Failure:
    """The two collectives swapped by hand before the first call."""
    compiled, _ = compile_model()
    lower = Compilation.__post_init__

    def lower_and_edit(self: Compilation) -> None:
        lower(self)
        schedule = tuple(reversed(self.lowered.program.schedule))
        self.lowered = replace(self.lowered, program=replace(self.lowered.program, schedule=schedule))

    def call() -> None:
        with replaced(Compilation, "__post_init__", lower_and_edit if rank == ODD else lower):
            compiled(make_ids(21))

    return attempt(call, fresh_call)


def fresh_call() -> bool:
    """Whether a newly compiled model equals eager; Dynamo would use the code of an equal one."""
    torch.compiler.reset()
    return equals_eager(*compile_model())


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Give an attribute another value for a while."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


# --- ranks fail ------------------------------------------------------------------------------------------------------


def failure_while_compiling(rank: int) -> Failure:
    """One rank's model is in training mode."""
    compiled, model = compile_model()
    model.train(rank == ODD)
    return attempt(lambda: compiled(make_ids(21)), lambda: equals_eager(compiled, model.eval()))


def failure_before_collectives(rank: int) -> Failure:
    """One rank refuses its input before it meets the others."""
    compiled, model = compile_model()
    assert equals_eager(compiled, model)
    (entry,) = pcp_compiler.compilations(compiled)

    def refuse(_inputs: Sequence[object]) -> NoReturn:
        raise CallError("the input is refused here")

    def call() -> None:
        with replaced(entry, "_num_tokens", refuse if rank == ODD else entry._num_tokens):
            compiled(make_ids(21))

    return attempt(call, lambda: equals_eager(compiled, model))


def failure_between_collectives(rank: int) -> Failure:
    """One rank runs out of memory after its first collective."""
    compiled, model = compile_model()
    assert equals_eager(compiled, model)
    return attempt(lambda: call_with(compiled, fail_after(1), only=rank == ODD), lambda: equals_eager(compiled, model))


def failure_after_collectives(rank: int) -> tuple[str, bool]:
    """One rank fails when the others may have their results already: the next call works."""
    compiled, model = compile_model()
    assert equals_eager(compiled, model)
    try:
        call_with(compiled, fail_after(2), only=rank == ODD)
        outcome = "result"
    except (MemoryError, RankError) as fault:
        outcome = type(fault).__name__
    return outcome, equals_eager(compiled, model)


def failure_beside_own_collectives(rank: int) -> float:
    """The caller's own all-reduce after a call that failed between collectives."""
    compiled, model = compile_model()
    assert equals_eager(compiled, model)
    attempt(lambda: call_with(compiled, fail_after(1), only=rank == ODD), lambda: True)
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return total.item()


def fail_after(num_collectives: int) -> Callable[[Program], Program]:
    """Return what a program becomes that raises once it has done some collectives."""

    def failing(program: Program) -> Program:
        answer = None
        for _ in range(num_collectives):
            answer = yield program.send(answer)
        raise MemoryError("out of memory here")

    return failing


def call_with(
    compiled: Any, change: Callable[[Program], Program], *, only: bool, device: torch.device | None = None
) -> Tensor:
    """Call with a changed program, on one rank only; the program is whole again afterwards."""
    (entry,) = pcp_compiler.compilations(compiled)
    whole = entry.lowered
    function = whole.program.function
    changed = replace(whole.program, function=lambda *inputs: change(function(*inputs)))
    with replaced(entry, "lowered", replace(whole, program=changed) if only else whole):
        out: Tensor = compiled(make_ids(21).to(device or "cpu"))
    return out


# --- ranks lag -------------------------------------------------------------------------------------------------------


def lag_before_call(rank: int) -> Failure:
    """One rank comes to a call later than the time-out."""
    compiled, model = compile_model(timeout_s={"start": 60, "step": STEP_S})
    assert equals_eager(compiled, model)

    def late_call() -> None:
        time.sleep(SLOW_S if rank == ODD else 0)
        compiled(make_ids(21))

    return attempt(late_call, lambda: meet() and equals_eager(compiled, model))


def lag_between_collectives(rank: int) -> Failure:
    """One rank takes longer than the time-out between two collectives."""
    compiled, model = compile_model(timeout_s={"start": 60, "step": STEP_S})
    assert equals_eager(compiled, model)

    def slow(program: Program) -> Program:
        answer = yield next(program)
        time.sleep(SLOW_S)
        answer = yield program.send(answer)
        with pytest.raises(StopIteration) as end:
            program.send(answer)
        return end.value.value  # type: ignore[no-any-return]

    return attempt(
        lambda: call_with(compiled, slow, only=rank == ODD), lambda: meet() and equals_eager(compiled, model)
    )


def meet() -> bool:
    """Wait until all ranks are here, by the caller's own group."""
    dist.barrier()
    return True


def slow_compile(rank: int) -> bool:
    """One rank compiles for longer than the start time-out, in a group that has not met yet."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = make_model()
    compiled = pcp_compiler.compile(model, options(2, timeout_s={"start": STEP_S, "step": 20}), group=pairs[rank % 2])
    lower = Compilation.__post_init__

    def lower_slowly(self: Compilation) -> None:
        lower(self)
        time.sleep(SLOW_S)

    with replaced(Compilation, "__post_init__", lower_slowly if rank >= 2 else lower):
        return equals_eager(compiled, model)


def call_inside_call(rank: int) -> str:
    """A second call while one is under way, as from another thread."""
    compiled, model = compile_model()
    assert equals_eager(compiled, model)
    (entry,) = pcp_compiler.compilations(compiled)
    assert entry.ranks is not None
    with entry.ranks.call(entry.config.parallel.timeout_s):
        try:
            compiled(make_ids(21))
            message = "no error"
        except CallError as fault:
            message = str(fault)
    assert equals_eager(compiled, model)
    return message


# --- ranks end -------------------------------------------------------------------------------------------------------


def killed_or_gone(rank: int) -> tuple[str, float]:
    """In one pair a rank is killed between two collectives, in the other one a rank ends before a call."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = make_model()
    compiled = pcp_compiler.compile(model, options(2, timeout_s={"start": 60, "step": 60}), group=pairs[rank // 2])
    assert equals_eager(compiled, model)
    if rank == 3:
        return "ended", 0.0

    def die(program: Program) -> Program:
        yield next(program)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")

    started = time.monotonic()
    try:
        call_with(compiled, die, only=rank == 1)
        return "no error", 0.0
    except RankError as fault:
        return str(fault), time.monotonic() - started


# ---------------------------------------------------------------------------------------------------------------------

SCENARIOS: tuple[Callable[..., Any], ...] = (
    equality, low_precision, short_prompts, own_groups, dumps, another_batch, another_batch_later, another_shape,
    another_weight, another_config, another_size, another_schedule, failure_while_compiling,
    failure_before_collectives, failure_between_collectives, failure_after_collectives,
    failure_beside_own_collectives, lag_before_call, lag_between_collectives, slow_compile, call_inside_call,
)  # fmt: skip


def run_all(rank: int, folder: str) -> dict[str, Any]:
    """Run every scenario, and return the outcome of each by name."""
    outcomes: dict[str, Any] = {}
    for scenario in SCENARIOS:
        torch.compiler.reset()
        dist.barrier()
        with torch.no_grad():
            outcomes[scenario.__name__] = scenario(rank, folder) if scenario is dumps else scenario(rank)
    return outcomes

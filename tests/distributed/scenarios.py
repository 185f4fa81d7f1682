"""What the tests of distributed ranks run on every rank; each scenario leaves the group usable for the next one.

Spawned processes import torch for seconds, so one spawn runs all of them: `run_all` returns each one's outcome.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import pcp_compiler
from pcp_compiler.backends.compilation import CallRecord, Compilation
from pcp_compiler.errors import CallError, PcpError
from pcp_compiler.ranks.distributed import RankGroup
from tests.backend.plain_decoder import Decoder, DecoderConfig, make_decoder
from tests.backend.support import make_ids, options

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


class LastRow(nn.Module):
    """A decoder that returns the logits of its last token only: input_ids [B, T] -> [B, 1, V]."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor) -> Tensor:
        """Select before the head, as transformers does with logits_to_keep=1."""
        decoder = self.decoder
        x = decoder.embedding(input_ids)
        return decoder.head(decoder.norm(torch.cumsum(torch.zeros_like(x), -1) + x)[:, -1:])  # type: ignore[no-any-return]


def decoder(seed: int = 0, dtype: torch.dtype = torch.float64) -> Decoder:
    return make_decoder(DecoderConfig(num_layers=1), seed=seed, dtype=dtype)


def settings(**parallel: Any) -> dict[str, Any]:
    """Return options for four ranks; every prompt of two tokens or more is sharded."""
    return options(WORLD_SIZE, **{"timeout_s": {"start": 60, "step": 20}, **parallel})


def compiled_decoder(**parallel: Any) -> tuple[Any, Decoder]:
    model = decoder()
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
    compiled, model = compiled_decoder()
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
    for model in (decoder(dtype=torch.bfloat16), LastRow(decoder(dtype=torch.bfloat16))):
        compiled = pcp_compiler.compile(model, settings())
        virtual = pcp_compiler.compile(model, settings(ranks="virtual"))
        same.append(torch.equal(compiled(make_ids(33)), virtual(make_ids(33))))
        pcp_compiler.assert_sharded(compiled, 1, WORLD_SIZE)
    return same


def short_prompts(rank: int) -> tuple[list[CallRecord], Failure]:
    """Prompts below min_tokens_to_shard, then one whose length differs on one rank."""
    compiled, model = compiled_decoder(min_tokens_to_shard=8)
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
        model = decoder()
        given = {**options(2, timeout_s={"start": 60, "step": 20}), "group": group}
        compiled = torch.compile(model, backend="pcp_spec", dynamic=True, options=given)
        again = torch.compile(model, backend="pcp_spec", dynamic=True, options=dict(given))
        with torch.no_grad():
            assert equals_eager(compiled, model) and equals_eager(again, model)
        records = pcp_compiler.assert_sharded(compiled, 2, 2)
        assert len(pcp_compiler.compilations(again)) == 1, "equal options with the same group were compiled twice"
        found.append((len(records[0].rows_per_rank), records[0].rank))
    return found


def caller_collectives(rank: int) -> float:
    """The caller's own all-reduce right after calls that failed between collectives on one rank."""
    compiled, model = compiled_decoder()
    assert equals_eager(compiled, model)
    break_program(compiled, after=1, only=rank == ODD)
    attempt(lambda: compiled(make_ids(21)), lambda: mend_program(compiled) or equals_eager(compiled, model))
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return total.item()


def dumps(rank: int, folder: str) -> bool:
    """All ranks write into one folder that does not exist yet; some dump there twice."""
    model = decoder()
    for _ in range(2):
        torch.compiler.reset()
        compiled = pcp_compiler.compile(model, {**settings(), "dump": {"dir": folder}})
        assert equals_eager(compiled, model)
    dist.barrier()
    return (Path(folder) / f"rank_{rank}" / "final.py").exists()


# --- ranks differ ----------------------------------------------------------------------------------------------------


def another_batch(rank: int) -> Failure:
    """Other ids of the same shape, in the first call."""
    compiled, model = compiled_decoder()
    ids = make_ids(21)
    return attempt(lambda: compiled(ids.flip(1) if rank == ODD else ids), lambda: equals_eager(compiled, model))


def another_batch_later(rank: int) -> Failure:
    """Other ids of the same shape, in the second call, under check.mode: inputs."""
    model = decoder()
    compiled = pcp_compiler.compile(model, {**settings(), "check": {"mode": "inputs"}})
    assert equals_eager(compiled, model)
    ids = make_ids(21)
    return attempt(lambda: compiled(ids.flip(1) if rank == ODD else ids), lambda: equals_eager(compiled, model))


def another_shape(rank: int) -> Failure:
    """Another length, in the second call."""
    compiled, model = compiled_decoder()
    assert equals_eager(compiled, model)
    return attempt(lambda: compiled(make_ids(20 + (rank == ODD))), lambda: equals_eager(compiled, model))


def another_weight(rank: int) -> Failure:
    """One element of one parameter."""
    compiled, model = compiled_decoder()
    weight = model.layers[0].get_submodule("down").weight
    assert isinstance(weight, Tensor)
    kept = weight[7, 13].item()
    if rank == ODD:
        weight[7, 13] = kept + 1e-9

    def good_call() -> bool:
        fresh, right = compiled_decoder()
        return equals_eager(fresh, right)

    return attempt(lambda: compiled(make_ids(21)), good_call)


def another_config(rank: int) -> Failure:
    """Another threshold."""
    compiled, model = compiled_decoder(min_tokens_to_shard=5 if rank == ODD else 6)

    def good_call() -> bool:
        fresh, right = compiled_decoder()
        return equals_eager(fresh, right)

    return attempt(lambda: compiled(make_ids(21)), good_call)


def another_size(rank: int) -> Failure:
    """Another pcp_size, which does not fit the group."""
    model = decoder()
    size = 3 if rank == ODD else WORLD_SIZE
    compiled = pcp_compiler.compile(model, {"parallel": {**settings()["parallel"], "pcp_size": size}})

    def good_call() -> bool:
        fresh, right = compiled_decoder()
        return equals_eager(fresh, right)

    return attempt(lambda: compiled(make_ids(21)), good_call)


def another_schedule(rank: int) -> Failure:
    """Two collectives swapped in the schedule, seen by a call."""
    compiled, model = compiled_decoder()
    with torch.no_grad():
        assert equals_eager(compiled, model)
    (entry,) = pcp_compiler.compilations(compiled)
    lowered = entry.lowered
    edited = Compilation(entry.config, entry.trace, ranks=entry.ranks)
    if rank == ODD:
        schedule = tuple(reversed(lowered.program.schedule))
        edited.lowered = replace(lowered, program=replace(lowered.program, schedule=schedule))
    inputs = flat_inputs(entry, model, make_ids(21))
    return attempt(lambda: edited.run(inputs), lambda: equals_eager(compiled, model))


def flat_inputs(entry: Compilation, model: nn.Module, ids: Tensor) -> Sequence[object]:
    """Return the inputs of a compilation's program for one call."""
    caught: list[Sequence[object]] = []
    run = entry.run
    entry.run = lambda inputs: caught.append(inputs) or run(inputs)  # type: ignore[method-assign,func-returns-value]
    try:
        for other in [model]:
            pcp_compiler.compile(other, entry.config)(ids)
    finally:
        del entry.run
    return caught[0]


# --- ranks fail ------------------------------------------------------------------------------------------------------


def failure_while_compiling(rank: int) -> Failure:
    """One rank's model is in training mode."""
    compiled, model = compiled_decoder()
    model.train(rank == ODD)

    def good_call() -> bool:
        model.eval()
        return equals_eager(compiled, model)

    return attempt(lambda: compiled(make_ids(21)), good_call)


def failure_before_collectives(rank: int) -> Failure:
    """One rank's input is refused by a check of the call."""
    compiled, model = compiled_decoder()
    assert equals_eager(compiled, model)
    (entry,) = pcp_compiler.compilations(compiled)
    if rank == ODD:
        entry._num_tokens = refuse_call  # type: ignore[method-assign]

    def good_call() -> bool:
        if rank == ODD:
            del entry._num_tokens
        return equals_eager(compiled, model)

    return attempt(lambda: compiled(make_ids(21)), good_call)


def refuse_call(_inputs: Sequence[object]) -> Any:
    raise CallError("the input is refused here")


def failure_between_collectives(rank: int) -> Failure:
    """One rank runs out of memory after its first collective."""
    compiled, model = compiled_decoder()
    assert equals_eager(compiled, model)
    break_program(compiled, after=1, only=rank == ODD)
    return attempt(
        lambda: compiled(make_ids(21)), lambda: mend_program(compiled) or equals_eager(compiled, model)
    )


def failure_after_collectives(rank: int) -> tuple[str, bool]:
    """One rank fails when the others have their results already: their next call works."""
    compiled, model = compiled_decoder()
    assert equals_eager(compiled, model)
    (entry,) = pcp_compiler.compilations(compiled)
    break_program(compiled, after=len(entry.lowered.program.schedule), only=rank == ODD)
    try:
        compiled(make_ids(21))
        outcome = "result"
    except MemoryError:
        outcome = "MemoryError"
    mend_program(compiled)
    return outcome, equals_eager(compiled, model)


def break_program(compiled: Any, *, after: int, only: bool) -> None:
    """Let the program raise MemoryError once it has done some collectives."""
    (entry,) = pcp_compiler.compilations(compiled)
    function = entry.lowered.program.function
    entry.kept_lowered = entry.lowered  # type: ignore[attr-defined]

    def broken(*inputs: object) -> Any:
        program, answer = function(*inputs), None
        for _ in range(after):
            answer = yield program.send(answer)
        raise MemoryError("out of memory here")

    if only:
        entry.lowered = replace(entry.lowered, program=replace(entry.lowered.program, function=broken))


def mend_program(compiled: Any) -> None:
    (entry,) = pcp_compiler.compilations(compiled)
    entry.lowered = entry.kept_lowered  # type: ignore[attr-defined]


# --- ranks lag -------------------------------------------------------------------------------------------------------


def lag_before_call(rank: int) -> Failure:
    """One rank comes to a call later than the time-out."""
    compiled, model = compiled_decoder(timeout_s={"start": 60, "step": STEP_S})
    assert equals_eager(compiled, model)

    def late_call() -> None:
        time.sleep(SLOW_S if rank == ODD else 0)
        compiled(make_ids(21))

    return attempt(late_call, lambda: meet() and equals_eager(compiled, model))


def lag_between_collectives(rank: int) -> Failure:
    """One rank takes longer than the time-out between two collectives."""
    compiled, model = compiled_decoder(timeout_s={"start": 60, "step": STEP_S})
    assert equals_eager(compiled, model)
    (entry,) = pcp_compiler.compilations(compiled)
    function = entry.lowered.program.function
    entry.kept_lowered = entry.lowered  # type: ignore[attr-defined]

    def slow(*inputs: object) -> Any:
        program = function(*inputs)
        answer = yield next(program)
        time.sleep(SLOW_S)
        while True:
            try:
                answer = yield program.send(answer)
            except StopIteration as stop:
                return stop.value

    if rank == ODD:
        entry.lowered = replace(entry.lowered, program=replace(entry.lowered.program, function=slow))

    def good_call() -> bool:
        mend_program(compiled)
        return meet() and equals_eager(compiled, model)

    return attempt(lambda: compiled(make_ids(21)), good_call)


def meet() -> bool:
    """Wait until all ranks are here, by the caller's own group."""
    dist.barrier()
    return True


def slow_compile(rank: int) -> bool:
    """One rank compiles for longer than the start time-out, in a group that has not met yet."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = decoder()
    compiled = pcp_compiler.compile(
        model, options(2, timeout_s={"start": STEP_S, "step": 20}), group=pairs[rank % 2]
    )
    lower = Compilation.__post_init__

    def slow_lower(self: Compilation) -> None:
        lower(self)
        time.sleep(SLOW_S)

    if rank >= 2:
        Compilation.__post_init__ = slow_lower  # type: ignore[method-assign]
    try:
        return equals_eager(compiled, model)
    finally:
        Compilation.__post_init__ = lower  # type: ignore[method-assign]


def call_inside_call(rank: int) -> str:
    """A second call while one is under way, as from another thread."""
    compiled, model = compiled_decoder()
    assert equals_eager(compiled, model)
    (entry,) = pcp_compiler.compilations(compiled)
    group = entry.ranks
    assert isinstance(group, RankGroup)
    with group.call(entry.config.parallel.timeout_s):
        try:
            compiled(make_ids(21))
        except CallError as fault:
            message = str(fault)
    assert equals_eager(compiled, model)
    return message


# ---------------------------------------------------------------------------------------------------------------------

SCENARIOS: tuple[Callable[..., Any], ...] = (
    equality, low_precision, short_prompts, own_groups, caller_collectives, dumps, another_batch, another_batch_later,
    another_shape, another_weight, another_config, another_size, another_schedule, failure_while_compiling,
    failure_before_collectives, failure_between_collectives, failure_after_collectives, lag_before_call,
    lag_between_collectives, slow_compile, call_inside_call,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Crash:
    """A scenario that raised what it should not."""

    traceback: str


def run_all(rank: int, folder: str) -> dict[str, Any]:
    """Run every scenario, also after one that crashed."""
    outcomes: dict[str, Any] = {}
    for scenario in SCENARIOS:
        torch.compiler.reset()
        dist.barrier()
        started = time.monotonic()
        try:
            with torch.no_grad():
                outcomes[scenario.__name__] = scenario(rank, folder) if scenario is dumps else scenario(rank)
        except Exception:
            outcomes[scenario.__name__] = Crash(traceback.format_exc())
        outcomes[f"{scenario.__name__} seconds"] = time.monotonic() - started
    return outcomes

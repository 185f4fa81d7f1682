"""`gather_kv` in graphs with a cache: gathered rows go to their slots as they come, with the bits of restored ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from pcp_compiler import kv_ops, ops
from pcp_compiler.config import load_config
from pcp_compiler.errors import InvariantError
from pcp_compiler.graph_text import format_graph
from pcp_compiler.invariants import check_invariants, check_values
from pcp_compiler.kv_formats import FP8, cache_shape
from pcp_compiler.pass_api import PassContext, calls
from pcp_compiler.passes import gather_kv
from pcp_compiler.passes.attach_kv import SLOTS
from pcp_compiler.passes.gather_kv import EXPANDED_SLOTS, GatherKv
from pcp_compiler.passes.shard_tokens import find_index_input
from pcp_compiler.pipeline import lower, passes_for, run_pass
from pcp_compiler.plan.partition import Partition, partition_batch
from pcp_compiler.program import RankProgram
from pcp_compiler.ranks import LockstepResult, run_lockstep
from pcp_compiler.ranks.virtual import Program
from pcp_compiler.runtime.batch import PAD_SLOT
from tests.passes.models import CASES, NUM_IDS
from tests.passes.support import trace
from tests.passes.test_split_segments import BLOCK_SIZE, CACHED, IDS, WEIGHT, cached_index, heads, tiny_llama

GOLDENS = Path(__file__).parent / "gather_goldens"
aten = torch.ops.aten


# -- goldens ---------------------------------------------------------------------------------------------------------


def attend(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(heads(x), k, v, is_causal=True)


def rows_then_heads(input_ids: Tensor, table: Tensor) -> Tensor:
    x = F.embedding(input_ids, table)
    return attend(x, heads(x * 2), heads(x * 3)).relu()


def heads_before_rows(input_ids: Tensor, table: Tensor) -> Tensor:
    x = F.embedding(input_ids, table)
    return attend(x, heads(x).relu(), heads(x) * 3).relu()


def key_that_is_returned(input_ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    x = F.embedding(input_ids, table)
    k = heads(x * 2)
    return attend(x, k, heads(x * 3)).relu(), k


def repeated_heads(input_ids: Tensor, table: Tensor) -> Tensor:
    x = F.embedding(input_ids, table)
    k, v = ((x[..., :8] * n).view(1, -1, 2, 1, 4).expand(1, -1, 2, 2, 4).reshape(1, -1, 4, 4) for n in (2, 3))
    return attend(x, k.transpose(1, 2), v.transpose(1, 2)).relu()


def numbers_of_a_head_apart(input_ids: Tensor, table: Tensor) -> Tensor:
    x = F.embedding(input_ids, table)
    k, v = ((x * n).view(1, -1, 4, 4).transpose(2, 3).transpose(1, 2) for n in (2, 3))
    return attend(x, k, v).relu()


MATCHING = (rows_then_heads, heads_before_rows)
NOT_MATCHING = (key_that_is_returned, repeated_heads, numbers_of_a_head_apart)


def start(forward: Callable[..., Any]) -> tuple[fx.GraphModule, PassContext]:
    """Return the graph that the pass is given."""
    traced = trace(forward, IDS, WEIGHT)
    gm, ctx = traced.trace.copy_graph(), replace(traced.context(), phase=CACHED)
    for step in passes_for(ctx.config, CACHED):
        if step.name == "gather_kv":
            return gm, ctx
        gm, _ = run_pass(step, gm, ctx)
    raise AssertionError("gather_kv does not run")


def check_golden(request: pytest.FixtureRequest, forward: Callable[..., Any], old: str, new: str) -> None:
    path, text = GOLDENS / f"gather_kv__{forward.__name__}.txt", f"{old}---\n{new}"
    if request.config.getoption("--update-goldens"):
        path.write_text(text)
    assert path.is_file() and text == path.read_text(), f"{path} differs; if that is meant: pytest --update-goldens"


@pytest.mark.parametrize("forward", MATCHING + NOT_MATCHING, ids=lambda forward: forward.__name__)
def test_gathered_rows_are_written_as_they_come_where_nothing_else_wants_them(
    forward: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    gm, ctx = start(forward)
    old = format_graph(gm, ctx.seeds)
    gm, stage = run_pass(GatherKv(), gm, ctx)
    check_values(gm)
    check_golden(request, forward, old, once := format_graph(gm, ctx.seeds))
    is_direct = forward in MATCHING
    assert stage.num_rewrites == 1 + is_direct
    assert len(list(calls(gm, kv_ops.STORE_GATHERED_KV))) == is_direct
    assert len(list(calls(gm, kv_ops.STORE_KV, ops.GATHER_WAIT))) == 2 * (not is_direct)
    assert (find_index_input(gm, SLOTS) is None) == (find_index_input(gm, EXPANDED_SLOTS) is not None) == is_direct
    gm, again = run_pass(GatherKv(), gm, ctx)
    assert again.num_rewrites == 0 and format_graph(gm, ctx.seeds) == once


def test_every_golden_file_belongs_to_a_case() -> None:
    names = {f"gather_kv__{forward.__name__}" for forward in MATCHING + NOT_MATCHING}
    assert {path.stem for path in GOLDENS.iterdir()} == names


def test_what_the_docstring_says_of_caches_comes_from_a_golden() -> None:
    found = re.search(r"of the form above\n(.+?)^becomes\n(.+?)^This leaves", gather_kv.__doc__ or "", re.M | re.S)
    assert found is not None
    new = (GOLDENS / "gather_kv__rows_then_heads.txt").read_text().split("---\n")[1]
    shown = re.findall(r"%.* = ([\w.]+)\(", found[2])
    rest = iter(re.findall(r"%.* = ([\w.]+)\(", new))
    assert shown == ["pcp.gather_start.default", "pcp.store_gathered_kv.default"] and all(op in rest for op in shown)


def test_a_gather_that_is_written_and_read_elsewhere_breaks_an_invariant() -> None:
    gm, ctx = start(rows_then_heads)
    gm, _ = run_pass(GatherKv(), gm, ctx)
    (store,) = calls(gm, kv_ops.STORE_GATHERED_KV)
    with gm.graph.inserting_after(store):
        again = gm.graph.node_copy(store)
    with pytest.raises(InvariantError, match=r"collective-paired does not hold .* has 2 waits or writes and 2 users"):
        check_invariants(gm, "a test")
    gm.graph.erase_node(again)
    store.update_arg(0, next(calls(gm, aten.mul.Tensor)))
    with pytest.raises(InvariantError, match="collective-paired does not hold"):
        check_invariants(gm, "a test")


# -- the op ----------------------------------------------------------------------------------------------------------


def expanded_slots_of(partition: Partition, slots: Tensor) -> Tensor:
    """Return the slot of each gathered row: that of its token in the row that writes it."""
    writers = torch.from_numpy(partition.write_mask)
    return torch.where(writers, slots[torch.from_numpy(partition.gather)], PAD_SLOT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
@given(
    lens=st.lists(st.integers(0, 6), min_size=1, max_size=4), pcp_size=st.integers(1, 3), shard_decode=st.booleans(),
    num_pads=st.integers(0, 2), widths=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
    seed=st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_slots_hold_the_bits_of_restored_rows_and_no_pad(
    dtype: torch.dtype, lens: list[int], pcp_size: int, shard_decode: bool, num_pads: int,
    widths: tuple[int, int, int], seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"pcp_size": pcp_size, "shard_decode": shard_decode}
    is_prefilling = [number % 2 == 0 for number in range(len(lens))]
    partition = partition_batch(lens, is_prefilling, **options)
    partition = partition_batch(lens, is_prefilling, **options, width=partition.width + num_pads)
    num_heads, k_width, v_width = widths
    k, v = (torch.randn(1, sum(lens), num_heads, width, generator=generator) for width in (k_width, v_width))
    slots = BLOCK_SIZE + torch.randperm(sum(lens) + 3, generator=generator)[: sum(lens)]
    gather = torch.from_numpy(partition.gather)
    expanded = torch.full((len(gather), num_heads * (k_width + v_width)), float("nan"))
    expanded_slots = torch.full((len(gather),), PAD_SLOT)
    if sum(lens):
        expanded_slots = expanded_slots_of(partition, slots)
        written = expanded_slots >= 0  # every other row, copies of replicated ones too, stays NaN
        expanded[written] = ops.pack_rows([k, v], [1, 1])[gather][written]
    (stored, by_rows) = (
        [torch.full((BLOCK_SIZE + sum(lens) + 4, *shape), 7).to(kind) for shape, kind in (
            cache_shape((num_heads, width), dtype) for width in (k_width, v_width))]
        for _ in range(2)
    )  # fmt: skip
    done = kv_ops.STORE_GATHERED_KV(expanded, expanded_slots, *stored, layer=0)
    kv_ops.STORE_KV(k, v, slots, *by_rows, layer=0)
    assert done.shape == (0,) and done.dtype == expanded.dtype
    for actual, expected in zip(stored, by_rows, strict=True):
        assert torch.equal(actual[:-1].view(torch.uint8), expected[:-1].view(torch.uint8))
        assert (actual[:BLOCK_SIZE] == 7).all()


# -- programs --------------------------------------------------------------------------------------------------------


@cache
def programs() -> tuple[RankProgram, RankProgram]:
    """Return the program of two layers that writes gathered rows, and one that restores them."""
    config = load_config({"parallel": {"pcp_size": 2}})
    direct = lower(tiny_llama(2).trace, config, phase=CACHED).program
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_kv, "_gather_behind", lambda store: None)
        restoring = lower(tiny_llama(2).trace, config, phase=CACHED).program
    targets = (kv_ops.STORE_GATHERED_KV, ops.GATHER_WAIT, kv_ops.STORE_KV)
    counts = [[len(list(calls(program.graph_module, target))) for target in targets] for program in (direct, restoring)]
    assert counts == [[2, 0, 0], [0, 2, 2]]
    assert direct.schedule == restoring.schedule
    return direct, restoring


def inputs_for(num_tokens: int) -> list[object]:
    inputs = tiny_llama(2).inputs_for(CASES["llama"].input_ids(max(num_tokens, 1)))
    return [*inputs[:-1], torch.arange(num_tokens)[None] % NUM_IDS]


def with_poisoned_pads(program: Program, num_rows: int) -> Program:
    """Run a rank's program with NaN in the keys and values of its rows of padding."""
    answer: Any = None
    while True:
        try:
            request = program.send(answer)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        if request.op is ops.GATHER_START:
            xs, dims = request.args
            pads = [torch.arange(num_rows, x.shape[dim]) for x, dim in zip(xs, dims, strict=True)]
            spoilt = [x.index_fill(dim, pad, float("nan")) for x, dim, pad in zip(xs, dims, pads, strict=True)]
            request.args = (spoilt, dims)
        answer = yield request


def run_ranks(
    program: RankProgram, partition: Partition, index: Sequence[dict[str, Tensor]], *, is_poisoned: bool = False
) -> LockstepResult:
    inputs = inputs_for(len(partition.restore))
    started = [program.start(inputs, tensors) for tensors in index]
    if is_poisoned:
        started = [with_poisoned_pads(*pair) for pair in zip(started, partition.per_rank, strict=True)]
    with torch.no_grad():
        done = run_lockstep(started)
    assert tuple((ran.name, ran.op) for ran in done.collectives) == program.schedule
    return done


def share_caches(index: list[dict[str, Tensor]]) -> None:
    """Let all ranks use the caches of rank 0, which alone writes, as virtual ranks of a decoder do."""
    for of_rank in index[1:]:
        of_rank.update({role: value for role, value in index[0].items() if "cache" in role})
        of_rank.update({role: torch.full_like(of_rank[role], PAD_SLOT) for role in (SLOTS, EXPANDED_SLOTS)})


@pytest.mark.parametrize("kv", ["shared", "per_rank"])
@pytest.mark.parametrize("pcp_size", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 16])
def test_ranks_compute_and_store_what_they_do_with_restored_rows(num_tokens: int, pcp_size: int, kv: str) -> None:
    direct, restoring = programs()
    partition = partition_batch([num_tokens], [True], pcp_size=pcp_size, shard_decode=False)
    partition = partition_batch(
        [num_tokens], [True], pcp_size=pcp_size, shard_decode=False, width=partition.width + (num_tokens == 7)
    )
    results, stored = [], []
    for program, is_poisoned in ((restoring, False), (direct, False), (direct, True)):
        index = cached_index(partition, program)
        if kv == "shared":
            share_caches(index)
        done = run_ranks(program, partition, index, is_poisoned=is_poisoned)
        results.append(done)
        stored.append([value[:-1] for of_rank in index for role, value in of_rank.items() if "cache" in role])
    for done, caches in zip(results[1:], stored[1:], strict=True):
        assert done.collectives == results[0].collectives
        for outputs, expected in zip(done.outputs, results[0].outputs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
        assert len(caches) == 4 * pcp_size
        for slots, by_restored in zip(caches, stored[0], strict=True):
            assert torch.equal(slots, by_restored) and not slots[:BLOCK_SIZE].any()
            assert bool(slots.any()) == (num_tokens > 0)

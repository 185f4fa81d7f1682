"""Random schedules against plain lists, and proof that the comparison notices faults."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from pcp_compiler.plan.partition import Partition
from pcp_compiler.runtime.batch import PAD_SLOT, Batch, LocalView, local_view
from pcp_compiler.runtime.kv_blocks import BlockPool
from pcp_compiler.runtime.request import Request
from pcp_compiler.runtime.scheduler import Scheduler
from tests.runtime import fakes
from tests.runtime.fuzz import run_schedule

NUM_SCHEDULES = 300
NUM_FAULTY = 200
SITUATIONS = (
    "prefill", "mixed", "decode", "verify", "piece of a prompt", "prompt of K + 1 rows", "accepted draft",
    "rejected draft", "tokens after a stop", "drafter with a gap", "preempted", "cached token", "cancelled",
    "step with an idle rank",
)  # fmt: skip


def test_random_schedules_give_the_lists_tokens_positions_slots_and_caches() -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        counts += run_schedule(seed)
    assert min(counts[situation] for situation in SITUATIONS) >= 20, counts


Patch = Callable[[pytest.MonkeyPatch], None]


def count_rejected_rows_as_computed(patch: pytest.MonkeyPatch) -> None:
    """Drop the rewind after a rejection."""

    def count_rows(self: Scheduler, request: Request, num_rows: int, *, has_draft_rows: bool) -> None:
        del self, has_draft_rows
        request.num_computed += num_rows + (len(request.token_ids) - 1 > request.num_computed + num_rows)

    patch.setattr(Scheduler, "_count_rows", count_rows)


def reserve_nothing_ahead(patch: pytest.MonkeyPatch) -> None:
    """Forget the blocks of the drafter's look ahead."""
    patch.setattr(Scheduler, "_end_of_blocks", lambda self, num_tokens: num_tokens)


def lose_the_last_token_when_preempted(patch: pytest.MonkeyPatch) -> None:
    """Restart without the token that was never computed."""
    restart = Request.restart

    def lossy_restart(self: Request) -> None:
        del self.token_ids[max(self.num_prompt_tokens, len(self.token_ids) - 1) :]
        restart(self)

    patch.setattr(Request, "restart", lossy_restart)


def share_by_block_tokens_alone(patch: pytest.MonkeyPatch) -> None:
    """Let MTP share a block whatever token follows it."""
    init = Scheduler.__init__

    def forgetful_init(self: Scheduler, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        self.limits = dataclasses.replace(self.limits, draft_shift=0)

    patch.setattr(Scheduler, "__init__", forgetful_init)


def share_blocks_that_the_drafter_has_not_written(patch: pytest.MonkeyPatch) -> None:
    """Publish what the target has computed."""
    publish = Scheduler._publish

    def hasty_publish(self: Scheduler, request: Request) -> None:
        request.num_draft_rows = request.num_computed
        publish(self, request)

    patch.setattr(Scheduler, "_publish", hasty_publish)


def free_shared_blocks_at_once(patch: pytest.MonkeyPatch) -> None:
    """Ignore that another request still uses a block."""

    def share(self: BlockPool, blocks: list[int]) -> None:
        for block in blocks:
            self._free.pop(block, None)
            self._num_users[block] = 1

    patch.setattr(BlockPool, "share", share)


def let_every_copy_write(patch: pytest.MonkeyPatch) -> None:
    """Skip the write mask: replicated rows have a slot on every rank."""

    def unmasked_view(batch: Batch, partition: Partition, rank: int) -> LocalView:
        slots = np.concatenate([local_view(batch, partition, r).local_slots for r in range(len(partition.per_rank))])
        return dataclasses.replace(local_view(batch, partition, rank), expanded_slots=slots)

    patch.setattr(fakes, "local_view", unmasked_view)


def leave_a_row_unwritten(patch: pytest.MonkeyPatch) -> None:
    """Treat the first row of a step as padding when K/V is written: after a rejection it holds the rejected draft's."""

    def leaky_view(batch: Batch, partition: Partition, rank: int) -> LocalView:
        view = local_view(batch, partition, rank)
        view.expanded_slots[partition.restore[:1]] = view.local_slots[:1] = PAD_SLOT
        return view

    patch.setattr(fakes, "local_view", leaky_view)


def take_the_requests_length_for_each_span(patch: pytest.MonkeyPatch) -> None:
    """Use one length per request where a prefill has two spans."""

    def long_view(batch: Batch, partition: Partition, rank: int) -> LocalView:
        view = local_view(batch, partition, rank)
        spans = tuple(span._replace(seq_len=int(batch.seq_lens[span.request])) for span in view.spans)
        return dataclasses.replace(view, spans=spans)

    patch.setattr(fakes, "local_view", long_view)


@pytest.mark.parametrize(
    "fault",
    [
        count_rejected_rows_as_computed,
        reserve_nothing_ahead,
        lose_the_last_token_when_preempted,
        share_by_block_tokens_alone,
        share_blocks_that_the_drafter_has_not_written,
        free_shared_blocks_at_once,
        let_every_copy_write,
        leave_a_row_unwritten,
        take_the_requests_length_for_each_span,
    ],
)
def test_random_schedules_notice_a_fault(fault: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(NUM_FAULTY):
            run_schedule(seed)

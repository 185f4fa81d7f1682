"""Random schedules of the runtime's bookkeeping on fake ranks, checked against plain lists.

Run it as a script: `python tests/runtime/fuzz.py --count 10000 --seed 0`. Schedule i has the seed `--seed` + i, so a
failing one runs again with `--count 1`.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pcp_compiler.plan.partition import Partition, partition_batch
from pcp_compiler.runtime.batch import Batch
from pcp_compiler.runtime.kv_blocks import BlockPool
from pcp_compiler.runtime.request import Request
from pcp_compiler.runtime.sampling import SamplingParams
from pcp_compiler.runtime.scheduler import RequestOutput, Scheduler, SchedulerLimits, Step
from tests.runtime.fakes import FakeRanks, Forward, Ids
from tests.runtime.oracle import Answer, Tables, answer_greedily

MAX_STEPS = 2000


@dataclass(frozen=True)
class Arrival:
    """A prompt, and the step before which it is submitted."""

    step: int
    prompt_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Scenario:
    """Everything that is drawn before the first step."""

    limits: SchedulerLimits
    num_blocks: int
    block_size: int
    tables: Tables
    arrivals: list[Arrival]
    pcp_size: int
    shard_decode: bool
    min_tokens_to_shard: int
    spare_rows: int
    always_gather: bool
    is_draft_sharded: bool
    varies_num_drafts: bool
    cancel_chance: float
    skip_drafter_chance: float

    @classmethod
    def draw(cls, rng: random.Random, pcp_size: int) -> Scenario:
        """Draw a scenario; small pools, chunks and budgets are common."""
        limits = _draw_limits(rng)
        tables = Tables.make(rng, rng.choice([2, 5, 9]), rng.choice([0, 64, 128, 256]))
        arrivals = _draw_arrivals(rng, limits, tables.vocab_size)
        block_size = rng.choice([1, 2, 3, 4, 8])
        return cls(
            limits=limits,
            num_blocks=1 + _draw_num_usable(rng, limits, block_size, arrivals),
            block_size=block_size,
            tables=tables,
            arrivals=arrivals,
            pcp_size=pcp_size,
            shard_decode=rng.random() < 0.5,
            min_tokens_to_shard=rng.choice([0, 0, 2, 2 * pcp_size]),
            spare_rows=rng.choice([0, 0, 1, 5]),
            always_gather=rng.random() < 0.3,
            is_draft_sharded=rng.random() < 0.5,
            varies_num_drafts=rng.random() < 0.3,
            cancel_chance=rng.choice([0, 0, 0.02]),
            skip_drafter_chance=rng.choice([0, 0, 0, 0.1]),
        )


def _draw_limits(rng: random.Random) -> SchedulerLimits:
    num_draft_tokens = rng.randint(0, 4)
    return SchedulerLimits(
        max_model_len=rng.randint(12, 40),
        max_num_requests=rng.choice([1, 3, 6]),
        max_num_tokens=rng.choice([rng.randint(1, 4), rng.randint(4, 16), 40]),
        prefill_chunk=rng.choice([None, rng.randint(1, 4), rng.randint(4, 16)]),
        prefix_cache=rng.random() < 0.8,
        num_draft_tokens=num_draft_tokens,
        num_lookahead=num_draft_tokens,
        draft_shift=1 if num_draft_tokens else 0,
    )


def _draw_arrivals(rng: random.Random, limits: SchedulerLimits, vocab_size: int) -> list[Arrival]:
    """Draw requests whose prompts often begin alike; some are exactly as long as a verify row group."""
    stems = [[rng.randrange(vocab_size) for _ in range(limits.max_model_len)] for _ in range(2)]
    arrivals = []
    for _ in range(rng.randint(1, 8)):
        longest = limits.max_model_len - 1
        num_tokens = rng.choice([limits.num_draft_tokens + 1, rng.randint(1, longest), rng.randint(1, longest // 2)])
        num_common = rng.choice([rng.randint(0, num_tokens), max(0, num_tokens - 2)])
        tail = [rng.randrange(vocab_size) for _ in range(num_tokens - num_common)]
        stop_token_ids = (rng.randrange(vocab_size),) if rng.random() < 0.2 else ()
        params = SamplingParams(rng.randint(1, 24), stop_token_ids=stop_token_ids)
        arrivals.append(Arrival(rng.choice([0, 0, rng.randint(0, 20)]), rng.choice(stems)[:num_common] + tail, params))
    return sorted(arrivals, key=lambda arrival: arrival.step)


def _draw_num_usable(rng: random.Random, limits: SchedulerLimits, block_size: int, arrivals: Iterable[Arrival]) -> int:
    """Return a pool size from what the largest request needs alone to what all need together."""
    needs = []
    for arrival in arrivals:
        num_rows = len(arrival.prompt_ids) + arrival.params.max_new_tokens - 1
        needs.append(-(-min(num_rows + limits.num_lookahead, limits.max_model_len) // block_size))
    return rng.choice([max(needs), min(max(needs) + 3, sum(needs)), rng.randint(max(needs), sum(needs) + 8)])


class Replay:
    """One scenario, run and checked step by step; `counts` tells what it came across."""

    def __init__(self, scenario: Scenario, rng: random.Random) -> None:
        self.scenario = scenario
        self.rng = rng
        self.counts: Counter[str] = Counter()
        self.pool = BlockPool(scenario.num_blocks, scenario.block_size)
        self.scheduler = Scheduler(scenario.limits, self.pool)
        self.ranks = FakeRanks(scenario.tables, scenario.pcp_size, scenario.num_blocks, scenario.block_size)
        self.ranks.always_gather = scenario.always_gather
        self.answers: dict[Request, Answer] = {}
        self.streams: dict[Request, list[int]] = {}
        """What a user who reads every output has seen of each request."""

    def run(self) -> None:
        """Run to the end."""
        arrivals = list(self.scenario.arrivals)
        for step_index in range(MAX_STEPS):
            while arrivals and arrivals[0].step <= step_index:
                self._submit(arrivals.pop(0))
            self._maybe_cancel()
            step = self.scheduler.schedule()
            if step is not None:
                self._run_step(step)
            elif not arrivals:
                break
        assert not self.scheduler.has_work, f"not done after {MAX_STEPS} steps"
        self._check_end()

    def _submit(self, arrival: Arrival) -> None:
        request = self.scheduler.submit(arrival.prompt_ids, arrival.params)
        self.streams[request] = []
        max_len = min(len(arrival.prompt_ids) + arrival.params.max_new_tokens, self.scenario.limits.max_model_len)
        self.answers[request] = answer_greedily(
            self.scenario.tables, arrival.prompt_ids, max_len, arrival.params.stop_token_ids
        )

    def _maybe_cancel(self) -> None:
        for request in self.answers:
            if self.rng.random() < self.scenario.cancel_chance:
                self.counts["cancelled"] += request.cancel()

    def _run_step(self, step: Step) -> None:
        partition = self._partition(step.batch)
        check_batch(step, self.pool)
        self.ranks.start(step.batch, partition)
        for index, rows in enumerate(step.rows):
            self.ranks.give_up(index, rows.request.num_computed, len(rows.request.block_table))
        forward = self.ranks.run_target()
        sampled = self._accept(step, self.ranks.pick_tokens(forward))
        drafts = None if self._skips_drafter() else self._propose(step, sampled, forward)
        self._maybe_cancel()
        self._count(step, partition, sampled)
        outputs = self.scheduler.complete(step, sampled, drafts)
        self._check_outputs(outputs, sampled, drafts)
        self._check_caches()

    def _partition(self, batch: Batch) -> Partition:
        def partition(width: int | None) -> Partition:
            return partition_batch(
                batch.query_lens,
                batch.is_prefilling,
                pcp_size=self.scenario.pcp_size,
                shard_decode=self.scenario.shard_decode,
                min_tokens_to_shard=self.scenario.min_tokens_to_shard,
                width=width,
            )

        return partition(partition(None).width + self.scenario.spare_rows)

    def _accept(self, step: Step, picked: Ids) -> list[list[int]]:
        """Return each request's accepted drafts and the token after them."""
        sampled = []
        for index, rows in enumerate(step.rows):
            tokens = picked[step.batch.logit_start[index] : step.batch.logit_start[index + 1]].tolist()
            drafts = rows.request.draft_ids[: rows.num_drafts]
            num_accepted = next((i for i, draft in enumerate(drafts) if draft != tokens[i]), len(drafts))
            sampled.append(tokens[: num_accepted + 1])
        return sampled

    def _skips_drafter(self) -> bool:
        return not self.scenario.limits.num_draft_tokens or self.rng.random() < self.scenario.skip_drafter_chance

    def _propose(self, step: Step, sampled: list[list[int]], forward: Forward) -> list[list[int]]:
        """Run the drafter as a decoder would: on what was sampled, whether or not it ends a request."""
        limits, num_drafts = self.scenario.limits, self.scenario.limits.num_draft_tokens
        num_kept, next_ids = [], []
        for rows, tokens in zip(step.rows, sampled, strict=True):
            num_rejected = rows.num_drafts + 1 - len(tokens) if rows.is_sampled else 0
            num_kept.append(rows.query_len - num_rejected)
            behind = rows.request.num_computed + rows.query_len
            next_ids.append(tokens[-1] if rows.is_sampled else rows.request.token_ids[behind])
        drafts = self.ranks.propose(
            forward,
            num_kept=np.array(num_kept),
            next_ids=np.array(next_ids),
            num_drafts=self.rng.randint(0, num_drafts) if self.scenario.varies_num_drafts else num_drafts,
            max_model_len=limits.max_model_len,
            is_whole=[rows.request.num_draft_rows == rows.request.num_computed for rows in step.rows],
            is_sharded=self.scenario.is_draft_sharded,
        )
        return [row.tolist() for row in drafts]

    def _count(self, step: Step, partition: Partition, sampled: list[list[int]]) -> None:
        self.counts[step.batch.phase] += 1
        self.counts["step with an idle rank"] += 0 in partition.per_rank
        for rows, tokens in zip(step.rows, sampled, strict=True):
            request = rows.request
            self.counts["accepted draft"] += max(len(tokens) - 1, 0)
            self.counts["rejected draft"] += rows.num_drafts + 1 - len(tokens) if rows.is_sampled else 0
            self.counts["piece of a prompt"] += not rows.is_sampled
            looks_like_verify = rows.query_len == self.scenario.limits.num_draft_tokens + 1
            self.counts["prompt of K + 1 rows"] += request.is_prefilling and looks_like_verify
            has_drafter = self.scenario.limits.num_draft_tokens > 0
            self.counts["drafter with a gap"] += has_drafter and request.num_draft_rows < request.num_computed

    def _check_outputs(
        self, outputs: list[RequestOutput], sampled: list[list[int]], drafts: list[list[int]] | None
    ) -> None:
        for index, output in enumerate(outputs):
            request, answer = output.request, self.answers[output.request]
            assert request.token_ids == answer.token_ids[: len(request.token_ids)], "tokens differ from plain greedy"
            assert output.token_ids == tuple(sampled[index][: len(output.token_ids)])
            self.streams[request] += output.token_ids
            assert request.output_ids == self.streams[request], "a token was emitted twice or not at all"
            self.counts["tokens after a stop"] += len(sampled[index]) - len(output.token_ids)
            if request.is_finished or request.is_prefilling:
                assert not request.draft_ids or request.finish_reason == "cancelled"
                continue
            assert request.num_computed == len(request.token_ids) - 1
            if drafts is not None and request.num_draft_rows == request.num_computed:
                expected = answer.drafts(request.num_computed - 1, len(request.draft_ids))
                assert list(request.draft_ids) == expected, "the drafter read other K/V than its own"

    def _check_caches(self) -> None:
        """Compare every slot that is said to be written, of each running request and rank, with the answer's K/V."""
        for request in self.scheduler.running:
            expected = self.answers[request].caches
            slots = list_slots(request, request.num_computed, self.scenario.block_size)
            target = self.ranks.kv[:, :2, slots]
            assert (target == expected[:2, : request.num_computed]).all(), "a K/V slot of the target is wrong"
            if self.scenario.limits.num_draft_tokens:
                drafter = self.ranks.kv[:, 2, slots[: request.num_draft_rows]]
                assert (drafter == expected[2, : request.num_draft_rows]).all(), "a K/V slot of the drafter is wrong"
        assert (self.ranks.kv[:, :, : self.scenario.block_size] == self.ranks.kv[0, 0, 0]).all(), "block 0 was written"

    def _check_end(self) -> None:
        assert self.pool.num_free == self.pool.num_usable, "KV blocks are missing"
        for request, answer in self.answers.items():
            self.counts["preempted"] += request.num_preemptions
            self.counts["cached token"] += request.num_cached_tokens
            if request.finish_reason == "cancelled":
                continue
            assert request.output_ids == answer.output_ids, "output differs from plain greedy"
            ended_by_stop = request.output_ids[-1] in request.params.stop_token_ids
            assert request.finish_reason == ("stop" if ended_by_stop else "length")


def list_slots(request: Request, stop: int, block_size: int) -> list[int]:
    """Return the KV slot of positions 0..stop - 1, one by one."""
    return [request.block_table[p // block_size] * block_size + p % block_size for p in range(stop)]


def check_batch(step: Step, pool: BlockPool) -> None:
    """Compare a step's batch with lists built from its requests, row by row."""
    batch, block_size = step.batch, pool.block_size
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    for index, rows in enumerate(step.rows):
        request, start = rows.request, rows.request.num_computed
        stop = start + rows.query_len
        ids += (request.token_ids + list(request.draft_ids))[start:stop]
        positions += range(start, stop)
        slots += list_slots(request, stop, block_size)[start:]
        logit_rows += [row for row in range(len(ids)) if row >= len(ids) - 1 - rows.num_drafts and rows.is_sampled]
        assert batch.seq_lens[index] == stop and batch.computed[index] == start
        assert batch.is_prefilling[index] == (start < request.prefill_len)
        for block in request.block_table[start // block_size :]:
            assert pool.num_users(block) == 1 and not pool.is_published(block), "a shared block would be written"
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert batch.logit_rows.tolist() == logit_rows


def run_schedule(seed: int) -> Counter[str]:
    """Run one random schedule on 1, 2 or 4 ranks; raise AssertionError if anything differs from the lists."""
    rng = random.Random(seed)
    replay = Replay(Scenario.draw(rng, pcp_size=(1, 2, 4)[seed % 3]), rng)
    replay.run()
    return replay.counts


def main() -> int:
    """Run the schedules that the command line asks for; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="schedules to run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    columns = (TextColumn("schedules"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        for seed in progress.track(range(args.seed, args.seed + args.count)):
            try:
                counts += run_schedule(seed)
            except Exception:
                traceback.print_exc()
                progress.console.print(f"failed; again with: python {sys.argv[0]} --count 1 --seed {seed}")
                return 1
    for name, number in sorted(counts.items()):
        print(f"{number:9} x {name}")
    print(f"{args.count} schedules, no differences")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`SpeculativeDecoder`: prefill sharded over PCP ranks, drafting, verification, sampling, for many requests at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pcp_compiler.config import Config, load_config
from pcp_compiler.drafters.base import Drafter, find_target_parts
from pcp_compiler.drafters.load import load_drafter
from pcp_compiler.errors import CallError, ConfigError
from pcp_compiler.plan.draft import DraftPlan, resolve_draft
from pcp_compiler.plan.k_schedule import build_schedule
from pcp_compiler.plan.partition import Partition, partition_batch
from pcp_compiler.plan.refusals import RefusalFacts, check_refusals
from pcp_compiler.runtime.batch import Batch
from pcp_compiler.runtime.cached_model import CachedModel, KvPlacement, StepIndex, bytes_per_slot, step_index
from pcp_compiler.runtime.kv_blocks import BlockPool
from pcp_compiler.runtime.metrics import AcceptanceStats
from pcp_compiler.runtime.proposer import MTPProposer, Proposal
from pcp_compiler.runtime.rejection import verify
from pcp_compiler.runtime.request import FinishReason, Request
from pcp_compiler.runtime.rows import TargetRows, attention_as_rows
from pcp_compiler.runtime.sampling import SamplingParams, SamplingRows
from pcp_compiler.runtime.scheduler import Scheduler, SchedulerLimits, Step
from pcp_compiler.trace import trace_module

KV_DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Event:
    """What a step gave one request: new tokens, and why it is finished if it is."""

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Generation:
    """The output of one request and its acceptance counts."""

    token_ids: list[int]
    finish_reason: FinishReason
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)


class SpeculativeDecoder:
    """Generates with a target model and, if the config names one, a drafter.

    Args:
        target: causal language model of transformers, in eval mode.
        config: `Config`, dict or file. drafter: a ready drafter; default: built from `config.draft`.
        kv: see `CachedModel`.
    Raises:
        ConfigError, UnsupportedGraphError: before anything runs.
    """

    def __init__(
        self, target: nn.Module, config: Config | Mapping[str, Any] | str | Path | None = None,
        drafter: Drafter | None = None, *, kv: KvPlacement = "shared",
    ) -> None:  # fmt: skip
        self.config = load_config(config)
        self.plan = self._resolve_plan()
        parts = find_target_parts(target)
        self.vocab_size = parts.vocab_size
        self.device = parts.embedding.weight.device
        self.drafter = drafter or load_drafter(target, self.config.draft.model_dump())
        num_drafts = self.config.draft.num_speculative_tokens if self.drafter else 0
        self._schedule = build_schedule(
            self.config.draft.k_schedule, num_speculative_tokens=num_drafts,
            max_num_requests=self.config.limits.max_num_requests,
        )  # fmt: skip
        self.limits = self._limits(parts.config, num_drafts)
        dtype = KV_DTYPES[self.config.limits.kv_cache_dtype]
        is_sharded_draft = self.plan is not None and self.plan.mode == "sharded"
        with attention_as_rows(target):
            traced = self._trace_target(target)
        num_blocks = self._num_blocks(traced, dtype)
        num_slots = num_blocks * self.config.limits.kv_block_size
        self.target = CachedModel(
            traced, self.config, name="target", num_slots=num_slots, dtype=dtype, kv=kv,
            local_output=0 if is_sharded_draft and self.config.parallel.pcp_size > 1 else None,
        )  # fmt: skip
        self.proposer = None
        if self.drafter is not None:
            assert self.plan is not None
            self.proposer = MTPProposer(
                self.drafter, self.plan, self.config, num_slots=num_slots, dtype=dtype, kv=kv,
                max_model_len=self.limits.max_model_len,
            )  # fmt: skip
        self.pool = BlockPool(num_blocks, self.config.limits.kv_block_size)
        self.scheduler = Scheduler(self.limits, self.pool)
        self.stats: dict[int, AcceptanceStats] = {}
        self._proposals: dict[int, Proposal] = {}

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """Queue a prompt.

        Raises:
            CallError: empty, too long, or an id outside of the vocabulary. ConfigError: the KV pool is too small.
        """
        ids = [int(token_id) for token_id in prompt_ids]
        bad = [token_id for token_id in ids if not 0 <= token_id < self.vocab_size]
        if bad:
            raise CallError(f"prompt_ids: id {bad[0]} is outside of the vocabulary; allowed: 0 to {self.vocab_size - 1}")
        request = self.scheduler.submit(ids, params.with_seed())
        self.stats[request.request_id] = AcceptanceStats()
        return request

    def step(self) -> list[Event]:
        """Run one step of all requests: their rows, the verification, the drafts for the next step."""
        step = self.scheduler.schedule()
        if step is None:
            return []
        batch = step.batch
        partition = self._partition(batch)
        index = step_index(batch, partition, self.device)
        hidden, logits = self._run_target(batch, index)
        sampled, last_rows = self._verify(step, logits)
        drafts = None
        if self.proposer is not None:
            drafts = self._propose(step, index, hidden, sampled, last_rows)
        events = []
        for output in self.scheduler.complete(step, sampled, drafts):
            stats = self.stats[output.request.request_id]
            if output.token_ids:
                stats.add_round(output.num_draft_tokens, output.num_accepted)
            if output.token_ids or output.finish_reason:
                events.append(Event(output.request, output.token_ids, output.finish_reason))
        return events

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams],
        on_tokens: Callable[[int, tuple[int, ...]], None] | None = None, progress: bool = True,
    ) -> list[Generation]:  # fmt: skip
        """Generate for several prompts; more than `limits.max_num_requests` wait in a queue.

        Args:
            params: one for all, or one per prompt. on_tokens: called with prompt number and new tokens.
            progress: show a progress bar.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise CallError(f"params: got {len(each)} for {len(prompts)} prompts; allowed: one, or one per prompt")
        requests: list[Request] = []
        try:
            for prompt, option in zip(prompts, each, strict=True):
                requests.append(self.submit(prompt, option))
            self._run_all(requests, on_tokens, progress)
        except BaseException:
            for request in requests:
                request.cancel()
            self.scheduler.release_finished()
            raise
        return [self._generation(request) for request in requests]

    # -- one step --------------------------------------------------------------------------------------------------

    def _partition(self, batch: Batch) -> Partition | None:
        """Return the rows of each rank, None when all ranks run all rows."""
        parallel = self.config.parallel
        if parallel.pcp_size == 1:
            return None
        prompts = batch.query_lens[batch.is_prefilling]
        if not parallel.shard_decode and (prompts < max(2, parallel.min_tokens_to_shard_resolved)).all():
            return None
        return partition_batch(
            batch.query_lens, batch.is_prefilling, pcp_size=parallel.pcp_size, shard_decode=parallel.shard_decode,
            min_tokens_to_shard=parallel.min_tokens_to_shard_resolved,
        )  # fmt: skip

    def _run_target(self, batch: Batch, index: StepIndex) -> tuple[list[Tensor], Tensor]:
        """Return the hidden states of each rank (one entry when rows are whole) and the logits [L, V]."""
        inputs = {
            "input_ids": self._tensor(batch.input_ids)[None],
            "position_ids": self._tensor(batch.positions)[None],
            "logit_rows": self._tensor(batch.logit_rows),
        }
        if index.partition is None:
            hidden, logits = self.target.run_whole(inputs, index.whole)
            return [hidden], logits
        results = self.target.run_sharded([inputs] * self.config.parallel.pcp_size, index)
        return [hidden for hidden, _ in results], results[0][1]

    def _verify(self, step: Step, logits: Tensor) -> tuple[list[tuple[int, ...]], np.ndarray]:
        """Return the tokens each request emits and its last row that counts; rank 0's logits decide."""
        batch = step.batch
        chosen = [i for i, rows in enumerate(step.rows) if rows.is_sampled]
        sampled: list[tuple[int, ...]] = [() for _ in step.rows]
        last_rows = batch.query_start[1:] - 1
        if not chosen:
            return sampled, last_rows
        counts = np.diff(batch.logit_start)[chosen]
        cu_rows = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        draft_ids = np.concatenate([batch.input_ids[batch.query_start[i + 1] - step.rows[i].num_drafts : batch.query_start[i + 1]] for i in chosen])
        starts = self._tensor(batch.positions[batch.query_start[np.array(chosen) + 1] - counts])
        verdict = verify(
            logits.float(), self._tensor(draft_ids), self._draft_probs(step, chosen), cu_rows,
            SamplingRows.from_params([step.rows[i].request.params for i in chosen], self.device), starts,
            verification=self.config.draft.verification,
        )  # fmt: skip
        tokens, emitted = verdict.token_ids.tolist(), verdict.num_emitted.tolist()
        for row, i in enumerate(chosen):
            sampled[i] = tuple(tokens[row][: emitted[row]])
            last_rows[i] = batch.query_start[i + 1] - int(counts[row]) + max(emitted[row], 1) - 1
        return sampled, last_rows

    def _draft_probs(self, step: Step, chosen: list[int]) -> Tensor | None:
        """Return the distributions that the drafts of this step came from, None for greedy drafts."""
        if self.config.draft.sampling == "greedy":
            return None
        found = [
            self._proposals[step.rows[i].request.request_id].probs[: step.rows[i].num_drafts]  # type: ignore[index]
            for i in chosen
            if step.rows[i].num_drafts
        ]
        return torch.cat(found) if found else None

    def _propose(
        self, step: Step, index: StepIndex, hidden: list[Tensor], sampled: list[tuple[int, ...]], last_rows: np.ndarray
    ) -> list[tuple[int, ...]]:  # fmt: skip
        """Run the drafter over this step's rows, and on for requests that go on; return drafts per request."""
        assert self.proposer is not None
        num_requests = len(self.scheduler.running)
        proposals = self.proposer.propose(
            step, index, hidden, sampled, last_rows, self._schedule.lookup(max(num_requests, 1))
        )
        for rows, proposal in zip(step.rows, proposals, strict=True):
            self._proposals[rows.request.request_id] = proposal
        return [proposal.token_ids for proposal in proposals]

    # -- set-up ----------------------------------------------------------------------------------------------------

    def _resolve_plan(self) -> DraftPlan | None:
        check_refusals(self.config, RefusalFacts())
        if self.config.draft.method == "none":
            return None
        return resolve_draft(self.config, method=self.config.draft.method, kind="full")

    def _trace_target(self, target: nn.Module) -> Any:
        rows = torch.zeros(1, 7, dtype=torch.int64, device=self.device)
        return trace_module(
            TargetRows(target), (rows, rows.clone(), torch.zeros(3, dtype=torch.int64, device=self.device)),
            tokens={"input_ids": 1, "position_ids": 1}, other_sizes={"logit_rows": 0},
        )  # fmt: skip

    def _limits(self, model_config: Any, num_drafts: int) -> SchedulerLimits:
        limits = self.config.limits
        longest = int(model_config.max_position_embeddings)
        if limits.max_model_len is not None and limits.max_model_len > longest:
            raise ConfigError(
                f"limits.max_model_len: got {limits.max_model_len}; the target has {longest} positions, allowed: up to that"
            )
        return SchedulerLimits(
            limits.max_model_len or longest, limits.max_num_requests, limits.max_num_tokens, limits.prefill_chunk_resolved,
            limits.prefix_cache, num_drafts, num_drafts, draft_shift=1 if num_drafts else 0,
        )  # fmt: skip

    def _num_blocks(self, traced: Any, dtype: torch.dtype | None) -> int:
        """Return KV blocks: what the config says, or a quarter of free memory, at most what requests can use."""
        if isinstance(self.config.limits.kv_blocks, int):
            return self.config.limits.kv_blocks
        block_size = self.config.limits.kv_block_size
        useful = self.config.limits.max_num_requests * -(-self.limits.max_model_len // block_size) + 1
        from pcp_compiler.pass_api import Phase
        from pcp_compiler.pipeline import lower

        program = lower(traced.trace, self.config, phase=Phase("size", is_sharded=False, block_size=block_size)).program
        per_block = bytes_per_slot(program, dtype) * block_size
        return max(2, min(useful, _free_memory(self.device) // 4 // per_block))

    # -- all requests ----------------------------------------------------------------------------------------------

    def _run_all(
        self, requests: list[Request], on_tokens: Callable[[int, tuple[int, ...]], None] | None, progress: bool
    ) -> None:
        from rich.progress import Progress

        numbers = {request.request_id: number for number, request in enumerate(requests)}
        with Progress(disable=not progress, transient=True) as bar:
            task = bar.add_task("generating", total=sum(request.num_allowed for request in requests))
            while self.scheduler.has_work:
                for event in self.step():
                    bar.advance(task, len(event.token_ids))
                    if on_tokens is not None and event.request.request_id in numbers:
                        on_tokens(numbers[event.request.request_id], event.token_ids)

    def _generation(self, request: Request) -> Generation:
        assert request.finish_reason is not None
        self._proposals.pop(request.request_id, None)
        return Generation(request.output_ids, request.finish_reason, self.stats.pop(request.request_id))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def _free_memory(device: torch.device) -> int:
    """Return free bytes on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

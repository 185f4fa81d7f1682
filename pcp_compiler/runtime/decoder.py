"""`SpeculativeDecoder`: prefill sharded over PCP ranks, drafting, verification, sampling, for many requests at once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn

from pcp_compiler.drafters.base import Drafter
from pcp_compiler.plan.captures import CaptureKey, CaptureLimits, CapturePhase, plan_captures
from pcp_compiler.plan.dispatch import unreachable_keys
from pcp_compiler.plan.k_schedule import build_schedule
from pcp_compiler.runtime.assembly import ConfigSource, assemble
from pcp_compiler.runtime.batch import Batch
from pcp_compiler.runtime.cached_model import CompileCache, KvPlacement
from pcp_compiler.runtime.captures import Captures, CaptureStats, pick_executor
from pcp_compiler.runtime.generation import Event, Generation, OnTokens, check_params, check_prompt, params_of_each
from pcp_compiler.runtime.judge import Judgement, judge
from pcp_compiler.runtime.kv_blocks import BlockPool
from pcp_compiler.runtime.layout import StepIndex, host_tensor
from pcp_compiler.runtime.metrics import AcceptanceStats, explain_low_acceptance
from pcp_compiler.runtime.proposer import MTPProposer, Proposal, Sampled
from pcp_compiler.runtime.request import Request
from pcp_compiler.runtime.round import Rounds
from pcp_compiler.runtime.sampling import SamplingParams
from pcp_compiler.runtime.scheduler import RequestOutput, Scheduler, Step
from pcp_compiler.runtime.weights import WeightWatch

log = logging.getLogger(__name__)


class SpeculativeDecoder:
    """Generates with a target model and, if the config names one, a drafter.

    Args:
        target: causal language model of transformers, in eval mode.
        config: `Config`, mapping or file; `draft.model` of a mapping may be a causal language model, the target too.
        drafter: a ready drafter or, for method `model`, a causal language model; default: built from `config.draft`.
        kv: `shared`: the ranks of this process share one cache; `per_rank`: each has its own, as on several devices.
        tie_margin: greedy choices whose best two logits are less than this apart are reported, see `Generation.ties`;
            0: none are.
        compile_cache: pass one to several decoders of the same models to trace and lower each once.
    Raises:
        ConfigError, UnsupportedGraphError: before anything runs.
    """

    def __init__(
        self, target: nn.Module, config: ConfigSource = None, drafter: Drafter | nn.Module | None = None, *,
        kv: KvPlacement = "shared", tie_margin: float = 1e-4, compile_cache: CompileCache | None = None,
    ) -> None:  # fmt: skip
        made = assemble(target, config, drafter, kv, compile_cache or CompileCache())
        self.config, self.plan, self.limits = made.config, made.plan, made.limits
        self.drafter, self.proposer, self.target = made.drafter, made.proposer, made.target
        self.vocab_size = made.parts.vocab_size
        self.acceptance = AcceptanceStats()
        """Of all requests so far."""
        self.num_proposals: Counter[int] = Counter()
        """Steps by K, the drafts that a request could get in them."""
        self.pool = BlockPool(made.num_blocks, self.config.limits.kv_block_size)
        self.scheduler = Scheduler(self.limits, self.pool)
        self._device = made.parts.embedding.weight.device
        self._schedule = build_schedule(
            self.config.draft.k_schedule, num_speculative_tokens=self.limits.num_draft_tokens,
            max_num_requests=self.limits.max_num_requests,
        )  # fmt: skip
        if self.proposer is not None:
            self.proposer.prepare(self._schedule.distinct(self.limits.max_num_requests))
        self._tie_margin = tie_margin
        self.rounds: Rounds | None = None
        """Whole rounds as one captured call each, where the drafter is one MTP module and drafts are greedy."""
        parallel = self.config.parallel
        is_whole = parallel.pcp_size == 1 or not parallel.shard_decode
        if isinstance(self.proposer, MTPProposer) and self.config.draft.sampling == "greedy" and is_whole:
            self.rounds = Rounds(self.target, self.proposer, self.limits.max_model_len, has_ties=tie_margin > 0)
        self.captures = self._make_captures()
        self._proposals: dict[int, Proposal] = {}
        self._weights = WeightWatch([target] if self.drafter is None else [target, self.drafter])
        self._has_warned = False
        for note in (*self.config.notes, *(self.plan.reasons if self.plan else ()), *self._schedule.notes):
            log.info("%s", note)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """Queue a prompt, a sequence or 1-D tensor of token ids; `Request.cancel()` ends it early.

        Raises:
            CallError: empty, too long, or not ids of the vocabulary. ConfigError: the KV pool is too small for it.
        """
        return self.scheduler.submit(check_prompt(prompt_ids, self.vocab_size), check_params(params).with_seed())

    def cancel(self, request: Request) -> bool:
        """End a request early and take its KV blocks back; return False if it had finished before."""
        has_ended = request.cancel()
        self.scheduler.release_finished()
        return has_ended

    def step(self) -> list[Event]:
        """Run one step of all requests: their rows, the verification, the drafts for the next step.

        A step that raises changes no request; the next call runs the same rows again.
        """
        self._check_weights()
        step = self.scheduler.schedule()
        if step is None:
            return []
        index = self.target.plan_step(step.batch, self.limits.max_model_len)
        verdict, proposals = self._replay_round(step, index) or self._run_round(step, index)
        drafts = None if proposals is None else [proposal.token_ids for proposal in proposals]
        outputs = self.scheduler.complete(step, verdict.token_ids, drafts)
        self._keep(step, proposals)
        self._record(step, verdict, outputs)
        return [
            Event(output.request, output.token_ids, output.finish_reason)
            for output in outputs
            if output.token_ids or output.finish_reason
        ]

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams],
        on_tokens: OnTokens | None = None, progress: bool = True,
    ) -> list[Generation]:  # fmt: skip
        """Generate for several prompts; more than `limits.max_num_requests` wait in a queue.

        Args:
            params: one for all, or one per prompt. on_tokens: called with prompt number and new tokens.
            progress: show a progress bar.
        Raises:
            CallError, ConfigError: as `submit`; then, and when it is interrupted, all its requests are cancelled.
        """
        each = params_of_each(params, len(prompts))
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
        return [Generation.of(request) for request in requests]

    def capture_stats(self) -> CaptureStats:
        """Return what captured programs did so far: replays, eager runs with their reasons, padding, memory."""
        return CaptureStats() if self.captures is None else self.captures.stats

    # -- captures --------------------------------------------------------------------------------------------------

    def _make_captures(self) -> Captures | None:
        """Capture what the config asks for; None if nothing is captured."""
        section, limits = self.config.capture, self.limits
        executor = pick_executor(section, self._device)
        if executor is None:
            return None
        bounds = CaptureLimits(
            limits.max_num_requests, limits.max_num_tokens, limits.max_model_len, self._schedule, self.target.windows,
            pcp_size=self.config.parallel.pcp_size, shard_decode=self.config.parallel.shard_decode,
            num_rerun=self.proposer.num_rerun if self.proposer else 0,
        )  # fmt: skip
        phases: list[CapturePhase] = ["prefill", "decode"]
        if self.proposer is not None:
            phases += ["verify", "window" if self.proposer.num_rerun else "draft"]
        if self.rounds is not None:
            phases.append("proposal")
        plan = plan_captures(
            section.mode, phases, bounds, sizes=section.sizes, context_buckets=section.context_buckets,
            memory_mb=section.memory_mb, estimate_bytes=self._estimate_bytes,
        )  # fmt: skip
        for line in (*plan.describe(), *plan.notes):
            log.info("%s", line)
        for key in unreachable_keys([key for key in plan.keys if key.is_full], bounds):
            log.warning("capture %s: no batch within the limits replays it", key)
        captures = Captures(executor, plan.keys, self.target.block_size)
        programs = [self.target.may_capture(self.target.few_rows.program, ("decode", "verify"), name="target")]
        for model in (self.target, *(self.proposer.models if self.proposer else ())):
            model.use_captures(captures)
        programs += self.proposer.captured() if self.proposer else []
        programs += self.rounds.programs(plan.keys) if self.rounds else []
        captures.capture_all(programs)
        return captures

    def _estimate_bytes(self, key: CaptureKey) -> int:
        """Return about what a capture adds: logits of its rows, in the model's type and in float32."""
        return key.capture_size * self.vocab_size * 8

    # -- one step --------------------------------------------------------------------------------------------------

    def _check_weights(self) -> None:
        """Give up all K/V if the weights are not those that it was made with."""
        if not self._weights.has_changed():
            return
        log.warning(
            "the weights of target or drafter changed: all K/V and the prefix cache are dropped, requests go on"
        )
        for model in (self.target, *(self.proposer.models if self.proposer else ())):
            model.refresh_weights()
        self.scheduler.drop_kv()
        self._proposals.clear()

    def _run_round(self, step: Step, index: StepIndex) -> tuple[Judgement, list[Proposal] | None]:
        """Run the target, judge, and run the drafter."""
        hidden, logits = self._run_target(step.batch, index)
        previous = [self._proposals.get(rows.request.request_id) for rows in step.rows]
        verdict = judge(
            step, logits, previous, verification=self.config.draft.verification, tie_margin=self._tie_margin
        )
        return verdict, self._propose(step, Sampled(hidden, verdict.token_ids, verdict.last_rows, index), previous)

    def _replay_round(self, step: Step, index: StepIndex) -> tuple[Judgement, list[Proposal] | None] | None:
        """Do all of a round by one replay; None if there is no capture for it."""
        if self.rounds is None or self.captures is None:
            return None
        assert isinstance(self.proposer, MTPProposer)
        num_draft_tokens = self._schedule.lookup(len(self.scheduler.running))
        made = self.rounds.replay(self.captures, step, index, num_draft_tokens, self._tie_margin)
        if made is None:
            return None
        self.num_proposals[num_draft_tokens] += 1
        verdict = made.verdict
        return verdict, self.proposer.collect_round(step, verdict.token_ids, verdict.last_rows, made.drafts)

    def _run_target(self, batch: Batch, index: StepIndex) -> tuple[list[Tensor], Tensor]:
        """Return the hidden states of each rank (one entry when rows are whole) and the logits [L, V] of rank 0."""
        inputs = {
            "input_ids": host_tensor(batch.input_ids)[None],
            "position_ids": host_tensor(batch.positions)[None],
            "logit_rows": host_tensor(batch.logit_rows),
        }
        if index.partition is None:
            hidden, logits = self.target.run_whole(inputs, index.whole, live=index.live)
            return [hidden], logits
        results = self.target.run_sharded([inputs] * self.config.parallel.pcp_size, index)
        return [hidden for hidden, _ in results], results[0][1]

    def _propose(self, step: Step, sampled: Sampled, previous: Sequence[Proposal | None]) -> list[Proposal] | None:
        """Run the drafter over this step's rows, and on for requests that go on; None without a drafter."""
        if self.proposer is None:
            return None
        num_draft_tokens = self._schedule.lookup(len(self.scheduler.running))
        proposals = self.proposer.propose(step, sampled, num_draft_tokens, previous)
        self.num_proposals[num_draft_tokens] += 1
        return proposals

    def _keep(self, step: Step, proposals: list[Proposal] | None) -> None:
        """Keep the proposals of requests that run on."""
        for rows, proposal in zip(step.rows, proposals or (), strict=False):
            self._proposals[rows.request.request_id] = proposal
        running = {request.request_id for request in self.scheduler.running}
        self._proposals = {number: kept for number, kept in self._proposals.items() if number in running}

    def _record(self, step: Step, verdict: Judgement, outputs: Sequence[RequestOutput]) -> None:
        """Count drafts, note ties, and say what went wrong."""
        for i, output in enumerate(outputs):
            if not output.token_ids:
                continue
            for stats in (output.request.stats, self.acceptance):
                stats.add_round(output.num_draft_tokens, output.num_accepted)
            known = len(output.request.token_ids)
            output.request.ties += [tie for tie in verdict.ties.get(i, ()) if tie.position < known]
        for i in verdict.failed:
            request = step.rows[i].request
            log.warning(
                "request %d: the target's logits at position %d have NaN or infinity; it ends, the others go on",
                request.request_id, len(request.token_ids) - 1,
            )  # fmt: skip
        if not self._has_warned and (report := explain_low_acceptance(self.acceptance)):
            self._has_warned = True
            log.warning("%s", report)

    # -- all requests ----------------------------------------------------------------------------------------------

    def _run_all(self, requests: list[Request], on_tokens: OnTokens | None, progress: bool) -> None:
        from rich.progress import Progress

        numbers = {request.request_id: number for number, request in enumerate(requests)}
        with Progress(disable=not progress, transient=True) as bar:
            task = bar.add_task("generating", total=sum(request.num_allowed for request in requests))
            while any(not request.is_finished for request in requests):
                for event in self.step():
                    bar.advance(task, len(event.token_ids))
                    if on_tokens is not None and event.token_ids and event.request.request_id in numbers:
                        on_tokens(numbers[event.request.request_id], event.token_ids)

"""Which rows of which requests run in the next step, and what its results mean for them.

Continuous batching: a step mixes one row or verify row group of each decode with pieces of prompts. Everything here is
a function of what was submitted and sampled, so all ranks that see the same results schedule the same steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from pcp_compiler.errors import CallError, ConfigError
from pcp_compiler.runtime.batch import Batch, RequestRows, build_batch
from pcp_compiler.runtime.kv_blocks import BlockPool, extend_block_keys
from pcp_compiler.runtime.request import FinishReason, Request
from pcp_compiler.runtime.sampling import SamplingParams
from pcp_compiler.runtime.stopping import num_useful_drafts


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of every step; the names are those of the config section `limits` where both have one."""

    max_model_len: int
    """Tokens of one request, prompt and output, >= 2."""
    max_num_requests: int
    """Requests that run at once, >= 1; more wait in the queue."""
    max_num_tokens: int
    """Rows of a step, >= 1."""
    prefill_chunk: int | None = None
    """Most rows of one prompt in a step, >= 1; None: `max_num_tokens` alone bounds them."""
    prefix_cache: bool = True
    """Whether requests share the KV blocks of equal prefixes."""
    num_draft_tokens: int = 0
    """K, most drafts that are verified per request and step; 0: there is no drafter."""
    num_lookahead: int = 0
    """Positions behind a step's rows that the drafter writes: K; K + 1 for layouts that fill in."""
    draft_shift: int = 0
    """Tokens a drafter row looks ahead, see `kv_blocks.extend_block_keys`."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a number below its lowest value."""
        lowest = {
            "limits.max_model_len": (self.max_model_len, 2),
            "limits.max_num_requests": (self.max_num_requests, 1),
            "limits.max_num_tokens": (self.max_num_tokens, 1),
            "limits.prefill_chunk": (1 if self.prefill_chunk is None else self.prefill_chunk, 1),
            "draft.num_speculative_tokens": (self.num_draft_tokens, 0),
        }
        for name, (value, bound) in lowest.items():
            if value < bound:
                raise ConfigError(f"{name} is {value}; give an integer >= {bound}")
        assert self.num_lookahead >= 0 and self.draft_shift >= 0


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """What one request does in a step."""

    request: Request
    query_len: int
    """Rows, >= 1: a piece of a prompt, or the last token and the drafts to verify."""
    num_drafts: int
    """Drafts among the rows, the last ones."""
    is_sampled: bool
    """Whether the rows end in a new token; not so while the prompt goes on after them."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step to run; entry i of `rows` is request i of `batch`."""

    rows: tuple[ScheduledRows, ...]
    batch: Batch


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a step gave one request."""

    request: Request
    token_ids: tuple[int, ...]
    """New tokens; none for a piece of a prompt."""
    num_draft_tokens: int
    """Drafts that count as proposed, see `stopping.Cut`."""
    num_accepted: int
    """Drafts among `token_ids`."""
    finish_reason: FinishReason | None
    """Why the request is finished, None if it goes on."""


class Scheduler:
    """The queue, the running requests, and the KV blocks of both.

    Use: `submit` at any time; then `schedule`, run the step, `complete`, in turn, while `has_work`.
    Invariant: running requests are older than waiting ones, and both are in order of arrival.
    """

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._max_blocks = pool.blocks_for(limits.max_model_len)
        self._request_ids = count()

    @property
    def has_work(self) -> bool:
        """Whether a request is not finished."""
        return any(not request.is_finished for request in (*self.running, *self.waiting))

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """Put a request in the queue; one that may not emit a token is finished at once.

        Args:
            prompt_ids: at least one token. Whether the ids are in the vocabulary is for the caller to check.
            params: `limits.max_model_len` may end the request before `max_new_tokens` does.
        Raises:
            CallError: the prompt is empty, or leaves no room for a new token.
            ConfigError: the pool cannot hold this request even when it runs alone.
        """
        if len(prompt_ids) == 0:
            raise CallError("prompt_ids is empty; give at least one token")
        if len(prompt_ids) >= self.limits.max_model_len:
            raise CallError(
                f"prompt_ids has {len(prompt_ids)} tokens, which leaves none of limits.max_model_len "
                f"{self.limits.max_model_len} for output; shorten the prompt or raise limits.max_model_len"
            )
        max_len = min(len(prompt_ids) + params.max_new_tokens, self.limits.max_model_len)
        self._check_pool_holds(max_len - 1)  # the last token is emitted, never computed
        request = Request(next(self._request_ids), list(prompt_ids), len(prompt_ids), params, max_len)
        if request.num_allowed == 0:
            request.finish("length")
        else:
            self.waiting.append(request)
        return request

    def schedule(self) -> Step | None:
        """Pick the next step's rows and give them KV blocks; None if there is nothing to do.

        Decodes get rows first, so that a long prompt does not stop them; what is left of `max_num_tokens` goes to
        prompts. Requests are served by age. When blocks run out the youngest running request goes back to the queue.
        """
        self.release_finished()
        num_running = len(self.running)
        chosen = self._schedule_running()
        while not chosen and self.running:  # all rows went to requests that then lost their blocks
            chosen = self._schedule_running()
        if len(self.running) == num_running:  # else whoever was just sent away would come straight back
            self._admit(chosen)
        assert chosen or not self.has_work, "requests wait but none can run"
        if not chosen:
            return None
        batch = build_batch([_to_rows(rows) for rows in chosen], self.pool.block_size, self._max_blocks)
        return Step(tuple(chosen), batch)

    def complete(
        self, step: Step, sampled: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]] | None = None
    ) -> list[RequestOutput]:
        """Take over the results of the step that `schedule` returned last.

        Args:
            sampled: for each request of the step the accepted drafts and the token after them, [R][1 + accepted];
                empty if `is_sampled` is false, and for a request that failed.
            drafts: for each request the drafts for its next step, [R][0..K]; more than it can use are dropped. None:
                the drafter did not run, so it has no rows for this step's tokens.
        Returns:
            One entry per request of the step, in its order, those cancelled meanwhile included.
        """
        assert len(sampled) == len(step.rows) and (drafts is None or len(drafts) == len(step.rows))
        outputs = []
        for index, rows in enumerate(step.rows):
            outputs.append(self._advance(rows, sampled[index], None if drafts is None else drafts[index]))
        self.release_finished()
        return outputs

    def draft_limit(self, request: Request) -> int:
        """Return how many drafts the next step of `request` can use: K, or less near its last token."""
        return num_useful_drafts(self.limits.num_draft_tokens, request.num_allowed)

    def release_finished(self) -> None:
        """Take finished and cancelled requests out, and their KV blocks back."""
        for request in self.running:
            if request.is_finished:
                self._release(request)
        self.running = [request for request in self.running if request.is_running]
        self.waiting = deque(request for request in self.waiting if not request.is_finished)

    def cancel_all(self) -> None:
        """Finish every request early; afterwards all KV blocks are free, also when a step was under way."""
        for request in (*self.running, *self.waiting):
            request.cancel()
        self.release_finished()

    def drop_kv(self) -> None:
        """Give up all KV between two steps, as needed when the weights change: requests compute theirs again."""
        while self.running:
            self._preempt_youngest()
        self.pool.forget_prefixes()

    def _check_pool_holds(self, num_tokens: int) -> None:
        num_blocks = self.pool.blocks_for(self._end_of_blocks(num_tokens))
        if num_blocks > self.pool.num_usable:
            raise ConfigError(
                f"the request needs {num_blocks} KV blocks of {self.pool.block_size} tokens, for up to {num_tokens} "
                f"tokens and {self.limits.num_lookahead} positions of look ahead; the pool has {self.pool.num_usable}; "
                f"raise limits.kv_blocks to >= {num_blocks + 1} (block 0 is reserved) or shorten prompt or output"
            )

    def _end_of_blocks(self, num_tokens: int) -> int:
        """Return the position up to which a request needs blocks when its rows end at `num_tokens`."""
        return min(num_tokens + self.limits.num_lookahead, self.limits.max_model_len)

    def _schedule_running(self) -> list[ScheduledRows]:
        """Choose rows of the running requests, oldest first; the youngest lose their blocks if they run out."""
        chosen = []
        query_lens = self._share_rows()
        for request in list(self.running):
            num_rows = query_lens[request.request_id]
            while num_rows and request.is_running:
                if self._grow(request, request.num_computed + num_rows):
                    chosen.append(_choose(request, num_rows))
                    break
                self._preempt_youngest()  # maybe `request` itself
        return chosen

    def _share_rows(self) -> dict[int, int]:
        """Return the rows of each running request by id: one for every decode, then drafts, then prompts, by age."""
        rows_left = self.limits.max_num_tokens
        query_lens = dict.fromkeys((request.request_id for request in self.running), 0)
        decodes = [(request, 1) for request in self.running if not request.is_prefilling]
        drafts = [(request, len(request.draft_ids)) for request, _ in decodes]
        prompts = [(request, self._piece_of_prompt(request)) for request in self.running if request.is_prefilling]
        for request, num_wanted in (*decodes, *drafts, *prompts):
            num_rows = min(num_wanted, rows_left)
            query_lens[request.request_id] += num_rows
            rows_left -= num_rows
        return query_lens

    def _piece_of_prompt(self, request: Request) -> int:
        """Return the rows a prompt wants in this step."""
        rows_to_go = request.prefill_len - request.num_computed
        return rows_to_go if self.limits.prefill_chunk is None else min(rows_to_go, self.limits.prefill_chunk)

    def _admit(self, chosen: list[ScheduledRows]) -> None:
        """Start waiting requests in order of arrival, while there are places, rows, and blocks for whole prompts."""
        rows_left = self.limits.max_num_tokens - sum(rows.query_len for rows in chosen)
        while self.waiting and len(self.running) < self.limits.max_num_requests and rows_left > 0:
            request = self.waiting[0]
            if not self._take_prefix(request):
                break
            self.running.append(self.waiting.popleft())
            request.is_running = True
            num_rows = min(self._piece_of_prompt(request), rows_left)
            has_blocks = self._grow(request, request.num_computed + num_rows)
            assert has_blocks, "blocks for the whole prompt were free"
            chosen.append(_choose(request, num_rows))
            rows_left -= num_rows

    def _take_prefix(self, request: Request) -> bool:
        """Give `request` its cached blocks if the rest of its prompt fits in free ones; tell whether it does."""
        blocks = self._find_prefix(request)
        num_new = self.pool.blocks_for(self._end_of_blocks(request.prefill_len)) - len(blocks)
        if num_new > self.pool.num_free - self.pool.num_free_among(blocks):
            return False
        self.pool.share(blocks)
        request.block_table.extend(blocks)
        request.num_published = len(blocks)
        request.num_computed = request.num_draft_rows = len(blocks) * self.pool.block_size
        request.num_cached_tokens += request.num_computed
        return True

    def _find_prefix(self, request: Request) -> list[int]:
        """Return cached blocks with a start of the request's tokens; at least one token is left to compute."""
        if not self.limits.prefix_cache:
            return []
        self._extend_keys(request)
        return self.pool.find_prefix(request.block_keys[: (request.prefill_len - 1) // self.pool.block_size])

    def _extend_keys(self, request: Request) -> None:
        extend_block_keys(request.block_keys, request.token_ids, self.pool.block_size, self.limits.draft_shift)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Let the block table reach `num_tokens` and the look ahead; False, and nothing is done, without the blocks."""
        num_new = self.pool.blocks_for(self._end_of_blocks(num_tokens)) - len(request.block_table)
        if num_new > self.pool.num_free:
            return False
        request.block_table.extend(self.pool.allocate(max(num_new, 0)))
        return True

    def _preempt_youngest(self) -> None:
        """Send the youngest running request to the front of the queue; its tokens stay, its KV is computed again."""
        request = self.running.pop()
        self._free_blocks(request)
        request.restart()
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        """Take the blocks of a finished request back."""
        if request.finish_reason == "error":
            self.pool.withdraw(request.block_table)  # its K/V may hold the NaN that ended it
        self._free_blocks(request)
        request.is_running = False

    def _free_blocks(self, request: Request) -> None:
        self.pool.free(request.block_table)
        del request.block_table[:]

    def _advance(self, rows: ScheduledRows, sampled: Sequence[int], drafts: Sequence[int] | None) -> RequestOutput:
        """Apply one request's results."""
        request = rows.request
        if request.is_finished:
            return RequestOutput(request, (), 0, 0, request.finish_reason)
        assert len(sampled) <= 1 + rows.num_drafts if rows.is_sampled else not sampled
        if not rows.is_sampled:
            self._count_rows(request, rows.query_len, has_draft_rows=drafts is not None)
            return RequestOutput(request, (), 0, 0, None)
        cut = request.append(sampled, rows.num_drafts)
        num_rejected = rows.num_drafts + 1 - len(cut.token_ids)
        self._count_rows(request, rows.query_len - num_rejected, has_draft_rows=drafts is not None)
        if drafts is not None and not request.is_finished:
            request.draft_ids = tuple(drafts[: self.draft_limit(request)])
        return RequestOutput(request, cut.token_ids, cut.num_draft_tokens, cut.num_accepted, request.finish_reason)

    def _count_rows(self, request: Request, num_rows: int, *, has_draft_rows: bool) -> None:
        """Count rows that are right for good, of the target and maybe of the drafter."""
        if has_draft_rows and request.num_draft_rows == request.num_computed:
            request.num_draft_rows += num_rows
        request.num_computed += num_rows
        self._publish(request)

    def _publish(self, request: Request) -> None:
        """Offer the request's full blocks to the prefix cache, once the drafter's rows in them are written too."""
        if not self.limits.prefix_cache:
            return
        self._extend_keys(request)
        num_ready = request.num_draft_rows if self.limits.num_draft_tokens else request.num_computed
        num_blocks = min(num_ready // self.pool.block_size, len(request.block_keys))
        for index in range(request.num_published, num_blocks):
            self.pool.publish(request.block_table[index], request.block_keys[index])
        request.num_published = max(request.num_published, num_blocks)


def _choose(request: Request, num_rows: int) -> ScheduledRows:
    """Return what `num_rows` rows of a request are; phase and draft count come from its progress."""
    if request.is_prefilling:
        return ScheduledRows(request, num_rows, 0, request.num_computed + num_rows == request.prefill_len)
    return ScheduledRows(request, num_rows, num_rows - 1, True)


def _to_rows(rows: ScheduledRows) -> RequestRows:
    request, start = rows.request, rows.request.num_computed
    token_ids = [*request.token_ids[start : start + rows.query_len], *request.draft_ids[: rows.num_drafts]]
    assert len(token_ids) == rows.query_len
    num_logits = 1 + rows.num_drafts if rows.is_sampled else 0
    return RequestRows(token_ids, start, request.is_prefilling, num_logits, request.block_table)

"""What is known of one request between two steps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from pcp_compiler.runtime.metrics import AcceptanceStats
from pcp_compiler.runtime.sampling import SamplingParams
from pcp_compiler.runtime.stopping import Cut, cut_tokens

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""The first two are told by the tokens, see `stopping`; "error": its logits had no answer, such as NaN."""


class RequestStatus(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    """In the queue, without KV blocks: new, or preempted."""
    RUNNING = "running"
    """Part of the batch, with KV blocks."""
    FINISHED = "finished"
    """Done, see `Request.finish_reason`."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A greedy choice between two tokens whose logits are so close that another order of additions may turn it."""

    position: int
    """Place in `Request.token_ids` of the token that was chosen."""
    token_ids: tuple[int, int]
    """The best two, most likely first."""
    margin: float
    """Difference of their logits, >= 0."""


@dataclass(slots=True, eq=False)
class Request:
    """One prompt, the tokens made from it, and its KV blocks.

    Invariant while it runs: the target's KV of positions 0..num_computed - 1 is that of `token_ids`; what lies behind
    comes from rejected drafts or a drafter's look ahead, and is rewritten before it is read.
    """

    request_id: int
    """Order of arrival, unique; the highest is the youngest."""
    token_ids: list[int]
    """Prompt, then output."""
    num_prompt_tokens: int
    params: SamplingParams
    max_len: int
    """Tokens, prompt included, at which the request finishes: what `params` or the model allow."""
    is_running: bool = False
    """Whether it is part of the batch; the scheduler's, which learns later than `finish_reason` that it is over."""
    finish_reason: FinishReason | None = None
    draft_ids: tuple[int, ...] = ()
    """Proposed continuation of `token_ids`, not verified yet."""
    num_computed: int = 0
    """Tokens whose KV the target has written and that are known to be right."""
    num_draft_rows: int = 0
    """Rows the drafter has written without a gap from row 0 on, <= num_computed."""
    prefill_len: int = field(init=False)
    """Tokens to compute before the request decodes: the prompt, after a preemption with the output made so far."""
    block_table: array[int] = field(default_factory=lambda: array("i"))
    """KV block of each `block_size` positions; goes past `num_computed` by the current step and the look ahead."""
    block_keys: list[bytes] = field(default_factory=list)
    """Prefix-cache keys of the first blocks, see `kv_blocks.extend_block_keys`."""
    num_published: int = 0
    """Blocks at the start of `block_table` that the prefix cache has been offered."""
    num_cached_tokens: int = 0
    """Tokens that were not computed, thanks to the prefix cache; summed over admissions."""
    num_preemptions: int = 0
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    """Drafts that were proposed and accepted."""
    ties: list[Tie] = field(default_factory=list)
    """Close calls among the output tokens, if the request is greedy."""

    def __post_init__(self) -> None:
        self.prefill_len = len(self.token_ids)

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt, a copy."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_ids(self) -> list[int]:
        """The tokens made so far, a copy."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_allowed(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_len - len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    @property
    def status(self) -> RequestStatus:
        """Where the request is."""
        if self.is_finished:
            return RequestStatus.FINISHED
        return RequestStatus.RUNNING if self.is_running else RequestStatus.WAITING

    @property
    def is_prefilling(self) -> bool:
        """Whether its next rows are those of a prompt. How many rows there are says nothing about it."""
        return self.num_computed < self.prefill_len

    def cancel(self) -> bool:
        """Finish the request early, at any time; return False if it had finished before.

        Tokens of a step that is under way are dropped. The scheduler takes the blocks back at its next call.
        """
        return self.finish("cancelled")

    def finish(self, reason: FinishReason) -> bool:
        """Finish the request; return False, and keep the first reason, if it had finished before."""
        if self.is_finished:
            return False
        self.finish_reason = reason
        return True

    def append(self, token_ids: Sequence[int], num_drafts: int) -> Cut:
        """Add what a round emitted, the accepted ones of `num_drafts` drafts and one more token; return what is kept.

        Nothing emitted is an error of this request, which finishes it.
        """
        cut = cut_tokens(token_ids, num_drafts, num_allowed=self.num_allowed, stop_token_ids=self.params.stop_token_ids)
        self.token_ids.extend(cut.token_ids)
        self.draft_ids = ()
        reason: FinishReason | None = cut.finish_reason if token_ids else "error"
        if reason is not None:
            self.finish(reason)
        return cut

    def restart(self) -> None:
        """Go back to the queue with all tokens but without KV, whose blocks the caller has freed."""
        self.is_running = False
        self.draft_ids = ()
        self.num_computed = self.num_draft_rows = self.num_published = 0
        self.prefill_len = len(self.token_ids)
        self.block_table = array("i")
        self.num_preemptions += 1

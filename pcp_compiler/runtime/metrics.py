"""How many draft tokens were accepted, and what is likely wrong when almost none are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

LOW_RATE: Final = 0.05
"""A position whose drafts are accepted less often, given that those before it were, is called near zero."""
MIN_SAMPLES: Final = 50
"""Drafts that a position needs before it is judged: at 30 % acceptance, 2 or fewer of 50 come once in 200 000 times."""

PAIRING_CAUSES: Final = (
    "drafter and target are not a pair: another checkpoint, or a vocabulary whose ids mean other tokens",
    "the drafter's embedding or output head is not the target's, or a tensor of its file is transposed or missing",
    "rope base, rope scaling or positions of the drafter differ from the target's (positions off by one)",
    "the drafter gets wrong hidden states: taken before instead of after the final norm, or from rows in another order",
    "the drafter's context is shorter than the prompts",
)
"""Likely causes when already the first draft of a round fails."""
CHAIN_CAUSES: Final = (
    "positions, slots or lengths do not advance between the steps of the draft chain",
    "the chain reads block tables or draft K/V that its first pass has not written",
    "the hidden state fed back is not that of the step before",
    "a module for a later position is missing, or its K/V is stale after a rejection",
)
"""Likely causes when the first draft is accepted and a later one fails."""


@dataclass(slots=True)
class AcceptanceStats:
    """Counts of verified drafts, of one request or of many; a round counts when it had at least one draft."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_tried_at: list[int] = field(default_factory=list)
    """Rounds that had a draft at position j of the round and accepted all before it."""
    num_accepted_at: list[int] = field(default_factory=list)
    """Rounds that accepted the draft at position j, and so all before it."""

    def add_round(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count one round of one request; without drafts it counts nothing."""
        assert 0 <= num_accepted <= num_draft_tokens, f"{num_accepted} of {num_draft_tokens} drafts accepted"
        if num_draft_tokens == 0:
            return
        self.num_rounds += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted += num_accepted
        not_accepted = [0] * (num_draft_tokens - num_accepted)
        _add_to_first(self.num_tried_at, ([1] * num_accepted + [1] + not_accepted)[:num_draft_tokens])
        _add_to_first(self.num_accepted_at, [1] * num_accepted + not_accepted)

    def add(self, other: AcceptanceStats) -> None:
        """Count the rounds of `other` too."""
        self.num_rounds += other.num_rounds
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted += other.num_accepted
        _add_to_first(self.num_tried_at, other.num_tried_at)
        _add_to_first(self.num_accepted_at, other.num_accepted_at)

    @property
    def acceptance_rate(self) -> float:
        """Accepted of all drafts, 0 to 1; 0 without drafts. Compare it only at equal K, else the length."""
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a round that had drafts, the target's own included, >= 1; 1 without such rounds."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else 1.0

    @property
    def per_position(self) -> tuple[float, ...]:
        """Share of all rounds that accepted draft j, [max K]; it falls with j, and a shorter round counts as not."""
        return tuple(count / self.num_rounds for count in self.num_accepted_at)

    @property
    def per_position_given_earlier(self) -> tuple[float, ...]:
        """Share that accepted draft j among those that had one and accepted all before it, [max K]; 0 if none did."""
        return tuple(
            accepted / tried if tried else 0.0
            for accepted, tried in zip(self.num_accepted_at, self.num_tried_at, strict=True)
        )


def explain_low_acceptance(stats: AcceptanceStats) -> str | None:
    """Return a report with the likely causes if drafts of some position are almost never accepted, else None.

    Acceptance does not touch the output, so a drafter that does not fit shows as low speed only. None also while a
    position has too few samples to tell.
    """
    rates = zip(stats.per_position_given_earlier, stats.num_tried_at, strict=True)
    failing = next((j for j, (rate, tried) in enumerate(rates) if tried >= MIN_SAMPLES and rate < LOW_RATE), None)
    if failing is None:
        return None
    rate, causes = stats.per_position_given_earlier[failing], PAIRING_CAUSES if failing == 0 else CHAIN_CAUSES
    lines = [
        f"Draft {failing + 1} of a round is accepted in {rate:.1%} of {stats.num_tried_at[failing]} cases "
        f"(acceptance rate {stats.acceptance_rate:.1%}, length {stats.acceptance_length:.2f}). "
        "The output is right, but drafting only costs time. Likely causes:",
        *(f"  - {cause}" for cause in causes),
        "Check: the target as its own drafter accepts every draft; if that works, the fault is in the drafter's files.",
    ]
    return "\n".join(lines)


def _add_to_first(totals: list[int], counts: list[int]) -> None:
    """Add counts to the totals of the same positions; the totals grow as needed."""
    totals.extend([0] * (len(counts) - len(totals)))
    for index, count in enumerate(counts):
        totals[index] += count

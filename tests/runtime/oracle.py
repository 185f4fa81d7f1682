"""A table-driven model and drafter, told in plain Python integers: what requests must emit and leave in the caches.

Token t at position p has the first layer's K/V E[t][p]. Attention is the sum of the K/V of positions 0..p. The second
layer's K/V is a hash of the first layer's output, and the next token is looked up with the second layer's output: so a
single wrong, missing or stale K/V entry anywhere before a row changes the row's token. The drafter's row p adds to the
second layer's output what it embeds of token p + 1; a hash of the sum of its K/V tells whether it guesses wrong.
"""

from __future__ import annotations

import random
from collections.abc import Container
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

NUM_POSITIONS = 64
NUM_STATES = 251
WORD = 2**64
FACTOR = 0x9E3779B97F4A7C15


def mix(word: int) -> int:
    """Return a hash of a 64-bit word."""
    return (word ^ (word >> 29)) * FACTOR % WORD


@dataclass(frozen=True)
class Tables:
    """The weights; V `vocab_size`."""

    embed: list[list[int]]
    """First layer's K/V of token and position, [V][NUM_POSITIONS]."""
    draft_embed: list[list[int]]
    """What the drafter embeds of the next token, [V][NUM_POSITIONS]."""
    next_token: list[int]
    """[NUM_STATES]."""
    error_rate: int
    """Of 256 guesses, how many are wrong."""

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.embed)

    @classmethod
    def make(cls, rng: random.Random, vocab_size: int, error_rate: int) -> Tables:
        """Draw the weights."""

        def words() -> list[list[int]]:
            return [[rng.getrandbits(64) for _ in range(NUM_POSITIONS)] for _ in range(vocab_size)]

        next_token = [rng.randrange(vocab_size) for _ in range(NUM_STATES)]
        return cls(words(), words(), next_token, error_rate)


@dataclass
class Answer:
    """All tokens of one request and the K/V of each; L tokens."""

    tables: Tables
    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    """[L], prompt first."""
    first_kv: list[int] = field(default_factory=list)
    second_kv: list[int] = field(default_factory=list)
    first_sums: list[int] = field(default_factory=list)
    second_sums: list[int] = field(default_factory=list)

    @property
    def output_ids(self) -> list[int]:
        """What the request emits."""
        return self.token_ids[self.num_prompt_tokens :]

    @cached_property
    def draft_kv(self) -> list[int]:
        """The drafter's K/V of each row whose next token is known, [L - 1]."""
        return [self._draft_kv(row, self.second_sums[row], self.token_ids[row + 1]) for row in range(self._num_rows)]

    @cached_property
    def caches(self) -> NDArray[np.uint64]:
        """K/V of both layers and of the drafter, [3, L - 1]."""
        rows = slice(self._num_rows)
        return np.array([self.first_kv[rows], self.second_kv[rows], self.draft_kv], dtype=np.uint64)

    @cached_property
    def _draft_sums(self) -> list[int]:
        sums: list[int] = []
        for word in self.draft_kv:
            sums.append(_add(sums, word))
        return sums

    @property
    def _num_rows(self) -> int:
        return len(self.token_ids) - 1

    def drafts(self, row: int, num_drafts: int) -> list[int]:
        """Return what the drafter proposes behind its row `row`, which embeds token `row + 1`."""
        guesses: list[int] = []
        token_id, draft_sum = self.token_ids[row + 1], self._draft_sums[row]
        first, second = self.first_sums[row], self.second_sums[row]
        for position in range(row + 1, row + 1 + num_drafts):
            first = (first + self.tables.embed[token_id][position]) % WORD
            second = (second + mix(first)) % WORD
            token_id = self._guess(second, draft_sum)
            guesses.append(token_id)
            draft_sum = (draft_sum + self._draft_kv(position, second, token_id)) % WORD
        return guesses

    def push(self, token_id: int) -> int:
        """Add a token and return the one that follows it."""
        position = len(self.token_ids)
        self.token_ids.append(token_id)
        self.first_kv.append(self.tables.embed[token_id][position])
        self.first_sums.append(_add(self.first_sums, self.first_kv[-1]))
        self.second_kv.append(mix(self.first_sums[-1]))
        self.second_sums.append(_add(self.second_sums, self.second_kv[-1]))
        return self.tables.next_token[self.second_sums[-1] % NUM_STATES]

    def _draft_kv(self, row: int, second_sum: int, next_token: int) -> int:
        return mix((second_sum + self.tables.draft_embed[next_token][row]) % WORD)

    def _guess(self, second_sum: int, draft_sum: int) -> int:
        right = self.tables.next_token[second_sum % NUM_STATES]
        is_wrong = mix(draft_sum) >> 56 < self.tables.error_rate
        return (right + is_wrong) % self.tables.vocab_size


def _add(sums: list[int], word: int) -> int:
    """Return the sum that follows in a list of running sums."""
    return ((sums[-1] if sums else 0) + word) % WORD


def answer_greedily(tables: Tables, prompt_ids: list[int], max_len: int, stop_token_ids: Container[int]) -> Answer:
    """Return what plain greedy decoding makes of a prompt, one request alone, nothing cached, nothing drafted."""
    answer = Answer(tables, len(prompt_ids))
    for token_id in prompt_ids:
        following = answer.push(token_id)
    while len(answer.token_ids) < max_len:
        token_id = following
        following = answer.push(token_id)
        if token_id in stop_token_ids:
            break
    return answer

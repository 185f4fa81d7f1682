"""Where a round's tokens are cut, and counts that agree with what was emitted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcp_compiler.runtime.metrics import AcceptanceStats
from pcp_compiler.runtime.stopping import Cut, cut_tokens, num_useful_drafts

EOS = 2


def cut(token_ids: list[int], num_draft_tokens: int, num_allowed: int = 99, stops: tuple[int, ...] = (EOS,)) -> Cut:
    return cut_tokens(token_ids, num_draft_tokens, num_allowed=num_allowed, stop_token_ids=stops)


def test_a_round_that_ends_nothing_is_kept_whole() -> None:
    assert cut([7, 8, 9], 3) == Cut((7, 8, 9), num_draft_tokens=3, num_accepted=2, finish_reason=None)


def test_b82_a_stop_token_inside_the_accepted_prefix_is_the_last_token() -> None:
    kept = cut([7, EOS, 8, 9, 5], 4)  # a, EOS, b, c, bonus
    assert kept == Cut((7, EOS), num_draft_tokens=2, num_accepted=2, finish_reason="stop")
    assert kept.num_computed == 2  # the token before the round and `a`; EOS is not counted, as in plain decoding


def test_the_first_of_several_stop_tokens_counts() -> None:
    assert cut([7, 3, EOS, 8], 3, stops=(EOS, 3)).token_ids == (7, 3)


@pytest.mark.parametrize(
    ("num_allowed", "expected"),
    [
        (5, Cut((7, 8, 9, 5), 3, 3, None)),
        (4, Cut((7, 8, 9, 5), 3, 3, "length")),
        (3, Cut((7, 8, 9), 3, 3, "length")),
        (1, Cut((7,), 1, 1, "length")),
        (0, Cut((), 0, 0, "length")),
    ],
)
def test_the_allowed_length_cuts_accepted_drafts_too(num_allowed: int, expected: Cut) -> None:
    assert cut([7, 8, 9, 5], 3, num_allowed) == expected


def test_a_stop_token_at_the_last_allowed_place_counts_as_stop() -> None:
    assert cut([7, EOS, 8], 3, num_allowed=2).finish_reason == "stop"
    assert cut([7, EOS, 8], 3, num_allowed=1) == Cut((7,), 1, 1, "length")


def test_without_stop_tokens_any_token_goes_on() -> None:
    assert cut([EOS, EOS], 1, stops=()).finish_reason is None


def test_a_failed_round_emits_nothing_and_ends_nothing() -> None:
    assert cut([], 3) == Cut((), 3, 0, None)


@given(st.data())
def test_a_speculative_request_stops_where_plain_decoding_does(data: st.DataObject) -> None:
    text = data.draw(st.lists(st.integers(0, 5), min_size=30, max_size=30))
    max_new_tokens = data.draw(st.integers(0, 20))
    plain: list[int] = []
    while len(plain) < max_new_tokens and EOS not in plain:
        plain.append(text[len(plain)])

    output: list[int] = []
    num_computed, finish_reason, stats = 10, None, AcceptanceStats()  # 11 tokens of prompt, the last not computed
    while finish_reason is None:
        num_drafts = data.draw(st.integers(0, 4))
        num_accepted = data.draw(st.integers(0, num_drafts))
        tokens = text[len(output) : len(output) + num_accepted + 1]
        kept = cut(tokens, num_drafts, max_new_tokens - len(output))
        stats.add_round(kept.num_draft_tokens, kept.num_accepted)
        output += kept.token_ids
        num_computed += kept.num_computed
        finish_reason = kept.finish_reason
    assert output == plain
    assert finish_reason == ("stop" if EOS in plain else "length")
    assert num_computed == 10 + len(plain)
    assert stats.num_accepted <= min(stats.num_draft_tokens, len(output))


@pytest.mark.parametrize(
    ("num_draft_tokens", "num_allowed", "expected"),
    [(4, 99, 4), (4, 5, 4), (4, 4, 3), (4, 2, 1), (4, 1, 0), (4, 0, 0), (0, 9, 0)],
)
def test_b91_drafts_that_could_not_be_emitted_are_not_made(
    num_draft_tokens: int, num_allowed: int, expected: int
) -> None:
    assert num_useful_drafts(num_draft_tokens, num_allowed) == expected


def test_b91_near_the_end_of_the_context_no_row_lies_past_it_and_decoding_goes_on_to_the_end() -> None:
    max_model_len, num_tokens = 32, 30
    rounds = []
    while num_tokens < max_model_len:
        num_drafts = num_useful_drafts(4, max_model_len - num_tokens)
        last_row = num_tokens - 1 + num_drafts
        assert last_row < max_model_len
        rounds.append(num_drafts)
        num_tokens += 1  # nothing accepted
    assert rounds == [1, 0]

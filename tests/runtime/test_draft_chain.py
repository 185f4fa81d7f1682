"""The chain program of a proposal against a loop of single steps, and how far its metadata reaches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pcp_compiler.kv_ops import ADVANCE_METADATA, BUILD_METADATA
from pcp_compiler.pass_api import Phase, RowMetadata
from pcp_compiler.passes.attach_kv import BLOCK_TABLES, SLOTS, SPANS
from pcp_compiler.runtime.batch import PAD_SLOT, slots_at
from pcp_compiler.runtime.cached_model import CachedModel
from pcp_compiler.runtime.decoder import SpeculativeDecoder
from pcp_compiler.runtime.draft_chain import ChainStart, DraftChains, chain_bound
from pcp_compiler.runtime.layout import spans_tensor
from pcp_compiler.runtime.proposer import ChainProposer
from pcp_compiler.runtime.sampling import SamplingParams, SamplingRows, sample_draft
from tests.runtime.tiny import VOCAB_SIZE, Tiny, make_prompt

BLOCK_SIZE, MAX_MODEL_LEN, MAX_BLOCKS = 4, 96, 24
POSITIONS = (7, 93, 40)
"""Before a block border, near the last position, in the middle of a block."""
PARAMS = (
    SamplingParams(9, temperature=0.8, seed=1), SamplingParams(9, seed=2), SamplingParams(9, temperature=1.5, seed=3),
)  # fmt: skip
Drafts = tuple[Tensor, Tensor | None]
Step = Callable[[Tensor, Tensor, np.ndarray], tuple[Tensor, Tensor]]


class CountedOps(TorchDispatchMode):
    """Counts the ops that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[object] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Game:
    """A drafter with random K/V, and where its proposals start."""

    model: CachedModel
    start: ChainStart
    options: SamplingRows
    is_greedy: bool

    def drafts_of(self, propose: Callable[[], Drafts]) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Return drafts, distributions, and the caches after a proposal, which are then as they were."""
        before = [cache.clone() for cache in self.model.caches[0].values()]
        ids, probs = propose()
        after = [cache.clone() for cache in self.model.caches[0].values()]
        for cache, old in zip(self.model.caches[0].values(), before, strict=True):
            cache.copy_(old)
        return ids, probs, after

    def chains(self) -> DraftChains:
        """Return the programs."""
        return DraftChains(self.model, is_greedy=self.is_greedy, max_model_len=MAX_MODEL_LEN)

    def loop(self, num_draft_tokens: int, run_step: Step) -> Drafts:
        """Draw, then run a step and draw again, in Python."""
        logits, hidden = self.start.logits, self.start.hidden
        starts = torch.from_numpy(self.start.positions)
        tokens, probs = [], []
        for number in range(num_draft_tokens):
            token, chances = sample_draft(logits, self.options, starts, number)
            tokens.append(token)
            probs.append(chances)
            if number + 1 < num_draft_tokens:
                hidden, logits = run_step(token, hidden, self.start.positions + number)
        return torch.stack(tokens, 1), None if self.is_greedy else torch.stack(probs, 1)

    def inputs(self, token: Tensor, hidden: Tensor, positions: np.ndarray) -> dict[str, Tensor]:
        """Return the inputs of one step."""
        rows = torch.arange(len(token))
        return {"next_ids": token[None], "hidden": hidden[None], "positions": torch.from_numpy(positions)[None],
                "logit_rows": rows}  # fmt: skip

    def step_with_row_metadata(self, num_draft_tokens: int) -> Step:
        """Return a step that builds its metadata in its graph."""
        rows = RowMetadata("positions", MAX_MODEL_LEN)
        lowered = self.model.lower(Phase("step", is_sharded=False, block_size=BLOCK_SIZE, rows=rows))
        bound = chain_bound(self.start.seq_lens, num_draft_tokens, MAX_MODEL_LEN)
        index = {BLOCK_TABLES: torch.from_numpy(self.start.block_tables[:, : -(-bound // BLOCK_SIZE)])}

        def run(token: Tensor, hidden: Tensor, positions: np.ndarray) -> tuple[Tensor, Tensor]:
            return tuple(self.model.run_whole(self.inputs(token, hidden, positions), index, lowered.program))

        return run

    def step_with_spans(self, token: Tensor, hidden: Tensor, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Run a step whose metadata is made on the host."""
        numbers, tables = np.arange(len(positions)), self.start.block_tables
        fits, clipped = positions < MAX_MODEL_LEN, np.minimum(positions, MAX_MODEL_LEN - 1)
        slots = np.where(fits, slots_at(tables, numbers, clipped, BLOCK_SIZE), PAD_SLOT)
        index = {
            SLOTS: torch.from_numpy(slots), BLOCK_TABLES: torch.from_numpy(tables),
            SPANS: spans_tensor((i, i, 1, int(position) + 1) for i, position in enumerate(clipped)),
        }  # fmt: skip
        return tuple(self.model.run_whole(self.inputs(token, hidden, positions), index))


def make_game(tiny: Tiny, draft: str, num_requests: int, *, is_greedy: bool) -> Game:
    """Return a drafter whose caches hold random numbers, and requests with blocks in no order."""
    proposer = tiny.decoder(draft).proposer
    assert isinstance(proposer, ChainProposer)
    generator = torch.Generator().manual_seed(num_requests)
    for cache in proposer.model.caches[0].values():
        cache.normal_(generator=generator)
    blocks = 1 + torch.randperm(120, generator=generator)[: num_requests * MAX_BLOCKS]
    width = 0 if draft == "model" else 32
    positions = np.array(POSITIONS[:num_requests])
    start = ChainStart(
        torch.randn(num_requests, VOCAB_SIZE, generator=generator, dtype=torch.float64),
        torch.randn(num_requests, width, generator=generator, dtype=torch.float64),
        positions, positions + 2, blocks.reshape(num_requests, MAX_BLOCKS).int().numpy(),
    )  # fmt: skip
    params = [SamplingParams(9, seed=4)] * num_requests if is_greedy else PARAMS[:num_requests]
    return Game(proposer.model, start, SamplingRows.from_params(params), is_greedy)


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("draft", ["mtp", "model"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5])
def test_a_chain_gives_the_bits_of_a_loop_of_steps(
    tiny: Tiny, draft: str, num_draft_tokens: int, num_requests: int, is_greedy: bool
) -> None:
    game = make_game(tiny, draft, num_requests, is_greedy=is_greedy)
    chains = game.chains()
    chain = game.drafts_of(lambda: chains.run(num_draft_tokens, game.start, game.options))
    loop = game.drafts_of(lambda: game.loop(num_draft_tokens, game.step_with_row_metadata(num_draft_tokens)))
    spans = game.drafts_of(lambda: game.loop(num_draft_tokens, game.step_with_spans))
    assert chain[0].shape == (num_requests, num_draft_tokens)
    assert torch.equal(chain[0], loop[0]) and torch.equal(chain[0], spans[0])
    if not is_greedy:
        assert chain[1] is not None and loop[1] is not None and spans[1] is not None
        assert chain[1].shape == (num_requests, num_draft_tokens, VOCAB_SIZE)
        assert torch.equal(chain[1], loop[1])
        torch.testing.assert_close(chain[1], spans[1], rtol=0, atol=1e-6)
    for written, by_loop, by_spans in zip(chain[2], loop[2], spans[2], strict=True):
        real = slice(0, -1)  # the spare row takes what no slot takes
        assert torch.equal(written[real], by_loop[real])
        torch.testing.assert_close(written[real], by_spans[real], rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5])
def test_a_proposal_runs_one_build_and_an_advance_for_each_further_step(tiny: Tiny, num_draft_tokens: int) -> None:
    game = make_game(tiny, "mtp", 3, is_greedy=True)
    chains = game.chains()
    chains.lower(num_draft_tokens)  # which runs ops on fake tensors
    with CountedOps() as ran:
        for _ in range(2):
            chains.run(num_draft_tokens, game.start, game.options)
    expected = (2 * min(num_draft_tokens - 1, 1), 2 * max(num_draft_tokens - 2, 0))
    assert (ran.counts[BUILD_METADATA], ran.counts[ADVANCE_METADATA]) == expected
    assert (chains.counts.builds, chains.counts.advances) == expected
    assert chains.counts.num_proposals == 2


@pytest.mark.parametrize(
    ("draft", "pcp_size", "mode"), [("mtp", 4, "sharded"), ("mtp", 4, "replicated"), ("model", 1, "auto")]
)
def test_every_k_of_the_schedule_has_its_program_and_metadata_is_counted(
    tiny: Tiny, draft: str, pcp_size: int, mode: str
) -> None:
    decoder = tiny.decoder(draft, pcp_size, mode=mode, num_drafts=5, k_schedule=[[1, 1, 3], [2, 2, 5], [3, 8, 1]])
    assert isinstance(decoder.proposer, ChainProposer)
    assert set(decoder.proposer.chains.lowered) == {1, 3, 5}
    tiny.check_greedy(decoder, [make_prompt(length) for length in (9, 21, 5)], 12)
    counts, runs = decoder.proposer.chains.counts, decoder.num_proposals
    assert all(runs[k] > 0 for k in (1, 3, 5))
    assert counts.builds <= counts.num_proposals <= sum(runs.values())
    assert counts.builds > 0 and counts.advances > counts.builds  # K = 3 advances once, K = 5 three times
    assert counts.first_builds == (0 if mode == "sharded" else sum(runs.values()))


def starts_of(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ChainStart]]:
    """Return a list that fills with K and start of every chain that runs."""
    found: list[tuple[int, ChainStart]] = []
    run = DraftChains.run

    def record(chains: DraftChains, num_draft_tokens: int, start: ChainStart, options: SamplingRows) -> Drafts:
        found.append((num_draft_tokens, start))
        return run(chains, num_draft_tokens, start, options)

    monkeypatch.setattr(DraftChains, "run", record)
    return found


def test_the_bound_covers_a_request_that_accepts_all_drafts_and_the_bonus_token_and_no_position_more(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny.decoder("self", num_drafts=3)
    found = starts_of(decoder, monkeypatch)
    tiny.check_greedy(decoder, [make_prompt(6)], 21)
    assert decoder.acceptance.acceptance_rate == 1.0
    full = [start for _, start in found[1:-1]]
    assert len(full) >= 3
    for start, after in pairwise(full):
        assert after.positions[0] - start.positions[0] == 4  # three drafts and the bonus
        assert chain_bound(start.seq_lens, 3, MAX_MODEL_LEN) == start.positions[0] + 2  # steps at p and p + 1


def test_the_bound_follows_the_batch_up_and_down(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny.decoder("mtp", num_drafts=3)
    found = starts_of(decoder, monkeypatch)
    tiny.check_greedy(decoder, [make_prompt(40)], 4)
    tiny.check_greedy(decoder, [make_prompt(4)], 4)
    bounds = [chain_bound(start.seq_lens, k, MAX_MODEL_LEN) for k, start in found]
    assert max(bounds) > 40 and min(bounds) < 10
    assert all(start.positions.max() + k - 1 <= bound for (k, start), bound in zip(found, bounds, strict=True))


def test_the_bound_ends_at_the_last_position() -> None:
    lens = np.array([3, 95, 20])
    assert [chain_bound(lens, k, 96) for k in (1, 2, 3, 9)] == [95, 96, 96, 96]
    assert chain_bound(np.array([0]), 1, 96) == 0


def test_a_chain_that_starts_behind_its_batch_or_without_a_block_is_our_own_error(tiny: Tiny) -> None:
    game = make_game(tiny, "mtp", 1, is_greedy=True)
    start = game.start
    behind = ChainStart(start.logits, start.hidden, start.positions + 3, start.seq_lens, start.block_tables)
    with pytest.raises(AssertionError, match="behind the positions of its batch"):
        game.chains().run(3, behind, game.options)
    cut = start.block_tables.copy()
    cut[:, 2:] = 0
    without = ChainStart(start.logits, start.hidden, start.positions, start.seq_lens, cut)
    with pytest.raises(AssertionError, match="no KV block"):
        game.chains().run(3, without, game.options)


def test_steps_at_or_behind_the_last_position_write_nothing(tiny: Tiny) -> None:
    game = make_game(tiny, "mtp", 1, is_greedy=True)
    start = game.start
    late = np.array([MAX_MODEL_LEN - 1])
    end = ChainStart(start.logits, start.hidden, late, late + 1, start.block_tables)
    before = [cache.clone() for cache in game.model.caches[0].values()]
    game.chains().run(5, end, game.options)
    last = int(start.block_tables[0, -1]) * BLOCK_SIZE + BLOCK_SIZE - 1
    for old, cache in zip(before, game.model.caches[0].values(), strict=True):
        changed = (old != cache).flatten(1).any(1)[:-1].nonzero().flatten().tolist()
        assert changed == [last]

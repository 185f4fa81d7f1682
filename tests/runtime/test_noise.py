"""Counter-based random numbers: a known answer, uniformity, and independence of everything that enters the key."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from pcp_compiler.runtime.noise import Stream, draw_keys, draw_uniform
from pcp_compiler.sampling_ops import GOLDEN_GAMMA, absorb, mix, to_uniform

NUM_DRAWS = 200_000
NUM_SIGMAS = 4.5


def draws(stream: Stream = Stream.DRAFT, seed: int = 7, start: int = 0) -> Tensor:
    """One draw at each of many positions of one round."""
    positions = torch.arange(start, start + NUM_DRAWS)
    return draw_uniform(torch.tensor(seed), torch.tensor(start), positions, stream)


def correlation(left: Tensor, right: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([left, right]))[0, 1])


def test_the_mixer_gives_the_published_outputs_of_splitmix64() -> None:
    states = torch.arange(1, 4) * GOLDEN_GAMMA  # seed 0
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [value % 2**64 for value in mix(states).tolist()] == published


def test_a_draw_equals_the_formula_in_unbounded_integers() -> None:
    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    seed, start, position = 2**63 - 1, 17, 123_456
    state = mix((seed + 0x9E3779B97F4A7C15) % 2**64)
    for word in (start, position, Stream.BONUS):
        state = mix(((state ^ word) + 0x9E3779B97F4A7C15) % 2**64)
    drawn = draw_uniform(torch.tensor(seed), torch.tensor(start), torch.tensor(position), Stream.BONUS)
    assert drawn.item() == ((state >> 12) + 0.5) / 2**52


@pytest.mark.parametrize("stream", Stream)
def test_draws_are_uniform_and_inside_the_open_interval(stream: Stream) -> None:
    drawn = draws(stream)
    assert drawn.min() > 0 and drawn.max() < 1
    num_bins = 256
    counts = torch.histc(drawn, num_bins, 0, 1)
    chi2 = float(((counts - NUM_DRAWS / num_bins) ** 2 / (NUM_DRAWS / num_bins)).sum())
    assert abs(chi2 - (num_bins - 1)) < NUM_SIGMAS * math.sqrt(2 * (num_bins - 1))


def test_draws_for_consecutive_seeds_are_uniform_too() -> None:
    drawn = draw_uniform(torch.arange(NUM_DRAWS), torch.tensor(3), torch.tensor(5), Stream.ACCEPT)
    counts = torch.histc(drawn, 256, 0, 1)
    chi2 = float(((counts - NUM_DRAWS / 256) ** 2 / (NUM_DRAWS / 256)).sum())
    assert abs(chi2 - 255) < NUM_SIGMAS * math.sqrt(2 * 255)


@pytest.mark.parametrize("streams", list(combinations(Stream, 2)), ids=str)
def test_b84_two_streams_share_no_noise(streams: tuple[Stream, Stream]) -> None:
    left, right = (draws(stream) for stream in streams)
    assert len(set(left.tolist()) & set(right.tolist())) == 0
    assert abs(correlation(left, right)) < NUM_SIGMAS / math.sqrt(NUM_DRAWS)
    joint = torch.bincount((left * 16).long() * 16 + (right * 16).long(), minlength=256).double()
    chi2 = float(((joint - NUM_DRAWS / 256) ** 2 / (NUM_DRAWS / 256)).sum())
    assert abs(chi2 - 255) < NUM_SIGMAS * math.sqrt(2 * 255)


def test_neighbouring_positions_rounds_and_seeds_are_independent() -> None:
    base = draws()
    positions = torch.arange(NUM_DRAWS)
    other_round = draw_uniform(torch.tensor(7), torch.tensor(1), positions, Stream.DRAFT)
    for other in (draws(seed=8), other_round, base.roll(1)):
        assert abs(correlation(base, other)) < NUM_SIGMAS / math.sqrt(NUM_DRAWS)


def test_the_tokens_of_a_draw_have_uniform_numbers_that_neighbouring_draws_do_not_share() -> None:
    num_tokens = NUM_DRAWS
    by_draw = draw_keys(torch.tensor(7), torch.tensor(0), torch.arange(2), Stream.DRAFT)
    drawn, other = to_uniform(absorb(by_draw[:, None], torch.arange(num_tokens)))
    counts = torch.histc(drawn, 256, 0, 1)
    chi2 = float(((counts - num_tokens / 256) ** 2 / (num_tokens / 256)).sum())
    assert abs(chi2 - 255) < NUM_SIGMAS * math.sqrt(2 * 255)
    for second in (other, drawn.roll(1)):
        assert abs(correlation(drawn, second)) < NUM_SIGMAS / math.sqrt(num_tokens)


def test_a_draw_depends_on_its_own_key_alone() -> None:
    seeds, starts = torch.tensor([4, 5, 6]), torch.tensor([10, 20, 30])
    together = draw_uniform(seeds[:, None], starts[:, None], starts[:, None] + torch.arange(3), Stream.ACCEPT)
    alone = draw_uniform(seeds[1], starts[1], starts[1] + 2, Stream.ACCEPT)
    assert together.shape == (3, 3)
    assert together[1, 2] == alone


def test_the_global_generator_of_torch_plays_no_part() -> None:
    torch.manual_seed(0)
    first, state = draws(), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(first, draws())
    torch.manual_seed(0)
    assert torch.equal(state, torch.get_rng_state())

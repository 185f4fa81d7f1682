"""The block pool: who has which block, and which blocks a later prompt may share."""

from __future__ import annotations

import random

import pytest

from pcp_compiler.errors import ConfigError
from pcp_compiler.runtime.kv_blocks import BlockPool, extend_block_keys


def keys_of(token_ids: list[int], block_size: int = 4, draft_shift: int = 0) -> list[bytes]:
    """Return the keys of all blocks that the tokens determine."""
    keys: list[bytes] = []
    extend_block_keys(keys, token_ids, block_size, draft_shift)
    return keys


def publish_all(pool: BlockPool, keys: list[bytes]) -> list[int]:
    """Return blocks of one request, published under the keys."""
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    return blocks


def test_block_0_is_never_handed_out() -> None:
    pool = BlockPool(num_blocks=5, block_size=4)
    assert pool.num_free == pool.num_usable == 4
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]


def test_a_block_comes_back_when_its_last_user_frees_it() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    [block] = publish_all(pool, keys_of([1, 2, 3, 4]))
    pool.share([block])
    pool.free([block])
    assert pool.num_users(block) == 1 and pool.num_free == 1
    pool.free([block])
    assert pool.num_users(block) == 0 and pool.num_free == 2


def test_freeing_a_block_twice_is_a_bug() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free(blocks)


def test_a_free_published_block_can_be_shared_again() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    keys = keys_of([1, 2, 3, 4, 5, 6, 7, 8])
    blocks = publish_all(pool, keys)
    pool.free(blocks)
    assert pool.find_prefix(keys) == blocks
    assert pool.num_free_among(blocks) == 2
    pool.share(blocks)
    assert pool.num_free == 1 and pool.num_free_among(blocks) == 0


def test_blocks_without_a_key_are_reused_before_cached_ones_and_the_end_of_a_prefix_before_its_start() -> None:
    pool = BlockPool(num_blocks=5, block_size=4)
    first, second = publish_all(pool, keys_of([1, 2, 3, 4, 5, 6, 7, 8]))
    plain = pool.allocate(2)
    pool.free([first, second])
    pool.free(plain)
    assert set(pool.allocate(2)) == set(plain)
    assert pool.allocate(2) == [second, first]


def test_an_allocated_block_is_no_longer_found() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    keys = keys_of([1, 2, 3, 4])
    pool.free(publish_all(pool, keys))
    pool.allocate(1)
    assert pool.find_prefix(keys) == []


def test_of_two_equal_blocks_the_first_is_shared() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    keys = keys_of([1, 2, 3, 4])
    first = publish_all(pool, keys)
    second = publish_all(pool, keys)
    assert pool.find_prefix(keys) == first and not pool.is_published(second[0])


def test_a_prefix_ends_at_the_first_unknown_block() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    known = list(range(12))
    blocks = publish_all(pool, keys_of(known))
    assert pool.find_prefix(keys_of([*known[:8], 99, 99, 99, 99])) == blocks[:2]
    assert pool.find_prefix(keys_of([99, *known[1:]])) == []  # the chain: equal later blocks do not count


def test_forgotten_and_withdrawn_prefixes_are_not_found_and_their_blocks_stay_in_use() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    keys = keys_of(list(range(8)))
    blocks = publish_all(pool, keys)
    pool.withdraw(blocks[1:])
    assert pool.find_prefix(keys) == blocks[:1]
    pool.forget_prefixes()
    assert pool.find_prefix(keys) == [] and pool.num_free == 1


@pytest.mark.parametrize(("draft_shift", "num_keys"), [(0, 2), (1, 1), (4, 1), (5, 0)])
def test_a_key_needs_the_tokens_that_the_drafter_looks_ahead(draft_shift: int, num_keys: int) -> None:
    assert len(keys_of(list(range(8)), draft_shift=draft_shift)) == num_keys


def test_with_mtp_a_block_is_shared_only_by_prompts_that_go_on_with_the_same_token() -> None:
    base = [1, 2, 3, 4]
    assert keys_of([*base, 5], draft_shift=1) == keys_of([*base, 5, 7], draft_shift=1)
    assert keys_of([*base, 5], draft_shift=1) != keys_of([*base, 6], draft_shift=1)
    assert keys_of([*base, 5], draft_shift=0) == keys_of([*base, 6], draft_shift=0)


def test_keys_extended_piece_by_piece_equal_those_of_the_whole() -> None:
    token_ids = [random.Random(0).randrange(100) for _ in range(50)]
    keys: list[bytes] = []
    for stop in range(51):
        extend_block_keys(keys, token_ids[:stop], 4, 1)
    assert keys == keys_of(token_ids, draft_shift=1)


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "message"), [(1, 4, "limits.kv_blocks is 1"), (4, 0, "limits.kv_block_size is 0")]
)
def test_a_pool_without_blocks_or_tokens_is_refused(num_blocks: int, block_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlockPool(num_blocks, block_size)

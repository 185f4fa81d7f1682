"""Which KV blocks are in use, by how many requests, and which hold a prefix that a later request may read.

Host integers only: the cache itself is a tensor that others own. Slot `s` of the cache is offset `s % block_size` of
KV block `s // block_size`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pcp_compiler.errors import ConfigError

NULL_BLOCK = 0
"""Reserved: unused entries of block tables name it, so it is never handed out and never written."""


class BlockPool:
    """KV blocks 1..num_blocks - 1 with their reference counts, and the prefix cache over them.

    A block is *free* when no request uses it. A published block keeps its key while free, so a later request can
    still take it, until `allocate` needs the room: blocks without a key go first, then the longest unused.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Set up a pool with all blocks free.

        Args:
            num_blocks: blocks of the cache, with the reserved one, >= 2.
            block_size: tokens per block, >= 1.
        Raises:
            ConfigError: a number below its lowest value.
        """
        if num_blocks < 2:
            raise ConfigError(f"limits.kv_blocks is {num_blocks}; give >= 2, because block {NULL_BLOCK} is reserved")
        if block_size < 1:
            raise ConfigError(f"limits.kv_block_size is {block_size}; give a number of tokens >= 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_users = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # next to allocate comes first
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that requests can have in all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that no request uses, published ones included."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_users(self, block: int) -> int:
        """Return how many requests use `block`."""
        return self._num_users[block]

    def is_published(self, block: int) -> bool:
        """Return whether later requests may share `block`; such a block must not be written."""
        return block in self._keys

    def allocate(self, count: int) -> list[int]:
        """Take `count` <= `num_free` free blocks for one user; what they held is lost, also for the prefix cache."""
        assert count <= self.num_free, f"{count} KV blocks asked for, {self.num_free} free"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._unpublish(block)
            self._num_users[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one user to each of `blocks`, which `find_prefix` returned."""
        for block in blocks:
            assert self.is_published(block), f"KV block {block} was never published"
            self._free.pop(block, None)
            self._num_users[block] += 1

    def free(self, blocks: Sequence[int] | array[int]) -> None:
        """Take one user from each block of a request's table, given in table order."""
        for block in reversed(blocks):  # the end of a prefix is worth least, so it becomes the longest unused
            assert self._num_users[block] > 0, f"KV block {block} is freed more often than it was taken"
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=self.is_published(block))

    def publish(self, block: int, key: bytes) -> None:
        """Let later requests share a used block that is full for good; of equal blocks the first one stays."""
        assert self._num_users[block] > 0, f"KV block {block} is published but nobody uses it"
        if key not in self._by_key and block not in self._keys:
            self._by_key[key] = block
            self._keys[block] = key

    def find_prefix(self, keys: Sequence[bytes]) -> list[int]:
        """Return the published blocks of the first keys, up to the first key that is not there."""
        blocks = []
        for key in keys:
            if key not in self._by_key:
                break
            blocks.append(self._by_key[key])
        return blocks

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` nobody uses: sharing them takes them from the free ones."""
        return sum(self._num_users[block] == 0 for block in blocks)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Let no later request share `blocks`, whose K/V is not to be trusted."""
        for block in blocks:
            self._unpublish(block)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, as needed when the weights change; blocks in use stay in use."""
        self._by_key.clear()
        self._keys.clear()

    def _unpublish(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._by_key[key]


def extend_block_keys(keys: list[bytes], token_ids: Sequence[int], block_size: int, draft_shift: int) -> None:
    """Append to `keys` the prefix-cache key of each further KV block that `token_ids` determine.

    Key k is a hash of the tokens 0..(k+1) * block_size - 1, chained over the blocks, and of the `draft_shift` tokens
    that follow: row i of an MTP drafter embeds token i + 1, so what the drafter keeps in the last row of a block
    depends on the next block's first token. A hit on such keys thus ends at least `draft_shift` tokens before the
    common prefix does, so the last token in common is recomputed.

    Args:
        keys: keys of the first blocks, changed in place.
        token_ids: all tokens of the request.
        draft_shift: tokens that a drafter row looks ahead: 0 for DSpark and draft models, 1 for one MTP module,
            M for M modules.
    """
    for index in range(len(keys), (len(token_ids) - draft_shift) // block_size):
        start, stop = index * block_size, (index + 1) * block_size + draft_shift
        parent = keys[index - 1] if index else b""
        keys.append(hashlib.sha256(parent + array("q", token_ids[start:stop]).tobytes()).digest())

"""Estimate of the full KV blocks that an engine still holds, and of a prompt's cached length.

A block's key is a hash chain: the digest of the block's tokens and of the key before it, seeded
by the salt. Equal keys mean equal prefixes. The index mirrors one engine's prefix cache from the
prompts that were sent there. It evicts the least recently used blocks at the engine's capacity, and
removes blocks whenever the engine reports fewer cached tokens than were predicted.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

_DIGEST_BYTES = 16


def chain_seed(salt: str) -> bytes:
    """Return the key before the first block."""
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES, person=b"headrace").digest()


def hash_blocks(token_ids: Sequence[int], block_tokens: int, parent: bytes) -> list[bytes]:
    """Return the keys of the full blocks of ``token_ids`` that follow the block keyed ``parent``.

    Tokens are hashed as little-endian int32. ``struct.pack`` of a list is three times as fast as
    ``np.asarray`` of it (26 against 69 us for 3,000 tokens).

    Raises:
        ValueError: a token id does not fit 32 bits.
    """
    full = len(token_ids) // block_tokens
    if full == 0:
        return []
    count = full * block_tokens
    if isinstance(token_ids, np.ndarray):
        data = token_ids[:count].astype("<i4").tobytes()
    else:
        head = token_ids if len(token_ids) == count else token_ids[:count]
        try:
            data = struct.pack(f"<{count}i", *head)
        except struct.error as e:
            raise ValueError(f"token ids must be 32-bit integers: {e}") from None
    width = 4 * block_tokens
    keys: list[bytes] = []
    append = keys.append
    for start in range(0, len(data), width):
        parent = blake2b(parent + data[start : start + width], digest_size=_DIGEST_BYTES).digest()
        append(parent)
    return keys


class PrefixIndex:
    """LRU set of block keys.

    A chain is touched from its tail to its head, so a block is never more recent than the block
    before it, and tails are evicted first, as in vLLM's own block pool.

    Args:
        capacity_blocks: maximum number of blocks; 0 for an engine without a prefix cache.

    Attributes:
        ends_only: whether only the ends of chains are hits, as in an engine with recurrent layers.
    """

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 0:
            raise ValueError(f"capacity must be at least 0 blocks, not {capacity_blocks}")
        self._capacity_blocks, self.ends_only = capacity_blocks, False
        self._blocks: OrderedDict[bytes, bool] = OrderedDict()
        """By key: whether a chain ended there."""

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are a hit, without a change of the LRU order."""
        blocks, hit = self._blocks, 0
        for n, key in enumerate(hashes, 1):
            ends = blocks.get(key)
            if ends is None:
                break
            if ends or not self.ends_only:
                hit = n
        return hit

    def insert(self, hashes: Sequence[bytes]) -> None:
        """Add or touch a chain that the engine got or used: its blocks are now the most recent."""
        blocks, ends = self._blocks, True
        for key in reversed(hashes):
            blocks[key] = ends or blocks.get(key, False)
            blocks.move_to_end(key)
            ends = False
        self.resize(self._capacity_blocks)

    def resize(self, capacity_blocks: int) -> None:
        """Set the maximum number of blocks."""
        self._capacity_blocks = capacity_blocks
        while len(self._blocks) > capacity_blocks:
            self._blocks.popitem(last=False)

    def truncate(self, hashes: Sequence[bytes], held_blocks: int) -> None:
        """Drop all blocks of this chain but the first ``held_blocks``."""
        for key in hashes[max(0, held_blocks) :]:
            self._blocks.pop(key, None)

    def clear(self) -> None:
        """Drop all blocks: the engine has stopped, and its cache is lost."""
        self._blocks.clear()

"""Names of the kept KV of streamed contexts in the node's store, and the lookup there. Another
engine continues from this KV, or the same engine after its cache lost it.

The kept KV is some of the scheduler's blocks, preceded by blocks that describe them
(`description`). The store has all of these as plain blocks. Their names look like block hashes.
They are made from vLLM's hash of the context's last block, which covers all of its tokens, the
share and the tenant:

    name of block n of N = hash(hash of the context, gate, n, whether n is the last)

An engine that knows a prompt therefore finds the KV kept of it, and its number of blocks, in time
linear in the prompt's length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

VERSION = b"headrace held 1"
"""Version of the description; part of all names."""


class Store(Protocol):
    """Store that `headrace_engine.connector.scheduler.SchedulerHalf` implements."""

    def lacking(self, names: Sequence[bytes]) -> list[bool]: ...

    def load(self, request_id: str, blocks: Sequence[int], names: Sequence[bytes]) -> None: ...

    def save(
        self, blocks: Sequence[int], names: Sequence[bytes], salt: str, tokens: int
    ) -> None: ...


class Found(NamedTuple):
    """Kept KV in the store.

    Attributes:
        blocks: number of the prompt's first blocks that it stands for.
        names: names of its blocks in the store.
    """

    blocks: int
    names: list[bytes]


def names_of(context: bytes, gate: bytes, count: int) -> list[bytes]:
    """Return the names of the blocks for one context.

    Args:
        context: hash of its last block. gate: bytes that distinguish gates and layouts of KV.
        count: number of blocks.
    """
    return [_name(context, gate, n, n == count - 1) for n in range(count)]


def _name(context: bytes, gate: bytes, number: int, last: bool) -> bytes:
    told = b"%s|%d|%d|" % (VERSION, number, last)
    return sha256(told + gate + context).digest()[: len(context)]


def find(store: Store, hashes: Sequence[bytes], gate: bytes, least: int, most: int) -> Found | None:
    """Find the kept KV of the most first blocks of a prompt; None if the store has none.

    Args:
        hashes: hashes of the prompt's full blocks. gate: as for `names_of`.
        least, most: minimum and maximum number of first blocks.
    """
    lengths = range(min(most, len(hashes)), max(least, 1) - 1, -1)
    firsts = [_name(hashes[blocks - 1], gate, 0, False) for blocks in lengths]
    there = (b for b, lacks in zip(lengths, store.lacking(firsts), strict=True) if not lacks)
    if (blocks := next(there, None)) is None:
        return None
    context = hashes[blocks - 1]
    lasts = [_name(context, gate, n, True) for n in range(1, 2 * blocks)]
    counts = (n for n, lacks in enumerate(store.lacking(lasts), 2) if not lacks)
    names = names_of(context, gate, next(counts, 0))
    return Found(blocks, names) if names and not any(store.lacking(names)) else None


class Layout(NamedTuple):
    """Layout of KV in a scheduler's blocks.

    Attributes:
        layers: number of the model's layers. heads: KV heads of a layer that a worker has.
        unit_tokens: tokens of a unit that heads keep.
        block_tokens, block_bytes: tokens and bytes of a block.
    """

    layers: int
    heads: int
    unit_tokens: int
    block_tokens: int
    block_bytes: int

    @classmethod
    def of(cls, kv_cache_config: Any, unit_tokens: int) -> Layout:
        """Return the layout of vLLM's KVCacheConfig with one group."""
        [group] = kv_cache_config.kv_cache_groups
        spec, layers = group.kv_cache_spec, len(group.layer_names)
        size = layers * spec.page_size_bytes
        return cls(layers, spec.num_kv_heads, unit_tokens, spec.block_size, size)

    @property
    def told(self) -> bytes:
        """Bytes that distinguish layouts."""
        return b"%d %d %d %d %d|" % self

    def described_in(self, kept: int) -> int:
        """Return the number of blocks that describe KV kept in so many others."""
        heads = self.layers * self.heads
        return math.ceil(4 * heads * (1 + kept * self.block_tokens) / self.block_bytes)

    def described_of(self, blocks: int) -> int:
        """Return how many of so many blocks describe the others."""
        return next(n for n in range(1, blocks + 1) if self.described_in(blocks - n) <= n)

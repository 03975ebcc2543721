"""What is held of streamed contexts, in the node's store. Another engine goes on from it, or the
same one when its cache has no room for it any more.

What is held are some of the scheduler's blocks, and in front of them those that describe them
(`description`). The store has all of these as plain blocks. Their names look like block hashes.
They are made from vLLM's hash of the context's last block, which stands for all of its tokens, the
share and the tenant:

    name of block n of N = hash(hash of the context, gate, n, whether n is the last)

So who knows a prompt finds what is held of it, and how many blocks that is, in time linear in the
prompt's length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

VERSION = b"headrace held 1"
"""Of the description; part of all names."""


class Store(Protocol):
    """As `headrace_kvstore.connector.scheduler.SchedulerHalf`."""

    def lacking(self, names: Sequence[bytes]) -> list[bool]: ...

    def load(self, request_id: str, blocks: Sequence[int], names: Sequence[bytes]) -> None: ...

    def save(
        self, blocks: Sequence[int], names: Sequence[bytes], salt: str, tokens: int
    ) -> None: ...


class Found(NamedTuple):
    """
    Attributes:
        blocks: first ones of the prompt, that it stands for.
        names: of the blocks in the store.
    """

    blocks: int
    names: list[bytes]


def names_of(context: bytes, gate: bytes, count: int) -> list[bytes]:
    """Names of what is held of a context in so many blocks.

    Args:
        context: hash of its last block. gate: tells gates, and layouts of KV, apart.
    """
    return [_name(context, gate, n, n == count - 1) for n in range(count)]


def _name(context: bytes, gate: bytes, number: int, last: bool) -> bytes:
    told = b"%s|%d|%d|" % (VERSION, number, last)
    return sha256(told + gate + context).digest()[: len(context)]


def find(store: Store, hashes: Sequence[bytes], gate: bytes, least: int, most: int) -> Found | None:
    """The longest begin of a prompt of which something is held.

    Args:
        hashes: of the prompt's full blocks. least, most: of these, that it may be.
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
    """How KV lies in a scheduler's blocks.

    Attributes:
        layers: of the model. heads: KV heads of one, that a worker has.
        unit_tokens: of what heads keep. block_tokens, block_bytes: of a block.
    """

    layers: int
    heads: int
    unit_tokens: int
    block_tokens: int
    block_bytes: int

    @classmethod
    def of(cls, kv_cache_config: Any, unit_tokens: int) -> Layout:
        """Of vLLM's KVCacheConfig with one group."""
        [group] = kv_cache_config.kv_cache_groups
        spec, layers = group.kv_cache_spec, len(group.layer_names)
        size = layers * spec.page_size_bytes
        return cls(layers, spec.num_kv_heads, unit_tokens, spec.block_size, size)

    @property
    def told(self) -> bytes:
        """Tells layouts apart."""
        return b"%d %d %d %d %d|" % self

    def described_in(self, kept: int) -> int:
        """Blocks that describe what is held in so many others."""
        heads = self.layers * self.heads
        return math.ceil(4 * heads * (1 + kept * self.block_tokens) / self.block_bytes)

    def described_of(self, blocks: int) -> int:
        """How many of so many blocks describe the others."""
        return next(n for n in range(1, blocks + 1) if self.described_in(blocks - n) <= n)

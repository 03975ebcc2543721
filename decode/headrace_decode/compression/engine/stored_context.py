"""Names of the retained KV of incrementally compressed contexts in the node's store, and the lookup
there. Another engine continues from this KV, or the same engine after its cache lost it.

The retained KV is some of the scheduler's blocks, preceded by blocks that describe them
(`retained_format`). The store has all of these as plain blocks. Their names look like block hashes.
They are made from vLLM's hash of the context's last block, which covers all of its tokens, the
share and the tenant:

    name of block n of N = hash(hash of the context, predictor, n, whether n is the last)

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


class ContextStore(Protocol):
    """Store of KV blocks, which `headrace_engine.connector.scheduler_connector.SchedulerConnector`
    implements."""

    def lacking(self, names: Sequence[bytes]) -> list[bool]: ...

    def load(self, request_id: str, blocks: Sequence[int], names: Sequence[bytes]) -> None: ...

    def save(
        self, blocks: Sequence[int], names: Sequence[bytes], salt: str, tokens: int
    ) -> None: ...


class StoredContext(NamedTuple):
    """Kept KV in the store.

    Attributes:
        blocks: number of the prompt's first blocks that it stands for.
        names: names of its blocks in the store.
    """

    blocks: int
    names: list[bytes]


def block_names(context: bytes, predictor: bytes, count: int) -> list[bytes]:
    """Return the names of the blocks for one context.

    Args:
        context: hash of its last block. predictor: bytes that distinguish predictors and layouts of
            KV.
        count: number of blocks.
    """
    return [_name(context, predictor, n, n == count - 1) for n in range(count)]


def _name(context: bytes, predictor: bytes, number: int, last: bool) -> bytes:
    label = b"%s|%d|%d|" % (VERSION, number, last)
    return sha256(label + predictor + context).digest()[: len(context)]


def find_stored(
    store: ContextStore, hashes: Sequence[bytes], predictor: bytes, least: int, most: int
) -> StoredContext | None:
    """Find the retained KV of the most first blocks of a prompt; None if the store has none.

    Args:
        hashes: hashes of the prompt's full blocks. predictor: as for `block_names`.
        least, most: minimum and maximum number of first blocks.
    """
    lengths = range(min(most, len(hashes)), max(least, 1) - 1, -1)
    firsts = [_name(hashes[blocks - 1], predictor, 0, False) for blocks in lengths]
    there = (b for b, lacks in zip(lengths, store.lacking(firsts), strict=True) if not lacks)
    if (blocks := next(there, None)) is None:
        return None
    context = hashes[blocks - 1]
    lasts = [_name(context, predictor, n, True) for n in range(1, 2 * blocks)]
    counts = (n for n, lacks in enumerate(store.lacking(lasts), 2) if not lacks)
    names = block_names(context, predictor, next(counts, 0))
    return StoredContext(blocks, names) if names and not any(store.lacking(names)) else None


class RetainedLayout(NamedTuple):
    """Layout of KV in a scheduler's blocks.

    Attributes:
        layers: number of the model's layers. heads: KV heads of a layer that a worker has.
        page_tokens: tokens of a page that heads keep.
        block_tokens, block_bytes: tokens and bytes of a block.
    """

    layers: int
    heads: int
    page_tokens: int
    block_tokens: int
    block_bytes: int

    @classmethod
    def of(cls, kv_cache_config: Any, page_tokens: int) -> RetainedLayout:
        """Return the layout of vLLM's KVCacheConfig with one group."""
        [group] = kv_cache_config.kv_cache_groups
        spec, layers = group.kv_cache_spec, len(group.layer_names)
        size = layers * spec.page_size_bytes
        return cls(layers, spec.num_kv_heads, page_tokens, spec.block_size, size)

    @property
    def identity(self) -> bytes:
        """Bytes that distinguish layouts."""
        return b"%d %d %d %d %d|" % self

    def description_blocks_for(self, kept: int) -> int:
        """Return the number of blocks that describe KV kept in so many others."""
        heads = self.layers * self.heads
        return math.ceil(4 * heads * (1 + kept * self.block_tokens) / self.block_bytes)

    def description_blocks_of(self, blocks: int) -> int:
        """Return how many of so many blocks describe the others."""
        return next(n for n in range(1, blocks + 1) if self.description_blocks_for(blocks - n) <= n)

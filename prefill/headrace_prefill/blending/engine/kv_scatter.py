"""Copies of runs of tokens from stored blocks to a request's slots, rotated to their new positions.

    K' = R(new - old) K,    V' = V

The source is always the stored original, whose position is known, never KV that was placed before.
Runs need not be aligned with blocks on either side. Each stored (block, layer) is first copied to
private memory and compared with its checksum there, so the placed bytes are the verified ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_engine.kv_views import split_kv
from headrace_engine.rope import Rope
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.blocks.checksum import copy_sum
from headrace_prefill.blending.engine.paged import BlockTable, PagedKV, stored_blocks


class LostKV(Exception):
    """Error: a stored block is corrupt or has left the store."""


@dataclass(frozen=True)
class StoredRun:
    """A run of tokens in stored blocks, and where the request wants it.

    Attributes:
        payloads: uint64 [blocks], addresses of the blocks' payloads, which the caller has leased.
        sums, seeds: uint64 [blocks, parts of all layers], stored checksums, and their initial
            values. Parts are those of all tensor-parallel ranks.
        offset: position of the run's first token in the first block.
        length: in tokens.
        old, new: position of the first token in the prompt that was stored, and in this request.
    """

    payloads: NDArray[np.uint64]
    sums: NDArray[np.uint64]
    seeds: NDArray[np.uint64]
    offset: int
    length: int
    old: int
    new: int

    @property
    def moved(self) -> bool:
        """Whether its KV may be wrong here. It is exact if the run begins both prompts."""
        return bool(self.new or self.old)

    def pieces(self, block_tokens: int) -> Iterator[Piece]:
        """Yield the run's parts, cut where stored blocks end.

        Raises:
            ValueError: the run does not lie in its blocks.
        """
        end = self.offset + self.length
        within = 0 <= self.offset < block_tokens and self.length > 0
        if not within or -(-end // block_tokens) != len(self.payloads):
            raise ValueError(
                f"a run of {self.length} tokens from {self.offset} on does not fill "
                f"{len(self.payloads)} blocks of {block_tokens}"
            )
        for number in range(len(self.payloads)):
            first = max(self.offset, number * block_tokens)
            last = min(end, (number + 1) * block_tokens)
            offset = first - number * block_tokens
            yield Piece(self, number, offset, last - first, self.new + first - self.offset)


@dataclass(frozen=True)
class Piece:
    """The part of a run that lies in one stored block: `length` tokens from `offset` on, to be
    placed from `position` on."""

    run: StoredRun
    block: int
    offset: int
    length: int
    position: int


class KvScatter:
    """A copier of pieces to an engine's cache.

    Args:
        kv: the cache, layers in the model's order.
        layout: layout of stored blocks and of this cache; layers in the order of `kv`.
        rope: of the model; also an attribute.
    """

    def __init__(self, kv: PagedKV, layout: BlockLayout, rope: Rope) -> None:
        if len(layout.layers) != len(kv.caches):
            raise ValueError(f"{len(layout.layers)} stored layers, {len(kv.caches)} in the engine")
        self.rope = rope
        self._kv, self._layout = kv, layout
        self._bytes = np.empty((len(kv.caches), layout.layer_bytes), np.uint8)
        shard = layout.shard
        parts = shard.first + np.arange(shard.count)
        self._parts = np.add.outer(np.arange(len(kv.caches)) * shard.parts, parts).ravel()
        """Where this cache's parts are among all parts of a block."""

    def place(self, piece: Piece, table: BlockTable) -> None:
        """Copy one piece to the request's slots: this rank's heads of all layers.

        Raises:
            LostKV: the stored bytes are wrong; some layers may have been placed.
        """
        run, layout = piece.run, self._layout
        payload = run.payloads[piece.block : piece.block + 1]
        stored = layout.payload_addresses(payload)[0, :, 0]
        mine = self._bytes.ctypes.data + np.arange(len(self._bytes), dtype=np.uint64) * np.uint64(
            layout.layer_bytes
        )
        parts = np.arange(layout.shard.count, dtype=np.uint64) * np.uint64(layout.part_bytes)
        into, there = (np.add.outer(starts, parts).ravel() for starts in (mine, stored))
        seeds, wanted = (of[piece.block, self._parts] for of in (run.seeds, run.sums))
        if (copy_sum(into, there, layout.part_bytes, seeds) != wanted).any():
            raise LostKV(f"block {piece.block} of a run of {run.length} tokens")
        positions = np.arange(piece.position, piece.position + piece.length)
        slots = torch.from_numpy(table.slots(positions)).to(self._kv.device)
        tokens = slice(piece.offset, piece.offset + piece.length)
        for layer, cache in enumerate(self._kv.caches):
            block = stored_blocks(torch.from_numpy(self._bytes[layer : layer + 1]), cache)
            keys, values = (by_token(half)[tokens] for half in self._split(block))
            keys, values = keys.to(cache.device), values.to(cache.device)
            self._kv.put(layer, slots, self.rope.shift(keys, run.new - run.old), values)

    def _split(self, block: Tensor) -> tuple[Tensor, Tensor]:
        return split_kv(block, self._kv.order)


def by_token(blocks: Tensor) -> Tensor:
    """Return K or V of consecutive kernel blocks, [n, heads, tokens, dim], as [n * tokens, heads,
    dim]."""
    return blocks.transpose(1, 2).flatten(0, 1)

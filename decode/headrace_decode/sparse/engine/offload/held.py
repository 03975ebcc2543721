"""KV of one offloaded request in the worker: where it lies, and how it is moved.

    units [0, gone)         in host memory; those with a slot are in the cache, too
    units [gone, copied)    the last full block: in host memory and in the request's own block
    units [copied, n)       in the request's own blocks

A block is copied at the end of the step that fills it. The scheduler takes blocks back in the next
step at the earliest, and never the last full one (`ledger`). The last full block therefore counts
as in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace_decode.sparse.engine.book import Book
from headrace_decode.sparse.engine.counts import SINKS
from headrace_decode.sparse.engine.keys import LayerKeys
from headrace_decode.sparse.engine.offload.host import HostPool, Ids, copy_rows, words
from headrace_decode.sparse.offload.working import Moves, WorkingSet


class Memory:
    """Cache and host memory, with all layers.

    Args:
        layers: layers of the cache. host: host memory.
        book: summaries, with room for the units of both: host unit `u` is `first_host + u`.
        most_units: maximum units of a request.
    """

    def __init__(
        self, layers: list[LayerKeys], host: HostPool, book: Book, most_units: int
    ) -> None:
        self.layers, self.host, self.book = layers, host, book
        self.most_units = most_units
        self.kv_heads, self.first_host = layers[0].kv_heads, layers[0].blocks
        self._cache = [words(layer.cache, by_head=False) for layer in layers]
        self._cache_by_head = [words(layer.cache, by_head=True) for layer in layers]
        self._host = [words(layer.cache, by_head=False) for layer in host.layers]
        self._host_by_head = [words(layer.cache, by_head=True) for layer in host.layers]
        self.staging = LayerKeys(layers[0].cache.new_empty(most_units, *layers[0].cache.shape[1:]))
        self._staged = words(self.staging.cache, by_head=False)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffer that holds a request's units of one layer in order."""
        return self._staged.nbytes

    def save(self, units: Ids, host_units: Ids) -> None:
        """Copy units of the cache into host memory, in all layers."""
        for cache, host in zip(self._cache, self._host, strict=True):
            copy_rows(cache, units, host, host_units)

    def fetch(self, layer: int, from_: Ids, to: Ids) -> None:
        """Copy units of single heads, numbered `unit * kv_heads + head`, into the cache."""
        copy_rows(self._host_by_head[layer], from_, self._cache_by_head[layer], to)

    def stage(self, layer: int, host_units: Ids, units: Ids) -> None:
        """Copy a request's units of one layer to the buffer: units in host memory, then units in
        the cache."""
        order = np.arange(len(host_units) + len(units))
        copy_rows(self._host[layer], host_units, self._staged, order[: len(host_units)])
        copy_rows(self._cache[layer], units, self._staged, order[len(host_units) :])

    def summarise(self, host_units: Ids) -> None:
        """Make summaries of units in host memory, in all layers."""
        for layer, summaries in zip(self.host.layers, self.book.summaries, strict=True):
            summaries.put(self.first_host + host_units, layer.read(host_units))


class Held:
    """An offloaded request.

    Args:
        memory: the engine's memory.
        slots: the scheduler's blocks of its working set; none if it attends densely.

    Attributes:
        units: int64, its units in host memory, from the first; whole blocks.
        summarised: number of the first of these units that have summaries.
    """

    def __init__(self, memory: Memory, slots: Sequence[int]) -> None:
        self._memory = memory
        self.units: Ids = np.empty(0, np.int64)
        self.summarised = 0
        per = memory.host.block_units
        blocks = np.asarray(slots, np.int64)
        self._slots = (blocks[:, None] * per + np.arange(per)).reshape(-1)
        shape = len(memory.layers), memory.kv_heads, len(self._slots), memory.most_units
        self._working = WorkingSet(*shape, SINKS) if len(self._slots) else None
        self.seen = False
        """Whether a step with it has been seen."""
        self.asked = self.missed = self.cold = 0
        """Numbers of units, each of one head in one layer, that steps chose: units that had left
        the cache; such units without a slot; and the latter while there were empty slots."""

    @property
    def copied(self) -> int:
        """Number of units in host memory."""
        return len(self.units)

    @property
    def gone(self) -> int:
        """Number of units that lie in host memory only."""
        return max(0, self.copied - self._memory.host.block_units)

    @property
    def slots(self) -> int:
        """Number of units that its working set has room for, in each layer and KV head."""
        return len(self._slots)

    def save_up_to(self, tokens: int, blocks: Sequence[int]) -> None:
        """Copy the blocks that are full with so many tokens and are not in host memory yet.

        Args:
            tokens: number of tokens whose KV is final.
            blocks: the request's blocks of the scheduler.
        """
        memory, self.seen = self._memory, True
        per, unit_tokens = memory.host.block_units, memory.layers[0].unit_tokens
        have, full = self.copied // per, tokens // (per * unit_tokens)
        if full < have:  # KV that could not be loaded is computed again
            memory.host.give_back(self.units[full * per :])
            self.units = self.units[: full * per]
            self.summarised = min(self.summarised, self.copied)
            self._lose(self.copied)
        elif full > have:
            mine = memory.host.take(full - have)
            there = np.asarray(blocks[have:full], np.int64)
            units = (there[:, None] * per + np.arange(per)).reshape(-1)
            memory.save(units, mine)
            if self._working is not None and self.summarised == self.copied:
                self.summarised += memory.book.copy(units, memory.first_host + mine)
            self.units = np.concatenate([self.units, mine])

    def _lose(self, first: int) -> None:
        """Empty the slots of units from `first` on."""
        if self._working is None:
            return
        for layer in range(len(self._memory.layers)):
            inside = self._working.units_in(layer)
            heads, slots = np.nonzero(inside >= first)
            units = inside[heads, slots]
            moves = (part.astype(np.int32) for part in (heads, units, slots))
            self._working.forget(layer, Moves(*moves))

    def summarise(self, most: int) -> int:
        """Make at most so many summaries, each of a unit in all layers; return their number."""
        left = self.units[self.summarised : self.summarised + most]
        if len(left):
            self._memory.summarise(left)
            self.summarised += len(left)
        return len(left)

    def scored(self) -> Ids:
        """Return the indices of the summaries of its units in host memory."""
        return self._memory.first_host + self.units

    def place(
        self, layer: int, scores: NDArray[np.float32], chosen: Ids, table: Ids
    ) -> NDArray[np.int64]:
        """Bring chosen units into the cache; return the place of each, `unit * kv_heads + head`.

        Args:
            scores: float32 [kv_heads, n], of all units before the newest.
            chosen: int64 [kv_heads, c], units among them, ascending.
            table: int64 [n], the request's own units of the cache; entries of units that left the
                cache are stale.
        """
        assert self._working is not None
        heads, gone = np.arange(self._memory.kv_heads)[:, None], self.gone
        left = chosen < gone
        self.asked += int(left.sum())
        missed = int((left & (self._working.slots_of(layer, chosen) < 0)).sum())
        self.missed += missed
        self._working.see(layer, scores[:, :gone])
        if self._working.has_room(layer):
            self.cold += missed
            self._fetch(layer, self._working.ahead(layer, gone, self.slots))
        self._fetch(layer, self._working.demand(layer, chosen, gone))
        slots = self._slots[self._working.slots_of(layer, chosen)]
        return np.where(left, slots, table[chosen]) * self._memory.kv_heads + heads

    def _fetch(self, layer: int, moves: Moves) -> None:
        kv_heads, heads = self._memory.kv_heads, moves.heads.astype(np.int64)
        from_ = self.units[moves.units] * kv_heads + heads
        self._memory.fetch(layer, from_, self._slots[moves.slots] * kv_heads + heads)

    def stage(self, layer: int, table: Ids) -> None:
        """Copy all its units of one layer to the buffer, in order.

        Args:
            table: int64 [n], as for `place`, the newest included.
        """
        gone = self.gone
        self._memory.stage(layer, self.units[:gone], table[gone:])

    def end(self) -> None:
        """Give host memory back."""
        self._memory.host.give_back(self.units)
        self.units = np.empty(0, np.int64)

"""KV of one offloaded request in the worker: where it lies, and how it is moved.

    pages [0, gone)         in host memory; those with a slot are in the cache, too
    pages [gone, copied)    the last full block: in host memory and in the request's own block
    pages [copied, n)       in the request's own blocks

A block is copied at the end of the step that fills it. The scheduler takes blocks back in the next
step at the earliest, and never the last full one (`attention.offload.ledger`). The last full block
therefore counts as in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace_decode.attention.cpu_cache import Ids, LayerCache, pages_of
from headrace_decode.attention.page_counts import SINKS
from headrace_decode.sparse.engine.page_summary_table import PageSummaryTable
from headrace_decode.sparse.offload.host_pool import HostPool, copy_rows, words
from headrace_decode.sparse.offload.working_set import Moves, WorkingSet


class TieredCache:
    """Cache and host memory, with all layers.

    Args:
        layers: layers of the cache. host: host memory.
        summary_table: summaries, with room for the pages of both: host page `u` is `first_host +
            u`.
        max_pages: maximum pages of a request.
    """

    def __init__(
        self,
        layers: list[LayerCache],
        host: HostPool,
        summary_table: PageSummaryTable,
        max_pages: int,
    ) -> None:
        self.layers, self.host, self.summary_table = layers, host, summary_table
        self.max_pages = max_pages
        self.kv_heads, self.first_host = layers[0].kv_heads, layers[0].blocks
        self._cache = [words(layer.cache, by_head=False) for layer in layers]
        self._cache_by_head = [words(layer.cache, by_head=True) for layer in layers]
        self._host = [words(layer.cache, by_head=False) for layer in host.layers]
        self._host_by_head = [words(layer.cache, by_head=True) for layer in host.layers]
        self.staging = LayerCache(layers[0].cache.new_empty(max_pages, *layers[0].cache.shape[1:]))
        self._staged = words(self.staging.cache, by_head=False)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffer that holds a request's pages of one layer in order."""
        return self._staged.nbytes

    def save(self, pages: Ids, host_pages: Ids) -> None:
        """Copy pages of the cache into host memory, in all layers."""
        for cache, host in zip(self._cache, self._host, strict=True):
            copy_rows(cache, pages, host, host_pages)

    def fetch(self, layer: int, from_: Ids, to: Ids) -> None:
        """Copy pages of single heads, numbered `page * kv_heads + head`, into the cache."""
        copy_rows(self._host_by_head[layer], from_, self._cache_by_head[layer], to)

    def stage(self, layer: int, host_pages: Ids, pages: Ids) -> None:
        """Copy a request's pages of one layer to the buffer: pages in host memory, then pages in
        the cache."""
        order = np.arange(len(host_pages) + len(pages))
        copy_rows(self._host[layer], host_pages, self._staged, order[: len(host_pages)])
        copy_rows(self._cache[layer], pages, self._staged, order[len(host_pages) :])

    def summarise(self, host_pages: Ids) -> None:
        """Make summaries of pages in host memory, in all layers."""
        for layer, summaries in zip(self.host.layers, self.summary_table.summaries, strict=True):
            summaries.put(self.first_host + host_pages, layer.read(host_pages))


class OffloadedRequest:
    """An offloaded request.

    Args:
        memory: the engine's memory.
        slots: the scheduler's blocks of its working set; none if it attends densely.

    Attributes:
        pages: int64, its pages in host memory, from the first; whole blocks.
        summarised: number of the first of these pages that have summaries.
    """

    def __init__(self, memory: TieredCache, slots: Sequence[int]) -> None:
        self._memory = memory
        self.pages: Ids = np.empty(0, np.int64)
        self.summarised = 0
        self._slots = pages_of(slots, memory.host.block_pages)
        shape = len(memory.layers), memory.kv_heads, len(self._slots), memory.max_pages
        self._working = WorkingSet(*shape, SINKS) if len(self._slots) else None
        self.seen = False
        """Whether a step with it has been seen."""
        self.asked = self.missed = self.cold = 0
        """Numbers of pages, each of one head in one layer, that steps chose: pages that had left
        the cache; such pages without a slot; and the latter while there were empty slots."""

    @property
    def copied(self) -> int:
        """Number of pages in host memory."""
        return len(self.pages)

    @property
    def gone(self) -> int:
        """Number of pages that lie in host memory only."""
        return max(0, self.copied - self._memory.host.block_pages)

    @property
    def slots(self) -> int:
        """Number of pages that its working set has room for, in each layer and KV head."""
        return len(self._slots)

    def save_up_to(self, tokens: int, blocks: Sequence[int]) -> None:
        """Copy the blocks that are full with so many tokens and are not in host memory yet.

        Args:
            tokens: number of tokens whose KV is final.
            blocks: the request's blocks of the scheduler.
        """
        memory, self.seen = self._memory, True
        per, page_tokens = memory.host.block_pages, memory.layers[0].page_tokens
        have, full = self.copied // per, tokens // (per * page_tokens)
        if full < have:  # KV that could not be loaded is computed again
            memory.host.free(self.pages[full * per :])
            self.pages = self.pages[: full * per]
            self.summarised = min(self.summarised, self.copied)
            self._lose(self.copied)
        elif full > have:
            mine = memory.host.allocate(full - have)
            pages = pages_of(blocks[have:full], per)
            memory.save(pages, mine)
            if self._working is not None and self.summarised == self.copied:
                self.summarised += memory.summary_table.copy(pages, memory.first_host + mine)
            self.pages = np.concatenate([self.pages, mine])

    def _lose(self, first: int) -> None:
        """Empty the slots of pages from `first` on."""
        if self._working is None:
            return
        for layer in range(len(self._memory.layers)):
            inside = self._working.pages_in(layer)
            heads, slots = np.nonzero(inside >= first)
            pages = inside[heads, slots]
            moves = (part.astype(np.int32) for part in (heads, pages, slots))
            self._working.undo(layer, Moves(*moves))

    def summarise(self, most: int) -> int:
        """Make at most so many summaries, each of a page in all layers; return their number."""
        left = self.pages[self.summarised : self.summarised + most]
        if len(left):
            self._memory.summarise(left)
            self.summarised += len(left)
        return len(left)

    def scored(self) -> Ids:
        """Return the indices of the summaries of its pages in host memory."""
        return self._memory.first_host + self.pages

    def place(
        self, layer: int, scores: NDArray[np.float32], chosen: Ids, table: Ids
    ) -> NDArray[np.int64]:
        """Bring chosen pages into the cache; return the place of each, `page * kv_heads + head`.

        Args:
            scores: float32 [kv_heads, n], of all pages before the newest.
            chosen: int64 [kv_heads, c], pages among them, ascending.
            table: int64 [n], the request's own pages of the cache; entries of pages that left the
                cache are stale.
        """
        assert self._working is not None
        heads, gone = np.arange(self._memory.kv_heads)[:, None], self.gone
        left = chosen < gone
        self.asked += int(left.sum())
        missed = int((left & (self._working.slots_of(layer, chosen) < 0)).sum())
        self.missed += missed
        self._working.record_scores(layer, scores[:, :gone])
        if self._working.has_room(layer):
            self.cold += missed
            self._fetch(layer, self._working.ahead(layer, gone, self.slots))
        self._fetch(layer, self._working.demand(layer, chosen, gone))
        slots = self._slots[self._working.slots_of(layer, chosen)]
        return np.where(left, slots, table[chosen]) * self._memory.kv_heads + heads

    def _fetch(self, layer: int, moves: Moves) -> None:
        kv_heads, heads = self._memory.kv_heads, moves.heads.astype(np.int64)
        from_ = self.pages[moves.pages] * kv_heads + heads
        self._memory.fetch(layer, from_, self._slots[moves.slots] * kv_heads + heads)

    def stage(self, layer: int, table: Ids) -> None:
        """Copy all its pages of one layer to the buffer, in order.

        Args:
            table: int64 [n], as for `place`, the newest included.
        """
        gone = self.gone
        self._memory.stage(layer, self.pages[:gone], table[gone:])

    def end(self) -> None:
        """Give host memory back."""
        self._memory.host.free(self.pages)
        self.pages = np.empty(0, np.int64)

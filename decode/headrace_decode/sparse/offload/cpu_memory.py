"""Cache and host memory of an engine on a CPU: copies between them, and offloaded requests with a
working set each.

A copy moves whole rows of bytes: a page of one KV head, or of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_decode.attention.cpu_cache import Ids, LayerCache
from headrace_decode.attention.page_counts import SINKS
from headrace_decode.sparse.engine.page_summary_table import PageSummaryTable
from headrace_decode.sparse.offload.host_pool import HostPool
from headrace_decode.sparse.offload.offloaded_request import OffloadedRequest
from headrace_decode.sparse.offload.working_set import Moves, WorkingSet
from headrace_decode.sparse.summary_layout import jit

Words = NDArray[np.int64]


class CpuTieredMemory:
    """Implements `TieredMemory` on a CPU.

    Args:
        layers: layers of the cache. host: host memory.
        summary_table: summaries, with room for the pages of both: host page `u` is `first_host +
            u`.
        max_pages: maximum pages of a request.

    Attributes:
        host_layers: layers over host memory, like those of the cache.
        asked, missed, cold: numbers of pages, each of one head in one layer, that steps chose:
            pages that had left the cache; such pages without a slot; and the latter while there
            were empty slots.
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
        self.layer_count, self.page_tokens = len(layers), layers[0].page_tokens
        shape = host.pages, *layers[0].cache.shape[1:]
        self.host_layers = [
            LayerCache(torch.empty(shape, dtype=layer.cache.dtype, device="cpu"))
            for layer in layers
        ]
        self.asked = self.missed = self.cold = 0
        self._cache = [words(layer.cache, by_head=False) for layer in layers]
        self._cache_by_head = [words(layer.cache, by_head=True) for layer in layers]
        self._host = [words(layer.cache, by_head=False) for layer in self.host_layers]
        self._host_by_head = [words(layer.cache, by_head=True) for layer in self.host_layers]
        self.staging = LayerCache(layers[0].cache.new_empty(max_pages, *layers[0].cache.shape[1:]))
        self._staged = words(self.staging.cache, by_head=False)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffer that holds a request's pages of one layer in order."""
        return self._staged.nbytes

    @property
    def host_bytes(self) -> int:
        return sum(each.nbytes for each in self._host)

    def hold(self, slots: Sequence[int]) -> CpuOffloadedRequest:
        """Implement `TieredMemory.hold`."""
        return CpuOffloadedRequest(self, slots)

    def allocate(self, blocks: int) -> Ids:
        """Implement `TieredMemory.allocate`."""
        return self.host.allocate(blocks)

    def save(self, pages: Ids, host_pages: Ids) -> None:
        """Implement `TieredMemory.save`."""
        for cache, host in zip(self._cache, self._host, strict=True):
            copy_rows(cache, pages, host, host_pages)

    def save_summaries(self, pages: Ids, host_pages: Ids) -> int:
        """Implement `TieredMemory.save_summaries`."""
        return self.summary_table.copy(pages, self.first_host + host_pages)

    def summarise(self, host_pages: Ids) -> None:
        """Implement `TieredMemory.summarise`."""
        for layer, summaries in zip(self.host_layers, self.summary_table.summaries, strict=True):
            summaries.put(self.first_host + host_pages, layer.read(host_pages))

    def finish(self) -> None:
        """Implement `TieredMemory.finish`: copies are done when `save` returns."""

    def fetch(self, layer: int, from_: Ids, to: Ids) -> None:
        """Copy pages of single heads, numbered `page * kv_heads + head`, into the cache."""
        copy_rows(self._host_by_head[layer], from_, self._cache_by_head[layer], to)

    def stage(self, layer: int, host_pages: Ids, pages: Ids) -> None:
        """Copy a request's pages of one layer to the buffer: pages in host memory, then pages in
        the cache."""
        order = np.arange(len(host_pages) + len(pages))
        copy_rows(self._host[layer], host_pages, self._staged, order[: len(host_pages)])
        copy_rows(self._cache[layer], pages, self._staged, order[len(host_pages) :])


class CpuOffloadedRequest(OffloadedRequest):
    """An offloaded request of an engine on a CPU."""

    _memory: CpuTieredMemory

    def __init__(self, memory: CpuTieredMemory, slots: Sequence[int]) -> None:
        super().__init__(memory, slots)
        shape = memory.layer_count, memory.kv_heads, len(self.slots), memory.max_pages
        self._working = WorkingSet(*shape, SINKS) if len(self.slots) else None

    def lose(self, first: int) -> None:
        """Implement `OffloadedRequest.lose`."""
        if self._working is None:
            return
        for layer in range(self._memory.layer_count):
            inside = self._working.pages_in(layer)
            heads, slots = np.nonzero(inside >= first)
            pages = inside[heads, slots]
            moves = (part.astype(np.int32) for part in (heads, pages, slots))
            self._working.undo(layer, Moves(*moves))

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
        memory, heads, gone = self._memory, np.arange(self._memory.kv_heads)[:, None], self.gone
        left = chosen < gone
        memory.asked += int(left.sum())
        missed = int((left & (self._working.slots_of(layer, chosen) < 0)).sum())
        memory.missed += missed
        self._working.record_scores(layer, scores[:, :gone])
        if self._working.has_room(layer):
            memory.cold += missed
            self._fetch(layer, self._working.ahead(layer, gone, len(self.slots)))
        self._fetch(layer, self._working.demand(layer, chosen, gone))
        slots = self.slots[self._working.slots_of(layer, chosen)]
        return np.where(left, slots, table[chosen]) * memory.kv_heads + heads

    def _fetch(self, layer: int, moves: Moves) -> None:
        kv_heads, heads = self._memory.kv_heads, moves.heads.astype(np.int64)
        from_ = self.pages[moves.pages] * kv_heads + heads
        self._memory.fetch(layer, from_, self.slots[moves.slots] * kv_heads + heads)

    def stage(self, layer: int, table: Ids) -> None:
        """Copy all its pages of one layer to the buffer, in order.

        Args:
            table: int64 [n], as for `place`, the newest included.
        """
        gone = self.gone
        self._memory.stage(layer, self.pages[:gone], table[gone:])


def words(cache: Tensor, by_head: bool) -> Words:
    """Return a view of a cache's bytes: int64 [pages, words], or [pages * kv_heads, words] by head.

    Args:
        cache: [pages, kv_heads, page_tokens, 2 head_dim].
    """
    flat = cache.flatten(2).view(torch.int64).numpy()
    rows = len(flat) * flat.shape[1] if by_head else len(flat)
    found: Words = flat.reshape(rows, -1)
    return found


@jit
def copy_rows(source: Any, from_: Any, into: Any, to: Any) -> None:
    """Copy rows: into[to[n]] = source[from_[n]] for all n."""
    for n in range(from_.size):
        row, other = source[from_[n]], into[to[n]]
        for word in range(row.size):
            other[word] = row[word]

"""KV of one offloaded request in the worker: where it lies, and when it is copied.

    pages [0, gone)         in host memory; those with a slot are in the cache, too
    pages [gone, copied)    the last full block: in host memory and in the request's own block
    pages [copied, n)       in the request's own blocks

A block is copied at the end of the step that fills it. The scheduler takes blocks back in the next
step at the earliest, and never the last full one (`attention.offload.ledger`). The last full block
therefore counts as in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from headrace_decode.attention.cpu_cache import Ids, pages_of
from headrace_decode.sparse.offload.host_pool import HostPool


class TieredMemory(Protocol):
    """Cache and host memory of an engine, with all layers, on one kind of device.

    Attributes:
        host: host memory.
        layer_count, page_tokens: number of layers, and tokens of a page.
    """

    @property
    def host(self) -> HostPool: ...
    @property
    def layer_count(self) -> int: ...
    @property
    def page_tokens(self) -> int: ...

    def hold(self, slots: Sequence[int]) -> OffloadedRequest:
        """Return a request that is offloaded from now on, and has no page in host memory yet.

        Args:
            slots: the scheduler's blocks of its working set; none if it attends densely.
        """
        ...

    def allocate(self, blocks: int) -> Ids:
        """Allocate blocks like `HostPool.allocate`; none of their pages has a slot."""
        ...

    def save(self, pages: Ids, host_pages: Ids) -> None:
        """Copy pages of the cache into host memory, in all layers."""
        ...

    def save_summaries(self, pages: Ids, host_pages: Ids) -> int:
        """Give pages that `save` copies their summaries in host memory, in all layers, as far as
        that takes no work; return the number of first pages that have theirs."""
        ...

    def summarise(self, host_pages: Ids) -> None:
        """Make summaries of pages in host memory, in all layers."""
        ...

    def finish(self) -> None:
        """Wait until all copies are done, so that others than the engine's own steps may write the
        cache."""
        ...


class OffloadedRequest:
    """An offloaded request.

    Args:
        memory: the engine's memory. slots: as for `TieredMemory.hold`.

    Attributes:
        pages: int64, its pages in host memory, from the first; whole blocks.
        summarised: number of the first of these pages that have summaries.
        slots: int64, pages of the cache of its working set.
        is_seen: whether a step with it has been seen.
    """

    def __init__(self, memory: TieredMemory, slots: Sequence[int]) -> None:
        self._memory = memory
        self.pages: Ids = np.empty(0, np.int64)
        self.summarised = 0
        self.slots = pages_of(slots, memory.host.block_pages)
        self.is_seen = False

    @property
    def copied(self) -> int:
        """Number of pages in host memory."""
        return len(self.pages)

    @property
    def gone(self) -> int:
        """Number of pages that lie in host memory only."""
        return max(0, self.copied - self._memory.host.block_pages)

    def save_up_to(self, tokens: int, blocks: Sequence[int]) -> tuple[Ids, Ids]:
        """Return the pages of blocks that are full with so many tokens and are not in host memory
        yet, and the pages there that the caller copies them to.

        Args:
            tokens: number of tokens whose KV is final.
            blocks: the request's blocks of the scheduler.
        """
        memory, self.is_seen = self._memory, True
        per = memory.host.block_pages
        have, full = self.copied // per, tokens // (per * memory.page_tokens)
        pages = mine = np.empty(0, np.int64)
        if full < have:  # KV that could not be loaded is computed again
            memory.host.free(self.pages[full * per :])
            self.pages = self.pages[: full * per]
            self.summarised = min(self.summarised, self.copied)
            self.lose(self.copied)
        elif full > have:
            mine = memory.allocate(full - have)
            pages = pages_of(blocks[have:full], per)
            if len(self.slots) and self.summarised == self.copied:
                self.summarised += memory.save_summaries(pages, mine)
            self.pages = np.concatenate([self.pages, mine])
        return pages, mine

    def lose(self, first: int) -> None:
        """Empty the slots of pages from `first` on, which are not in host memory any more."""

    def summarise(self, most: int) -> int:
        """Make at most so many summaries, each of a page in all layers; return their number."""
        left = self.pages[self.summarised : self.summarised + most]
        if len(left):
            self._memory.summarise(left)
            self.summarised += len(left)
        return len(left)

    def end(self) -> None:
        """Give host memory back."""
        self._memory.host.free(self.pages)
        self.pages = np.empty(0, np.int64)

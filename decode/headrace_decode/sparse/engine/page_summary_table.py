"""Keeps the summaries of all pages of an engine's KV cache up to date, whatever wrote the pages.

A page is a block of the attention kernel. Its bytes come from the engine's own steps, from another
engine (NIXL) or from the store. When its request ends, the next request overwrites them. None of
these writes is reported, so each summary has a sum of the bytes that it was made from. When a
request is first seen, the sums of its pages are compared, and summaries whose sums differ are made
again. After that its full pages cannot change until it leaves the batch, so only pages that fill up
are compared.

Each step has a budget for this work. A request is dense until all its pages are done.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace_decode.attention.cpu_cache import KeyChecksums, LayerCache
from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.summaries import Summaries

AT_ONCE = 16
"""Number of pages whose sums are computed together."""


class PageSummaryTable:
    """Summaries of all layers.

    Memory: `nbytes`, for all blocks of the cache whether used or not.

    Args:
        layers: layers in order, of one shape.
        bases: basis of each layer; None for pages' own directions.
        others: number of pages that the caller summarises, numbered after the cache's pages.
    """

    def __init__(
        self, layers: list[LayerCache], bases: Sequence[Basis] | None = None, others: int = 0
    ) -> None:
        first = layers[0]
        self._layers, self._sums = layers, KeyChecksums(layers)
        shape = first.blocks + others, first.kv_heads, first.page_tokens, first.head_dim
        of_layers: Sequence[Basis | None] = bases or [None] * len(layers)
        self.summaries = [
            Summaries(*shape, basis=basis) for _, basis in zip(layers, of_layers, strict=True)
        ]
        self._seen = np.zeros((first.blocks, len(layers)), np.uint64)
        self.made = 0
        """Number of summaries made so far, each of one layer."""

    @property
    def nbytes(self) -> int:
        """Bytes of summaries and sums."""
        return self._seen.nbytes + sum(each.nbytes for each in self.summaries)

    def refresh(self, pages: NDArray[np.int64], budget: int) -> tuple[int, int]:
        """Bring the summaries of pages up to date, in order.

        Args:
            pages: int64 [n], full pages.
            budget: work that may be done. Comparing a page costs 1, making a summary of it in one
                layer costs 1.

        Returns:
            The number of first pages that are up to date now, and the cost of that. The last page
            may exceed the budget.
        """
        done = cost = 0
        while done < len(pages) and cost < budget:
            part = pages[done : done + min(AT_ONCE, budget - cost)]
            sums = self._sums.of(part)
            stale = self._seen[part] != sums
            costs = np.cumsum(stale.sum(1) + 1)
            room = int(np.searchsorted(costs, budget - cost)) + 1
            part, sums, stale = part[:room], sums[:room], stale[:room]
            for layer in np.flatnonzero(stale.any(0)):
                old = part[stale[:, layer]]
                self.summaries[layer].put(old, self._layers[layer].read(old))
            self._seen[part] = sums
            self.made += int(stale.sum())
            done, cost = done + len(part), cost + int(costs[len(part) - 1])
        return done, cost

    def copy(self, pages: NDArray[np.int64], others: NDArray[np.int64]) -> int:
        """Copy summaries to pages that hold the same keys.

        Args:
            pages: int64 [n], full pages of the cache. others: int64 [n], pages that the caller
                summarises.

        Returns:
            The number of first pages whose summaries were up to date, and were copied.
        """
        stale = (self._seen[pages] != self._sums.of(pages)).any(1)
        right = int(stale.argmax()) if stale.any() else len(pages)
        for each in self.summaries:
            each.copy(pages[:right], others[:right])
        return right

"""The working set of one request: which pages have a slot in the engine's memory.

Each layer and KV head has slots of its own. A step's scores (`page_scores`) estimate how much
attention each page draws. The next step's scores will be similar, so the worth of a page is

    worth(u) = max(score(u), FADING * worth(u) before)

If a step chooses pages without a slot, they are fetched before it attends (`demand`). They take the
slots of the pages of least worth that it did not choose. Pages that every step chooses keep theirs.
Pages of high worth may also be fetched before a step chooses them (`ahead`). Both copy only pages
that have no slot.

Empty slots are filled ahead, since an answer's first step chooses fewer pages than there are slots.
If pages are fetched ahead in later steps as well, 0.6 to 1.5 % more of the chosen pages have a slot
already, and three times as many pages are copied. That pays if copies run beside the computation.
On a CPU, copies take time of the core that computes. The engine there fetches only on demand once
slots are full.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_decode.sparse.summary_layout import jit

FADING = 0.8
"""Factor by which a step reduces earlier worth (`python -m benchmarks.sparse.prefetch`)."""
Ints = NDArray[np.int32]


class Moves(NamedTuple):
    """Pages that go into slots, in place of those there: int32 [n] each."""

    heads: Ints
    pages: Ints
    slots: Ints


class WorkingSet:
    """Slots of one request's pages.

    Args:
        layers, kv_heads: numbers of the model's layers and KV heads.
        slots: number of slots of each layer and KV head.
        pages: maximum number of pages that the request can have.
        sinks: number of first pages, which every step chooses.
    """

    def __init__(self, layers: int, kv_heads: int, slots: int, pages: int, sinks: int = 0) -> None:
        self.slots = slots
        self._slot_of = np.full((layers, kv_heads, pages), -1, np.int32)
        self._page_in = np.full((layers, kv_heads, slots), -1, np.int32)
        self._worth = np.zeros((layers, kv_heads, pages), np.float32)
        self._worth[:, :, :sinks] = np.inf
        self._sinks = sinks

    def slots_of(self, layer: int, pages: NDArray[np.integer]) -> Ints:
        """Return the slots of pages, int32 [kv_heads, n]; -1 for a page without one.

        Args:
            pages: int [kv_heads, n].
        """
        found: Ints = np.take_along_axis(self._slot_of[layer], pages, axis=1)
        return found

    def pages_in(self, layer: int) -> Ints:
        """Return the page in each slot, int32 [kv_heads, slots]; -1 for an empty slot."""
        return self._page_in[layer].copy()

    def has_room(self, layer: int) -> bool:
        """Return whether a slot is empty."""
        return bool((self._page_in[layer] < 0).any())

    def record_scores(self, layer: int, scores: NDArray[np.float32]) -> None:
        """Update the worth of pages with a step's scores: float32 [kv_heads, n] of the first n."""
        worth = self._worth[layer, :, self._sinks : scores.shape[1]]
        np.maximum(scores[:, self._sinks :], worth * np.float32(FADING), out=worth)

    def demand(self, layer: int, chosen: NDArray[np.int64], n: int) -> Moves:
        """Give slots to chosen pages that have none.

        Args:
            chosen: int64 [kv_heads, c].
            n: number of first pages that need slots; others are left out.

        Raises:
            ValueError: more pages are chosen than there are slots.
        """
        if (chosen < n).sum(1).max(initial=0) > self.slots:
            raise ValueError(f"more pages are chosen than there are slots, {self.slots}")
        moved = np.empty((3, chosen.size), np.int32)
        places = self._slot_of[layer], self._page_in[layer], self._worth[layer]
        count = _demand(*places, chosen, n, moved)
        return Moves(*moved[:, :count])

    def ahead(self, layer: int, n: int, most: int) -> Moves:
        """Give slots to the pages of most worth, before a step chooses them.

        Args:
            n: number of pages that the request has.
            most: maximum number of pages to move for each KV head; the highest worth comes first.
        """
        kv_heads = self._slot_of.shape[1]
        moved = np.empty((3, kv_heads * min(most, self.slots)), np.int32)
        if moved.size == 0 or n == 0:
            return Moves(*moved[:, :0])
        best = np.argsort(-self._worth[layer, :, :n], axis=1, kind="stable")[:, : self.slots]
        count = _ahead(self._slot_of[layer], self._page_in[layer], best, n, most, moved)
        return Moves(*moved[:, :count])

    def undo(self, layer: int, moves: Moves) -> None:
        """Undo moves: their slots are empty."""
        self._slot_of[layer, moves.heads, moves.pages] = -1
        self._page_in[layer, moves.heads, moves.slots] = -1


@jit
def _demand(slot_of: Any, page_in: Any, worth: Any, chosen: Any, n: int, moved: Any) -> int:
    count = 0
    for head in range(chosen.shape[0]):
        kept = np.zeros(page_in.shape[1], np.bool_)
        for page in chosen[head]:
            if page < n and slot_of[head, page] >= 0:
                kept[slot_of[head, page]] = True
        for page in chosen[head]:
            if page >= n or slot_of[head, page] >= 0:
                continue
            slot, least = -1, np.float32(np.inf)
            for s in range(page_in.shape[1]):
                if kept[s]:
                    continue
                there = page_in[head, s]
                value = np.float32(-1) if there < 0 else worth[head, there]
                if slot < 0 or value < least:
                    slot, least = s, value
            kept[slot] = True
            _put(slot_of, page_in, head, page, slot)
            moved[0, count], moved[1, count], moved[2, count] = head, page, slot
            count += 1
    return count


@jit
def _ahead(slot_of: Any, page_in: Any, best: Any, n: int, most: int, moved: Any) -> int:
    """Put the pages of most worth into slots, in place of others."""
    count = 0
    for head in range(best.shape[0]):
        wanted = np.zeros(n, np.bool_)
        for page in best[head]:
            wanted[page] = True
        slot, left = 0, most
        for page in best[head]:
            if slot_of[head, page] >= 0:
                continue
            if left == 0:
                break
            there = page_in[head, slot]
            while 0 <= there < n and wanted[there]:
                slot += 1
                there = page_in[head, slot]
            _put(slot_of, page_in, head, page, slot)
            moved[0, count], moved[1, count], moved[2, count] = head, page, slot
            count += 1
            left -= 1
    return count


@jit
def _put(slot_of: Any, page_in: Any, head: int, page: int, slot: int) -> None:
    before = page_in[head, slot]
    if before >= 0:
        slot_of[head, before] = -1
    slot_of[head, page] = slot
    page_in[head, slot] = page

"""The forest of prefixes that the slots form, and eviction orders that respect it.

A block is of use only while every block before it in its prefix is there. So leaves are evicted
before their parents, and blocks that lost an ancestor (orphans) first of all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.blocks.slot_record import FREE
from headrace_kvstore.numba_jit import jit
from headrace_kvstore.policy.base import (
    Mask,
    Slots,
    Table,
    candidates,
    parent_keys,
    slot_keys,
)

ROOT = -1  # in `parents`: the block has no parent
ORPHAN = -2  # in `parents`: an ancestor was evicted

_Floats = NDArray[np.float64]


class Forest:
    """Links of a table's blocks.

    - `parents`, int32 (slots,): each block's parent's slot, `ROOT` or `ORPHAN`
    - `order`, int32 (blocks,): the slots in use, deepest first
    """

    def __init__(self, table: Table) -> None:
        used = table["state"] != FREE
        self.depth = np.ascontiguousarray(table["depth"])
        self.order = _deepest_first(self.depth, used)
        self.parents = _link(slot_keys(table), parent_keys(table), self.depth, self.order)

    def cover(self, score: _Floats) -> _Floats:
        """Raise each block's score to the highest among the blocks that need it. In place."""
        _cover(self.parents, self.order, score)
        return score

    def removable(self, may_go: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return `may_go` without the ancestors of blocks that may not be evicted. (slots,)"""
        blocked = np.zeros(len(may_go), dtype=np.bool_)
        held = self.order[~may_go[self.order]]
        blocked[held] = True
        _block_ancestors(self.parents, held, blocked)
        return may_go & ~blocked


def worst_first(
    table: Table,
    forest: Forest,
    score: _Floats,
    now_s: float,
    need: int,
    among: Mask | None = None,
) -> Slots:
    """Return the `need` evictable slots of least score, leaves before parents, orphans before all.

    `score`, (slots,), is changed. Ancestors of blocks that may not be evicted stay. Equal scores:
    the deepest first.
    """
    score[forest.parents == ORPHAN] = -np.inf
    forest.cover(score)
    slots = np.flatnonzero(forest.removable(candidates(table, now_s, among)))
    if len(slots) > need:
        limit = np.partition(score[slots], need - 1)[need - 1] if need else -np.inf
        slots = slots[score[slots] <= limit]
    rank = np.lexsort((-forest.depth[slots].astype(np.int64), score[slots]))
    return slots[rank[:need]]


@jit(nogil=True)
def _deepest_first(depth, used):  # type: ignore[no-untyped-def]
    """Sort by counting; depths beyond the number of slots (no chain is that long) count as
    equal."""
    limit = len(depth)
    starts = np.zeros(limit + 2, np.int64)
    count = 0
    for i in range(len(depth)):
        if used[i]:
            starts[limit - min(depth[i], limit) + 1] += 1
            count += 1
    starts = np.cumsum(starts)
    order = np.empty(count, np.int32)
    for i in range(len(depth)):
        if used[i]:
            bucket = limit - min(depth[i], limit)
            order[starts[bucket]] = i
            starts[bucket] += 1
    return order


@jit(nogil=True)
def _link(keys, parent_keys, depth, order):  # type: ignore[no-untyped-def]
    bits = 4
    while (1 << bits) < 2 * len(order):
        bits += 1
    mask = (1 << bits) - 1
    shift = np.uint64(64 - bits)
    spread = np.uint64(0x9E3779B97F4A7C15)
    cells = np.full(1 << bits, -1, np.int32)
    for i in order:
        at = np.int64((keys[i] * spread) >> shift)
        while cells[at] >= 0:
            at = (at + 1) & mask
        cells[at] = i
    parents = np.full(len(keys), -2, np.int32)
    for n in range(len(order) - 1, -1, -1):  # shallow first: a parent's own link is known
        i = order[n]
        if depth[i] == 0:
            parents[i] = -1
            continue
        at = np.int64((parent_keys[i] * spread) >> shift)
        while cells[at] >= 0:
            p = cells[at]
            if keys[p] == parent_keys[i] and depth[p] + 1 == depth[i]:
                if parents[p] != -2:
                    parents[i] = p
                break
            at = (at + 1) & mask
    return parents


@jit(nogil=True)
def _cover(parents, order, score):  # type: ignore[no-untyped-def]
    for i in order:
        p = parents[i]
        if p >= 0 and score[p] < score[i]:
            score[p] = score[i]


@jit(nogil=True)
def _block_ancestors(parents, held, blocked):  # type: ignore[no-untyped-def]
    for i in held:
        p = parents[i]
        while p >= 0 and not blocked[p]:
            blocked[p] = True
            p = parents[p]

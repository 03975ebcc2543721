"""S3-FIFO: a small queue on probation, a main queue, and a memory of what left the small one.

Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023. Blocks enter the small
queue (a tenth of the slots); when its turn comes, one that was used since moves to the main
queue, any other goes and leaves its key as a ghost. One that returns while its ghost is
remembered enters the main queue at once. The main queue gives up its oldest block, but lets one
that was used go round again, up to three times.

Two changes for prefixes: a prompt's blocks queue deepest first, and a block that others in the
table need is passed over like one that was used.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from headrace_kvstore.policy.base import Keys, Mask, Policy, Slots, Table, candidates, slot_keys
from headrace_kvstore.policy.tree import ORPHAN, Forest

_PROMPT_BLOCKS = 1 << 20  # places in the queue that one write may take

STATE = np.dtype([("place", "i8"), ("uses", "u1"), ("main", "u1"), ("generation", "u4")])
"""Per slot: place in its queue (lower leaves first), uses counted up to 3, which queue."""


class S3FIFO(Policy):
    """S3-FIFO over `slots` (STATE, one a slot) and `ghosts` (u64 keys, a direct-mapped set).

    `ghosts` is sized by the caller; the paper remembers as many keys as the main queue holds.
    """

    name = "s3-fifo"
    learns = True
    small_share = 0.1

    def __init__(self, slots: np.ndarray, ghosts: np.ndarray, clock: np.ndarray) -> None:
        self._slots, self._ghosts, self._clock = slots, ghosts, clock

    @classmethod
    def create(cls, slots: int) -> S3FIFO:
        """With fresh arrays for a table of `slots` slots."""
        return cls(
            np.zeros(slots, STATE), np.zeros(max(1, slots), np.uint64), np.zeros(1, np.int64)
        )

    def _ghost(self, keys: Keys) -> np.ndarray:
        return (keys * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(16)) % np.uint64(
            len(self._ghosts)
        )

    def touched(self, table: Table, slots: Slots, now_s: float, hit: bool) -> None:
        if hit:
            self._slots["uses"][slots] = np.minimum(self._slots["uses"][slots] + 1, 3)
            return
        keys = slot_keys(table[slots])
        self._slots["main"][slots] = self._ghosts[self._ghost(keys)] == keys
        self._slots["uses"][slots] = 0
        self._clock[0] += _PROMPT_BLOCKS
        self._slots["place"][slots] = self._clock[0] - np.arange(len(slots))

    def choose(self, table: Table, now_s: float, need: int, among: Mask | None = None) -> Slots:
        forest = Forest(table)
        may_go = forest.removable(candidates(table, now_s, among))
        orphans = np.flatnonzero(may_go & (forest.parents == ORPHAN))[:need]
        may_go[orphans] = False
        taken = self._scan(forest, may_go, need - len(orphans), len(table)) if need else orphans
        return np.concatenate([orphans, taken])

    def given_up(self, table: Table, slots: Slots) -> None:
        """These slots of the last choice are really evicted."""
        left_small = slots[self._slots["main"][slots] == 0]
        keys = slot_keys(table[left_small])
        self._ghosts[self._ghost(keys)] = keys

    def _scan(self, forest: Forest, may_go: np.ndarray, need: int, size: int) -> Slots:
        state = self._slots
        used = forest.order
        by_place = used[np.argsort(state["place"][used], kind="stable")]
        taken = _scan(
            by_place,
            state["place"],
            state["uses"],
            state["main"],
            forest.parents,
            may_go,
            int(self.small_share * size),
            need,
        )
        self._clock[0] = max(int(self._clock[0]), int(state["place"].max(initial=0)))
        return taken


@njit(cache=True, nogil=True)
def _scan(by_place, place, uses, main, parents, may_go, small_target, need):  # type: ignore[no-untyped-def]
    n = len(by_place)
    children = np.zeros(len(parents), np.int32)
    queues = np.empty((2, n + 1), np.int32)  # rings
    head = np.zeros(2, np.int64)
    size = np.zeros(2, np.int64)
    for i in by_place:
        if parents[i] >= 0:
            children[parents[i]] += 1
        if may_go[i]:
            q = main[i]
            queues[q, size[q]] = i
            size[q] += 1
    top = place[by_place[n - 1]] if n else 0
    taken = np.empty(need, np.int64)
    count, passed = 0, 0
    while count < need and size[0] + size[1] > 0:
        stuck = passed > size[1]  # all in the main queue wait for blocks of the small one
        q = 0 if size[0] > small_target or size[1] == 0 or (stuck and size[0] > 0) else 1
        i = queues[q, head[q]]
        head[q] = (head[q] + 1) % (n + 1)
        size[q] -= 1
        passed += 1
        if uses[i] == 0 and children[i] == 0:
            taken[count] = i
            count += 1
            passed = 0
            if parents[i] >= 0:
                children[parents[i]] -= 1
            continue
        if uses[i] > 0:
            uses[i] = uses[i] - 1 if q == 1 else 0
            passed = 0
        main[i] = 1
        top += 1
        place[i] = top
        queues[1, (head[1] + size[1]) % (n + 1)] = i
        size[1] += 1
    return taken[:count]

"""The queue of blocks that an engine saves, first waiting, then being copied.

The engine's block pool holds all of them by a reference, as it holds a running request's blocks.
So they outlive their request, which ends, is preempted or is aborted as it would without a store.

Two bounds keep room for requests. At most a quarter of the pool is being copied. The other blocks
that an ended request has left wait, and are released, newest first, if the pool gets short of free
blocks. Copies keep up: a GPU computes 10,000 tokens/s of an 8B model, 1.3 GB/s of KV, and its bus
takes 20 GB/s. Unsaved blocks of a running request are held by the request and are not queued, if
vLLM keeps them until the request ends. If not, they are queued as soon as they may be saved.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

from headrace_engine.connector.store_work import BlockSave

logger = logging.getLogger("headrace.kvstore")

COPYING_FRACTION = 1 / 4
"""Fraction of the engine's blocks that may be copied at once: 8,192 tokens, if 32,768 fit."""
FREE_FRACTION = 1 / 16
"""Fraction of the engine's blocks that waiting blocks leave free."""
JOB_BLOCKS = 256
"""Maximum number of stored blocks of one copy: it reserves their slots under one hold of the
arena's lock, and they are released together."""


class Index(Protocol):
    """The part of the store that is used here."""

    def lacking(self, hashes: Sequence[bytes]) -> list[bool]:
        """Return, for each block, whether it is missing. No side effects."""
        ...


class SaveQueue:
    """The queue of one engine.

    Args:
        index: the store.
        counts: gets "save_busy": number of stored blocks that were released unsaved.
        ended: called with the blocks of each copy that all workers have ended; must not wait.
    """

    def __init__(
        self,
        index: Index,
        counts: Counter[str],
        ended: Callable[[Sequence[bytes]], None] | None = None,
    ) -> None:
        self._index, self._counts, self._ended = index, counts, ended
        self._pool: Any = None
        self._waiting: deque[BlockSave] = deque()
        self._waiting_blocks = self.copied_blocks = 0
        self._names: Counter[bytes] = Counter()
        self.jobs: dict[int, BlockSave] = {}
        self._begun: dict[int, BlockSave] = {}
        self._next_job = 0

    def bind(self, pool: Any) -> None:
        """Set vLLM's block pool."""
        self._pool = pool

    @property
    def has_pool(self) -> bool:
        """Whether blocks can be held."""
        return self._pool is not None

    @property
    def is_pool_free(self) -> bool:
        """Whether all blocks of the pool are free, as they are after a reset that succeeded."""
        # vLLM's null block is never free.
        return self._pool is None or self._pool.get_num_free_blocks() == len(self._pool.blocks) - 1

    @property
    def busy(self) -> bool:
        """Whether blocks are held."""
        return bool(self.jobs or self._waiting)

    @property
    def frees_blocks(self) -> bool:
        """Whether blocks will be free once their copies have ended."""
        saves = chain(self.jobs.values(), self._waiting)
        pool = self._pool.blocks if self.busy else ()
        return any(pool[block].ref_cnt == 1 for save in saves for block in chain(*save.blocks))

    @property
    def room(self) -> int:
        """Number of further blocks of the engine that may be copied now; 0 before there is a
        pool."""
        return max(0, self._limit - self.copied_blocks - self._waiting_blocks)

    @property
    def _limit(self) -> int:
        return 0 if self._pool is None else max(1, int(len(self._pool.blocks) * COPYING_FRACTION))

    def lacking(self, names: Sequence[bytes]) -> list[bool]:
        """Return, for each block, whether both the store and this queue lack it."""
        absent = zip(self._index.lacking(names), names, strict=True)
        return [lacks and name not in self._names for lacks, name in absent]

    def held(self, names: Iterable[bytes]) -> list[int]:
        """Return the positions of those of these blocks that are held."""
        return [place for place, name in enumerate(names) if name in self._names]

    def add(self, save: BlockSave) -> None:
        """Hold blocks until they are copied, in the order in which they arrive. Needs a pool."""
        pieces = max(1, min(JOB_BLOCKS, self._limit // len(save.blocks)))
        for first in range(0, len(save.hashes), pieces):
            piece = _cut(save, slice(first, first + pieces))
            self._hold(piece)
            self._waiting.append(piece)
            self._waiting_blocks += piece.engine_blocks

    def add_at_once(self, save: BlockSave) -> bool:
        """Copy blocks with the next step.

        Returns:
            False if others are being copied, and together they would be more than the limit and
            more than `JOB_BLOCKS`: a small cache takes the copies of a context all the same.
        """
        busy = self.copied_blocks + self._waiting_blocks
        most = max(self._limit, JOB_BLOCKS)
        if self._pool is None or (busy and busy + save.engine_blocks > most):
            return False
        self._hold(save)
        self._begin(save)
        return True

    def step(self) -> dict[int, BlockSave]:
        """Begin the copies for which there is room; return those that begin with this step, by
        job."""
        while self._waiting:
            save = self._waiting[0]
            if self.copied_blocks and self.copied_blocks + save.engine_blocks > self._limit:
                break
            self._waiting.popleft()
            self._waiting_blocks -= save.engine_blocks
            self._begin(save)
        begun, self._begun = self._begun, {}
        return begun

    def yield_room(self, freed: int = 0) -> None:
        """Release waiting blocks, newest first, if the pool is short of free ones.

        Args:
            freed: blocks that will be free in a moment.
        """
        if not self._waiting:
            return
        least = int(len(self._pool.blocks) * FREE_FRACTION)
        short = least - freed - self._pool.get_num_free_blocks()
        while self._waiting and short > 0:
            save = self._waiting.pop()
            self._waiting_blocks -= save.engine_blocks
            self._let_go(save)
            short -= save.engine_blocks
            if not self._counts["save_busy"]:
                logger.warning(
                    "%d blocks are not saved: %d others are being copied, and the engine needs "
                    "its cache",
                    *(len(save.hashes), self.copied_blocks),
                )
            self._counts["save_busy"] += len(save.hashes)

    def end(self, jobs: Iterable[int]) -> None:
        """Release the blocks of these jobs, whose copies have ended, well or not."""
        for job in jobs:
            save = self.jobs.pop(job, None)
            if save is None:
                continue
            self.copied_blocks -= save.engine_blocks
            if self._ended is not None:
                self._ended(save.hashes)
            self._let_go(save)

    def _begin(self, save: BlockSave) -> None:
        self.jobs[self._next_job] = self._begun[self._next_job] = save
        self.copied_blocks += save.engine_blocks
        self._next_job += 1

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks of the engine until `release`. Needs a pool."""
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def release(self, blocks: Iterable[int]) -> None:
        """Release blocks, in the order in which the pool may evict them."""
        self._pool.free_blocks(self._pool.blocks[block] for block in blocks)

    def _hold(self, save: BlockSave) -> None:
        self.hold(chain(*save.blocks))
        self._names.update(save.hashes)

    def _let_go(self, save: BlockSave) -> None:
        """Free the end of the prefix first, because the pool evicts in that order."""
        self._names -= Counter(save.hashes)
        self.release(block for group in save.blocks for block in reversed(group))


def _cut(save: BlockSave, part: slice) -> BlockSave:
    each_s = save.compute_s
    return replace(
        save,
        blocks=[group[part] for group in save.blocks],
        hashes=save.hashes[part],
        parents=save.parents[part],
        depths=save.depths[part],
        compute_s=each_s[part] if isinstance(each_s, list) else each_s,
    )

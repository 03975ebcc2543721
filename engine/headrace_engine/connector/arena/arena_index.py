"""The index of the arena that the scheduler's side of the connector asks."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_kvstore.arena.arena import Arena


class ArenaIndex:
    """Index of the arena by block hash. Every call takes microseconds.

    Args:
        arena, row: where the engine's blocks are.
        workers: number of workers that load each block.
    """

    def __init__(self, arena: Arena, row: int, lease_s: float, workers: int = 1) -> None:
        self._lease_s, self._workers = lease_s, workers
        self.move(arena, row)

    def move(self, arena: Arena, row: int) -> None:
        """Use another arena from now on."""
        self._arena, self._row = arena, row

    def leading(self, hashes: Sequence[bytes]) -> int:
        """Return how many of the first blocks can be loaded. No side effects."""
        return [*self.lacking(hashes), True].index(True)

    def lacking(self, hashes: Sequence[bytes]) -> list[bool]:
        """Return for each block whether the arena lacks it. No side effects."""
        return [bool(absent) for absent in self._arena.lookup(self._row, hashes) < 0]

    def lease(self, hashes: Sequence[bytes]) -> None:
        """Keep blocks from eviction while they are loaded. If a block was evicted already, or
        another process holds the lock, the load reads without a lease and checksums detect wrong
        bytes."""
        self._arena.lease(self._row, hashes, self._lease_s, self._workers)

    def record_misses(self, blocks: int) -> None:
        """Count blocks that a request needs and that no tier supplies."""
        self._arena.record_misses(blocks)

"""Prefetching of blocks from a slower tier into the arena before they are needed.

Wanted blocks queue by priority. The source tells which of them it has, the prefetcher reserves
arena slots, and the source fills them. The prefetcher compares checksums in place, and only then
publishes the blocks, so readers see whole and right blocks or none. Blocks for which the queue or
the arena has no room are dropped and counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import numpy as np

from headrace_kvstore.arena.arena import EXISTS, NO_ROOM, Arena
from headrace_kvstore.nvme.record import padded
from headrace_kvstore.staging.sources import (
    PendingRead,
    Source,
    SourceBlock,
    SourceLease,
    SourceUnavailable,
)
from headrace_kvstore.staging.transfer_pool import TransferPool

QUEUE_BLOCKS = 1 << 16
REFUSED = {EXISTS: "already_there", NO_ROOM: "dropped_no_room"}
THREADS = 4
"""Maximum number of batches under way at once."""


@dataclass(eq=False)
class _Ticket:
    """One call's blocks: how many are still on their way, and how many were loaded."""

    missing: int
    loaded: int = 0
    done: Future[int] = field(default_factory=Future)

    def finish(self) -> None:
        if self.done.set_running_or_notify_cancel():
            self.done.set_result(self.loaded)


class Prefetcher(TransferPool[tuple[bytes, list[bytes]]]):
    """Prefetcher from one source into an arena.

    Args:
        source: where the blocks come from.
        reading_bytes: bytes on their way from which on no further batch begins.
        name: of the threads.
    """

    def __init__(
        self, arena: Arena, source: Source, reading_bytes: int, name: str = "kv-prefetch"
    ) -> None:
        super().__init__(name, THREADS)
        self._arena, self._source, self._limit = arena, source, reading_bytes
        self._queue: list[tuple[int, int, bytes, bytes]] = []
        self._wanted: dict[bytes, list[_Ticket]] = {}
        self._order = count()
        self._fills: dict[PendingRead, tuple[np.ndarray, np.ndarray]] = {}
        """Slots and generations of each read under way."""
        self._start_threads()

    @property
    def idle(self) -> bool:
        """Whether no block waits or is being read."""
        with self._condition:
            return not self._wanted and not self._busy

    def ask(self, digest: bytes, hashes: Sequence[bytes], priority: int = 0) -> int:
        """Queue blocks, higher priorities first; return how many were added to the queue."""
        return self._enqueue(digest, hashes, priority, None)

    def fetch(self, digest: bytes, hashes: Sequence[bytes], priority: int = 0) -> Future[int]:
        """Queue blocks as `ask` does, and return a future. It completes when each block was loaded
        or given up, with the number of blocks that were loaded into DRAM."""
        ticket = _Ticket(1)
        self._enqueue(digest, hashes, priority, ticket)
        with self._condition:
            over = self._finish_one(ticket)
        if over:
            ticket.finish()
        return ticket.done

    def stats(self) -> dict[str, Any]:
        """Return JSON-able sizes and counts."""
        with self._condition:
            return {
                "queued_blocks": len(self._queue),
                "reading_bytes": self._bytes_in_flight,
                **self._totals(),
            }

    def _enqueue(
        self, digest: bytes, hashes: Sequence[bytes], priority: int, ticket: _Ticket | None
    ) -> int:
        taken = 0
        with self._condition:
            for block_hash in hashes:
                key = digest + padded(block_hash)
                tickets = self._wanted.get(key)
                if tickets is None:
                    if len(self._queue) >= QUEUE_BLOCKS or self._stopping:
                        self._counts["dropped_busy"] += 1
                        continue
                    tickets = self._wanted[key] = []
                    entry = (-priority, next(self._order), digest, padded(block_hash))
                    heapq.heappush(self._queue, entry)
                    taken += 1
                if ticket is not None:
                    ticket.missing += 1
                    tickets.append(ticket)
            self._condition.notify_all()
        return taken

    def _next_task(self) -> tuple[bytes, list[bytes]] | None:
        """Take the first blocks of the queue, all of one namespace and priority."""
        if not self._queue or self._bytes_in_flight >= self._limit:
            return None
        priority, _, digest, _ = self._queue[0]
        hashes: list[bytes] = []
        while (
            self._queue
            and len(hashes) < self._source.batch_blocks
            and (self._queue[0][0], self._queue[0][2]) == (priority, digest)
        ):
            hashes.append(heapq.heappop(self._queue)[3])
        return digest, hashes

    def _cancel_all(self) -> None:
        for _, _, digest, name in self._queue:
            for ticket in self._wanted.pop(digest + name, ()):
                ticket.done.cancel()
        self._queue.clear()
        for fill in self._fills:
            fill.abort()

    def _run_task(self, task: tuple[bytes, list[bytes]]) -> None:
        digest, hashes = task
        left, waiting = len(hashes), set(hashes)
        try:
            offer = self._source.open(digest, hashes)
            self._count("absent", left - len(offer.found))
            left = len(offer.found)
            groups: dict[Any, list[int]] = {}
            for i, found in enumerate(offer.found):
                groups.setdefault(found.kind, []).append(i)
            bad: list[int] = []
            try:
                for group in groups.values():
                    slots = self._reserve([offer.found[i] for i in group])
                    left -= len(group)
                    given = slots >= 0
                    bad += self._fill(offer, np.array(group)[given], slots[given], waiting)
            finally:
                offer.close(bad)
        except (SourceUnavailable, CancelledError) as error:
            self._count(f"dropped_{error}" if error.args else "dropped_end", left)
        except Exception:
            self._count("dropped_failed", left)
            raise
        finally:
            # Close only the tickets of blocks that did not arrive: another task may already have
            # requested a block that did.
            self._close_tickets(digest, list(waiting))

    def _reserve(self, found: Sequence[SourceBlock]) -> np.ndarray:
        """Reserve arena slots for blocks of one kind; below 0 for a block that gets none."""
        first = found[0]
        shape = first.shape
        namespace_id = self._arena.register_namespace(
            shape.digest, shape.payload_bytes, shape.layers, keep=False
        )
        slots = self._arena.reserve(
            namespace_id,
            [each.hash for each in found],
            [each.parent for each in found],
            [each.depth for each in found],
            tenant=first.tenant,
            compute_s=np.array([each.compute_s for each in found]),
        )
        for code, word in REFUSED.items():
            self._count(word, int((slots == code).sum()))
        return slots

    def _fill(
        self, offer: SourceLease, which: np.ndarray, slots: np.ndarray, waiting: set[bytes]
    ) -> list[int]:
        """Read blocks into their slots and publish the right ones; return the positions of the
        others. Removes the blocks whose read was begun from `waiting`."""
        if not len(slots):
            return []
        fills: list[tuple[slice, PendingRead]] = []
        generations = self._arena.generations(slots)
        try:
            self._begin_fills(offer, which, slots, generations, fills)
        finally:  # wait for the reads that were begun, even if the source failed
            bad: list[int] = []
            errors: list[Exception] = []
            for part, fill in fills:
                waiting.difference_update(offer.found[i].hash for i in which[part])
                try:
                    tickets = slots[part], generations[part]
                    good = self._finish(offer, fill, which[part], *tickets)
                    bad += which[part][~good].tolist()
                except Exception as error:
                    errors.append(error)
            rest = slice(fills[-1][0].stop if fills else 0, None)
            self._count("dropped_failed", len(slots[rest]))
            self._arena.abandon(slots[rest], generations[rest])
            if errors:
                raise errors[0]
        return bad

    def _begin_fills(
        self,
        offer: SourceLease,
        which: np.ndarray,
        slots: np.ndarray,
        generations: np.ndarray,
        fills: list[tuple[slice, PendingRead]],
    ) -> None:
        """Begin to read blocks into their slots; append the reads to `fills`."""
        shape = offer.found[which[0]].shape
        addresses = self._arena.addresses(slots)[:, None] + (
            np.arange(shape.layers) * shape.layer_bytes
        )
        cuts = np.cumsum(self._source.split(len(slots), shape.payload_bytes))
        for begin, end in pairwise([0, *cuts.tolist()]):
            part = slice(begin, end)
            fill = offer.read(which[part].tolist(), addresses[part])
            fills.append((part, fill))
            with self._condition:
                self._bytes_in_flight += shape.payload_bytes * (end - begin)
                self._fills[fill] = slots[part], generations[part]
                if self._stopping:
                    fill.abort()

    def renew(self) -> None:
        """Keep the slots of the reads under way: no other writer may get them while bytes may still
        arrive. Must be called more often than every WRITER_TIMEOUT_S. Raises LockBusyError."""
        with self._condition:
            fills = list(self._fills.values())
        for slots, generations in fills:
            self._arena.renew(slots, generations)

    def _finish(
        self,
        offer: SourceLease,
        fill: PendingRead,
        which: np.ndarray,
        slots: np.ndarray,
        generations: np.ndarray,
    ) -> np.ndarray:
        """Wait for a read and publish the right blocks; return bool [n]: which blocks are right."""
        found = [offer.found[i] for i in which]
        done = np.zeros(len(found), np.bool_)
        try:
            good = fill.wait()
            self._count("dropped_bad", int((~good).sum()))
            try:
                if good.any():
                    sums = np.array([each.sums for each in found])
                    done[good] = self._arena.publish(
                        slots[good], sums[good], generations=generations[good]
                    )
                    self._count("loaded", int(done.sum()))
            finally:
                self._arena.abandon(slots[~good], generations[~good])
        finally:
            with self._condition:
                self._bytes_in_flight -= found[0].shape.payload_bytes * len(found)
                self._fills.pop(fill, None)
                self._condition.notify_all()
            self._close_tickets(found[0].shape.digest, [each.hash for each in found], done)
        return good

    # Tickets

    def _close_tickets(
        self, digest: bytes, hashes: Sequence[bytes], loaded: np.ndarray | None = None
    ) -> None:
        """Close the tickets of blocks that were loaded or given up."""
        over = []
        with self._condition:
            for i, name in enumerate(hashes):
                for ticket in self._wanted.pop(digest + name, ()):
                    ticket.loaded += int(loaded is not None and loaded[i])
                    if self._finish_one(ticket):
                        over.append(ticket)
        for ticket in over:
            ticket.finish()

    @staticmethod
    def _finish_one(ticket: _Ticket) -> bool:
        ticket.missing -= 1
        return not ticket.missing

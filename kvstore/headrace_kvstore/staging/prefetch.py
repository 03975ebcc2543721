"""Brings blocks from a slower tier into the arena before they are needed.

Wanted blocks queue by priority. The source says which of them it has, arena slots are reserved,
and the source fills them. Checksums are compared in place, and only then are the blocks
published, so that readers see whole and right blocks or none. Blocks that fit neither the queue
nor the arena are dropped and counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from headrace_kvstore.arena.arena import NO_ROOM, NOT_WORTH, TAKEN, Arena
from headrace_kvstore.nvme.record import padded
from headrace_kvstore.staging.move_loop import MoveLoop
from headrace_kvstore.staging.sources import Fill, Found, Offer, Source, Unavailable

QUEUE_BLOCKS = 1 << 16
REFUSED = {TAKEN: "already_there", NO_ROOM: "dropped_no_room", NOT_WORTH: "dropped_not_worth"}
OPENINGS = 4
"""Batches of which the source is asked at once."""


@dataclass(eq=False)
class _Ticket:
    """One call's blocks: how many are still on their way, and how many have come."""

    missing: int
    loaded: int = 0
    done: Future[int] = field(default_factory=Future)

    def finish(self) -> None:
        if self.done.set_running_or_notify_cancel():
            self.done.set_result(self.loaded)


@dataclass(eq=False)
class _Opening:
    """The source is being asked."""

    digest: bytes
    hashes: list[bytes]
    answer: Future[Offer]
    bytes: int = 0


@dataclass(eq=False)
class _Use:
    """An offer, as long as something of it is read."""

    offer: Offer
    digest: bytes
    fills: int = 0
    bad: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Filling:
    """Slots that the source is filling."""

    use: _Use
    which: list[int]
    fill: Fill
    slots: np.ndarray
    bytes: int


class Prefetcher(MoveLoop[tuple[bytes, list[bytes]], _Opening | _Filling]):
    """Fills an arena from one source.

    Args:
        source: where the blocks come from.
        reading_bytes: blocks on their way at once.
        name: of the thread.
    """

    def __init__(
        self, arena: Arena, source: Source, reading_bytes: int, name: str = "kv-prefetch"
    ) -> None:
        super().__init__(name)
        self._arena, self._source, self._limit = arena, source, reading_bytes
        self._queue: list[tuple[int, int, bytes, bytes]] = []
        self._wanted: dict[bytes, list[_Ticket]] = {}
        self._order = count()
        self._openings = 0
        self._begin()

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing is being read."""
        with self._wake:
            return not self._wanted and self._at_rest

    def ask(self, digest: bytes, hashes: Sequence[bytes], priority: int = 0) -> int:
        """Queue blocks, higher priorities first; returns how many there was room for."""
        return self._enqueue(digest, hashes, priority, None)

    def fetch(self, digest: bytes, hashes: Sequence[bytes], priority: int = 0) -> Future[int]:
        """As `ask`; the future tells, once all have come or will not, how many are in DRAM of
        those that were not there before."""
        ticket = _Ticket(1)
        self._enqueue(digest, hashes, priority, ticket)
        with self._wake:
            over = self._leave(ticket)
        if over:
            ticket.finish()
        return ticket.done

    def stats(self) -> dict[str, Any]:
        """JSON-able sizes and counts."""
        with self._wake:
            return {
                "queued_blocks": len(self._queue),
                "reading_bytes": self._moving_bytes,
                **self._totals(),
            }

    def _enqueue(
        self, digest: bytes, hashes: Sequence[bytes], priority: int, ticket: _Ticket | None
    ) -> int:
        taken = 0
        with self._wake:
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
            self._wake.notify()
        return taken

    # Called by the loop

    def _may_start(self) -> bool:
        return bool(self._queue) and self._moving_bytes < self._limit and self._openings < OPENINGS

    def _take(self) -> tuple[bytes, list[bytes]]:
        """First blocks of the queue, of one namespace and priority."""
        priority, _, digest, _ = self._queue[0]
        hashes: list[bytes] = []
        while (
            self._queue
            and len(hashes) < self._source.batch_blocks
            and (self._queue[0][0], self._queue[0][2]) == (priority, digest)
        ):
            hashes.append(heapq.heappop(self._queue)[3])
        return digest, hashes

    def _start(self, task: tuple[bytes, list[bytes]]) -> None:
        digest, hashes = task
        try:
            opening = _Opening(digest, hashes, self._source.open(digest, hashes))
        except BaseException:
            self._close_wants(digest, hashes)
            self._count("dropped_failed", len(hashes))
            raise
        self._fly(opening)
        with self._wake:
            self._openings += 1
        opening.answer.add_done_callback(lambda _: self._land(opening))

    def _end(self, batch: _Opening | _Filling) -> None:
        if isinstance(batch, _Opening):
            self._opened(batch)
        else:
            self._filled(batch)

    def _drop_all(self) -> None:
        dropped = [(digest, name) for _, _, digest, name in self._queue]
        self._queue.clear()
        for digest, name in dropped:
            for ticket in self._wanted.pop(digest + name, ()):
                ticket.done.cancel()
        for batch in self._flying.values():
            if isinstance(batch, _Filling):
                batch.fill.call_off()

    # An answer of the source

    def _opened(self, opening: _Opening) -> None:
        with self._wake:
            self._openings -= 1
        started: set[bytes] = set()
        try:
            offer = opening.answer.result()
            absent = len(opening.hashes) - len(offer.found)
            self._count("absent", absent)
            use = _Use(offer, opening.digest, fills=1)
            try:
                groups: dict[Any, list[int]] = {}
                for i, found in enumerate(offer.found):
                    groups.setdefault(found.kind, []).append(i)
                for group in groups.values():
                    started |= self._read(use, group)
            finally:
                self._let_go(use)
        except (Unavailable, CancelledError) as error:
            self._count(f"dropped_{error}" if error.args else "dropped_end", len(opening.hashes))
        finally:
            self._close_wants(opening.digest, [h for h in opening.hashes if h not in started])

    def _read(self, use: _Use, group: list[int]) -> set[bytes]:
        """Reserve slots and have the source fill them; the hashes of blocks that come."""
        found = [use.offer.found[i] for i in group]
        shape = found[0].shape
        slots = self._reserve(found)
        given = slots >= 0
        for code, word in REFUSED.items():
            self._count(word, int((slots == code).sum()))
        which = [i for i, g in zip(group, given, strict=True) if g]
        slots = slots[given]
        started: set[bytes] = set()
        first = 0
        for size in self._source.split(len(slots), shape.payload_bytes):
            part, its = slots[first : first + size], which[first : first + size]
            try:
                self._fill(use, its, part, shape.layers, shape.layer_bytes)
            except BaseException:
                self._arena.abandon(slots[first:])
                self._count("dropped_failed", len(slots) - first)
                raise
            started.update(use.offer.found[i].hash for i in its)
            first += size
        return started

    def _reserve(self, found: Sequence[Found]) -> np.ndarray:
        first = found[0]
        shape = first.shape
        row = self._arena.namespace(shape.digest, shape.payload_bytes, shape.layers)
        return self._arena.reserve(
            row,
            [each.hash for each in found],
            [each.parent for each in found],
            [each.depth for each in found],
            tenant=first.tenant,
            priority=first.priority,
            compute_s=np.array([each.compute_s for each in found]),
        )

    def _fill(
        self, use: _Use, which: list[int], slots: np.ndarray, layers: int, layer_bytes: int
    ) -> None:
        addresses = self._arena.addresses(slots)[:, None] + np.arange(layers) * layer_bytes
        fill = use.offer.read(which, addresses)
        filling = _Filling(use, which, fill, slots, len(slots) * layers * layer_bytes)
        self._fly(filling)
        with self._wake:
            use.fills += 1
            if self._stopping:
                fill.call_off()
        fill.when_done(lambda: self._land(filling))

    def _filled(self, filling: _Filling) -> None:
        use = filling.use
        hashes = [use.offer.found[i].hash for i in filling.which]
        done = np.zeros(len(hashes), np.bool_)
        try:
            good = filling.fill.wait(0.0)
            self._arena.abandon(filling.slots[~good])
            self._count("dropped_bad", int((~good).sum()))
            use.bad += [i for i, g in zip(filling.which, good, strict=True) if not g]
            if good.any():
                sums = np.array([use.offer.found[i].sums for i in filling.which])
                done[good] = self._arena.publish(filling.slots[good], sums[good])
                self._count("loaded", int(done.sum()))
        finally:
            self._let_go(use)
            self._close_wants(use.digest, hashes, done)

    def _let_go(self, use: _Use) -> None:
        use.fills -= 1
        if not use.fills:
            use.offer.close(use.bad)

    # Tickets

    def _close_wants(
        self, digest: bytes, hashes: Sequence[bytes], loaded: np.ndarray | None = None
    ) -> None:
        """These blocks have come, or will not."""
        over = []
        with self._wake:
            for i, name in enumerate(hashes):
                for ticket in self._wanted.pop(digest + name, ()):
                    ticket.loaded += int(loaded is not None and loaded[i])
                    if self._leave(ticket):
                        over.append(ticket)
        for ticket in over:
            ticket.finish()

    @staticmethod
    def _leave(ticket: _Ticket) -> bool:
        ticket.missing -= 1
        return not ticket.missing

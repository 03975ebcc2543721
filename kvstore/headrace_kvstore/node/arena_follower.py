"""Follower of an arena's ring of events, which publishes DRAM's blocks and has them written to
NVMe.

The ring may overflow, and a process that dies inside the arena may lose events. In both cases,
and at the start, the follower reads the whole arena instead. The same sweep finds blocks that
write-behind had to drop, once the disk has time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import numpy as np

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.arena.arena_map import NamespaceInfo
from headrace_kvstore.arena.locking import LockBusyError
from headrace_kvstore.blocks.slot_record import STORED
from headrace_kvstore.protocol.events import DRAM, Change
from headrace_kvstore.staging.write_behind import WriteBehind

logger = logging.getLogger("headrace.kvstore")

POLL_S, IDLE_POLL_S = 0.02, 0.16
"""Pause between two checks of the ring: at first, and at most. Each check without events doubles
it."""
OFFER_BLOCKS = 1024
"""Maximum number of blocks offered at once: the tier's lock is held for so many look-ups."""


class ArenaFollower:
    """Follower that passes changes to `publish` and stored blocks to `writer`, and calls
    `resync` if events were lost."""

    def __init__(
        self,
        arena: Arena,
        writer: WriteBehind,
        publish: Callable[[list[Change]], None],
        resync: Callable[[], None],
        sweep_s: float,
    ) -> None:
        self._arena, self._writer = arena, writer
        self._publish, self._resync, self._sweep_s = publish, resync, sweep_s
        self._seq: int | None = None
        self._namespaces: list[NamespaceInfo] = []
        self._swept_s = time.monotonic()
        self._sweeping = False
        self.lost = self.sweeps = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-follow", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Stop following."""
        self._stop.set()
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def sweep_soon(self) -> None:
        """Offer all blocks again, because a disk has become available."""
        self._swept_s = -math.inf
        self._writer.missed = True

    @property
    def caught_up(self) -> bool:
        """Whether all events so far were handled, and no sweep is due."""
        if self._sweeping or self._is_sweep_due():
            return False
        return self._seq is not None and self._seq == self._arena.next_seq

    def stats(self) -> dict[str, Any]:
        """Return JSON-able counts."""
        return {"resyncs": self.lost, "sweeps": self.sweeps}

    def _run(self) -> None:
        pause_s = POLL_S
        while not self._stop.is_set():
            try:
                if self._poll():
                    pause_s = POLL_S
                else:
                    self._stop.wait(pause_s)
                    pause_s = min(2 * pause_s, IDLE_POLL_S)
            except LockBusyError as error:
                logger.warning("the arena is not followed for now: %s", error)
            except Exception:
                logger.exception("following the arena failed; it goes on")
                self._stop.wait(1.0)

    def _poll(self) -> bool:
        """Handle new events; return False if there were none."""
        if self._seq is None:
            self._seq = self._sweep()
            self._resync()
            return True
        if self._seq == self._arena.next_seq:
            if self._is_sweep_due() and self._writer.idle:
                self._sweep()
                self.sweeps += 1
            return False
        found, upto, lost = self._arena.events(self._seq)
        if lost:
            self.lost += 1
            self._seq = None
            return True
        if self._publish_events(found):
            self._seq = upto
        else:
            self.lost += 1
            self._seq = None
        return True

    def _is_sweep_due(self) -> bool:
        if not (self._writer.missed and self._writer.has_disk):
            return False
        return time.monotonic() - self._swept_s >= self._sweep_s

    def _publish_events(self, found: np.ndarray) -> bool:
        """Publish events, and offer blocks that were stored.

        Returns False, with nothing done, if a row was given to another namespace: some of these
        events may be of the previous namespace, and events do not tell.
        """
        before, self._namespaces = self._namespaces, self._arena.namespaces()
        namespaces = self._namespaces
        if before != namespaces[: len(before)]:
            return False
        changes = [
            Change(kind == STORED, DRAM, namespaces[namespace_id].digest, block_hash.tobytes())
            for kind, namespace_id, block_hash in zip(
                found["kind"].tolist(), found["namespace"].tolist(), found["hash"], strict=True
            )
        ]
        self._publish(changes)
        stored = found[found["kind"] == STORED]
        self._offer(stored["namespace"].tolist(), [h.tobytes() for h in stored["hash"]])
        return True

    def _sweep(self) -> int:
        """Offer every stored block: those with hits first, and of these the latest used first.
        Return the ring's number."""
        self._swept_s, self._sweeping = time.monotonic(), True
        try:
            return self._offer_all()
        finally:
            self._sweeping = False

    def _offer_all(self) -> int:
        self._writer.missed = False
        rows, seq = self._arena.blocks()
        rows = rows[np.lexsort((rows["depth"], -rows["used_s"], rows["hits"] == 0))]
        self._offer(rows["namespace"].tolist(), [h.tobytes() for h in rows["hash"]])
        return seq

    def _offer(self, namespaces: Iterable[int], hashes: list[bytes]) -> None:
        at = 0
        for namespace_id, run in groupby(namespaces):
            end = at + sum(1 for _ in run)
            for first in range(at, end, OFFER_BLOCKS):
                self._writer.offer(namespace_id, hashes[first : min(end, first + OFFER_BLOCKS)])
            at = end

"""Which attacks ran while a token was late or a loop stood still."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from benchmarks.hostile.neighbour import NeighbourProcess
from benchmarks.hostile.target import Stall, Target

STALL_POLL_S = 2.0


class StallWatch:
    """Asks for the longest stall now and then, in a thread.

    Attributes:
        notes: (loop, stall, when it was seen) of each stall that was longer than those before.
    """

    def __init__(self, target: Target) -> None:
        self.longest = Stall()
        self.notes: list[tuple[str, Stall, float]] = []
        self._by_loop: dict[str, Stall] = {}
        self._target, self._over = target, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> StallWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60.0)

    def _run(self) -> None:
        while not self._over.wait(STALL_POLL_S):
            try:
                for loop, stall in self._target.stalls_s().items():
                    before = self._by_loop.get(loop, Stall())
                    self._by_loop[loop] = Stall(*map(max, before, stall))
                    if self._by_loop[loop] != before:
                        self.notes.append((loop, stall, time.monotonic()))
                    self.longest = Stall(*map(max, self.longest, stall))
            except httpx.HTTPError as error:
                print(f"no status: {error!r}", file=sys.stderr)


class Attacks:
    """A record of the times at which attacks ran."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, float, float]] = []

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Record that this attack runs during the `with` block."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._seen.append((name, began_s, time.monotonic()))

    def beside(self, neighbour: NeighbourProcess, count: int = 20) -> list[str]:
        """Return the neighbour's latest tokens, with the attacks that ran while it waited."""
        waits = sorted(zip(neighbour.itl_s, neighbour.came_s, strict=True), reverse=True)[:count]
        return [
            f"a token after {itl_s * 1e3:.0f} ms beside "
            + (", ".join(self._between(came_s - itl_s, came_s)) or "no attack")
            for itl_s, came_s in waits
        ]

    def around(self, stalls: StallWatch) -> list[str]:
        """Return the stalls that were longer than those before, with the attacks that ran then."""
        return [
            f"{loop} loop: {stall.stall * 1e3:.0f} ms, held {stall.held * 1e3:.0f} ms, beside "
            + (", ".join(self._between(seen_s - STALL_POLL_S, seen_s)) or "no attack")
            for loop, stall, seen_s in stalls.notes
        ]

    def _between(self, began_s: float, ended_s: float) -> list[str]:
        return [
            f"{name} ({end_s - start_s:.1f} s)"
            for name, start_s, end_s in self._seen
            if start_s < ended_s and end_s > began_s
        ]

"""The gate through which lines enter, as many as the pacers allow.

A batch waits here with one line at a time. The next line is that of the tenant with the fewest
lines in flight; batches of one tenant take turns.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from headrace.gateway.batches.line_pacer import LineLoad, LinePacer

POLL_INTERVAL_S = 0.05
MAX_YIELDS = 3
"""Number of times that a line is taken back; after that it stays to its end."""


@dataclass(slots=True, eq=False)
class LinePlace:
    """A line in flight.

    Attributes:
        model_id: own name of its model.
        tenant: the tenant of its batch.
        yields: number of times that it was taken back before.
        on_yield: takes the line back; None while it cannot be.
        is_yielding: whether it was taken back, and ends.
    """

    model_id: str
    tenant: str | None = None
    yields: int = 0
    on_yield: Callable[[], object] | None = None
    is_yielding: bool = False


class LineGate:
    """The gate of one gateway's lines.

    Args:
        load: returns the load of a model, for a number of lines in flight.
        lines_per_replica: see `LinePacer`.
    """

    def __init__(
        self,
        load: Callable[[str, int], LineLoad],
        lines_per_replica: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load, self._lines_per_replica, self._clock = load, lines_per_replica, clock
        self._pacers: dict[str, LinePacer] = {}
        self._waiting: dict[str, list[tuple[LinePlace, asyncio.Future[None]]]] = {}
        self._places: dict[str, list[LinePlace]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return the number of lines in flight."""
        return sum(map(len, self._places.values()))

    async def enter(self, model_id: str, tenant: str | None, yields: int = 0) -> LinePlace:
        """Wait until a line may be in flight; `leave` must follow.

        Args:
            model_id: own name of its model.
            tenant: the tenant of its batch.
            yields: number of times that it was taken back before.
        """
        place = LinePlace(model_id, tenant, yields)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(model_id, [])
        waiting.append((place, waiter))
        self._tick()
        try:
            await waiter
        except asyncio.CancelledError:
            if (place, waiter) in waiting:
                waiting.remove((place, waiter))
            else:
                self.leave(place)
            raise
        return place

    def leave(self, place: LinePlace) -> None:
        """Give a place back."""
        self._places[place.model_id].remove(place)
        if any(self._waiting.values()):
            self._tick()

    def on_request(self) -> None:
        """Take surplus lines back at once, because another request arrived."""
        if len(self):
            asyncio.get_running_loop().call_soon(self._tick)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        """Let lines in, take surplus lines back, and repeat while there are lines."""
        now_s = self._clock()
        for model_id in {*self._waiting, *self._places}:
            self._pace(model_id, now_s)
        self.close()
        if len(self) or any(self._waiting.values()):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(POLL_INTERVAL_S, self._tick)

    def _pace(self, model_id: str, now_s: float) -> None:
        pacer = self._pacers.setdefault(model_id, LinePacer(self._lines_per_replica))
        places = self._places.setdefault(model_id, [])
        waiting = self._waiting.setdefault(model_id, [])
        lines = sum(not place.is_yielding for place in places)
        target = pacer.target(self._load(model_id, lines), now_s)
        while waiting and lines < target:
            of_tenants = Counter(place.tenant for place in places)
            place, waiter = min(waiting, key=lambda one: of_tenants[one[0].tenant])
            waiting.remove((place, waiter))
            places.append(place)
            lines += 1
            pacer.on_start(now_s)
            waiter.set_result(None)
        for place in reversed(places):  # the youngest have done the least
            if lines <= target:
                break
            if place.on_yield is not None and place.yields < MAX_YIELDS and not place.is_yielding:
                place.is_yielding = True
                place.on_yield()
                lines -= 1

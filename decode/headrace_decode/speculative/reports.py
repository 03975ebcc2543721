"""The decode replica's latest report on drafting, fetched from the engine at an interval.

The engine answers between two of its steps, so a question may take as long as a step. A caller that
needs the answer at once, such as the gateway's choice of a replica, gets the last report while it
is fresh.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

logger = logging.getLogger("headrace.decode")

INTERVAL_S = 1.0
FRESH_S = 5.0
"""Seconds after which prices are no longer reported: an engine whose steps take that long has other
prices by then."""


class DraftingReports:
    """A loop that fetches a report on drafting every `INTERVAL_S`."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[Mapping[str, Any] | None]],
        watch: Callable[[Mapping[str, Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        ask: returns the engine's report; None if it does not draft.
        watch: receives every report.
        clock: returns the time in seconds.
        """
        self._ask, self._watch, self._clock = ask, watch, clock
        self._prices: dict[str, Any] | None = None
        self._asked_s = 0.0

    async def run(self) -> None:
        """Fetch reports until cancelled. An engine that does not answer is asked again."""
        while True:
            try:
                await self.fetch()
            except Exception as error:
                logger.debug("no report on drafting: %r", error)
            await asyncio.sleep(INTERVAL_S)

    async def fetch(self) -> None:
        """Fetch one report. Errors of the engine and the watcher are raised."""
        report = await self._ask()
        if report is None:
            return
        self._prices, self._asked_s = report["prices"], self._clock()
        if self._watch is not None:
            self._watch(report)

    @property
    def prices(self) -> dict[str, Any] | None:
        """The cost of tokens here (`speculation.publish.prices`); None if not known at present."""
        return self._prices if self._clock() - self._asked_s <= FRESH_S else None

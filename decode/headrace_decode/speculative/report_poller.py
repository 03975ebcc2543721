"""The latest report on speculative decoding of a decode replica's engine, fetched at an interval.

The engine answers between two of its steps, so an answer may take as long as a step. A caller that
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

POLL_INTERVAL_S = 1.0
MAX_AGE_S = 5.0
"""Seconds after which prices are no longer reported: an engine whose steps take that long has other
prices by then."""


class SpeculationReportPoller:
    """A loop that fetches a report on speculative decoding every `POLL_INTERVAL_S`."""

    def __init__(
        self,
        fetch_report: Callable[[], Awaitable[Mapping[str, Any] | None]],
        on_report: Callable[[Mapping[str, Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        fetch_report: returns the engine's report; None if it does not draft.
        on_report: receives every report.
        clock: returns the time in seconds.
        """
        self._fetch_report, self._on_report, self._clock = fetch_report, on_report, clock
        self._prices: dict[str, Any] | None = None
        self._fetched_s = 0.0

    async def run(self) -> None:
        """Fetch reports until cancelled. An engine that does not answer is polled again."""
        while True:
            try:
                await self.fetch()
            except Exception as error:
                logger.debug("no report on speculative decoding: %r", error)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def fetch(self) -> None:
        """Fetch one report. Errors of the engine and of `on_report` are raised."""
        report = await self._fetch_report()
        if report is None:
            return
        self._prices, self._fetched_s = report["prices"], self._clock()
        if self._on_report is not None:
            self._on_report(report)

    @property
    def prices(self) -> dict[str, Any] | None:
        """The cost of tokens here (`speculation_report.prices`); None if not known at present."""
        return self._prices if self._clock() - self._fetched_s <= MAX_AGE_S else None

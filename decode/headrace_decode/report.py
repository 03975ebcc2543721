"""The decode replica's latest word on its drafting, fetched from the engine now and then.

The engine answers between two of its steps, so that a question may take as long as a step does.
Whoever needs the answer at once, as the gateway's choice does, gets the last one while it is fresh.
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
"""Prices that are older are not told: an engine whose steps take that long has others by now."""


def drafting_facts(prices: Mapping[str, Any] | None, running: int) -> dict[str, Any]:
    """What a replica's report tells of drafting.

    Args:
        prices: of `DraftingReports`.
        running: requests that the engine runs; the next one is counted beside them.
    """
    if prices is None:
        return {}
    depths = prices["draft_tokens"]
    return {
        "draft_tokens": depths[min((running + 1).bit_length(), len(depths)) - 1],
        "tested_tokens": prices["tested_tokens"],
        "right_tokens": prices["right_tokens"],
    }


class DraftingReports:
    """Asks for a report every `INTERVAL_S`, for ever."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[Mapping[str, Any] | None]],
        watch: Callable[[Mapping[str, Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        ask: the engine's report; None if it does not draft.
        watch: told every report.
        """
        self._ask, self._watch, self._clock = ask, watch, clock
        self._prices: dict[str, Any] | None = None
        self._asked_s = 0.0

    async def run(self) -> None:
        """Until cancelled. An engine that does not answer is asked again."""
        while True:
            try:
                await self.fetch()
            except Exception as error:
                logger.debug("no report on drafting: %r", error)
            await asyncio.sleep(INTERVAL_S)

    async def fetch(self) -> None:
        """Ask once. Raises what the engine or the watcher raises."""
        report = await self._ask()
        if report is None:
            return
        self._prices, self._asked_s = report["prices"], self._clock()
        if self._watch is not None:
            self._watch(report)

    @property
    def prices(self) -> dict[str, Any] | None:
        """What tokens cost here (`speculation.publish.prices`); None if nobody knows at present."""
        return self._prices if self._clock() - self._asked_s <= FRESH_S else None

"""Fetches the reports on speculative decoding of a decode replica's engine, at an interval.

The engine answers between two of its steps, so an answer may take as long as a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

logger = logging.getLogger("headrace.decode")

POLL_INTERVAL_S = 1.0


async def poll_reports(
    fetch_report: Callable[[], Awaitable[Mapping[str, Any] | None]],
    on_report: Callable[[Mapping[str, Any]], None],
) -> None:
    """Fetch reports until cancelled. An engine that does not answer is polled again.

    Args:
        fetch_report: returns the engine's report; None if it does not draft.
        on_report: receives every report.
    """
    while True:
        try:
            report = await fetch_report()
            if report is not None:
                on_report(report)
        except Exception as error:
            logger.debug("no report on speculative decoding: %r", error)
        await asyncio.sleep(POLL_INTERVAL_S)

"""The prompts of one request begin one after the other, each in a turn of the event loop.

vLLM starts all prompts of a completion at once. Each is checked, planned and handed to the engine
in a millisecond, and a thousand of them would hold the loop, and everybody's streams, for a second.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

TURNS: ContextVar[asyncio.Lock | None] = ContextVar("headrace_turns", default=None)
"""Of the request that this task answers; None for what is no request of a client's."""


async def turn() -> None:
    """Wait for a turn of the loop that no other prompt of the same request has."""
    lock = TURNS.get()
    if lock is not None:
        async with lock:
            await asyncio.sleep(0)

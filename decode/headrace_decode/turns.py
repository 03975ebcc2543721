"""The prompts of one request begin one after the other, each in a turn of the event loop.

vLLM starts all prompts of a completion at once. Each is checked, planned and handed to the engine
in a millisecond, and a thousand of them would hold the loop, and everybody's streams, for a second.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field

from headrace_engine.gate import Job


@dataclass
class Prompts:
    """What the prompts of one request share.

    Attributes:
        turn: held by the one that begins.
        job: their place in the queue for the engine.
    """

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    job: Job = field(default_factory=Job)


PROMPTS: ContextVar[Prompts | None] = ContextVar("headrace_prompts", default=None)
"""Of the request that this task answers; None for what is no request of a client's."""


async def turn() -> None:
    """Wait for a turn of the loop that no other prompt of the same request has."""
    prompts = PROMPTS.get()
    if prompts is not None:
        async with prompts.turn:
            await asyncio.sleep(0)

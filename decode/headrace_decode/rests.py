"""Long work on an event loop, in pieces: after each piece comes a rest as long as the piece.

A token needs several turns of the loop to get out. Without rests it waits for as many pieces. A
thread is worse for work in Python: it gives up the interpreter's lock every 5 ms only, and a token
needs that several times, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import ParamSpec, TypeVar

PIECE_BYTES = 16 * 1024
"""Size of a piece of a stream, which is some milliseconds of work."""
P = ParamSpec("P")
T = TypeVar("T")


async def then_rest(piece: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Do a piece of work, then nothing for as long as it took."""
    began_s = perf_counter()
    try:
        return piece(*args, **named)
    finally:
        await asyncio.sleep(perf_counter() - began_s)

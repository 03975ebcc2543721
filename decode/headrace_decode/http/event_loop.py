"""Runs long work on an event loop in pieces, with a rest as long as the piece after each piece.

A token needs several turns of the loop to leave the replica. Without rests it waits for as many
pieces. A thread is worse for work in Python: it releases the interpreter's lock only every 5 ms,
and a token needs the lock several times, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import ParamSpec, TypeVar

PIECE_BYTES = 16 * 1024
"""Size of a piece of a stream; a piece takes some milliseconds of work."""
P = ParamSpec("P")
T = TypeVar("T")


async def run_then_rest(piece: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Do a piece of work, then rest for as long as it took."""
    began_s = perf_counter()
    try:
        return piece(*args, **named)
    finally:
        await asyncio.sleep(perf_counter() - began_s)

"""A limit for the number of requests that begin in one turn of an event loop.

A request blocks the loop for a millisecond or two until it first waits. Without a limit, sixty
requests that arrive at once would begin in the same turn, and every stream would stop for a tenth
of a second. Only a few therefore begin in each turn; the others begin in the next turns, in the
order of their arrival.
"""

from __future__ import annotations

import asyncio
from collections import deque

from headrace.gateway.asgi import ASGIApp, Receive, Scope, Send

AT_ONCE = 4
"""Maximum number of requests that begin in one turn of the loop."""


class StartLimiter:
    """An ASGI app that begins at most `AT_ONCE` HTTP requests in a turn of its event loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._left = AT_ONCE
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._follows = False  # whether `_start_next` runs in the next turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            await self._wait_for_turn()
        await self._app(scope, receive, send)

    async def _wait_for_turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._follows:
            self._follows = True
            loop.call_soon(self._start_next, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        waits = loop.create_future()
        self._waiting.append(waits)
        await waits

    def _start_next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin waiting requests in a new turn of the loop."""
        self._left = AT_ONCE
        while self._left and self._waiting:
            waits = self._waiting.popleft()
            if not waits.done():  # otherwise the request was cancelled
                waits.set_result(None)
                self._left -= 1
        self._follows = self._left < AT_ONCE
        if self._follows:
            loop.call_soon(self._start_next, loop)

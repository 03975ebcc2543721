"""How many requests begin in one turn of an event loop.

A request holds the loop for a millisecond or two until it first waits for something. When sixty
arrive at once, all of them would begin in the same turn, and every stream would stand still for
a tenth of a second. So only a few begin in each turn; the others begin in the next ones, in the
order in which they came.
"""

from __future__ import annotations

import asyncio
from collections import deque

from headrace.gateway.asgi import ASGIApp, Receive, Scope, Send

AT_ONCE = 4
"""Requests that begin in one turn of the loop."""


class InTurns:
    """ASGI: at most `AT_ONCE` HTTP requests begin in one turn of the loop. For one loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._left = AT_ONCE
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._follows = False  # whether `_next` runs in the next turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            await self._turn()
        await self._app(scope, receive, send)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._follows:
            self._follows = True
            loop.call_soon(self._next, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        waits = loop.create_future()
        self._waiting.append(waits)
        await waits

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Another turn of the loop begins."""
        self._left = AT_ONCE
        while self._left and self._waiting:
            waits = self._waiting.popleft()
            if not waits.done():  # or its request was cancelled
                waits.set_result(None)
                self._left -= 1
        self._follows = self._left < AT_ONCE
        if self._follows:
            loop.call_soon(self._next, loop)

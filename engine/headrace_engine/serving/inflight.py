"""Counts the requests of an HTTP port, and limits how many of them run at once.

Ray Serve counts and limits only calls of its handles, so both are done here for a replica's own
port. Requests above the limit wait for their turn, first come first served, as Serve's do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

ASGIApp = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]

UNCOUNTED = frozenset({"/health"})
"""Paths that report the replica's health. Their requests neither wait nor count."""


class InFlight:
    """ASGI application that counts requests and limits those that run. Bound to one event loop.

    Args:
        app: application that answers them.
        most: returns the limit, called for each request; None for no limit.
    """

    def __init__(self, app: ASGIApp, most: Callable[[], int] | None = None) -> None:
        self._app, self._most = app, most
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def count(self) -> int:
        """Requests that are worked on or wait."""
        return self._running + len(self._waiting)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Answer one request, in its turn."""
        if scope["type"] != "http" or scope["path"] in UNCOUNTED:
            await self._app(scope, receive, send)
            return
        await self._turn()
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1
            self._admit()

    async def _turn(self) -> None:
        if not self._waiting and self._has_room():
            self._running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()  # the limit may have been raised
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with contextlib.suppress(ValueError):
                    self._waiting.remove(turn)
            else:  # its turn had just come
                self._running -= 1
                self._admit()
            raise

    def _has_room(self) -> bool:
        return self._most is None or self._running < self._most()

    def _admit(self) -> None:
        while self._waiting and self._has_room():
            turn = self._waiting.popleft()
            if not turn.cancelled():
                self._running += 1
                turn.set_result(None)

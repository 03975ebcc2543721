"""A replica's `/health` fails also when its engine hangs.

vLLM's own asks whether the engine's process lives. One that was stopped, or waits for a device that
never answers, lives. ASGI, around vLLM's application.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

HUNG_S = 20.0
"""From the first question to an engine that has requests and makes no step, until it counts as
hung. Longer than any one step should take."""

ASGIApp = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class Health:
    """ASGI: answers `/health` with 503 while the engine hangs, and passes on all else.

    Args:
        engine: (steps since it started, requests that it runs).
        now: seconds of a clock that only goes forward.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine: Callable[[], tuple[int, int]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._engine, self._now = app, engine, now
        self._seen: tuple[int, float] | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["path"] != "/health" or not self.hangs():
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b"the engine makes no step"})

    def hangs(self) -> bool:
        """Whether the engine has made no step for `HUNG_S` though it had requests whenever this was
        asked."""
        steps, running = self._engine()
        now = self._now()
        if not running or self._seen is None or self._seen[0] != steps:
            self._seen = (steps, now) if running else None
            return False
        return now - self._seen[1] > HUNG_S

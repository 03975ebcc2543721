"""A replica's `/health` fails also when its engine hangs.

vLLM's own asks whether the engine's process lives. One that was stopped, or waits for a device that
never answers, lives. ASGI, around vLLM's application.

How long an engine may make no step follows from the step itself: its longest step by the fit of its
own step times, so that neither a large model on a slow machine counts as hung nor a fast one is
waited for in vain.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from headrace_engine.meter import Progress

MAX_STEPS = 5.0
"""An engine that makes no step for so many times its longest predicted step counts as hung. The
fit is off by a tenth or two. A process with a fifth of its processor time takes five times as
long."""
MIN_HUNG_S = 10.0
"""No engine counts as hung before that: the first use of a kernel compiles it for seconds."""
UNFITTED_HUNG_S = 300.0
"""The same before the engine's steps are fitted, and while its requests may only wait for KV. It is
vLLM's own limit of a step (`VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`)."""
MAX_GAP_S = 10.0
"""Between two questions. Gateways ask each second while a replica is silent; after a longer gap the
engine may have been idle in between."""
HUNG = b"the engine makes no step"
"""The body of the 503. vLLM's own, for an engine that has ended, is empty."""

ASGIApp = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class Health:
    """ASGI: answers `/health` with 503 while the engine hangs, and passes on all else.

    Args:
        progress: how far the engine is now.
        now: seconds of a clock that only goes forward.
    """

    def __init__(
        self,
        app: ASGIApp,
        progress: Callable[[], Progress],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._progress, self._now = app, progress, now
        self._seen: tuple[int, float] | None = None
        self._asked_s = 0.0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["path"] != "/health" or not self.hangs():
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": HUNG})

    def hangs(self) -> bool:
        """Return whether the engine has made no step for too long, though it had requests whenever
        this was asked."""
        progress, now_s = self._progress(), self._now()
        gap_s, self._asked_s = now_s - self._asked_s, now_s
        seen = self._seen
        if not progress.running or seen is None or seen[0] != progress.steps or gap_s > MAX_GAP_S:
            self._seen = (progress.steps, now_s) if progress.running else None
            return False
        return now_s - seen[1] > hung_s(progress)


def hung_s(progress: Progress) -> float:
    """Return the seconds without a step after which an engine with requests counts as hung."""
    if progress.longest_step_s is None:
        return UNFITTED_HUNG_S
    return max(MIN_HUNG_S, MAX_STEPS * progress.longest_step_s)

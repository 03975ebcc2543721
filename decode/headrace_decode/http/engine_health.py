"""Makes a replica's `/health` fail when its engine hangs.

vLLM's own check asks only whether the engine's process lives. A process lives even if it was
stopped, or waits for a device that never answers. ASGI, around vLLM's application.

The time an engine may take without a step follows from its longest step, predicted by the fit of
its own step times. A large model on a slow machine is therefore not taken for hung, and the hang of
a fast one is noticed early.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from headrace_engine.meter import Progress

MAX_STEPS = 5.0
"""Multiple of an engine's longest predicted step after which it counts as hung if it makes no step.
The fit is off by a tenth or two. A process with a fifth of its processor time takes five times as
long."""
MIN_HUNG_S = 10.0
"""Minimum time without a step: the first use of a kernel compiles it for seconds."""
UNFITTED_HUNG_S = 300.0
"""Time without a step before the engine's steps are fitted, and while its requests may only wait
for KV. It is vLLM's own limit of a step (`VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`)."""
MAX_GAP_S = 10.0
"""Maximum time between two questions. Gateways ask each second while a replica is silent; in a
longer gap the engine may have been idle."""
HUNG = b"the engine makes no step"
"""Body of the 503. vLLM's own 503, for an engine that has ended, has an empty body."""

ASGIApp = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class EngineHealth:
    """ASGI application that answers `/health` with 503 while the engine hangs.

    It passes on all other requests.

    Args:
        app: vLLM's application.
        progress: returns the engine's present progress.
        now: returns the seconds of a monotonic clock.
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
        """Return whether the engine made no step for too long, although it had requests at each
        call."""
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

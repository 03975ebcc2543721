"""Long-lived asyncio tasks that are logged when they fail, and started again.

A task that is not awaited dies without a log line, and its work stays undone for ever. A supervised
task logs each failure with its traceback and begins again after a pause. The pause doubles, as
Kubernetes' CrashLoopBackOff does (from 10 s to 5 min; these tasks cost less to start).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger("headrace.engine")

MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
"""Pause after the first failure, and the longest one."""
STABLE_S = 60.0
"""After a run of this length, the pause is again that of a first failure."""


def supervise(
    work: Callable[[], Awaitable[None]], name: str, *, restarts: bool = True
) -> asyncio.Task[None]:
    """Start a task that runs `work` until it returns, again after each failure.

    Args:
        work: makes the coroutine of one run.
        name: the task's work as an imperative, for the log: "follow the replicas".
        restarts: whether a failed run is followed by another one.

    Returns:
        The task. It raises nothing but `asyncio.CancelledError`, when it is cancelled.
    """
    return asyncio.get_running_loop().create_task(_run(work, name, restarts), name=name)


async def _run(work: Callable[[], Awaitable[None]], name: str, restarts: bool) -> None:
    loop = asyncio.get_running_loop()
    pause_s = MIN_PAUSE_S
    while True:
        began_s = loop.time()
        try:
            await work()
            return
        except Exception:
            if not restarts:
                logger.exception("a task failed and is not repeated: %s", name)
                return
            if loop.time() - began_s >= STABLE_S:
                pause_s = MIN_PAUSE_S
            logger.exception("a task failed and starts again in %.0f s: %s", pause_s, name)
        await asyncio.sleep(pause_s)
        pause_s = min(2.0 * pause_s, MAX_PAUSE_S)

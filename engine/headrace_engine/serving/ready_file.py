"""Tells Kubernetes' readiness probe that the engine of this process serves.

The probe does not know a replica's port and token, so it looks at the age of a file
(`helm/headrace/templates/_pod.tpl`). A process that hangs or has died touches no file.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from headrace_engine.supervise import supervise

READY_FILE = "HEADRACE_READY_FILE"
"""Environment variable with the path of the file. Without it, no file is written."""
TOUCH_INTERVAL_S = 5.0
"""Time between two touches. To the probe, a file of more than 30 s is that of no engine."""


def start_ready_file(
    check_health: Callable[[], Awaitable[None]], env: Mapping[str, str] = os.environ
) -> asyncio.Task[None] | None:
    """Start to keep the file that the environment names; return the task, None without a file.

    Args:
        check_health: raises an exception if the engine does not serve.
    """
    path = env.get(READY_FILE)
    if not path:
        return None
    return supervise(partial(keep_ready, Path(path), check_health), "keep the readiness file")


async def keep_ready(
    path: Path, check_health: Callable[[], Awaitable[None]], interval_s: float = TOUCH_INTERVAL_S
) -> None:
    """Touch a file after each health check that passes; remove it after one that fails, and at the
    end. It runs until it is cancelled."""
    try:
        while True:
            try:
                await check_health()
            except Exception:  # the engine's own error is logged where Serve asks
                path.unlink(missing_ok=True)
            else:
                path.touch()
            await asyncio.sleep(interval_s)
    finally:
        path.unlink(missing_ok=True)

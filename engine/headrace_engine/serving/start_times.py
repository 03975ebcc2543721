"""The phases of a replica's start, and how long each took."""

from __future__ import annotations

import time
from typing import Any

import psutil

PROCESS, ENGINE, STEP_TIMES, WARM_UP = "process", "engine", "step_times", "warm_up"
"""The phases: imports, and waiting for Serve's order; vLLM's engine (weights, KV cache, compiled
code); the rehearsal that learns how long steps take; and the first requests, routes and ports."""


class StartTimes:
    """The phases since this process was created. Each ends where the next one begins."""

    def __init__(self) -> None:
        self._began: list[tuple[str, float]] = [(PROCESS, psutil.Process().create_time())]
        self._ended: float | None = None

    def begin(self, phase: str) -> None:
        """End the current phase, and begin another one."""
        self._began.append((phase, time.time()))

    def finish(self) -> None:
        """End the last phase: the replica serves."""
        self._ended = time.time()

    def snapshot(self) -> dict[str, Any]:
        """Return `began`, in seconds since the epoch, and the seconds of each phase that has ended,
        in their order; JSON-able."""
        ends = [at for _, at in self._began[1:]] + ([] if self._ended is None else [self._ended])
        phases = {
            name: round(max(0.0, end - at), 3)
            for (name, at), end in zip(self._began, ends, strict=False)
        }
        return {"began": round(self._began[0][1], 3), "phases": phases}

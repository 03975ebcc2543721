"""Which threads of this process spin while it has nothing to do, and making way for everyone else.

NIXL's progress thread polls without a pause (`pthrDelay = 0` in its Python API), so every engine
with a NIXL connector keeps one core busy for ever, idle or not. Where prefill, decode and
everything else share a few cores, that core is missed. Linux's SCHED_IDLE lets such a thread run
at full speed on a core that nobody wants and hardly at all elsewhere; a transfer whose engine is
busy is driven by the engine's own polling.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

logger = logging.getLogger("headrace.kvstore")

WATCH_S = 0.5
SPINNING_SHARE = 0.15
"""Share of one core above which a thread of an idle process spins: others may be using the cores
too."""


def cpu_seconds() -> dict[int, float]:
    """CPU seconds that each thread of this process has used, by thread id."""
    ticks = os.sysconf("SC_CLK_TCK")
    used = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        used[int(task.name)] = (int(fields[11]) + int(fields[12])) / ticks
    return used


def spinning_threads(watch_s: float = WATCH_S) -> list[int]:
    """Ids of the threads, the caller's aside, that use CPU while the process is idle.

    Blocks for `watch_s` seconds; call it when the process has no work.
    """
    before, started = cpu_seconds(), time.monotonic()
    time.sleep(watch_s)
    enough = SPINNING_SHARE * (time.monotonic() - started)
    own = threading.get_native_id()
    return [
        thread
        for thread, used in cpu_seconds().items()
        if thread != own and used - before.get(thread, used) >= enough
    ]


def calm_spinning_threads(watch_s: float = WATCH_S) -> list[int]:
    """Let all other work on the machine go before this process's spinning threads; returns their
    ids."""
    calmed = []
    for thread in spinning_threads(watch_s):
        try:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        except OSError as error:
            logger.warning("thread %d spins and cannot be calmed: %s", thread, error)
        else:
            calmed.append(thread)
    return calmed

"""The client of a benchmark gets its share of a machine that the servers keep busy.

Linux shares CPUs among sessions before it shares them among processes (autogroups, sched(7)).
Servers that a benchmark starts are sessions of their own. With both cores of a machine busy, a
client that needs a twentieth of one stood still for 3 to 8 s at a time (Linux 6.18), and took the
standstill for the servers' (docs/resume-measurements.md).
"""

from __future__ import annotations

import atexit
import contextlib
from pathlib import Path

NICE = -10
"""Niceness of the client's session: it has about nine times the weight of a server's."""
_AUTOGROUP = Path("/proc/self/autogroup")


def run_first() -> bool:
    """Raise the weight of this process's session until it ends; return whether that is allowed.

    Takes Linux with autogroups, and root. Processes that begin a session of their own, as servers
    do, are not in this one.
    """
    try:
        before = int(_AUTOGROUP.read_text().rpartition(" ")[2])
        _AUTOGROUP.write_text(str(NICE))
    except (OSError, ValueError):
        return False
    atexit.register(_set, before)
    return True


def _set(nice: int) -> None:
    with contextlib.suppress(OSError):
        _AUTOGROUP.write_text(str(nice))

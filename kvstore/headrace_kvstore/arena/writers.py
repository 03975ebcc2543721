"""Which reservations have lost their writer.

A slot that is being written belongs to its writer for as long as that process lives. A writer is
known by its pid and the time of the reservation. A pid may be given out again, so a process that
started after the reservation is not its writer. A reservation older than WRITER_LIMIT_S is dropped
in any case: its writer may have forgotten it, or have the same pid in another container. If that
writer still writes, checksums tell.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from headrace_kvstore.table import WRITING

WRITER_TIMEOUT_S = 30.0
"""Age of a reservation from which its writer is looked for."""
WRITER_LIMIT_S = 600.0
START_TOLERANCE_S = 0.1
"""Process start times are known to a clock tick."""


def dead_writers(table: np.ndarray) -> np.ndarray:
    """bool [slots]: being written by a process that is no more. table: SLOT [slots]."""
    dead = np.zeros(len(table), np.bool_)
    writing = np.flatnonzero(table["state"] == WRITING)
    owners = table["owner"][writing]
    reserved_s = table["stored_s"][writing]
    for owner in np.unique(owners):
        started_s = process_started_s(int(owner))
        its = owners == owner
        if started_s is not None:
            its &= reserved_s < started_s - START_TOLERANCE_S
        dead[writing[its]] = True
    return dead


def left_behind(table: np.ndarray, now_s: float) -> np.ndarray:
    """Slots (int64) whose writers will not finish them, and are past their time-out."""
    slots = np.flatnonzero(table["state"] == WRITING)
    age_s = now_s - table["stored_s"][slots]
    slots, age_s = slots[age_s > WRITER_TIMEOUT_S], age_s[age_s > WRITER_TIMEOUT_S]
    if not len(slots):
        return slots
    return slots[(age_s > WRITER_LIMIT_S) | dead_writers(table)[slots]]


def process_started_s(pid: int) -> float | None:
    """When the process started, in time.monotonic() seconds; None if there is none or it is dead.

    A zombie is dead: it runs no more code. A process that may not be looked at counts as alive
    since ever.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return float("-inf") if _exists(pid) else None
    except OSError:
        return None  # it went while being read
    if fields[0] in "ZX":
        return None
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return since_boot_s - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

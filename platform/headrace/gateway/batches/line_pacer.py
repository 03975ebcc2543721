"""The number of lines of batches that may be in flight, given what other requests leave. Pure.

For one model:

- While no other request is in flight, each replica has up to `lines_per_replica` lines. After other
  requests, lines start when `QUIET_S` have passed: a shorter pause is a user who reads. There are
  `FIRST_LINES` then, and twice as many after each further `QUIET_S`, so that few are taken back if
  requests arrive again.
- A line lengthens the steps of the streams beside it twice: once by its prompt, and then by one
  more row. So beside other requests, each replica has as many lines as make a step at most
  `MAX_SLOWDOWN` times as long, and at most one of its lines starts in `START_STEPS` steps. Fewer
  than 1 % of the steps then carry a prompt.
- One line starts after each `MAX_PAUSE_S` in any case, so that every batch makes progress.
- If requests arrive while more lines are in flight, the surplus is taken back and run later. Each
  replica keeps one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

QUIET_S = 1.0
"""Time without other requests after which lines start."""
FIRST_LINES = 4
"""Lines at each replica that start then."""
MAX_DOUBLINGS = 20
MAX_SLOWDOWN = 1.05
MIN_ROW = 1e-6
"""Minimum share of a step that a row takes, so that the number of lines is finite."""
START_STEPS = 200
"""Minimum number of steps of a replica's streams between two lines that start beside them."""
DEFAULT_STEP_S = 0.05
"""Assumed length of a step until replicas have reported theirs."""
MAX_PAUSE_S = 60.0
UNCERTAIN = 0.25
"""Part of the lines by which a count of requests elsewhere may be wrong: reports are older than the
gateway's own count."""


@dataclass(frozen=True, slots=True)
class LineLoad:
    """The load of one model.

    Attributes:
        replicas: number of available decode replicas.
        requests: number of this gateway's requests in flight that are no lines.
        elsewhere: number of requests in flight that other gateways sent, by the last reports.
        lines: number of lines in flight.
        step_s: the longest step of an engine with streams; 0 if unknown.
        slowdown: factor by which one more row lengthens that step; 1 if unknown.
    """

    replicas: int
    requests: int = 0
    elsewhere: int = 0
    lines: int = 0
    step_s: float = 0.0
    slowdown: float = 1.0


class LinePacer:
    """The pacer of one model's lines.

    Args:
        lines_per_replica: maximum lines at each replica that has no other request.
    """

    def __init__(self, lines_per_replica: int) -> None:
        self._lines_per_replica = lines_per_replica
        self._busy_s = self._started_s = -math.inf

    def on_start(self, now_s: float) -> None:
        """Record that a line starts."""
        self._started_s = now_s

    def target(self, load: LineLoad, now_s: float) -> int:
        """Return the number of lines that should be in flight now.

        Fewer than now are a surplus, which is taken back; lines that more allow may start.
        """
        if load.requests:
            self._busy_s = now_s
        if not load.replicas:
            return max(1, load.lines)  # one wakes replicas that are scaled to zero
        if load.requests:
            kept = load.replicas * max(1, self._lines_beside(load))
            return min(load.lines, kept) + self._starts_beside(load, now_s)
        if load.elsewhere > UNCERTAIN * load.lines:
            return load.lines + self._starts_beside(load, now_s)
        quiet_s = now_s - self._busy_s
        if quiet_s < QUIET_S:
            return load.lines
        doublings = int(min(quiet_s / QUIET_S - 1.0, MAX_DOUBLINGS))
        limit = min(self._lines_per_replica, FIRST_LINES << doublings)
        return max(load.lines, limit * load.replicas)

    def _lines_beside(self, load: LineLoad) -> int:
        """Return the number of lines that each replica may have beside other requests.

        A step of length 1 contains the rows of the lines in flight, n at each replica, and a row
        takes r of it. So the step is 1 - n r without them, and m lines lengthen it to at most
        `MAX_SLOWDOWN` times that if m r <= (MAX_SLOWDOWN - 1) (1 - n r). One while steps are
        unknown.
        """
        if not load.step_s:
            return 1
        row = max(load.slowdown - 1.0, MIN_ROW)
        without = max(0.0, 1.0 - row * load.lines / load.replicas)
        return min(self._lines_per_replica, int((MAX_SLOWDOWN - 1.0) * without / row))

    def _starts_beside(self, load: LineLoad, now_s: float) -> int:
        """Return the number of lines that may start beside other requests."""
        paused_s = now_s - self._started_s
        room = load.replicas * self._lines_beside(load) - load.lines
        if room <= 0:
            return int(paused_s >= MAX_PAUSE_S and load.lines < load.replicas)
        replica_steps = load.replicas * paused_s / (load.step_s or DEFAULT_STEP_S)
        return int(min(room, replica_steps / START_STEPS))

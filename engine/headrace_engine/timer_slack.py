"""Makes threads that wake on a timer wake less often.

Gloo gives each process group a thread that waits for events for 10 ms at a time. vLLM makes about
ten groups for an engine of one process. They have nothing to say to each other, and wake a thousand
times a second. A Linux thread's timer slack is how much later a timed wait may end than it asked
for; an event ends it at once all the same. Threads inherit it from the one that starts them
(`prctl(2)`, PR_SET_TIMERSLACK).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30
SLACK_S = 0.2


@contextmanager
def coarse_timers(slack_s: float = SLACK_S) -> Iterator[None]:
    """Let the threads that this thread starts inside end their timed waits up to `slack_s` later.
    Until the end of the block, this holds for this thread's own waits, too. Without effect where
    there is no timer slack."""
    if sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    before_ns = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)
    prctl(PR_SET_TIMERSLACK, round(1e9 * slack_s), 0, 0, 0)
    try:
        yield
    finally:
        if before_ns > 0:
            prctl(PR_SET_TIMERSLACK, before_ns, 0, 0, 0)

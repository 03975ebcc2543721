"""Threads that wait on a timer wake less often, and events still wake them at once."""

from __future__ import annotations

import os
import select
import sys
import threading
import time

import pytest

from headrace_engine.timer_slack import coarse_timers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="timer slack is Linux's")


class Waiter:
    """A thread that waits for 10 ms at a time, as Gloo's do."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self.turns = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wake(self) -> None:
        os.write(self._write, b"x")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _run(self) -> None:
        poller = select.epoll()
        poller.register(self._read)
        while not poller.poll(0.01):
            self.turns += 1
        poller.close()


def test_a_thread_started_inside_waits_longer_and_others_do_not() -> None:
    with coarse_timers(0.5):
        inside = Waiter()
    outside = Waiter()
    time.sleep(1.2)
    assert inside.turns <= 4 and outside.turns >= 20
    began_s = time.monotonic()
    inside.wake()
    assert time.monotonic() - began_s < 0.3
    outside.wake()


def test_the_thread_itself_is_as_exact_as_before_afterwards() -> None:
    with coarse_timers(0.5):
        pass
    began_s = time.monotonic()
    for _ in range(5):
        time.sleep(0.01)
    assert time.monotonic() - began_s < 0.5

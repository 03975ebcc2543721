"""Reasons to end `headrace up` from outside: signals, `headrace down`, the end of its parent."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from headrace.cli import down, state

INTERVAL_S = 0.5  # between two checks


class Stopped(BaseException):
    """A signal, or a reason to end. Not an Exception, so that no handler takes it for a failure."""


class Watch:
    """Watch that ends this process, as SIGTERM does, for reasons that send no signal.

    These are `headrace down` in another shell and, with `parent`, the end of the process that
    started this one. Some processes are meant to outlive their parent: the leader of a session (a
    service, `setsid`), and one that ignores SIGHUP (`nohup`).
    """

    def __init__(self, instance: state.Instance, *, parent: bool) -> None:
        self.why = ""
        self._instance = instance
        ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        detached = ignores_hangup or os.getsid(0) == os.getpid()
        self._parent = os.getppid() if parent and not detached else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(INTERVAL_S):
            if self._parent is not None and os.getppid() != self._parent:
                self.why = " because the process that started it has ended"
            elif not down.stopped_elsewhere(self._instance):
                continue
            # To the main thread: if another one got it, a sleep of the main one would continue.
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGTERM)
            return


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise Stopped inside. An ignored SIGHUP stays ignored."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Stopped

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)

"""Wakes a thread that waits for sockets."""

from __future__ import annotations

import socket
from contextlib import suppress

_MOST_SIGNALS = 64


class Wake:
    """One thread polls it beside its sockets and calls `clear`; any thread calls `set`.

    What is there for the thread is put where it looks before `set`, and it looks after `clear`. So
    nothing is overlooked, and one signal stands for all that came before it.
    """

    def __init__(self) -> None:
        self._in, self._out = socket.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)
        self._signalled = False

    def fileno(self) -> int:
        """For a poller."""
        return self._out.fileno()

    def set(self) -> None:
        """Never waits. After `close` it does nothing."""
        if not self._signalled:
            self._signalled = True
            with suppress(OSError):
                self._in.send(b"\0")

    def clear(self) -> None:
        """Take the signals."""
        with suppress(OSError):
            self._out.recv(_MOST_SIGNALS)
        self._signalled = False

    def close(self) -> None:
        self._in.close()
        self._out.close()

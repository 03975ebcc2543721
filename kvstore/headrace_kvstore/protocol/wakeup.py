"""Signal that wakes a thread that waits for sockets."""

from __future__ import annotations

import socket
from contextlib import suppress

_MAX_SIGNALS = 64


class WakeupSignal:
    """Signal that one thread polls beside its sockets and then clears with `clear`; any thread
    calls `set`.

    A caller of `set` first puts its work where the thread finds it, and the thread looks there
    after `clear`. So no work is overlooked, and one signal covers all earlier work.
    """

    def __init__(self) -> None:
        self._in, self._out = socket.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)
        self._signalled = False

    def fileno(self) -> int:
        """Return the descriptor for a poller."""
        return self._out.fileno()

    def set(self) -> None:
        """Wake the thread. Never waits; after `close` it does nothing."""
        if not self._signalled:
            self._signalled = True
            with suppress(OSError):
                self._in.send(b"\0")

    def clear(self) -> None:
        """Clear the signals."""
        with suppress(OSError):
            self._out.recv(_MAX_SIGNALS)
        self._signalled = False

    def close(self) -> None:
        self._in.close()
        self._out.close()

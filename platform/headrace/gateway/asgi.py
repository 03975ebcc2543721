"""ASGI's types, our extensions of ASGI, and a way to interrupt a request's task from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

WRITE_EXTENSION = "headrace.write_at_once"
"""Name of our extension of ASGI, a `Write`. Only our own server has it (`http_server`)."""
Write = Callable[[bytes], bool]
"""Function that writes a piece of a stream's body after its head, also from outside a task. If the
client is slow it writes nothing and returns False; the caller then uses `send`, which waits."""

ABORT_EXTENSION = "headrace.hang_up"
"""Name of another extension: a function that ends the connection, at once if the client does not
read the answer under way."""

JSON_TYPE = (b"content-type", b"application/json")


class ClientGone(Exception):
    """The error of a request whose client hung up, so that no answer is needed."""


def path_of(scope: Scope) -> str:
    """Return the request's path, below the root at which the app is mounted."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    if root and path.startswith(root):
        path = path[len(root) :] or "/"
    return path


def write_nowait(scope: Scope) -> Write:
    """Return the function of the extension; without it, one that writes nothing."""
    write: Write = scope.get("extensions", {}).get(WRITE_EXTENSION, lambda piece: False)
    return write


def abort_connection(scope: Scope) -> Callable[[], None]:
    """Return the function of the extension; without it, one that leaves this to the server."""
    found: Callable[[], None] = scope.get("extensions", {}).get(ABORT_EXTENSION, lambda: None)
    return found


class Interrupts:
    """An interrupter of the task that created it: it cancels the task once, and keeps the reason.

    One timer and one listener for the client's disconnection serve the whole request, so that the
    streaming loop itself needs neither a time-out nor a second task to wait for.
    The task catches `asyncio.CancelledError`, calls `taken()` for the reason and continues. If the
    reason is None, other code cancelled the task.
    """

    CLIENT_GONE = "client gone"

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._reason: str | None = None
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._listener: asyncio.Task[None] | None = None

    def set_deadline(self, seconds: float, reason: str) -> None:
        """Interrupt with `reason` in `seconds` from now, instead of at any earlier deadline."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._fire, reason)

    def listen(self, receive: Receive) -> None:
        """Interrupt with `CLIENT_GONE` when the client hangs up; call it when the body is read."""
        self._listener = self._loop.create_task(self._wait_for_disconnect(receive))

    def taken(self) -> str | None:
        """Return the reason of the interruption, and clear the task's cancellation."""
        if self._reason is not None:
            self._task.uncancel()
        return self._reason

    def close(self) -> None:
        """Stop interrupting: end the timer and the listener."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._listener is not None:
            self._listener.cancel()

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._fire(self.CLIENT_GONE)

    def _fire(self, reason: str) -> None:
        if not self._closed and self._reason is None:
            self._reason = reason
            self._task.cancel()

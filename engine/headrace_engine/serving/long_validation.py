"""Validates requests of many items in a thread that rests, not on the event loop.

pydantic takes 15 to 370 us for one item of `/v1/responses`, since an item may be of thirty kinds,
so a conversation of 16,000 items would hold every stream of the replica for seconds. A thread
alone does not help: pydantic's native code keeps the interpreter's lock. Here a validator of each
list calls Python before each of its items, and after `SLICE_S` the thread releases the lock, and
rests as long as it worked. Threads work one at a time.

The route's own validation is then given the thread's result.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from headrace_engine.asgi_body import read_body, with_body

MANY_OBJECTS = 100
"""Number of objects above which a body is validated in a thread: some ten milliseconds of work.
Braces are counted, those in texts included."""
SLICE_S = 0.002
"""Longest work of a thread before it rests, but for a single item that takes longer."""
THREADS = 4

Message = MutableMapping[str, Any]
Validate = Callable[[Any], Any]


@dataclass(frozen=True)
class Found:
    """Result of validating a body: the request, or the faults."""

    request: Any = None
    faults: ValidationError | None = None

    def get(self) -> Any:
        """Return the request.

        Raises:
            ValidationError: it is malformed.
        """
        if self.faults is not None:
            raise self.faults
        return self.request


FOUND: ContextVar[list[Found] | None] = ContextVar("headrace_validation", default=None)
"""Result for the request of this task. It is taken out once: tasks that vLLM starts during a
request keep this context, and would keep the request."""


class TimeSlicer:
    """Lets threads work in slices of `SLICE_S`, one at a time."""

    def __init__(self) -> None:
        self._working = threading.Lock()
        self._of_thread = threading.local()

    def work(self, piece: Callable[[], Any]) -> Any:
        """Call a function that calls `rest` often."""
        with self._working:
            self._of_thread.began_s = time.perf_counter()
            try:
                return piece()
            finally:
                del self._of_thread.began_s

    def rest(self, item: Any) -> Any:
        """Return the item; the thread rests before, if it has worked for long."""
        began_s = getattr(self._of_thread, "began_s", None)
        if began_s is not None and (worked_s := time.perf_counter() - began_s) > SLICE_S:
            self._working.release()
            time.sleep(worked_s)
            self._working.acquire()
            self._of_thread.began_s = time.perf_counter()
        return item


class LongValidation:
    """ASGI middleware that validates bodies of many items before their routes do.

    Args:
        app: the application.
        validators: by path, what validates the parsed body and calls `slicer.rest` often.
        slicer: as the validators have it.
    """

    def __init__(
        self,
        app: Callable[[Message, Any, Any], Awaitable[None]],
        validators: Mapping[str, Validate],
        slicer: TimeSlicer,
    ) -> None:
        self._app, self._validators, self._slicer = app, validators, slicer
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="headrace-validation")

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """Answer one request."""
        path = scope["path"] if scope["type"] == "http" else ""
        if scope.get("method") != "POST" or path not in self._validators:
            await self._app(scope, receive, send)
            return
        body = await read_body(receive)
        if body is None:
            return
        found = None
        if body.count(b"{") > MANY_OBJECTS and _is_json(scope):
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._threads, self._validate, path, body)
        before = FOUND.set(None if found is None else [found])
        try:
            # The route need not parse the body again: its adapter takes what was found.
            given = body if found is None else b"{}"
            await self._app(*with_body(scope, given, receive), send)
        finally:
            FOUND.reset(before)

    def _validate(self, path: str, body: bytes) -> Found | None:
        """Return what is found; None for any error but pydantic's, which the route meets again and
        answers in its own way."""
        try:
            value = json.loads(body)
            return Found(self._slicer.work(lambda: self._validators[path](value)))
        except ValidationError as error:
            return Found(faults=error)
        except Exception:
            return None


def _is_json(scope: Message) -> bool:
    return any(name == b"content-type" and b"json" in value for name, value in scope["headers"])

"""A request in its handler: its caller, its deadlines and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from headrace.gateway import errors
from headrace.gateway.admission.slo_classes import SloClass
from headrace.gateway.asgi import JSON_TYPE, Interrupts, Receive, Send
from headrace.gateway.errors import ApiError
from headrace.gateway.ingress.api_keys import ANONYMOUS, Caller, may_administer
from headrace.gateway.relay.call import Call

REFUSAL_TIMEOUT_S = 5.0
"""Seconds for a client to take a refusal, after which its connection is ended."""
MAX_PARAMETERS = 64
"""Maximum number of parameters in a query that is read."""
BODY_LATE = "body late"
TIME_UP = "time up"


@dataclass(slots=True)
class RequestContext:
    """A request in its handler.

    Attributes:
        path: the request's path without the app's root, and without its query.
        headers: the client's headers by name.
        client: address and port of the client, as in ASGI; None if unknown.
        caller: the tenant and role that the request's key proves.
        interrupts: the interrupter that ends the handler early.
        abort_connection: ends the connection; see `asgi.ABORT_EXTENSION`.
        is_over_tls: whether the client's own connection is encrypted.
        slo: the class of a request of the gateway's own, such as a line of a batch; None for the
            class that the request and its key name.
    """

    call: Call
    path: str
    receive: Receive
    send: Send
    headers: dict[bytes, bytes]
    client: Sequence[Any] | None
    caller: Caller = ANONYMOUS
    interrupts: Interrupts = field(default_factory=Interrupts)
    abort_connection: Callable[[], None] = lambda: None
    is_over_tls: bool = False
    slo: SloClass | None = None

    @property
    def may_administer(self) -> bool:
        """Whether the request may change how the app works, or look into it."""
        return may_administer(self.caller, self.client, self.headers)

    @property
    def is_browser_start(self) -> bool:
        """Whether a browser asks for the first page: `GET /` with `text/html` in `Accept`."""
        accepts_html = b"text/html" in self.headers.get(b"accept", b"")
        return self.path == "/" and self.call.method == "GET" and accepts_html

    def allow_methods(self, *methods: str) -> None:
        """Refuse all other methods.

        Raises:
            ApiError: 405, the request has another method.
        """
        if self.call.method not in methods:
            raise errors.method_not_allowed(self.call.method, methods)

    def query(self) -> Callable[[str], str | None]:
        """Return the function that returns a parameter of the query.

        Raises:
            ApiError: 400, the query has too many parameters.
        """
        query = self.call.target.partition("?")[2]
        try:
            return dict(parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_PARAMETERS)).get
        except ValueError:
            message = f"has more than {MAX_PARAMETERS} parameters"
            raise errors.bad_field("query", message) from None

    async def answer(self, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        """Send an answer of the gateway's own."""
        call = self.call
        ours = [(b"x-request-id", call.request_id), (b"content-length", b"%d" % len(body))]
        start = {"type": "http.response.start", "status": status, "headers": [*headers, *ours]}
        await self.send(start)
        call.status = status
        await self.send({"type": "http.response.body", "body": body})
        call.sent_bytes = len(body)

    async def refuse(self, error: ApiError) -> None:
        """Send an error: as the answer, or as the last event of a stream that has begun.

        The connection is ended if the client does not read the error in time, if the error ends a
        stream, and if an answer that is no stream has begun.
        """
        call = self.call
        try:
            async with asyncio.timeout(REFUSAL_TIMEOUT_S):
                if call.status == 0:
                    body = call.dialect.body(error)
                    await self.answer(error.status, body, JSON_TYPE, *error.headers)
                    return
                if call.streamed:
                    event = call.dialect.event(error, call.last_events)
                    await self.send({"type": "http.response.body", "body": event})
        except TimeoutError:
            pass
        self.abort_connection()

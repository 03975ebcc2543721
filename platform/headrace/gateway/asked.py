"""A request in its handler: its caller, its body, its deadlines, and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from headrace.gateway import errors
from headrace.gateway.asgi import JSON_TYPE, Interrupts, Receive, Send
from headrace.gateway.backend import GatewayOptions
from headrace.gateway.errors import ApiError
from headrace.gateway.ingress import encodings, limits
from headrace.gateway.ingress.budget import BodyBudget, Held
from headrace.gateway.ingress.keys import ANYONE, Caller, may_administer
from headrace.gateway.relay.call import Call
from headrace_decode.rests import then_rest

REFUSAL_TIMEOUT_S = 5.0
"""Seconds for a client to take a refusal, after which its connection is ended."""
BODY_LATE = "body late"
TIME_UP = "time up"


@dataclass(slots=True)
class Asked:
    """A request in its handler.

    Attributes:
        path: the request's path without the app's root, and without its query.
        seen: the client's headers.
        client: address and port of the client, as in ASGI; None if unknown.
        caller: the tenant and role that the request's key proves.
        interrupts: the interrupter that ends the handler early.
        hang_up: ends the connection; see `asgi.HANG_UP`.
        is_over_tls: whether the client's own connection is encrypted.
    """

    call: Call
    path: str
    receive: Receive
    send: Send
    seen: dict[bytes, bytes]
    client: Sequence[Any] | None
    caller: Caller = ANYONE
    interrupts: Interrupts = field(default_factory=Interrupts)
    hang_up: Callable[[], None] = lambda: None
    is_over_tls: bool = False

    @property
    def may_administer(self) -> bool:
        """Whether the request may change how the app works, or look into it."""
        return may_administer(self.caller, self.client, self.seen)

    def only(self, *methods: str) -> None:
        """Refuse all methods but these.

        Raises:
            ApiError: 405, the request has another method.
        """
        if self.call.method not in methods:
            raise errors.method_not_allowed(self.call.method, methods)

    async def answer(self, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        """Send an answer of the gateway's own."""
        call = self.call
        told = [(b"x-request-id", call.request_id), (b"content-length", b"%d" % len(body))]
        start = {"type": "http.response.start", "status": status, "headers": [*headers, *told]}
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
                    event = call.dialect.event(error, call.last)
                    await self.send({"type": "http.response.body", "body": event})
        except TimeoutError:
            pass
        self.hang_up()


class Intake:
    """The reader of requests' bodies; it also sets the deadlines of bodies and answers.

    Args:
        options: the limits.
        keys_on: whether keys are configured.
    """

    def __init__(self, options: GatewayOptions, *, keys_on: bool) -> None:
        self._options, self._keys_on = options, keys_on
        self._budget = BodyBudget(options.body_budget_bytes)
        self._long_body = asyncio.Lock()

    @property
    def held_bytes(self) -> int:
        """Number of bytes held by all bodies."""
        return self._budget.held_bytes

    def hold(self, tenant: str | None) -> Held:
        """Return an empty part of the budget, for an answer to a tenant."""
        return self._budget.hold(tenant)

    def check_admin(self, asked: Asked) -> None:
        """Refuse an operation that concerns all tenants, unless an administrator asks for it.

        Raises:
            ApiError: 403, the caller is no administrator.
        """
        if not asked.may_administer:
            raise errors.not_an_admin(asked.path, keys_on=self._keys_on)

    async def take(self, asked: Asked) -> None:
        """Read the body into the call, unparsed.

        Raises:
            ApiError: its type or size is wrong, or there is no room for it.
            ClientGone: the client hung up first.
        """
        call, began = asked.call, perf_counter()
        call.body = await self._read(asked, self._options.max_body_bytes)
        call.waited_s += perf_counter() - began

    async def json(self, asked: Asked, most_bytes: int | None = None) -> Mapping[str, Any]:
        """Read the request's body and return it as an object.

        Args:
            most_bytes: maximum size of this body; None for the limit of all bodies.

        Raises:
            ApiError: as `take`, and when the body is no JSON object.
            ClientGone: the client hung up first.
        """
        most_bytes = most_bytes or self._options.max_body_bytes
        body = await self._read(asked, most_bytes)
        return limits.parse_object(encodings.as_utf8(body, most_bytes))

    def use_utf8(self, call: Call) -> None:
        """Convert the call's body to UTF-8 without a byte order mark.

        Raises:
            ApiError: 400, the body is in no encoding of JSON; 413, it is too large in UTF-8.
        """
        body = encodings.as_utf8(call.body, self._options.max_body_bytes)
        if call.held is not None and len(body) > len(call.body):
            call.held.add(len(body) - len(call.body))
        call.body = body

    async def parsed(self, body: bytes) -> Mapping[str, Any]:
        """Return a request's body as an object, with its fields checked.

        Each pass over a body of megabytes blocks the loop for some milliseconds. Such bodies are
        parsed one after another, with a pause after each pass. Streams therefore wait for one pass
        and not for all passes over all bodies.

        Raises:
            ApiError: the body is no JSON object, a field is too large, or no replica may get one
                of the fields.
        """
        if len(body) <= limits.MAX_OTHER_BYTES:
            return _checked(limits.parse_object(body), body)
        async with self._long_body:
            await then_rest(limits.check_other_bytes, body)
            await then_rest(limits.check_parts, body)
            request = await then_rest(limits.decode_object, body)
            return await then_rest(_checked, request, body)

    async def _read(self, asked: Asked, most_bytes: int) -> bytes:
        """Read the body, which has to arrive within `body_timeout_s` from now."""
        limits.check_content_type(asked.seen.get(b"content-type"))
        limits.check_length(asked.seen.get(b"content-length"), most_bytes)
        decoder = encodings.decoder_of(asked.call.encodings)
        asked.interrupts.set_deadline(self._options.body_timeout_s, BODY_LATE)
        asked.call.held = held = self._budget.hold(asked.call.tenant)
        body = await limits.read_body(asked.receive, most_bytes, held, decoder)
        spent_s = perf_counter() - asked.call.started
        asked.interrupts.set_deadline(self._options.request_timeout_s - spent_s, TIME_UP)
        return body

    def answer_in_time(
        self, asked: Asked, *, spent_s: float = 0.0, may_leave: bool = False
    ) -> None:
        """Set the answer's deadline, and end the handler when the client hangs up.

        Args:
            spent_s: the part of the time limit that is already over.
            may_leave: continue even when the client hangs up.
        """
        asked.interrupts.set_deadline(self._options.request_timeout_s - spent_s, TIME_UP)
        if not may_leave:
            asked.interrupts.listen(asked.receive)


def _checked(request: Mapping[str, Any], body: bytes) -> Mapping[str, Any]:
    limits.check_fields(request)
    limits.check_logprobs(request, len(body))
    return request

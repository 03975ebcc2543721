"""A request in its handler: who asks, its body, until when it is answered, and the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from headrace.gateway import errors
from headrace.gateway.asgi import JSON_TYPE, Interrupts, Receive, Send, send_answer
from headrace.gateway.backend import GatewayOptions
from headrace.gateway.door import limits
from headrace.gateway.door.budget import BodyBudget
from headrace.gateway.door.keys import ANYONE, Caller, may_administer
from headrace.gateway.errors import ApiError
from headrace.gateway.relay.call import Call

BODY_LATE = "body late"
TIME_UP = "time up"


@dataclass(slots=True)
class Asked:
    """A request in its handler.

    Attributes:
        path: without the app's root, and without its query.
        seen: the client's headers.
        client: its address and port, as ASGI has them; None if nobody knows.
        caller: who the request's key proves it comes from.
        interrupts: what ends the handler early.
    """

    call: Call
    path: str
    receive: Receive
    send: Send
    seen: dict[bytes, bytes]
    client: Sequence[Any] | None
    caller: Caller = ANYONE
    interrupts: Interrupts = field(default_factory=Interrupts)

    @property
    def may_administer(self) -> bool:
        """Whether the request may change how the app works, or look into it."""
        return may_administer(self.caller, self.client, self.seen)

    def only(self, *methods: str) -> None:
        """Refuse other methods.

        Raises:
            ApiError: 405.
        """
        if self.call.method not in methods:
            raise errors.method_not_allowed(self.call.method, methods)

    async def answer(self, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        """Send an answer of the gateway's own."""
        call = self.call
        call.status = status
        call.sent_bytes = len(body)
        await send_answer(self.send, status, body, [*headers, (b"x-request-id", call.request_id)])

    async def refuse(self, error: ApiError) -> None:
        """Send an error: as the answer, or as the last event of a stream that has begun."""
        call = self.call
        if call.status == 0:
            await self.answer(error.status, call.dialect.body(error), JSON_TYPE, *error.headers)
        elif call.streamed:
            event = call.dialect.event(error, call.last)
            await self.send({"type": "http.response.body", "body": event})


class Intake:
    """Takes requests' bodies, and sets the times by which they come and are answered.

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
        """Of all bodies."""
        return self._budget.held_bytes

    def check_admin(self, asked: Asked) -> None:
        """Refuse what concerns every tenant to everybody but an administrator.

        Raises:
            ApiError: 403.
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
        """The request's body, an object.

        Args:
            most_bytes: its limit, where that is another than for all.

        Raises:
            ApiError: as `take`, and when it is no JSON object.
            ClientGone: the client hung up first.
        """
        return limits.parse_object(
            await self._read(asked, most_bytes or self._options.max_body_bytes)
        )

    async def parsed(self, body: bytes) -> Mapping[str, Any]:
        """A request's body as an object.

        Each pass over a body of megabytes holds the loop for some milliseconds. Such bodies are
        parsed one after the other, and each pass in a turn of the loop of its own, so that streams
        wait for one pass and not for all passes over all bodies.

        Raises:
            ApiError: it is no JSON object, or its bulk is not where a request may have bulk.
        """
        if len(body) <= limits.MOST_OTHER_BYTES:
            return limits.parse_object(body)
        async with self._long_body:
            for check in (limits.check_other_bytes, limits.check_parts):
                check(body)
                await asyncio.sleep(0)
            return limits.decode_object(body)

    async def _read(self, asked: Asked, most_bytes: int) -> bytes:
        """The body, which has to come in time from here on."""
        limits.check_content_type(asked.seen.get(b"content-type"))
        limits.check_length(asked.seen.get(b"content-length"), most_bytes)
        asked.interrupts.set_deadline(self._options.body_timeout_s, BODY_LATE)
        asked.call.held = held = self._budget.hold(asked.call.tenant)
        body = await limits.read_body(asked.receive, most_bytes, held)
        spent_s = perf_counter() - asked.call.started
        asked.interrupts.set_deadline(self._options.request_timeout_s - spent_s, TIME_UP)
        return body

    def answer_in_time(
        self, asked: Asked, *, spent_s: float = 0.0, may_leave: bool = False
    ) -> None:
        """From here on the answer has to come in time, and the client to stay.

        Args:
            spent_s: how much of the time has gone by.
            may_leave: go on also when the client hangs up.
        """
        asked.interrupts.set_deadline(self._options.request_timeout_s - spent_s, TIME_UP)
        if not may_leave:
            asked.interrupts.listen(asked.receive)

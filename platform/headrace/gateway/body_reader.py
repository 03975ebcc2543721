"""The reader of requests' bodies: it limits their size, their time and their fields."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from headrace.config.gateway import GatewaySettings
from headrace.gateway import errors
from headrace.gateway.ingress import limits
from headrace.gateway.ingress.body_budget import BodyBudget, BodyReservation
from headrace.gateway.relay.call import Call
from headrace.gateway.request_context import BODY_LATE, TIME_UP, RequestContext
from headrace_decode.http.event_loop import run_then_rest


class BodyReader:
    """The reader of requests' bodies; it also sets the deadlines of bodies and answers.

    Args:
        settings: the limits.
        keys_on: whether keys are configured.
    """

    def __init__(self, settings: GatewaySettings, *, keys_on: bool) -> None:
        self._settings, self._keys_on = settings, keys_on
        self._budget = BodyBudget(settings.body_budget_bytes)
        self._long_body = asyncio.Lock()

    @property
    def held_bytes(self) -> int:
        """Number of bytes held by all bodies."""
        return self._budget.held_bytes

    def reserve(self, tenant: str | None) -> BodyReservation:
        """Return an empty part of the budget, for an answer to a tenant."""
        return self._budget.reserve(tenant)

    def check_admin(self, context: RequestContext) -> None:
        """Refuse an operation that concerns all tenants, unless an administrator asks for it.

        Raises:
            ApiError: 403, the caller is no administrator.
        """
        if not context.may_administer:
            raise errors.not_an_admin(context.path, keys_on=self._keys_on)

    async def read_into_call(self, context: RequestContext) -> None:
        """Read the body into the call, unparsed.

        Raises:
            ApiError: its type or size is wrong, or there is no room for it.
            ClientGone: the client hung up first.
        """
        call, began = context.call, perf_counter()
        call.body = await self._read_body(context, self._settings.max_body_bytes)
        call.waited_s += perf_counter() - began

    async def json(
        self, context: RequestContext, max_bytes: int | None = None
    ) -> Mapping[str, Any]:
        """Read the request's body and return it as an object.

        Args:
            max_bytes: maximum size of this body; None for the limit of all bodies.

        Raises:
            ApiError: as `read_into_call`, and when the body is no JSON object.
            ClientGone: the client hung up first.
        """
        max_bytes = max_bytes or self._settings.max_body_bytes
        body = await self._read_body(context, max_bytes)
        return limits.parse_object(body.removeprefix(codecs.BOM_UTF8))

    async def replace(self, call: Call, change: Callable[[bytes], bytes]) -> None:
        """Replace the call's body, within its budget.

        Raises:
            ApiError: 429, there is no room for the new body.
        """
        is_long = len(call.body) > limits.MAX_OTHER_BYTES
        body = await run_then_rest(change, call.body) if is_long else change(call.body)
        call.replace_body(body)

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
            await run_then_rest(limits.check_other_bytes, body)
            await run_then_rest(limits.check_parts, body)
            request = await run_then_rest(limits.decode_object, body)
            return await run_then_rest(_checked, request, body)

    async def _read_body(self, context: RequestContext, max_bytes: int) -> bytes:
        """Read the body, which has to arrive within `body_timeout_s` from now."""
        limits.check_content_type(context.headers.get(b"content-type"))
        limits.check_length(context.headers.get(b"content-length"), max_bytes)
        limits.check_encoding(context.call.encodings)
        context.interrupts.set_deadline(self._settings.body_timeout_s, BODY_LATE)
        context.call.reservation = reservation = self._budget.reserve(context.call.tenant)
        body = await limits.read_body(context.receive, max_bytes, reservation)
        spent_s = perf_counter() - context.call.started
        context.interrupts.set_deadline(self._settings.request_timeout_s - spent_s, TIME_UP)
        return body

    def limit_answer_time(
        self, context: RequestContext, *, spent_s: float = 0.0, may_leave: bool = False
    ) -> None:
        """Set the answer's deadline, and end the handler when the client hangs up.

        Args:
            spent_s: the part of the time limit that is already over.
            may_leave: continue even when the client hangs up.
        """
        context.interrupts.set_deadline(self._settings.request_timeout_s - spent_s, TIME_UP)
        if not may_leave:
            context.interrupts.listen(context.receive)


def _checked(request: Mapping[str, Any], body: bytes) -> Mapping[str, Any]:
    limits.check_fields(request)
    limits.check_logprobs(request, len(body))
    return request

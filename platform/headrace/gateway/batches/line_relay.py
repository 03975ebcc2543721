"""The way of one line: through the gateway's own request path, as if its client had sent it.

The line's key was checked when its batch was made. Its model, its fields and its size are checked
as any request's. It has the class of background requests, so with admission it is sent while no
other request waits.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.gateway import errors
from headrace.gateway.admission.slo_classes import SloClass
from headrace.gateway.batches.batch_records import WINDOW_S
from headrace.gateway.conversations.background import CANCELLED_STATUS
from headrace.gateway.errors import ApiError
from headrace.gateway.ingress.api_keys import Caller
from headrace.gateway.models.model_table import ModelTable
from headrace.gateway.relay.call import Call
from headrace.gateway.relay.headers import forwarded
from headrace.gateway.relayed_routes import RelayedRoutes
from headrace.gateway.request_context import RequestContext

BATCH_CLASS = SloClass("batch", max_wait_s=float(WINDOW_S), background=True)
MAX_ANSWER_BYTES = 16 << 20
"""Maximum size of the answer to one line."""
PAIRS = [(b"content-type", b"application/json")]


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to a line.

    Attributes:
        status: the HTTP status.
        request_id: the id of the request at the gateway.
    """

    status: int
    request_id: str
    body: bytes


class AnswerTooLargeError(Exception):
    """The error of a line whose answer has more than `MAX_ANSWER_BYTES`."""


class _Fields(msgspec.Struct):
    """The fields of a request that decide how it is sent."""

    model: Any = None
    stream: Any = None
    background: Any = None


class LineRelay:
    """Sends lines.

    Args:
        relayed: the handler of requests for the replicas' routes.
        models: the models.
        on_end: called with the call of each line that has ended.
        timeout_s: time limit of each.
    """

    def __init__(
        self,
        relayed: RelayedRoutes,
        models: ModelTable,
        on_end: Callable[[Call], None],
        timeout_s: float,
    ) -> None:
        self._relayed, self._models = relayed, models
        self._on_end, self._timeout_s = on_end, timeout_s

    def model_of(self, body: bytes, caller: Caller) -> str:
        """Return the own name of the model that a line asks for, or of the first one if its name is
        not known here."""
        first = next(iter(self._models)).model_id
        try:
            fields = msgspec.json.decode(body, type=_Fields)
            asked = self._models.asked({"model": fields.model}, caller)
            return self._models.find(asked, caller) or first
        except (msgspec.DecodeError, RecursionError, ApiError):
            return first

    async def send(self, path: str, body: bytes, caller: Caller) -> LineAnswer:
        """Send a line; return its answer, also if the gateway refuses it.

        Args:
            path: its route.
            caller: the key of its batch.

        Raises:
            AnswerTooLargeError: the answer is too large.
        """
        request_id = uuid.uuid4().hex.encode()
        headers = forwarded(PAIRS, request_id)
        call = Call(request_id, "POST", path, headers)
        call.tenant, call.route = caller.tenant, self._models.routes.at(path).get("POST")
        answer = _Answer(body)
        context = RequestContext(call, path, answer.receive, answer.send, dict(PAIRS), None, caller)
        context.slo = BATCH_CLASS
        try:
            _check_fields(body)
            return await self._handle(context, answer)
        except ApiError as error:
            call.error, call.status = error.code or error.kind, call.status or error.status
            return LineAnswer(error.status, request_id.decode(), call.dialect.body(error))
        finally:
            context.interrupts.close()
            call.drop_body()
            self._on_end(call)

    async def _handle(self, context: RequestContext, answer: _Answer) -> LineAnswer:
        try:
            await self._relayed.handle(context)
        except asyncio.CancelledError:
            if context.interrupts.taken() is None:
                context.call.status = context.call.status or CANCELLED_STATUS
                raise
            raise errors.request_timeout(self._timeout_s) from None
        return LineAnswer(context.call.status, context.call.request_id.decode(), answer.body)


def _check_fields(body: bytes) -> None:
    """Refuse a line whose answer would not be one document.

    Raises:
        ApiError: 400, it asks for a stream, or to be answered later.
    """
    try:
        fields = msgspec.json.decode(body, type=_Fields)
    except (msgspec.DecodeError, RecursionError):
        return  # the body's own check says what is wrong
    for name in ("stream", "background"):
        if getattr(fields, name) not in (None, False):
            raise errors.bad_field(name, "is not possible in a batch")


class _Answer:
    """The client's side of a line's request: its body, and the answer's."""

    def __init__(self, body: bytes) -> None:
        self._request: bytes | None = body
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    @property
    def body(self) -> bytes:
        """The body of the answer."""
        return b"".join(self._pieces)

    async def receive(self) -> MutableMapping[str, Any]:
        """Give the body, and then nothing: the client stays."""
        if self._request is None:
            await asyncio.Event().wait()
        body, self._request = self._request, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Take an ASGI message."""
        if message["type"] == "http.response.body":
            piece = message.get("body", b"")
            self._size_bytes += len(piece)
            if self._size_bytes > MAX_ANSWER_BYTES:
                raise AnswerTooLargeError
            self._pieces.append(piece)

"""One response with state: the request that a replica gets, and the answer that is kept.

The request gets its earlier items, and the id that the answer will have, so replicas need no state
and any of them can resume its stream. Of the answer's events only those that carry the whole
response are changed: they get `previous_response_id`, `conversation` and `store`. The last event is
sent after the response is kept, so a client that has it can continue the response at any gateway.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from headrace.gateway.conversations import history, items
from headrace.gateway.conversations.history import History
from headrace.gateway.conversations.records import QUEUED, Size, StoredResponse, TurnItems
from headrace.gateway.conversations.state import ConversationState
from headrace.gateway.conversations.state_ids import (
    RESPONSE,
    first_response_id,
    new_response_id,
    parse_id,
)
from headrace.gateway.conversations.tenant_state import TenantState
from headrace.gateway.errors import ApiError, bad_field
from headrace.gateway.ingress.limits import count_entries

logger = logging.getLogger("headrace.gateway")

MAX_ID_CHARS = 200
INLINE_BYTES = 256 * 1024
"""Size up to which a request is joined on the event loop, which takes a third of a millisecond."""
_RESPONSE_EVENT = re.compile(
    rb"(?m)^event: response\.(created|queued|in_progress|completed|incomplete|failed)\n"
)
_LAST = (b"completed", b"incomplete", b"failed")
_OURS = ("previous_response_id", "conversation", "background")
"""Fields that no replica gets."""
_MALFORMED = (KeyError, msgspec.DecodeError)
"""Errors of a replica's answer that is no response."""
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

Fields = dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class StateFields:
    """The fields of a request that concern conversation state.

    Attributes:
        previous: id of the response that it continues; None if it continues none.
        conversation: id of its conversation; None if it has none.
        is_stored: whether its response is kept.
        is_background: whether its response is made in the background.
    """

    previous: str | None
    conversation: str | None
    is_stored: bool
    is_background: bool

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> StateFields:
        """Return the fields of a decoded body.

        Raises:
            ApiError: 400, one of them is wrong, or they do not fit together.
        """
        previous, conversation = request.get("previous_response_id"), request.get("conversation")
        if isinstance(conversation, Mapping):
            conversation = conversation.get("id", 0)
        for name, value in (("previous_response_id", previous), ("conversation", conversation)):
            if value is not None and not (isinstance(value, str) and len(value) <= MAX_ID_CHARS):
                raise bad_field(name, "must be an id")
        for name in ("store", "background", "stream"):
            if not isinstance(request.get(name), (bool, type(None))):
                raise bad_field(name, "must be true or false")
        if previous is not None and conversation is not None:
            name = "previous_response_id"
            raise bad_field(name, "cannot be sent together with conversation")
        background = request.get("background") is True
        stored = request.get("store") is not False
        if background and not stored:
            raise bad_field("background", "needs store: true")
        if background and request.get("stream") is True:
            raise bad_field(
                "stream", "is not possible with background: true; poll GET /v1/responses/ID instead"
            )
        return cls(previous, conversation, stored, background)

    @property
    def needs_state(self) -> bool:
        """Whether the request or its answer concern the state at all."""
        return self.is_stored or self.previous is not None or self.conversation is not None


class _Sent(msgspec.Struct):
    """The fields of a request that its response repeats before it is made."""

    model: Any = None
    parallel_tool_calls: Any = None
    tool_choice: Any = None
    tools: Any = None
    instructions: Any = None
    metadata: Any = None
    temperature: Any = None
    top_p: Any = None
    max_output_tokens: Any = None
    text: Any = None


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """A request as a replica gets it.

    Attributes:
        body: the request's body.
        own_id_bytes: number of leading bytes of it that differ each time the request is sent.
        first: the items up to the first message of the user, decoded. All turns of a conversation
            have them in common.
        recorder: the recorder of its answer.
    """

    body: bytes
    own_id_bytes: int
    first: list[Any]
    recorder: TurnRecorder


async def prepare(
    state: ConversationState,
    tenant: str | None,
    body: bytes,
    request: Mapping[str, Any],
    max_bytes: int,
    received: bytes = b"",
) -> PreparedTurn | None:
    """Return a request with its earlier items; None if it has nothing to do with the state.

    Args:
        body: the request's body.
        request: the same, decoded.
        max_bytes: of all items as JSON.
        received: the beginning of the stream that the client has and wants to resume.

    Raises:
        ApiError: 400, its fields are wrong, or the conversation is too long; 404, what it continues
            is not kept; 500 and 503 as `ConversationState.run`.
    """
    fields = StateFields.of(request)
    if not fields.needs_state or not isinstance(request.get("input"), (str, list)):
        return None  # vLLM refuses a request without input
    had = History()
    if fields.previous is not None:
        read = TenantState.history_of_response
        had = await state.run(tenant, read, fields.previous, max_bytes)
    elif fields.conversation is not None:
        read = TenantState.history_of_conversation
        had = await state.run(tenant, read, fields.conversation, max_bytes)
    entries = count_entries(request["input"])
    record = partial(TurnRecorder, state, tenant)
    resumed = first_response_id(received)
    join = partial(_joined, body, fields, had, entries, max_bytes, resumed, record)
    is_long = len(body) + had.size.size_bytes > INLINE_BYTES
    return await asyncio.to_thread(join) if is_long else join()


def _joined(
    body: bytes,
    fields: StateFields,
    had: History,
    entries: int,
    max_bytes: int,
    resumed: str | None,
    record: Callable[[str, StateFields, TurnItems], TurnRecorder],
) -> PreparedTurn:
    """Put the earlier items into a body."""
    parsed: Fields = _decode_fields(body)
    own = items.split_input(bytes(parsed["input"]))
    total = had.size + Size(sum(map(len, own)), len(own), entries)
    if had.items:
        param = "conversation" if fields.previous is None else "previous_response_id"
        history.check_size(param, total, max_bytes)
        parsed["input"] = items.joined([*had.items, *own])
    turn = TurnItems(had.earlier, own, [], "", had.conversation, total)
    response_id = resumed or new_response_id(had.thread)
    place = parse_id(RESPONSE, response_id)
    if place is None or had.thread not in (None, place.thread):
        response_id = new_response_id(had.thread)
    own_id_bytes = 0
    for name in _OURS:
        parsed.pop(name, None)
    if fields.is_background:
        parsed.pop("stream", None)
    if fields.is_stored:
        parsed.pop("request_id", None)
        own_id = {"request_id": msgspec.Raw(b'"' + response_id.encode() + b'"')}
        own_id_bytes = len(msgspec.json.encode(own_id))
        parsed = own_id | parsed
    first = items.first_items([*had.items, *own])
    recorder = record(response_id, fields, turn)
    return PreparedTurn(msgspec.json.encode(parsed), own_id_bytes, first, recorder)


class TurnRecorder:
    """The recorder of one answer.

    Args:
        state: keeps it.
        tenant: the tenant of the request.
        response_id: the id that the request gave it.
        fields: the request's fields that concern the state.
        turn: the turn without its output.
    """

    def __init__(
        self,
        state: ConversationState,
        tenant: str | None,
        response_id: str,
        fields: StateFields,
        turn: TurnItems,
    ) -> None:
        self._state, self._tenant, self._turn = state, tenant, turn
        self.response_id, self.fields = response_id, fields
        self._last: tuple[bytes, Fields, Fields] | None = None

    @property
    def is_background(self) -> bool:
        """Whether the response is made after the client has got an answer."""
        return self.fields.is_background

    @property
    def holds_last(self) -> bool:
        """Whether the last event has arrived, and `finish` has not yet returned it."""
        return self._last is not None

    def rewrite(self, events: bytes) -> bytes:
        """Return the events to send now; the last one is held until `finish`.

        Args:
            events: whole events.
        """
        if _RESPONSE_EVENT.search(events) is None:
            return events
        passed = []
        for event in events.split(b"\n\n")[:-1]:
            found = _RESPONSE_EVENT.match(event)
            if found is None:
                passed.append(event + b"\n\n")
                continue
            head, _, data = event.partition(b"\ndata: ")
            try:
                document: Fields = _decode_fields(data)
                response: Fields = _decode_fields(document["response"])
            except (*_MALFORMED, RecursionError):
                passed.append(event + b"\n\n")
                continue
            if found[1] in _LAST:
                self._last = head, document, response
            else:
                passed.append(_event(head, document, response | self._echo(self.fields.is_stored)))
        return b"".join(passed)

    async def finish(self) -> bytes:
        """Keep the response, and return the last event; nothing if it was returned before."""
        if self._last is None:
            return b""
        (head, document, response), self._last = self._last, None
        response |= self._echo(await self._save(response))
        return _event(head, document, response)

    async def whole(self, body: bytes) -> bytes:
        """Keep a response that is no stream, and return it."""
        try:
            response: Fields = _decode_fields(body)
        except (msgspec.DecodeError, RecursionError):
            return body
        response |= self._echo(await self._save(response))
        return msgspec.json.encode(response)

    async def begin_background(self, request: bytes, owner: str, model: str, at_s: int) -> bytes:
        """Keep a background response before it is run; return it as JSON.

        Args:
            request: the request's body.
            owner: the gateway that will run it.
            model: the model if the request names none.
            at_s: Unix seconds.

        Raises:
            ApiError: it cannot be kept.
        """
        sent = msgspec.json.decode(request, type=_Sent)
        document = {
            **msgspec.structs.asdict(sent),
            "id": self.response_id,
            "object": "response",
            "created_at": at_s,
            "status": QUEUED,
            "error": None,
            "incomplete_details": None,
            "model": sent.model or model,
            "output": [],
            "parallel_tool_calls": sent.parallel_tool_calls is not False,
            "tool_choice": sent.tool_choice or "auto",
            "tools": sent.tools or [],
            **self._echo(True),
            "usage": None,
        }
        body = msgspec.json.encode(document)
        place = parse_id(RESPONSE, self.response_id)
        assert place is not None
        queued = StoredResponse(body, QUEUED, owner, is_background=True)
        turn = msgspec.structs.replace(self._turn, status=QUEUED)
        save = TenantState.save_response
        await self._state.run(self._tenant, save, place, queued, turn, is_new=True)
        return body

    def _echo(self, is_stored: bool) -> Fields:
        """Return the fields that a response gets: the ids of its request, and `store`."""
        fields = self.fields
        conversation = None if fields.conversation is None else {"id": fields.conversation}
        values = {
            "background": fields.is_background,
            "conversation": conversation,
            "previous_response_id": fields.previous,
            "store": is_stored,
        }
        return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in values.items()}

    async def _save(self, response: Fields) -> bool:
        """Keep a response that has ended; return whether it is kept."""
        if not self.fields.is_stored:
            return False
        try:
            return await self._state.run(self._tenant, self._keep, response)
        except ApiError as error:
            logger.warning("a response is not kept: %s", error.message)
        except _MALFORMED as error:
            logger.warning("a response is not kept, since it is malformed: %r", error)
        return False

    def _keep(self, stored: TenantState, response: Fields) -> bool:
        """Write the response. Blocks.

        Raises:
            KeyError, msgspec.DecodeError: it is malformed.
        """
        given = msgspec.json.decode(response["id"])
        place = parse_id(RESPONSE, given) if isinstance(given, str) else None
        if place is None:
            logger.warning("a response is not kept: its replica calls it %.100r", given)
            return False
        output = items.split_items(response["output"])
        had = self._turn
        turn = msgspec.structs.replace(
            had,
            output=output,
            status=msgspec.json.decode(response["status"], type=str),
            total=had.total + items.size_of(output),
        )
        rest = response | self._echo(True) | {"output": msgspec.Raw(b"[]")}
        is_background = self.fields.is_background
        kept = StoredResponse(msgspec.json.encode(rest), turn.status, is_background=is_background)
        return stored.save_response(place, kept, turn, is_new=not is_background)


def _event(head: bytes, document: Fields, response: Fields) -> bytes:
    document = document | {"response": msgspec.Raw(msgspec.json.encode(response))}
    return head + b"\ndata: " + msgspec.json.encode(document) + b"\n\n"

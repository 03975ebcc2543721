"""The APIs' shapes of errors and ends of event streams.

The gateway's own refusals have the shape that the API's clients expect, and a stream that breaks
off ends with an error event which the API's clients understand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.gateway.errors import ApiError
from headrace_decode.resume.journal import EVENTS, Events

_ERROR_EVENT = b"event: error\n"
_SEQUENCE = re.compile(rb'"sequence_number":\s*(\d+)')
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

Event = tuple[bytes, dict[str, Any]]
"""The lines before an event's data, and the data."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The shapes of one API.

    Attributes:
        document: returns an error as the JSON document of an answer.
        error_event: returns an error as the last event of a stream, given the bytes sent before it.
        ended: possible beginnings of the last event of a whole stream.
        events: the parts of events that a journal reads.
    """

    document: Callable[[ApiError], dict[str, Any]]
    error_event: Callable[[ApiError, bytes], Event]
    ended: tuple[bytes, ...]
    events: Events

    def body(self, error: ApiError) -> bytes:
        """Return an error as the body of an answer."""
        return msgspec.json.encode(self.document(error))

    def event(self, error: ApiError, sent: bytes) -> bytes:
        """Return the last event of a stream that broke off after `sent`."""
        head, data = self.error_event(error, sent)
        return head + b"data: " + msgspec.json.encode(data) + b"\n\n"

    def is_over(self, sent: bytes) -> bool:
        """Return whether the last of the events `sent` ends their stream."""
        return sent.rstrip(b"\n").rpartition(b"\n\n")[2].startswith(self.ended)


def _anthropic(error: ApiError) -> dict[str, Any]:
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, default)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _anthropic_event(error: ApiError, sent: bytes) -> Event:
    """Return Anthropic's error event with our error code, which `headrace.client` reads."""
    data = _anthropic(error)
    data["error"]["code"] = error.code
    return _ERROR_EVENT, data


def _responses_event(error: ApiError, sent: bytes) -> Event:
    seen = _SEQUENCE.findall(sent)
    number = int(seen[-1]) + 1 if seen else 0
    return _ERROR_EVENT, {"type": "error", "sequence_number": number, **error.document()}


DIALECTS = {
    "openai": Dialect(
        ApiError.document,
        lambda error, sent: (b"", error.document()),
        ended=(b"data: [DONE]",),
        events=EVENTS["openai"],
    ),
    "responses": Dialect(
        ApiError.document,
        _responses_event,
        ended=(
            b"event: response.completed\n",
            b"event: response.incomplete\n",
            b"event: response.failed\n",
            _ERROR_EVENT,
        ),
        events=EVENTS["responses"],
    ),
    "anthropic": Dialect(
        _anthropic,
        _anthropic_event,
        ended=(b"event: message_stop\n", _ERROR_EVENT),
        events=EVENTS["anthropic"],
    ),
}
"""Dialects by the API's name in a route (`headrace_decode.http.public_routes.API_MODULES`)."""

OPENAI = DIALECTS["openai"]


def dialect_of(api: str) -> Dialect:
    """Return the dialect of an API; OpenAI's if the API has none of its own."""
    return DIALECTS.get(api, OPENAI)

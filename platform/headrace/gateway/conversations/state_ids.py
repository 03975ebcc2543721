"""Ids of responses and conversations, and the names of their records.

An id is a prefix, a thread and a name: `resp_` + 16 + 24 hexadecimal digits. A *thread* is what
lives and dies together: a first response with all responses that continue it, or a conversation
with its responses. An id therefore leads to its records without an index. It has 160 random bits,
96 of which no other id of its thread tells. It is longer than the ids that vLLM makes up, which a
journal replaces when a stream is resumed (`headrace_decode.resume.journal`).
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

RESPONSE, CONVERSATION = "resp_", "conv_"
THREAD_BYTES, NAME_BYTES = 8, 12
"""Random bytes of a thread, and of a name."""
_ID = re.compile(r"(resp|conv)_([0-9a-f]{16})([0-9a-f]{24})")
_RESPONSE_ID = re.compile(rb"\bresp_[0-9a-f]{40}\b")

CONVERSATION_RECORD = "conversation"
ITEMS = "items-"
"""Beginning of the names of a conversation's batches of items; their order is that of time."""


class ThreadId(NamedTuple):
    """The thread of an id, and its name there."""

    thread: str
    name: str


def new_response_id(thread: str | None = None) -> str:
    """Return the id of a new response.

    Args:
        thread: the thread that it continues; None to begin one.
    """
    return RESPONSE + (thread or secrets.token_hex(THREAD_BYTES)) + secrets.token_hex(NAME_BYTES)


def new_conversation_id() -> str:
    """Return the id of a new conversation, which is a new thread."""
    return CONVERSATION + secrets.token_hex(THREAD_BYTES) + secrets.token_hex(NAME_BYTES)


def parse_id(prefix: str, given: str) -> ThreadId | None:
    """Return the thread and name of an id with this prefix; None if it is no such id."""
    found = _ID.fullmatch(given)
    if found is None or not given.startswith(prefix):
        return None
    return ThreadId(found[2], found[3])


def first_response_id(events: bytes) -> str | None:
    """Return the first id of a response in the events of a stream; None if there is none."""
    found = _RESPONSE_ID.search(events)
    return None if found is None else found[0].decode()


def response_id(thread: str, name: str) -> str:
    """Return the id of a response."""
    return RESPONSE + thread + name


def turn_record(name: str) -> str:
    """Return the name of the record with a response's items."""
    return f"turn-{name}"


def response_record(name: str) -> str:
    """Return the name of the record with the rest of a response."""
    return f"response-{name}"


def items_record(position: int) -> str:
    """Return the name of a new batch of items.

    Args:
        position: where it stands among the conversation's batches.
    """
    return f"{ITEMS}{position:020d}-{secrets.token_hex(4)}"


def position_of(record: str) -> int:
    """Return the position of a batch of items."""
    return int(record[len(ITEMS) :].partition("-")[0])

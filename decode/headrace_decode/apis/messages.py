"""Corrects answers of `/v1/messages` to the format that Anthropic's clients expect.

vLLM omits `stop_sequence` if no stop string matched, and names answers `chatcmpl-...`. Pure: bytes
in, bytes out.
"""

from __future__ import annotations

import json
from typing import Any

from headrace_decode.apis.errors import anthropic_error, anthropic_type, message_of, plain

_VLLM_ID, ID = "chatcmpl-", "msg_"
_START, _DELTA, _ERROR = b"event: message_start\n", b"event: message_delta\n", b"event: error\n"


def answer(body: bytes) -> bytes:
    """Return a whole answer with Anthropic's fields."""
    message = json.loads(body)
    _complete(message)
    return _encoded(message)


def error(status: int, body: bytes) -> bytes:
    """Return an error's document in Anthropic's format."""
    message = message_of(body) or body.decode("utf-8", "replace")[:500]
    return _encoded(anthropic_error(status, plain(message)))


def event(one: bytes) -> bytes:
    """Return one event of a stream with Anthropic's fields."""
    if not one.startswith((_START, _DELTA, _ERROR)):
        return one
    head, _, data = one.partition(b"data: ")
    document = json.loads(data)
    if head == _START:
        _complete(document["message"])
    elif head == _DELTA:
        document["delta"].setdefault("stop_reason", None)
        document["delta"].setdefault("stop_sequence", None)
    else:
        document["error"]["type"] = anthropic_type(500)
    return head + b"data: " + _encoded(document) + b"\n\n"


def _complete(message: dict[str, Any]) -> None:
    if message["id"].startswith(_VLLM_ID):
        message["id"] = ID + message["id"].removeprefix(_VLLM_ID)
    message.setdefault("stop_reason", None)
    message.setdefault("stop_sequence", None)


def _encoded(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()

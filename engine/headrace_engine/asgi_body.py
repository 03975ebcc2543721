"""Whole bodies of ASGI requests and answers: read, given on to another application, and sent."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

Message = MutableMapping[str, Any]


async def read_body(receive: Any) -> bytes | None:
    """Return the whole body; None if the client left before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def with_body(scope: Message, body: bytes, receive: Any) -> tuple[Message, Any]:
    """Return the scope of a request with this body, and a `receive` that gives the body."""
    length = b"%d" % len(body)
    headers = [(k, length if k == b"content-length" else v) for k, v in scope["headers"]]
    first = True

    async def receiving() -> Any:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return {**scope, "headers": headers}, receiving


async def send_whole(send: Any, start: Message, body: bytes) -> None:
    """Send an answer.

    Args:
        start: its `http.response.start`, with the length of any body.
    """
    headers = [head for head in start["headers"] if head[0] != b"content-length"]
    start["headers"] = [*headers, (b"content-length", b"%d" % len(body))]
    await send(start)
    await send({"type": "http.response.body", "body": body})

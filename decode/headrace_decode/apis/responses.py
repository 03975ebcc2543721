"""Corrects answers of `/v1/responses` to the format that OpenAI's clients expect.

In streams, vLLM gives each item two ids, one in the item's events and one in the last event. It
also reports a cut answer, and the item that was cut, as completed. Here an item keeps the id with
which it was added, the last event of a cut answer is `response.incomplete`, and the item that was
cut is marked incomplete.

Events that need no parsing make up most of a stream: their id is replaced as bytes. Pure: bytes in,
bytes out.
"""

from __future__ import annotations

import json
import re
from typing import Any

PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
"""Type of an item -> OpenAI's prefix of its id."""
_ADDED, _DONE = b"event: response.output_item.added\n", b"event: response.output_item.done\n"
_COMPLETED = b"event: response.completed\n"
_PLAIN_ID = re.compile(r"[0-9a-f]{16,32}")
_CALL = ("id", "call_id")


def answer(body: bytes) -> bytes:
    """Return a whole answer; if it was cut, its last item is marked incomplete."""
    response = json.loads(body)
    if not _mark_cut(response):
        return body
    return _encoded(response)


class EventRewriter:
    """Rewriter of the events of one stream."""

    def __init__(self) -> None:
        self._ids: tuple[bytes, bytes] | None = None
        self._items: list[dict[str, Any]] = []
        self._held = b""

    def rewrite(self, event: bytes) -> bytes:
        """Return the events to send after this event arrived.

        The end of an item is held until the next event, which shows whether the item was cut.
        """
        if self._ids is not None:
            event = event.replace(*self._ids)
        if event.startswith(_COMPLETED):
            return self._last(event)
        held, self._held = self._held, b""
        if event.startswith(_ADDED):
            event = self._added(event)
        elif event.startswith(_DONE):
            self._items.append(_document(event)["item"])
            self._held, event = event, b""
            self._ids = None
        return held + event

    def rest(self) -> bytes:
        """Return the event that is still held at the end of the stream."""
        held, self._held = self._held, b""
        return held

    def _added(self, event: bytes) -> bytes:
        item = _document(event)["item"]
        plain, prefix = item.get("id"), PREFIXES.get(item.get("type", ""))
        if prefix is None or not isinstance(plain, str) or not _PLAIN_ID.fullmatch(plain):
            return event
        self._ids = plain.encode(), (prefix + plain).encode()
        return event.replace(*self._ids)

    def _last(self, event: bytes) -> bytes:
        head, document = _COMPLETED, _document(event)
        response = document["response"]
        self._name_items(response)
        held, self._held = self._held, b""
        if response.get("status") in ("incomplete", "failed"):
            document["type"] = f"response.{response['status']}"
            head = f"event: {document['type']}\n".encode()
        if _mark_cut(response) and held:
            done = _document(held)
            done["item"]["status"] = "incomplete"
            held = _DONE + b"data: " + _encoded(done) + b"\n\n"
        return held + head + b"data: " + _encoded(document) + b"\n\n"

    def _name_items(self, response: dict[str, Any]) -> None:
        """Give the items of the last event the ids that they had in their own events."""
        output = response.get("output") or []
        if [item.get("type") for item in output] != [item.get("type") for item in self._items]:
            response["output"] = self._items  # the items that the client has
            return
        for item, sent in zip(output, self._items, strict=True):
            item.update({name: sent[name] for name in _CALL if name in sent and name in item})


def _mark_cut(response: dict[str, Any]) -> bool:
    """Mark the last item of a cut answer as incomplete; return whether there is one."""
    output = response.get("output")
    if response.get("status") != "incomplete" or not output:
        return False
    output[-1]["status"] = "incomplete"
    return True


def _document(event: bytes) -> dict[str, Any]:
    return dict(json.loads(event.partition(b"data: ")[2]))


def _encoded(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()

"""Items of conversations: as they are stored, counted and listed.

An item is stored as the JSON that the client or the model gave, so a later request renders exactly
what it would render if the client sent the items again. Lists show each item with an id and in the
form that OpenAI's clients read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.gateway.conversations.records import Size
from headrace.gateway.errors import bad_field
from headrace.gateway.ingress.limits import count_entries
from headrace.gateway.models.model_names import MAX_FIRST_MESSAGES
from headrace_decode.apis.request_checks import ITEM_TYPES

DELETED = b"null"
"""Stands in the place of a deleted item."""
MAX_LISTED, DEFAULT_LISTED = 100, 20
_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}
_WITH_STATUS = frozenset(_PREFIXES) - {"reasoning"}
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode

Item = dict[str, Any]


def split_input(raw: bytes) -> list[bytes]:
    """Return the items of a request's `input`, each as JSON.

    Args:
        raw: the field as JSON, a list or a text, which is the message of a user.
    """
    if raw[:1] == b'"':
        return [b'{"role":"user","content":' + raw + b"}"]
    return split_items(raw)


def split_items(raw: bytes | msgspec.Raw) -> list[bytes]:
    """Return the items of a list, each as JSON."""
    return [bytes(item) for item in _decode_items(raw)]


def joined(items: Sequence[bytes]) -> msgspec.Raw:
    """Return items as a list in JSON."""
    return msgspec.Raw(b"[" + b",".join(items) + b"]")


def size_of(items: Sequence[bytes]) -> Size:
    """Return the size of the items that are not deleted."""
    left = [item for item in items if item != DELETED]
    entries = count_entries([msgspec.json.decode(item) for item in left])
    return Size(sum(map(len, left)), len(left), entries)


def first_items(items: Sequence[bytes]) -> list[Any]:
    """Return the items up to the first message of the user, decoded (`conversation_key`)."""
    found: list[Any] = []
    for item in items[:MAX_FIRST_MESSAGES]:
        found.append(msgspec.json.decode(item))
        if not isinstance(found[-1], dict) or found[-1].get("role") == "user":
            break
    return found


def item_id(item: Item, scope: str, number: int) -> str:
    """Return an item's id: its own one, or one that follows from its place.

    Args:
        scope: the record that has the item.
        number: its number there.
    """
    own = item.get("id")
    if isinstance(own, str) and own:
        return own
    kind = item.get("type") or "message"
    digest = hashlib.blake2b(f"{scope}/{number}".encode(), digest_size=16).hexdigest()
    return _PREFIXES.get(kind if isinstance(kind, str) else "", "item_") + digest


def listed(item: Item, given_id: str) -> Item:
    """Return an item as lists show it: with id, type, status, and a message's content in parts."""
    kind = item.get("type") or "message"
    shown = {**item, "id": given_id, "type": kind}
    if kind in _WITH_STATUS and not item.get("status"):
        shown["status"] = "completed"
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        part: Item = {"type": "input_text", "text": content}
        if item.get("role") == "assistant":
            part = {"type": "output_text", "text": content, "annotations": []}
        shown["content"] = [part]
    return shown


def numbered(items: Sequence[bytes], scope: str) -> list[Item]:
    """Return the items that are not deleted, as lists show them."""
    return [
        listed(item, item_id(item, scope, number))
        for number, raw in enumerate(items)
        if (item := _decoded(raw)) is not None
    ]


def number_of(wanted: str, items: Sequence[bytes], scope: str) -> int | None:
    """Return the number of the item with an id that lists show; None if it is not there."""
    for number, raw in enumerate(items):
        item = _decoded(raw)
        if item is not None and item_id(item, scope, number) == wanted:
            return number
    return None


def _decoded(raw: bytes) -> Item | None:
    """Return an item; None if it was deleted."""
    if raw == DELETED:
        return None
    item = msgspec.json.decode(raw)
    return item if isinstance(item, dict) else {"type": "unknown"}


def page(
    items: list[Item],
    query: Callable[[str], str | None],
    max_listed: int = MAX_LISTED,
    default_listed: int = DEFAULT_LISTED,
) -> dict[str, Any]:
    """Return the part of a list that a query asks for, newest first by default.

    Args:
        items: oldest first.
        query: returns a parameter: `after`, `limit` or `order`.
        max_listed: the largest `limit`.
        default_listed: the `limit` of a query that names none.

    Raises:
        ApiError: 400, a parameter is wrong.
    """
    order, limit, after = query("order") or "desc", query("limit"), query("after")
    if order not in ("asc", "desc"):
        raise bad_field("order", 'must be "asc" or "desc"')
    if limit is not None and not (limit.isdigit() and 1 <= int(limit[:9]) <= max_listed):
        raise bad_field("limit", f"must be a number from 1 to {max_listed}")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise bad_field("after", "is no id of an item in this list")
        items = items[places[0] + 1 :]
    size = default_listed if limit is None else int(limit)
    data = items[:size]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(items) > size,
    }


def check_items(items: Sequence[Item]) -> None:
    """Refuse items that no model could be given.

    Raises:
        ApiError: 400, naming the item.
    """
    for number, item in enumerate(items):
        kind = item.get("type") or "message"
        if kind not in ITEM_TYPES:
            known = ", ".join(ITEM_TYPES)
            raise bad_field("items", f"[{number}].type must be one of {known}")
        if kind == "message" and not isinstance(item.get("role"), str):
            raise bad_field("items", f"[{number}] has no role")
        if kind == "message" and not isinstance(item.get("content"), (str, list)):
            raise bad_field("items", f"[{number}].content must be a text or a list")

"""The earlier items of a request: of the responses that it continues, or of its conversation.

Pure. A response names all responses before it, so they are read at once and not one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.gateway.conversations import refusals
from headrace.gateway.conversations.items import DELETED
from headrace.gateway.conversations.records import UNFINISHED, ItemBatch, Size, TurnItems
from headrace.gateway.conversations.state_ids import ThreadId, response_id
from headrace.gateway.ingress.limits import MAX_ITEMS, MAX_MESSAGE_PARTS

MAX_TURNS = 1000
"""Maximum number of responses in a chain, and of batches in a conversation."""


@dataclass(frozen=True, slots=True)
class History:
    """The earlier items of a request.

    Attributes:
        items: each as JSON, oldest first.
        earlier: names of the responses that they are from; empty for a conversation.
        thread: the thread that the request continues; None if it continues none.
        conversation: id of the conversation that it continues; None if it continues none.
        size: of the items.
    """

    items: list[bytes] = field(default_factory=list)
    earlier: list[str] = field(default_factory=list)
    thread: str | None = None
    conversation: str | None = None
    size: Size = field(default_factory=Size)


def check_turn(turn: TurnItems, given: str, max_bytes: int) -> None:
    """Refuse a request that continues this response, before the earlier ones are read.

    Args:
        given: the response's id.
        max_bytes: as in `check_size`.

    Raises:
        ApiError: 400, the response has not ended, belongs to a conversation, or is too long.
    """
    if turn.status in UNFINISHED:
        raise refusals.unfinished(given, turn.status)
    if turn.conversation is not None:
        raise refusals.in_conversation(given, turn.conversation)
    if len(turn.earlier) + 1 >= MAX_TURNS:
        count = len(turn.earlier) + 2
        raise refusals.too_long("previous_response_id", count, MAX_TURNS, "responses")
    check_size("previous_response_id", turn.total, max_bytes)


def check_size(param: str, size: Size, max_bytes: int) -> None:
    """Refuse a conversation that is longer than a request may be that sends it whole.

    Args:
        max_bytes: of the items as JSON.

    Raises:
        ApiError: 400.
    """
    for has, maximum, unit in (
        (size.size_bytes, max_bytes, "bytes"),
        (size.items, MAX_ITEMS["input"], "items"),
        (size.entries, MAX_MESSAGE_PARTS, "items and parts of items"),
    ):
        if has > maximum:
            raise refusals.too_long(param, has, maximum, unit)


def of_responses(last: ThreadId, turn: TurnItems, earlier: Mapping[str, TurnItems]) -> History:
    """Return the items of a response and of those that it continues.

    Args:
        last: the response that the request continues.
        turn: its items.
        earlier: the earlier responses that are kept, by name.

    Raises:
        ApiError: 404, an earlier response is missing.
    """
    items: list[bytes] = []
    for name in turn.earlier:
        if name not in earlier:
            given = response_id(*last)
            raise refusals.previous_not_found(given, response_id(last.thread, name))
        items += earlier[name].input
        items += earlier[name].output
    items += turn.input
    items += turn.output
    return History(
        items=items,
        earlier=[*turn.earlier, last.name],
        thread=last.thread,
        size=turn.total,
    )


def of_conversation(
    conversation_id: str, thread: str, batches: Sequence[ItemBatch], max_bytes: int
) -> History:
    """Return the items of a conversation that are not deleted.

    Args:
        batches: its batches of items, oldest first.
        max_bytes: as in `check_size`.

    Raises:
        ApiError: 400, it is too long.
    """
    size = sum((batch.size for batch in batches), Size())
    check_size("conversation", size, max_bytes)
    items = [item for batch in batches for item in batch.items if item != DELETED]
    return History(items=items, thread=thread, conversation=conversation_id, size=size)

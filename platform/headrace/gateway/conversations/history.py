"""The earlier items of a request: of the responses that it continues, or of its conversation.

Pure. A response names all responses before it, so they are read at once and not one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.gateway.conversations import refusals
from headrace.gateway.conversations.items import DELETED
from headrace.gateway.conversations.records import UNFINISHED, ItemBatch, TurnItems
from headrace.gateway.conversations.state_ids import ThreadId, response_id
from headrace.gateway.ingress.limits import MAX_ITEMS, MAX_MESSAGE_PARTS

MAX_TURNS = 1000
"""Maximum number of responses in a chain, and of batches in a conversation."""


@dataclass(frozen=True, slots=True)
class HistoryLimits:
    """The limits of a conversation with a request's own items.

    Attributes:
        max_bytes: bytes of the items as JSON.
        max_items: number of items.
        max_entries: number of entries of all lists, as `limits.count_entries` counts them.
    """

    max_bytes: int
    max_items: int
    max_entries: int


def history_limits(max_bytes: int) -> HistoryLimits:
    """Return the limits of a conversation: those of a request that sends it whole."""
    return HistoryLimits(max_bytes, MAX_ITEMS["input"], MAX_MESSAGE_PARTS)


@dataclass(frozen=True, slots=True)
class History:
    """The earlier items of a request.

    Attributes:
        items: each as JSON, oldest first.
        earlier: names of the responses that they are from; empty for a conversation.
        thread: the thread that the request continues; None if it continues none.
        conversation: id of the conversation that it continues; None if it continues none.
        total_bytes, total_entries: bytes of the items, and the number of entries of their lists.
    """

    items: list[bytes] = field(default_factory=list)
    earlier: list[str] = field(default_factory=list)
    thread: str | None = None
    conversation: str | None = None
    total_bytes: int = 0
    total_entries: int = 0


def check_turn(turn: TurnItems, given: str, limits: HistoryLimits) -> None:
    """Refuse a request that continues this response, before the earlier ones are read.

    Args:
        given: the response's id.

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
    check_totals(
        "previous_response_id", turn.total_bytes, turn.total_items, turn.total_entries, limits
    )


def check_totals(
    param: str, total_bytes: int, total_items: int, total_entries: int, limits: HistoryLimits
) -> None:
    """Refuse a conversation that is too long.

    Raises:
        ApiError: 400.
    """
    for has, maximum, unit in (
        (total_bytes, limits.max_bytes, "bytes"),
        (total_items, limits.max_items, "items"),
        (total_entries, limits.max_entries, "items and parts of items"),
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
        total_bytes=turn.total_bytes,
        total_entries=turn.total_entries,
    )


def of_conversation(
    conversation_id: str, thread: str, batches: Sequence[ItemBatch], limits: HistoryLimits
) -> History:
    """Return the items of a conversation that are not deleted.

    Args:
        batches: its batches of items, oldest first.

    Raises:
        ApiError: 400, it is too long.
    """
    items = [item for batch in batches for item in batch.items if item != DELETED]
    history = History(
        items=items,
        thread=thread,
        conversation=conversation_id,
        total_bytes=sum(map(len, items)),
        total_entries=sum(batch.entries for batch in batches),
    )
    totals = history.total_bytes, len(items), history.total_entries
    check_totals("conversation", *totals, limits)
    return history

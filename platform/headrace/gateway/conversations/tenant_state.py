"""The responses and conversations of one tenant, read from and written to the store.

All methods block; `state.ConversationState` runs them in its threads. A record of another tenant is
not found, since its place follows from the tenant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.gateway.conversations import history, items, refusals
from headrace.gateway.conversations.history import MAX_TURNS, History
from headrace.gateway.conversations.records import (
    CANCELLED,
    FAILED,
    UNFINISHED,
    Conversation,
    Heartbeat,
    ItemBatch,
    StoredResponse,
    TurnItems,
)
from headrace.gateway.conversations.state_ids import (
    CONVERSATION,
    CONVERSATION_RECORD,
    ITEMS,
    RESPONSE,
    ThreadId,
    items_record,
    new_conversation_id,
    parse_id,
    position_of,
    response_record,
    turn_record,
)
from headrace.gateway.kept_records.record_cipher import GATEWAYS, OVERHEAD_BYTES
from headrace.gateway.kept_records.tenant_records import Record, TenantRecords

BEAT_S = 5.0
"""Time between two signs of life of a gateway that runs background responses."""
DEAD_S = 4 * BEAT_S
"""Time without a sign of life after which its background responses have failed."""
_BEAT = "heartbeat"

Document = dict[str, Any]


class TenantState(TenantRecords):
    """The responses and conversations of a tenant."""

    # Histories.

    def history_of_response(self, given: str, max_bytes: int) -> History:
        """Return the items of a response and of those that it continues.

        Args:
            max_bytes: of the items as JSON.

        Raises:
            ApiError: 404, it or an earlier one is not kept; 400, it cannot be continued.
        """
        found = self._find(given, turn_record, TurnItems)
        if found is None:
            raise refusals.previous_not_found(given)
        last, turn = found
        if turn.status in UNFINISHED:
            self._known_response(given)  # ends it if its gateway died
            turn = self._one(last.thread, turn_record(last.name), TurnItems) or turn
        history.check_turn(turn, given, max_bytes)
        names = {turn_record(name): name for name in turn.earlier}
        read = self._read(last.thread, list(names), TurnItems)
        earlier = {names[name]: each for name, each in read.items()}
        return history.of_responses(last, turn, earlier)

    def history_of_conversation(self, given: str, max_bytes: int) -> History:
        """Return the items of a conversation.

        Args:
            max_bytes: of the items as JSON.

        Raises:
            ApiError: 404, it is not kept; 400, it is too long.
        """
        thread, _ = self._conversation(given)
        batches = self._batches(thread, max_bytes)
        return history.of_conversation(given, thread, list(batches.values()), max_bytes)

    # Responses.

    def save_response(
        self, place: ThreadId, response: StoredResponse, turn: TurnItems, *, is_new: bool
    ) -> bool:
        """Keep a response, and add its items to its conversation.

        Args:
            is_new: False for a background response, which is kept since it was asked for.

        Returns:
            Whether it is kept: a background response that was cancelled or deleted is not.
        """
        if not is_new:
            had = self._one(place.thread, response_record(place.name), StoredResponse)
            if had is None or had.status not in UNFINISHED:
                return False
        records: dict[str, msgspec.Struct] = {
            turn_record(place.name): turn,
            response_record(place.name): response,
        }
        if turn.conversation is not None and response.status not in UNFINISHED:
            known = self._store.sizes(self._tag, place.thread, self._clock())
            if CONVERSATION_RECORD in known:
                added = [*turn.input, *turn.output]
                batch = ItemBatch(added, items.size_of(added))
                records[self._next_batch(known)] = batch
        self._write(place.thread, records)
        return True

    def document(self, given: str) -> bytes:
        """Return a response as JSON, with its output.

        A background response whose gateway died is kept as failed from then on.

        Raises:
            ApiError: 404, it is not kept.
        """
        place, stored = self._known_response(given)
        turn = self._one(place.thread, turn_record(place.name), TurnItems)
        if turn is None:
            raise refusals.response_not_found(given)
        return _with(stored.document, output=items.joined(turn.output))

    def input_items(self, given: str) -> list[items.Item]:
        """Return the items of a response's own request, oldest first, as lists show them.

        Raises:
            ApiError: 404, it is not kept.
        """
        found = self._find(given, turn_record, TurnItems)
        if found is None:
            raise refusals.response_not_found(given)
        return items.numbered(found[1].input, given)

    def delete_response(self, given: str) -> None:
        """Delete a response; requests can no longer continue it, nor one that continues it.

        Raises:
            ApiError: 404, it is not kept.
        """
        place, _ = self._known_response(given)
        names = [response_record(place.name), turn_record(place.name)]
        self._store.remove(self._tag, place.thread, names)

    def cancel(self, given: str) -> bytes:
        """Cancel a background response, unless it has ended; return it as JSON.

        Raises:
            ApiError: 404, it is not kept; 400, it was not made in the background.
        """
        place, stored = self._known_response(given)
        if not stored.is_background:
            raise refusals.not_in_background(given)
        if stored.status in UNFINISHED:
            self._with_status(place, stored, CANCELLED)
        return self.document(given)

    def set_status(self, given: str, status: str, error: Mapping[str, str] | None = None) -> None:
        """Set the status of a background response, if it is kept and has not ended.

        Args:
            error: its code and message, if it failed.
        """
        found = self._find(given, response_record, StoredResponse)
        if found is not None and found[1].status in UNFINISHED:
            self._with_status(*found, status, error)

    def is_unfinished(self, given: str) -> bool:
        """Return whether a response is kept and has not ended."""
        found = self._find(given, response_record, StoredResponse)
        return found is not None and found[1].status in UNFINISHED

    def beat(self, gateway: str) -> None:
        """Record a gateway's sign of life. Only the state of `GATEWAYS` is asked for this.

        Args:
            gateway: 16 hexadecimal digits.
        """
        self._write(gateway, {_BEAT: Heartbeat(self._clock())})

    # Conversations.

    def create_conversation(
        self, metadata: Mapping[str, str], first: Sequence[items.Item]
    ) -> Document:
        """Begin a conversation; return it as its document."""
        given = new_conversation_id()
        place = parse_id(CONVERSATION, given)
        assert place is not None
        record = Conversation(int(self._clock()), msgspec.json.encode(metadata))
        records: dict[str, msgspec.Struct] = {CONVERSATION_RECORD: record}
        if first:
            records[items_record(self._position())] = _batch(first)
        self._write(place.thread, records)
        return _shown(given, record)

    def conversation(self, given: str) -> Document:
        """Return a conversation as its document.

        Raises:
            ApiError: 404, it is not kept.
        """
        return _shown(given, self._conversation(given)[1])

    def update_conversation(self, given: str, metadata: Mapping[str, str]) -> Document:
        """Set a conversation's metadata; return it as its document.

        Raises:
            ApiError: 404, it is not kept.
        """
        thread, record = self._conversation(given)
        record = msgspec.structs.replace(record, metadata=msgspec.json.encode(metadata))
        self._write(thread, {CONVERSATION_RECORD: record})
        return _shown(given, record)

    def delete_conversation(self, given: str) -> None:
        """Delete a conversation with its items. Its responses stay until they are deleted or
        expire.

        Raises:
            ApiError: 404, it is not kept.
        """
        thread, _ = self._conversation(given)
        self._store.remove(self._tag, thread, [CONVERSATION_RECORD, *self._batch_sizes(thread)])

    def add_items(
        self, given: str, added: Sequence[items.Item], max_bytes: int
    ) -> list[items.Item]:
        """Add items to a conversation; return them as lists show them.

        Raises:
            ApiError: 404, it is not kept; 400, it would be too long.
        """
        thread, _ = self._conversation(given)
        sizes = self._batch_sizes(thread)
        batch, name = _batch(added), self._next_batch(sizes)
        if len(sizes) >= MAX_TURNS:
            raise refusals.too_long("items", len(sizes) + 1, MAX_TURNS, "additions")
        total = sum(sizes.values()) + sum(map(len, batch.items))
        if total > max_bytes:
            raise refusals.too_long("items", total, max_bytes, "bytes")
        self._write(thread, {name: batch})
        return items.numbered(batch.items, f"{thread}/{name}")

    def conversation_items(self, given: str, max_bytes: int) -> list[items.Item]:
        """Return the items of a conversation, oldest first, as lists show them.

        Raises:
            ApiError: 404, it is not kept; 400, it has more than `max_bytes`.
        """
        thread, _ = self._conversation(given)
        return [
            item
            for name, batch in self._batches(thread, max_bytes).items()
            for item in items.numbered(batch.items, f"{thread}/{name}")
        ]

    def delete_item(self, given: str, item: str, max_bytes: int) -> Document:
        """Delete an item of a conversation; return the conversation's document.

        Raises:
            ApiError: 404, the conversation or the item is not kept.
        """
        thread, record = self._conversation(given)
        for name, batch in self._batches(thread, max_bytes).items():
            number = items.number_of(item, batch.items, f"{thread}/{name}")
            if number is not None:
                left = [*batch.items[:number], items.DELETED, *batch.items[number + 1 :]]
                self._write(thread, {name: ItemBatch(left, items.size_of(left))})
                return _shown(given, record)
        raise refusals.item_not_found(item)

    # Internal.

    def _find(
        self, given: str, record: Callable[[str], str], kind: type[Record]
    ) -> tuple[ThreadId, Record] | None:
        """Return the place of a response and one of its records; None if it is not kept."""
        place = parse_id(RESPONSE, given)
        found = None if place is None else self._one(place.thread, record(place.name), kind)
        return None if place is None or found is None else (place, found)

    def _known_response(self, given: str) -> tuple[ThreadId, StoredResponse]:
        found = self._find(given, response_record, StoredResponse)
        if found is None:
            raise refusals.response_not_found(given)
        place, stored = found
        if stored.status in UNFINISHED and not self._lives(stored.owner):
            message = "The gateway that ran this response in the background died."
            error = {"code": "server_error", "message": message}
            stored = self._with_status(place, stored, FAILED, error)
        return place, stored

    def _lives(self, gateway: str) -> bool:
        gateways = TenantState(self._store, self._cipher, GATEWAYS, self._clock)
        beat = gateways._one(gateway, _BEAT, Heartbeat)
        return beat is not None and self._clock() - beat.at_s < DEAD_S

    def _with_status(
        self,
        place: ThreadId,
        stored: StoredResponse,
        status: str,
        error: Mapping[str, str] | None = None,
    ) -> StoredResponse:
        """Set the status of a response; return it."""
        document = _with(stored.document, status=status, error=error)
        changed = msgspec.structs.replace(stored, document=document, status=status)
        records: dict[str, msgspec.Struct] = {response_record(place.name): changed}
        turn = self._one(place.thread, turn_record(place.name), TurnItems)
        if turn is not None:
            records[turn_record(place.name)] = msgspec.structs.replace(turn, status=status)
        self._write(place.thread, records)
        return changed

    def _conversation(self, given: str) -> tuple[str, Conversation]:
        place = parse_id(CONVERSATION, given)
        record = None
        if place is not None:
            record = self._one(place.thread, CONVERSATION_RECORD, Conversation)
        if place is None or record is None:
            raise refusals.conversation_not_found(given)
        return place.thread, record

    def _batches(self, thread: str, max_bytes: int) -> dict[str, ItemBatch]:
        """Return a conversation's batches of items by name, oldest first."""
        sizes = self._batch_sizes(thread)
        names, total = sorted(sizes), sum(sizes.values())
        if total > max_bytes:
            raise refusals.too_long("conversation", total, max_bytes, "bytes")
        found = self._read(thread, names, ItemBatch)
        return {name: found[name] for name in names if name in found}

    def _batch_sizes(self, thread: str) -> dict[str, int]:
        """Return the bytes of a conversation's batches of items before encryption, by name."""
        known = self._store.sizes(self._tag, thread, self._clock())
        return {
            name: max(0, size - OVERHEAD_BYTES)
            for name, size in known.items()
            if name.startswith(ITEMS)
        }

    def _next_batch(self, known: Iterable[str]) -> str:
        """Return the name of a batch after all that are known."""
        last = max((position_of(name) for name in known if name.startswith(ITEMS)), default=0)
        return items_record(max(last + 1, self._position()))

    def _position(self) -> int:
        return int(self._clock() * 1e6)


def _with(document: bytes, **fields: Any) -> bytes:
    """Return a JSON object with some fields changed; the others stay unparsed."""
    parsed: dict[str, Any] = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(parsed | fields)


def _batch(added: Sequence[items.Item]) -> ItemBatch:
    raw = [msgspec.json.encode(item) for item in added]
    return ItemBatch(raw, items.size_of(raw))


def _shown(given: str, record: Conversation) -> Document:
    return {
        "id": given,
        "object": "conversation",
        "created_at": record.created_at,
        "metadata": msgspec.Raw(record.metadata),
    }

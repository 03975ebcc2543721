"""The records of conversation state, as they are encrypted and stored.

A response has two records: its items, which later requests need, and the rest, which may hold large
tools and instructions that later requests do not need.
"""

from __future__ import annotations

import msgspec

QUEUED, IN_PROGRESS, COMPLETED = "queued", "in_progress", "completed"
FAILED, CANCELLED = "failed", "cancelled"
UNFINISHED = frozenset({QUEUED, IN_PROGRESS})


class Size(msgspec.Struct, frozen=True):
    """The size of items.

    Attributes:
        size_bytes: bytes of their JSON.
        items: number of them.
        entries: number of entries of their lists, as `limits.count_entries` counts them.
    """

    size_bytes: int = 0
    items: int = 0
    entries: int = 0

    def __add__(self, more: Size) -> Size:
        return Size(
            self.size_bytes + more.size_bytes,
            self.items + more.items,
            self.entries + more.entries,
        )


class TurnItems(msgspec.Struct, frozen=True, omit_defaults=True):
    """The items of a response.

    Attributes:
        earlier: names of the responses that it continues, oldest first.
        input: the request's own items, each as JSON.
        output: the answer's items, each as JSON.
        status: OpenAI's status of the response.
        conversation: id of the conversation that has the earlier items; None if `earlier` has them.
        total: size of all items up to this turn's last.
    """

    earlier: list[str]
    input: list[bytes]
    output: list[bytes]
    status: str = COMPLETED
    conversation: str | None = None
    total: Size = Size()


class StoredResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A response without its output.

    Attributes:
        document: the response as JSON, with an empty output.
        status: OpenAI's status.
        owner: the gateway that runs it in the background; empty if it does not run there.
        is_background: whether it was asked for with `background`.
    """

    document: bytes
    status: str = COMPLETED
    owner: str = ""
    is_background: bool = False


class Conversation(msgspec.Struct, frozen=True):
    """A conversation without its items.

    Attributes:
        created_at: Unix seconds.
        metadata: the client's own, as JSON.
    """

    created_at: int
    metadata: bytes


class ItemBatch(msgspec.Struct, frozen=True):
    """Items that were added to a conversation at once.

    Attributes:
        items: each as JSON; `null` in the place of one that was deleted.
        size: of those that are not deleted.
    """

    items: list[bytes]
    size: Size


class Heartbeat(msgspec.Struct, frozen=True):
    """The sign of life of a gateway that runs responses in the background. `at_s`: Unix seconds."""

    at_s: float

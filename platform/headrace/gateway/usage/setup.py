"""The place of the ledger, from the configuration: beside conversation state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.config.gateway import GatewaySettings
from headrace.gateway.conversations.object_store import ObjectRecordStore
from headrace.gateway.conversations.record_store import RecordStore
from headrace.gateway.conversations.sqlite_store import SqliteStore
from headrace.gateway.usage.ledger import UsageLedger

FILE = "usage-1.sqlite"
"""Name of the file; the number is that of its tables' version."""
OBJECTS = "/usage"
"""End of the prefix under which an object store has the records."""
MAX_BYTES = 16 << 30
"""Limit of all records; the oldest days go first."""


def make_ledger(
    settings: GatewaySettings, folder: Callable[[], Path], object_options: Mapping[str, Any]
) -> UsageLedger | None:
    """Return the ledger; None if none is kept.

    Args:
        folder: returns the default folder of the file; it may block.
        object_options: options of the object store's client (`store.object_options`).
    """
    place, limits = settings.conversations, (settings.usage.ttl_s, MAX_BYTES)
    if not settings.usage.enabled:
        return None

    def open_store() -> RecordStore:
        if place.object_url is not None:
            url = place.object_url.rstrip("/") + OBJECTS
            return ObjectRecordStore(url, object_options, *limits)
        own = place.folder
        return SqliteStore(folder() if own is None else Path(own), *limits, FILE)

    return UsageLedger(open_store)

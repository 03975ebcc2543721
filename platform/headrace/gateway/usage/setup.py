"""The place of the ledger: beside conversation state, under a name of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.config.gateway import UsageSettings
from headrace.gateway.conversations.setup import StateSetup
from headrace.gateway.kept_records.record_store import RecordStore
from headrace.gateway.usage.ledger import UsageLedger

NAME, FILE = "usage", "usage-1.sqlite"
"""Names below the URL of an object store, and in a folder; the number is that of the tables."""
MAX_BYTES = 16 << 30
"""Limit of all records; the oldest days go first."""


def make_ledger(
    setup: StateSetup, settings: UsageSettings, folder: Callable[[], Path]
) -> UsageLedger | None:
    """Return the ledger; None if none is kept.

    Args:
        setup: the place of conversation state.
        settings: the section `gateway.usage`.
        folder: as for `StateSetup.make`.
    """
    if not settings.enabled:
        return None

    def open_store() -> RecordStore:
        return setup.open(folder, NAME, FILE, settings.ttl_s, MAX_BYTES)

    return UsageLedger(open_store)

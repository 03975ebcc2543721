"""The place of files and batches: beside conversation state, under a name of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from headrace.config.batches import BatchSettings
from headrace.gateway.batches import refusals
from headrace.gateway.batches.tenant_batches import BatchState, TenantBatches
from headrace.gateway.conversations.setup import StateSetup
from headrace.gateway.kept_records.record_store import RecordStore

NAME, FILE = "batches", "batches-1.sqlite"
"""Names below the URL of an object store, and in a folder; the number is that of the tables."""


def make_batch_state(
    setup: StateSetup,
    settings: BatchSettings,
    folder: Callable[[], Path],
    cluster_secret: Callable[[bytes], bytes],
) -> BatchState | None:
    """Return the state of files and batches; None if they are off.

    Args:
        setup: the place of conversation state, and the app's secret.
        settings: the section `gateway.batches`.
        folder, cluster_secret: as for `StateSetup.make`.
    """
    if not settings.enabled:
        return None

    def open_store() -> RecordStore:  # the limit of a tenant is checked when files arrive
        return setup.open(folder, NAME, FILE, settings.ttl_s, sys.maxsize)

    return BatchState(
        open_store,
        partial(setup.read_secret, cluster_secret),
        TenantBatches,
        threads=setup.threads,
        what="batches",
        refusals=refusals,
    )

"""The place of conversation state and the app's secret, from the configuration."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.config.conversations import ConversationSettings
from headrace.gateway.conversations.state import ConversationState
from headrace.gateway.kept_records.object_store import THREADS, ObjectRecordStore
from headrace.gateway.kept_records.record_store import RecordStore
from headrace.gateway.kept_records.sqlite_store import FILE as CONVERSATIONS_FILE
from headrace.gateway.kept_records.sqlite_store import SqliteStore

SECRET_BYTES = 32


@dataclass(frozen=True)
class StateSetup:
    """How a gateway opens its conversation state.

    Attributes:
        settings: the section `gateway.conversations`.
        secret: the app's secret (`store.node.secret`); None to make one that the cluster keeps.
        object_options: options of the object store's client (`store.object_options`).
    """

    settings: ConversationSettings
    secret: str | None = field(default=None, repr=False)
    object_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def make(
        self, folder: Callable[[], Path], cluster_secret: Callable[[bytes], bytes]
    ) -> ConversationState | None:
        """Return the conversation state; None if none is kept.

        Args:
            folder: returns the default folder of the file; it may block.
            cluster_secret: returns the secret that the cluster keeps for the app, and keeps the
                given one if it has none; it may block.
        """
        settings = self.settings
        if not settings.enabled:
            return None

        def open_store() -> RecordStore:
            limits = settings.ttl_s, settings.max_tenant_bytes
            return self.open(folder, "", CONVERSATIONS_FILE, *limits)

        read_secret = partial(self.read_secret, cluster_secret)
        return ConversationState(open_store, read_secret, threads=self.threads)

    @property
    def threads(self) -> int:
        """Number of threads that use the store at once."""
        return 1 if self.settings.object_url is None else THREADS

    def read_secret(self, cluster_secret: Callable[[bytes], bytes]) -> bytes:
        """Return the app's secret; see `make`. Blocks."""
        if self.secret is not None:
            return self.secret.encode()
        return cluster_secret(secrets.token_bytes(SECRET_BYTES))

    def open(
        self,
        folder: Callable[[], Path],
        name: str,
        file: str,
        ttl_s: float,
        max_tenant_bytes: int,
    ) -> RecordStore:
        """Open a store of records. Blocks.

        Args:
            folder: as for `make`.
            name: of the store below the URL; empty for the URL itself.
            file: name of the SQLite file.
            ttl_s: seconds for which a thread lives after its last write.
            max_tenant_bytes: limit of a tenant's records.

        Raises:
            StoreError: it cannot be opened.
        """
        url, own = self.settings.object_url, self.settings.folder
        limits = ttl_s, max_tenant_bytes
        if url is not None:
            below = f"{url.rstrip('/')}/{name}" if name else url
            return ObjectRecordStore(below, self.object_options, *limits)
        return SqliteStore(folder() if own is None else Path(own), *limits, file)


def folder_of(session: Path, app: str) -> Path:
    """Return an app's default folder.

    Args:
        session: the folder of the Ray session on this machine.
    """
    return session / f"headrace-conversations-{quote(app, safe='')}"

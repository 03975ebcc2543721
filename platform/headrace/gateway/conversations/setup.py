"""The place of conversation state and the app's secret, from the configuration."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.config.conversations import ConversationSettings
from headrace.gateway.conversations.object_store import THREADS, ObjectRecordStore
from headrace.gateway.conversations.record_store import RecordStore
from headrace.gateway.conversations.sqlite_store import SqliteStore
from headrace.gateway.conversations.state import ConversationState

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

        def read_secret() -> bytes:
            if self.secret is not None:
                return self.secret.encode()
            return cluster_secret(secrets.token_bytes(SECRET_BYTES))

        def open_store() -> RecordStore:
            limits = settings.ttl_s, settings.max_tenant_bytes
            if settings.object_url is not None:
                return ObjectRecordStore(settings.object_url, self.object_options, *limits)
            own = settings.folder
            return SqliteStore(folder() if own is None else Path(own), *limits)

        threads = 1 if settings.object_url is None else THREADS
        return ConversationState(open_store, read_secret, threads=threads)


def folder_of(session: Path, app: str) -> Path:
    """Return an app's default folder.

    Args:
        session: the folder of the Ray session on this machine.
    """
    return session / f"headrace-conversations-{quote(app, safe='')}"

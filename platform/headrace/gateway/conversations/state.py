"""Conversation state for the gateway's event loop.

A store that cannot be used never costs a request its answer: a request that needs earlier items is
refused, and an answer that cannot be kept says `store: false`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.gateway.conversations import refusals
from headrace.gateway.conversations.tenant_state import TenantState
from headrace.gateway.kept_records.record_store import RecordStore
from headrace.gateway.kept_records.state_runner import StateRunner


class ConversationState(StateRunner[TenantState]):
    """The conversation state of one event loop.

    Args:
        open_store, read_secret, threads: as for `StateRunner`.
    """

    def __init__(
        self,
        open_store: Callable[[], RecordStore],
        read_secret: Callable[[], bytes],
        *,
        threads: int = 1,
    ) -> None:
        super().__init__(
            *(open_store, read_secret, TenantState, time.time),
            threads=threads,
            what="conversation state",
            refusals=refusals,
        )

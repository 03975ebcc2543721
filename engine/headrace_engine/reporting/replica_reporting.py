"""Publishes a replica's reports, and the blocks that its engine holds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from headrace_engine.reporting.engine_events import EngineEvents
from headrace_engine.reporting.replica_publisher import ReplicaPublisher
from headrace_engine.reporting.reporter import EngineFacts, Reporter


class ReplicaReporting:
    """A replica's publisher and its reporter, open from the start. Made and used on the replica's
    event loop.

    Args:
        replica, role, machine: as in a `Report`.
        token, host: as in a `ReplicaPublisher`.
        events: follows the engine's KV events; None if they are not followed.
        engine: the engine's part of each report.
        facts: gives further fields of a report, if there are any.
        kv: gives the field `kv` of a `Report`.
    """

    def __init__(
        self,
        replica: str,
        role: Literal["prefill", "decode"],
        machine: str,
        *,
        token: str,
        host: str,
        events: EngineEvents | None,
        engine: EngineFacts,
        facts: Callable[[], Mapping[str, Any]],
        kv: Callable[[], str] = str,
    ) -> None:
        self._identity = {"replica_id": replica, "role": role, "machine": machine}
        self._kv = kv
        self._draining = False
        self._loop = asyncio.get_running_loop()
        contents = tuple if events is None else events.held.contents
        windows = () if events is None else events.groups.windows
        self._publisher = ReplicaPublisher(
            *(token, host, contents, self._on_first_subscriber),
            windows=[window.blocks for window in windows],
        )
        if events is not None:
            events.subscribe(self._publisher.publish, self._publisher.resync)
        self._reporter = Reporter(self._publisher, engine, facts, self._own_facts)
        engine.on_rows.append(self.changed)

    def info(self) -> dict[str, Any]:
        """Return what gateways need of the replica: its id, role and machine, and the endpoints and
        token of its publisher."""
        return {**self._identity, "endpoint": self._publisher.info()}

    def changed(self) -> None:
        """Report soon: a request came or ended, or something else in the report has changed."""
        self._reporter.changed()

    def drains(self) -> None:
        """Tell gateways to send no more requests."""
        self._draining = True
        self._reporter.now()

    async def close(self) -> None:
        """Stop reporting, and unbind the sockets."""
        self._reporter.close()
        await asyncio.to_thread(self._publisher.close)

    def _on_first_subscriber(self) -> None:
        """Report at once, because a gateway begins to listen. Called on the publisher's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(lambda: self._reporter.now())

    def _own_facts(self) -> dict[str, Any]:
        identity = self._identity
        return {
            "replica": identity["replica_id"],
            "role": identity["role"],
            "machine": identity["machine"],
            "draining": self._draining,
            "kv": self._kv(),
        }

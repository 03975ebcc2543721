"""A replica's line, fed: its reports, and the blocks that its engine holds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from headrace_engine.reporting.engine_events import EngineEvents
from headrace_engine.reporting.line import Line
from headrace_engine.reporting.reporter import EngineFacts, Reporter


class ReplicaLine:
    """Open from the start; made and used on the replica's event loop.

    Args:
        replica, role, machine: as in a `Report`.
        token, host: as for a `Line`.
        events: follows the engine; None if nobody does.
        engine: the engine's part of each report.
        facts: gives the other fields of a report, as far as there are any.
        kv: gives the field of a `Report`.
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
        self._line = Line(token, host, contents, self._followed)
        if events is not None:
            events.tell(self._line.publish, self._line.resync)
        self._reporter = Reporter(self._line, engine, facts, self._own_facts)
        engine.on_rows.append(self.changed)

    def info(self) -> dict[str, Any]:
        """What gateways are told of the replica: its id, role and machine, and where its line is
        (with the token)."""
        return {**self._identity, "line": self._line.info()}

    def changed(self) -> None:
        """A request came or ended, or something else that a report tells has changed."""
        self._reporter.changed()

    def drains(self) -> None:
        """Tell gateways that no request is to come."""
        self._draining = True
        self._reporter.now()

    async def close(self) -> None:
        """Report no more, and unbind."""
        self._reporter.close()
        await asyncio.to_thread(self._line.close)

    def _followed(self) -> None:
        """Somebody begins to listen; called on the line's thread."""
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

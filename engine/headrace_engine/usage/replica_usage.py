"""A replica's usage on its way out: to the metrics, to gateways, and to the gateway that asks.

Gateways ask each replica about once a second for its facts, and get the totals with them. A replica
that stops reports its totals once more, because Serve no longer lets gateways ask it then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace_engine.supervise import supervise
from headrace_engine.usage.request_usage import RequestUsage
from headrace_engine.usage.usage_book import UsageBook

logger = logging.getLogger("headrace.engine")

EXPORT_S = 2.0
"""Interval at which the totals become metrics."""
LAST_REPORT_S = 2.0
"""Time limit of the last report."""

ExportUsage = Callable[[str, Mapping[str, RequestUsage]], None]
"""(served name of the model, totals by tenant) -> nothing; called every `EXPORT_S`."""
SendReport = Callable[[dict[str, Any]], Awaitable[None]]
"""Sends a report (`ReplicaUsage.report`) to a gateway."""


@dataclass(frozen=True)
class UsageExports:
    """Where a replica's usage goes. Importable by name.

    Attributes:
        make_metrics: makes the exporter of the metrics.
        send: sends the last report.
    """

    make_metrics: Callable[[], ExportUsage]
    send: SendReport


class ReplicaUsage:
    """Usage of one replica that serves.

    Args:
        book: the sums, which begin at zero here.
        model: served name of its model.
        replica_id: the replica's id.
        exports: where the usage goes; None for nowhere.
    """

    def __init__(
        self, book: UsageBook, model: str, replica_id: str, exports: UsageExports | None
    ) -> None:
        self._book, self._model, self._replica_id = book, model, replica_id
        self._exports = exports
        book.restart()
        self._task = None
        if exports is not None:
            self._task = supervise(self._export, "export the usage as metrics")

    def report(self) -> dict[str, Any]:
        """Return the totals for gateways, JSON-able: `replica_id`, `model`, `since_s` and
        `tenants`."""
        return {"replica_id": self._replica_id, "model": self._model, **self._book.report()}

    def of_request(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]:
        """Return what this replica's engine did for a request, JSON-able.

        Args:
            request_id: the client's id of the request.
            tenant: whose request; None for any tenant's.
        """
        return [
            {
                "replica_id": self._replica_id,
                "model": self._model,
                "tenant": record.tenant,
                "complete": record.is_complete,
                "usage": record.usage.to_dict(),
            }
            for record in self._book.find(request_id, tenant)
        ]

    async def close(self) -> None:
        """Report the totals once more, and stop exporting."""
        if self._task is not None:
            self._task.cancel()
        if self._exports is None or not self._book.totals:
            return
        try:
            async with asyncio.timeout(LAST_REPORT_S):
                await self._exports.send(self.report())
        except Exception as error:
            logger.warning("the last usage of this replica was not reported: %r", error)

    async def _export(self) -> None:
        assert self._exports is not None
        export = self._exports.make_metrics()
        while True:
            await asyncio.sleep(EXPORT_S)
            export(self._model, self._book.totals)

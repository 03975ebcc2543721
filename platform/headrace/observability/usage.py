"""The metric of usage by tenant and model, and a stopping replica's last report to a gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

from headrace.observability.totals import TotalCounter
from headrace_engine.usage.replica_usage import UsageExports
from headrace_engine.usage.request_usage import RequestUsage

GATEWAY = "gateway"
"""Name of the deployment of gateways."""


class RayUsageMetrics:
    """Exporter that is called with a replica's totals from time to time. A replica exports at most
    `usage_book.MAX_TENANTS` tenants, and one for all others."""

    def __init__(self) -> None:
        self._usage = TotalCounter(
            "headrace_usage",
            "What requests cost the engines: requests, tokens and seconds, by quantity.",
            tag_keys=("tenant", "model", "quantity"),
        )

    def __call__(self, model: str, totals: Mapping[str, RequestUsage]) -> None:
        for tenant, usage in totals.items():
            for quantity, value in usage.to_dict().items():
                tags = {"tenant": tenant, "model": model, "quantity": quantity}
                self._usage.follow(value, tags)


async def send_last_report(report: dict[str, Any]) -> None:
    """Send a stopping replica's usage to one of the app's gateways.

    Raises:
        Exception: no gateway took it.
    """
    app = serve.get_replica_context().app_name
    await serve.get_deployment_handle(GATEWAY, app).headrace_take_usage.remote(report)


USAGE_EXPORTS = UsageExports(RayUsageMetrics, send_last_report)

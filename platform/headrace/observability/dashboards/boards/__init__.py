"""The dashboards, one a module. Each panel answers the question that its description asks."""

from __future__ import annotations

from headrace.observability.dashboards.boards.autoscaling import autoscaling
from headrace.observability.dashboards.boards.failures import failures
from headrace.observability.dashboards.boards.gpus import gpus
from headrace.observability.dashboards.boards.kv_tiers import kv_tiers
from headrace.observability.dashboards.boards.overview import overview
from headrace.observability.dashboards.boards.placement import placement
from headrace.observability.dashboards.boards.slos import slos
from headrace.observability.dashboards.boards.speculation import speculation
from headrace.observability.dashboards.boards.tenants import tenants
from headrace.observability.dashboards.panel import DashboardSpec


def dashboards() -> list[DashboardSpec]:
    """Return all dashboards."""
    return [
        overview(),
        slos(),
        tenants(),
        autoscaling(),
        placement(),
        kv_tiers(),
        speculation(),
        failures(),
        gpus(),
    ]

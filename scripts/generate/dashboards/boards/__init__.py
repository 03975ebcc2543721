"""The dashboards, one a module. Each panel answers the question that its description asks."""

from __future__ import annotations

from scripts.generate.dashboards.boards.autoscaling import autoscaling
from scripts.generate.dashboards.boards.failures import failures
from scripts.generate.dashboards.boards.gpus import gpus
from scripts.generate.dashboards.boards.kv_tiers import kv_tiers
from scripts.generate.dashboards.boards.overview import overview
from scripts.generate.dashboards.boards.placement import placement
from scripts.generate.dashboards.boards.slos import slos
from scripts.generate.dashboards.boards.speculation import speculation
from scripts.generate.dashboards.boards.tenants import tenants
from scripts.generate.dashboards.panel import DashboardSpec


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

"""Dashboards in Grafana's form, from panels that say what they ask and show."""

from __future__ import annotations

from dataclasses import dataclass, field

from grafana_foundation_sdk.builders import common, timeseries
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import (
    Dashboard,
    DataSourceRef,
    GridPos,
    VariableRefresh,
)

from headrace.observability.dashboards import promql as q
from headrace.observability.dashboards.promql import CLUSTER

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
SESSIONS = f'{CLUSTER}=~"${CLUSTER}"'
WIDTH, HEIGHT = 12, 8
"""Size of a panel, in Grafana's grid of 24 columns."""


@dataclass(frozen=True)
class Panel:
    """A chart.

    Attributes:
        asks: the operator's question; Grafana shows it at the panel's head.
        queries: PromQL by legend; `{{label}}` in a legend is filled in.
        unit: Grafana's name of the unit.
        most: top of the axis; None for no limit.
    """

    title: str
    asks: str
    queries: dict[str, str] = field(hash=False)
    unit: str = "short"
    most: float | None = None


@dataclass(frozen=True)
class DashboardSpec:
    """A dashboard: its name in the address, its title, its panels."""

    uid: str
    title: str
    panels: tuple[Panel, ...]


def built(dashboard: DashboardSpec) -> Dashboard:
    """Return the dashboard in Grafana's form."""
    clusters = f"label_values(ray_headrace_gateway_ready_replicas, {CLUSTER})"
    made = (
        grafana.Dashboard(dashboard.title)
        .uid(dashboard.uid)
        .tags(["headrace"])
        .time("now-1h", "now")
        .refresh("30s")
        .with_variable(
            grafana.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
        .with_variable(
            grafana.QueryVariable(CLUSTER)
            .label("Ray session")
            .datasource(SOURCE)
            .query(clusters)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    )
    for number, panel in enumerate(dashboard.panels):
        made = made.with_panel(_chart(panel, number))
    return made.build()


def _chart(panel: Panel, number: int) -> timeseries.Panel:
    columns = 24 // WIDTH
    chart = (
        timeseries.Panel()
        .id(number + 1)
        .title(panel.title)
        .description(panel.asks)
        .datasource(SOURCE)
        .unit(panel.unit)
        .min(0)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .grid_pos(
            GridPos(x=WIDTH * (number % columns), y=HEIGHT * (number // columns), w=WIDTH, h=HEIGHT)
        )
    )
    if panel.most is not None:
        chart = chart.max(panel.most)
    for at, (legend, query) in enumerate(panel.queries.items()):
        chart = chart.with_target(
            Dataquery()
            .expr(q.narrowed(query, SESSIONS))
            .legend_format(legend)
            .ref_id(chr(ord("A") + at))
        )
    return chart

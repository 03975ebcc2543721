"""Dashboards in Grafana's form, from panels that say what they ask and show.

Limits are drawn from the alerts' own thresholds. Links lead to the other dashboards, to the console
and to the entries of the alerts in the runbook; the chart fills in the last two addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from grafana_foundation_sdk.builders import (
    common,
    gauge,
    heatmap,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    GraphTresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    Dashboard,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    GridPos,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableRefresh,
)
from grafana_foundation_sdk.models.dashboard import Panel as GrafanaPanel
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from scripts.generate.dashboards import alerts
from scripts.generate.dashboards.filters import FILTERS, Variable, filtered
from scripts.generate.dashboards.panel import DashboardSpec, Kind, Panel, Place, places

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
CONSOLE = "http://127.0.0.1:8000/console"
"""Address of the console below `headrace up`. The chart's `monitoring.consoleUrl` takes its
place."""
TAG = "headrace"
FIRING = 'ALERTS{alertname=~"Headrace.+", alertstate="firing"}'
GOOD, BETWEEN, BAD = "green", "orange", "red"

P = TypeVar(
    "P",
    timeseries.Panel,
    stat.Panel,
    gauge.Panel,
    table.Panel,
    heatmap.Panel,
    statetimeline.Panel,
)


def built(dashboard: DashboardSpec) -> Dashboard:
    """Return the dashboard in Grafana's form."""
    made = (
        grafana.Dashboard(dashboard.title)
        .uid(dashboard.uid)
        .tags([TAG])
        .time("now-1h", "now")
        .refresh("30s")
        .with_variable(
            grafana.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
    )
    queries = [query for panel in dashboard.panels for query in panel.queries.values()]
    for each in FILTERS:
        if any(map(each.concerns, queries)):
            for variable in each.variables:
                made = made.with_variable(_choice(variable))
    made = made.with_variable(grafana.ConstantVariable("runbook").value(alerts.RUNBOOK))
    made = made.with_variable(grafana.ConstantVariable("console").value(CONSOLE))
    made = (
        made.link(
            grafana.DashboardLink("Dashboards")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .link(_link("Runbook", "${runbook:raw}"))
        .link(_link("Console", "${console:raw}"))
    )
    made = made.annotation(_marks("Alerts", FIRING, BAD))
    made = made.annotation(_marks("Replica starts", filtered(alerts.starts("1m")), "blue"))
    for number, (panel, place) in enumerate(
        zip(dashboard.panels, places(dashboard.panels), strict=True)
    ):
        made = made.with_panel(KINDS[panel.kind](panel, number, place))
    return made.build()


def _choice(variable: Variable) -> grafana.QueryVariable:
    made = (
        grafana.QueryVariable(variable.name)
        .label(variable.label)
        .datasource(SOURCE)
        .query(variable.query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
    )
    return made if variable.all_value is None else made.all_value(variable.all_value)


def _link(title: str, url: str) -> grafana.DashboardLink:
    return grafana.DashboardLink(title).type(DashboardLinkType.LINK).url(url).target_blank(True)


def _marks(name: str, query: str, colour: str) -> grafana.AnnotationQuery:
    """Return marks, in all charts, at the times at which a query has a result."""
    made = grafana.AnnotationQuery().name(name).datasource(SOURCE).enable(True)
    return made.icon_color(colour).expr(query)


def _filled(made: P, panel: Panel, number: int, place: Place) -> P:
    """Return a panel with what all kinds have."""
    entries = {alert.name: alert.anchor for alert in alerts.alerts()}
    made = (
        made.id(number + 1)
        .title(panel.title)
        .description(panel.asks)
        .datasource(SOURCE)
        .unit(panel.unit)
        .grid_pos(GridPos(x=place.x, y=place.y, w=place.width, h=place.height))
        .thresholds(_thresholds(panel))
        .links(
            [_link(f"Headrace{name}", f"${{runbook:raw}}#{entries[name]}") for name in panel.alerts]
        )
    )
    if panel.if_empty:
        made = made.no_value(panel.if_empty)
    for at, (legend, query) in enumerate(panel.queries.items()):
        made = made.with_target(_target(panel, at, legend, query))
    return made


def _target(panel: Panel, at: int, legend: str, query: str) -> Dataquery:
    made = Dataquery().expr(filtered(query)).legend_format(legend).ref_id(_letter(at))
    if panel.kind is Kind.TABLE:
        return made.format(PromQueryFormat.TABLE).instant()
    if panel.kind is Kind.HEATMAP:
        return made.format(PromQueryFormat.HEATMAP)
    return made


def _letter(at: int) -> str:
    return chr(ord("A") + at)


def _thresholds(panel: Panel) -> grafana.ThresholdsConfig:
    """Return the panel's limits as steps of colour. Grafana colours values from a step on; a count
    above 0 is a count of 1 or more."""
    values = sorted(alerts.T[name].value or 1 for name in panel.limits)
    base, colours = GOOD, [*[BETWEEN] * (len(values) - 1), BAD]
    if panel.is_good_above:
        base, colours = BAD, [*[BETWEEN] * (len(values) - 1), GOOD]
    steps = [Threshold(value, colour) for value, colour in zip(values, colours, strict=False)]
    first = Threshold(None, base)
    return grafana.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps([first, *steps])


def _time_series(panel: Panel, number: int, place: Place) -> timeseries.Panel:
    made = _filled(timeseries.Panel(), panel, number, place).min(0)
    made = made.legend(
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    if panel.limits:
        style = common.GraphThresholdsStyleConfig().mode(GraphTresholdsStyleMode.DASHED)
        made = made.thresholds_style(style)
    return made if panel.max_value is None else made.max(panel.max_value)


def _stat(panel: Panel, number: int, place: Place) -> stat.Panel:
    return (
        _filled(stat.Panel(), panel, number, place)
        .graph_mode(BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def _gauge(panel: Panel, number: int, place: Place) -> gauge.Panel:
    made = (
        _filled(gauge.Panel(), panel, number, place)
        .min(0)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    return made if panel.max_value is None else made.max(panel.max_value)


def _table(panel: Panel, number: int, place: Place) -> table.Panel:
    """Return a table: a row for each combination of labels, a column for each query. A column
    without a heading is hidden. The column `alertname` links to the runbook's entries."""
    several = len(panel.queries) > 1
    values = {
        f"Value #{_letter(at)}" if several else "Value": heading
        for at, heading in enumerate(panel.queries)
    }
    hidden = {"Time": True, **{name: True for name, heading in values.items() if not heading}}
    renamed = {name: heading for name, heading in values.items() if heading}
    made = (
        _filled(table.Panel(), panel, number, place)
        .show_header(True)
        .with_transformation(DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(
            DataTransformerConfig(
                id_val="organize", options={"excludeByName": hidden, "renameByName": renamed}
            )
        )
        .override_by_name("runbook", [DynamicConfigValue("custom.hidden", True)])
        .override_by_name(
            "alertname",
            [
                DynamicConfigValue(
                    "links",
                    [
                        {
                            "title": "Runbook",
                            "url": "${runbook:raw}#${__data.fields.runbook}",
                            "targetBlank": True,
                        }
                    ],
                )
            ],
        )
    )
    for heading, unit in panel.units.items():
        made = made.override_by_name(heading, [DynamicConfigValue("unit", unit)])
    return made


def _heatmap(panel: Panel, number: int, place: Place) -> heatmap.Panel:
    return (
        _filled(heatmap.Panel(), panel, number, place)
        .calculate(False)
        .show_tooltip()
        .y_axis(heatmap.YAxisConfig().unit(panel.unit))
    )


def _state_timeline(panel: Panel, number: int, place: Place) -> statetimeline.Panel:
    states = {
        str(value): ValueMappingResult(text=state.text, color=state.colour)
        for value, state in panel.states.items()
    }
    return (
        _filled(statetimeline.Panel(), panel, number, place)
        .mappings([ValueMap(options=states)])
        .show_value(VisibilityMode.NEVER)
        .merge_values(True)
        .row_height(0.8)
    )


KINDS: dict[Kind, Callable[[Panel, int, Place], Builder[GrafanaPanel]]] = {
    Kind.TIME_SERIES: _time_series,
    Kind.STAT: _stat,
    Kind.GAUGE: _gauge,
    Kind.TABLE: _table,
    Kind.HEATMAP: _heatmap,
    Kind.STATE_TIMELINE: _state_timeline,
}

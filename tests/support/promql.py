"""What the dashboards and alerts ask for: every series that their queries name, with its labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import promql_parser
from prometheus_client.parser import text_string_to_metric_families

from scripts.generate.dashboards import alerts
from scripts.generate.dashboards.boards import dashboards
from scripts.generate.dashboards.filters import FILTERS
from scripts.generate.dashboards.grafana import built

VARIABLES = {each.name: each for group in FILTERS for each in group.variables}
ROOM = {"$__rate_interval": "5m", **dict.fromkeys((f"${name}" for name in VARIABLES), ".*")}
"""What stands for Grafana's variables."""
DCGM = "DCGM_FI_"
"""Beginning of the metrics of NVIDIA's dcgm-exporter, which is no part of an app."""
MADE_HERE = frozenset({"ReplicaId"})
"""Labels that a query makes itself, with label_replace."""


class Asked(NamedTuple):
    """A series that a query names.

    Attributes:
        where: which panel or alert.
        matchers: label, operator and value.
        labels: further labels that the query groups or joins by.
    """

    where: str
    metric: str
    matchers: tuple[tuple[str, str, str], ...]
    labels: frozenset[str]


def queries() -> Iterator[tuple[str, str]]:
    """Where, and PromQL: of all panels and alerts, with Grafana's variables filled in."""
    for dashboard in map(built, dashboards()):
        for panel in dashboard.panels or ():
            for target in panel.targets:
                text = target.expr
                for name, value in ROOM.items():
                    text = text.replace(name, value)
                yield f"{dashboard.uid}: {panel.title}", text
    for variable in VARIABLES.values():
        text = variable.query.removeprefix("label_values(").removesuffix(")")
        metric, _, label = text.rpartition(", ")
        for name, value in ROOM.items():
            metric = metric.replace(name, value)
        yield f"variable {variable.name}", f"sum by ({label}) ({metric})"
    for alert in alerts.alerts():
        yield alert.name, alert.query


def asked() -> list[Asked]:
    """All of them."""
    return [one for where, text in queries() for one in _walk(where, promql_parser.parse(text))]


def _walk(where: str, node: Any, labels: frozenset[str] = frozenset()) -> Iterator[Asked]:
    """The series below a node that is grouped or joined by `labels`."""
    match node:
        case promql_parser.VectorSelector():
            found = tuple((m.name, str(m.op), m.value) for m in node.matchers.matchers)
            yield Asked(where, node.name, found, labels)
        case promql_parser.MatrixSelector():
            yield from _walk(where, node.vector_selector, labels)
        case promql_parser.AggregateExpr():
            by = frozenset(node.modifier.labels) if node.modifier else frozenset()
            yield from _walk(where, node.expr, by)  # what is outside sees only these
        case promql_parser.BinaryExpr():
            joined = node.modifier.matching if node.modifier else None
            on = frozenset(joined.labels if joined else ())
            brought = frozenset((node.modifier.group_labels if node.modifier else None) or ())
            yield from _walk(where, node.lhs, (labels - brought) | on)
            yield from _walk(where, node.rhs, (labels & brought if brought else labels) | on)
        case promql_parser.Call():
            for argument in node.args:
                yield from _walk(where, argument, labels)
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            yield from _walk(where, node.expr, labels)


def exported(text: str) -> dict[str, list[dict[str, str]]]:
    """The labels of each series in Prometheus' text format, by the name of its samples."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found

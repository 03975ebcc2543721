"""Panels and dashboards as they are written down: what they ask, and what shows the answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

COLUMNS = 24
"""Width of Grafana's grid."""


class Kind(Enum):
    """How a panel shows its answer."""

    TIME_SERIES = auto()
    STAT = auto()
    GAUGE = auto()
    TABLE = auto()
    HEATMAP = auto()
    STATE_TIMELINE = auto()


SIZES = {Kind.STAT: (4, 4), Kind.GAUGE: (4, 4), Kind.TABLE: (24, 8)}
"""Usual width and height of a kind, in cells of the grid; `SIZE` for the others."""
SIZE = (12, 8)


class State(NamedTuple):
    """The text and the colour of a value in a state timeline."""

    text: str
    colour: str


HEALTH = {1: State("healthy", "green"), 0: State("failing", "red")}
"""States of Serve's health checks."""


@dataclass(frozen=True)
class Panel:
    """A panel of a dashboard.

    Attributes:
        asks: the operator's question; Grafana shows it at the panel's head.
        queries: PromQL by legend; `{{label}}` in a legend is filled in. In a table, each query is
            a column, and the legend its heading.
        unit: Grafana's name of the unit.
        max_value: top of the axis; None for no limit.
        limits: names of thresholds (`alerts.T`) that are drawn.
        is_good_above: whether values above the limit are the good ones.
        alerts: names of alerts about its answer; the panel links to their runbook entries.
        states: the states of a state timeline, by value.
        units: units of a table's columns, by heading; `unit` for the others.
        if_empty: text in the place of "No data", where no series means that all is well.
        size: width and height; None for those of its kind.
    """

    title: str
    asks: str
    queries: Mapping[str, str] = field(hash=False)
    unit: str = "short"
    max_value: float | None = None
    kind: Kind = Kind.TIME_SERIES
    limits: tuple[str, ...] = ()
    is_good_above: bool = False
    alerts: tuple[str, ...] = ()
    states: Mapping[int, State] = field(default_factory=dict, hash=False)
    units: Mapping[str, str] = field(default_factory=dict, hash=False)
    if_empty: str = ""
    size: tuple[int, int] | None = None


@dataclass(frozen=True)
class DashboardSpec:
    """A dashboard: its name in the address, its title, its panels in reading order."""

    uid: str
    title: str
    panels: tuple[Panel, ...]


class Place(NamedTuple):
    """A panel's place in the grid, in cells."""

    x: int
    y: int
    width: int
    height: int


def places(panels: tuple[Panel, ...]) -> Iterator[Place]:
    """Yield each panel's place: rows from left to right, each as high as its highest panel."""
    x = y = row_height = 0
    for panel in panels:
        width, height = panel.size or SIZES.get(panel.kind, SIZE)
        if x + width > COLUMNS:
            x, y, row_height = 0, y + row_height, 0
        yield Place(x, y, width, height)
        x, row_height = x + width, max(row_height, height)

"""The files that the chart carries: one JSON document a dashboard, and the alerts' rule groups."""

from __future__ import annotations

from pathlib import Path

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from scripts.generate.dashboards.alerts import groups
from scripts.generate.dashboards.boards import dashboards
from scripts.generate.dashboards.grafana import built

CHART_FILES = Path(__file__).parents[3] / "helm" / "headrace" / "files"
WRITTEN = "Written by `python -m scripts.generate`; change the Python there."


def files() -> dict[str, str]:
    """Return the texts of the files, by path below `CHART_FILES`."""
    encoder = JSONEncoder(sort_keys=True, indent=1)
    found = {
        f"dashboards/{dashboard.uid}.json": encoder.encode(built(dashboard)) + "\n"
        for dashboard in dashboards()
    }
    rules = yaml.safe_dump(groups(), sort_keys=False, width=100)
    return {**found, "alerts.yaml": f"# {WRITTEN}\n{rules}"}

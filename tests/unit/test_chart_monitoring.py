"""What the chart gives to Prometheus and Grafana: alerts, dashboards and their links."""

from __future__ import annotations

import json
from typing import Any

import promql_parser
import pytest
import yaml

from tests.support.chart import CHART, merged, objects
from tests.support.chart_objects import of_kind
from tests.support.chart_sets import SETS


def test_alerts_link_to_the_runbook_of_the_released_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))

    def links(address: str) -> list[str]:
        values = merged(SETS["everything"], {"monitoring.runbookUrl": address})
        [rule] = of_kind(objects(values), "PrometheusRule")
        alerts = [one for group in rule["spec"]["groups"] for one in group["rules"]]
        return [alert["annotations"]["runbook_url"] for alert in alerts]

    site = f"https://docs.example.com/headrace/{chart['appVersion']}/runbook/"
    plain = links("")
    assert "docs/runbook.md#headracedown" in plain
    assert links("https://docs.example.com/headrace/{version}/runbook/") == [
        link.replace("docs/runbook.md", site) for link in plain
    ]


@pytest.mark.parametrize(
    ("changes", "runbook", "console"),
    [
        ({"ingress.enabled": False}, "docs/runbook.md", "http://127.0.0.1:8000/console"),
        (
            {"monitoring.runbookUrl": "https://docs.example.com/{version}/runbook.html"},
            "https://docs.example.com/{version}/runbook.html",
            "https://llm.example.com/console",
        ),
        (
            {"monitoring.consoleUrl": "https://chat.example.com/console"},
            "docs/runbook.md",
            "https://chat.example.com/console",
        ),
    ],
    ids=["port-forward", "ingress", "its own address"],
)
def test_all_dashboards_are_shipped_and_link_to_the_runbook_and_the_console(
    changes: dict[str, Any], runbook: str, console: str
) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))["appVersion"]
    maps = of_kind(objects(merged(SETS["everything"], changes)), "ConfigMap")
    texts = {
        name: text
        for one in maps
        if "grafana_dashboard" in one["metadata"]["labels"]
        for name, text in one["data"].items()
    }
    assert texts.keys() == {file.name for file in (CHART / "files/dashboards").glob("*.json")}
    for text in texts.values():
        constants = {
            each["name"]: each["query"]
            for each in json.loads(text)["templating"]["list"]
            if each["type"] == "constant"
        }
        assert constants == {"runbook": runbook.replace("{version}", version), "console": console}


def selectors(expression: Any) -> list[Any]:
    """All vector selectors of a parsed query."""
    found, todo = [], [expression]
    while todo:
        node = todo.pop()
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
            continue
        parts = ("expr", "lhs", "rhs", "vector_selector", "param")
        todo += [part for name in parts if (part := getattr(node, name, None)) is not None]
        todo += list(getattr(node, "args", None) or ())
    return found


def test_the_alerts_of_a_release_look_at_its_own_pods() -> None:
    """Two releases would otherwise both fire for one, and `absent` would be silent while another
    one lives. The PodMonitor sets the label."""
    values = SETS["everything"]
    [monitor] = of_kind(objects(values), "PodMonitor")
    assert monitor["spec"]["podTargetLabels"] == ["app.kubernetes.io/instance"]
    [rule] = of_kind(objects(values), "PrometheusRule")
    alerts = [one for group in rule["spec"]["groups"] for one in group["rules"]]
    for alert in alerts:
        found = selectors(promql_parser.parse(alert["expr"]))
        assert found, alert["alert"]
        for one in found:
            matchers = {m.name: m.value for m in one.matchers.matchers}
            assert matchers["namespace"] == "prod", alert["expr"]
            assert matchers["app_kubernetes_io_instance"] == "demo", alert["expr"]


def test_without_the_pod_monitor_the_alerts_ask_for_no_label_of_its_own() -> None:
    [rule] = of_kind(
        objects(merged(SETS["everything"], {"monitoring.podMonitor": False})), "PrometheusRule"
    )
    assert "app_kubernetes_io_instance" not in str(rule)

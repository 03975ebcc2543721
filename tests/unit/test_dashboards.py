"""The dashboards: files that are current, panels that ask, and metrics that the code makes."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("grafana_foundation_sdk")

from ray.serve import context as serve_context

from headrace.observability.metrics import TTFT_BUCKETS_S, RayGatewayMetrics, RayPlanMetrics
from headrace.observability.speculation import RaySpeculationMetrics
from headrace.observability.store import RayStoreMetrics
from headrace.observability.totals import TotalCounter
from headrace.observability.usage import RayUsageMetrics
from scripts.generate.dashboards import alerts, promql
from scripts.generate.dashboards.boards import dashboards
from scripts.generate.dashboards.files import CHART_FILES, files
from scripts.generate.dashboards.filters import filtered
from scripts.generate.dashboards.panel import COLUMNS, Kind
from tests.support.promql import DCGM, MADE_HERE, VARIABLES, asked

RAYS_OWN = {promql.CLUSTER, "le", "deployment", "replica"}
EVERYWHERE = {"datasource", "model", promql.CLUSTER, "runbook", "console"}
"""Variables of all dashboards."""
NIXL_PREFIX = "ray_vllm_nixl_"
NIXL = f"{NIXL_PREFIX}num_"
"""Counters of failures, in `NIXL_FILE` of vLLM."""
NIXL_FILE = "distributed/kv_transfer/kv_connector/v1/nixl/stats.py"
RAY_FOLDERS = {"ray_serve_": "serve/_private", "ray_node_": "dashboard/modules/reporter"}
"""Folders of Ray with the names of its metrics."""
DCGM_DEFAULTS = {
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    "DCGM_FI_PROF_DRAM_ACTIVE",
    "DCGM_FI_DEV_XID_ERRORS",
}
"""Metrics that dcgm-exporter exports unless it is told otherwise (`default-counters.csv`)."""


def variables_in(query: str) -> set[str]:
    """Return the names of the variables in a query."""
    return set(re.findall(r"\$([A-Za-z]\w*)", query))


def of_ours() -> dict[str, set[str]]:
    """Exported names of Headrace's own metrics, with the labels of each."""
    found: dict[str, set[str]] = {}

    def take(value: Any) -> None:
        value = value.counter if isinstance(value, TotalCounter) else value
        info = getattr(value, "info", None)
        if isinstance(value, dict):
            for each in value.values():
                take(each)
        elif isinstance(info, dict) and "tag_keys" in info:
            for suffix in {"Counter": ("_total",), "Histogram": ("_bucket", "_sum", "_count")}.get(
                type(value).__name__, ("",)
            ):
                found[f"ray_{info['name']}{suffix}"] = set(info["tag_keys"])

    kinds = (RayPlanMetrics, RaySpeculationMetrics, RayStoreMetrics, RayUsageMetrics)
    for made in (RayGatewayMetrics(), *(kind() for kind in kinds)):
        take(vars(made))
    return found


def test_the_files_of_the_chart_are_current() -> None:
    wanted = files()
    there = {
        str(path.relative_to(CHART_FILES))
        for path in [*CHART_FILES.glob("dashboards/*.json"), CHART_FILES / "alerts.yaml"]
    }
    assert there == wanted.keys()
    for name, text in wanted.items():
        hint = f"{name} is old: run python -m scripts.generate"
        assert (CHART_FILES / name).read_text() == text, hint


def documents() -> list[dict[str, Any]]:
    """The dashboards as Grafana reads them."""
    return [json.loads(text) for name, text in files().items() if name.endswith(".json")]


def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    """The cells of the grid that a panel covers."""
    place = panel["gridPos"]
    columns = range(place["x"], place["x"] + place["w"])
    return {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}


def test_ids_are_unique_and_panels_do_not_overlap() -> None:
    uids = [document["uid"] for document in documents()]
    assert len(set(uids)) == len(uids) == 9
    for document in documents():
        panels = document["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        covered = [cell for panel in panels for cell in cells(panel)]
        assert len(set(covered)) == len(covered), document["uid"]
        assert max(x for x, _ in covered) < COLUMNS


def test_the_overview_fits_on_one_screen() -> None:
    (overview,) = (each for each in documents() if each["uid"] == "headrace-overview")
    assert max(y for panel in overview["panels"] for _, y in cells(panel)) < 20


def test_a_dashboard_has_the_variables_that_its_queries_use() -> None:
    for document in documents():
        there = [each["name"] for each in document["templating"]["list"]]
        queries = [target["expr"] for panel in document["panels"] for target in panel["targets"]]
        used = {name for query in queries for name in variables_in(query)} & VARIABLES.keys()
        chained = {name for each in used for name in variables_in(VARIABLES[each].query)}
        assert set(there) == EVERYWHERE | used | chained, document["uid"]
        for name in used | chained:
            before = there[: there.index(name)]
            assert variables_in(VARIABLES[name].query) <= set(before), "options depend on it"


def test_role_and_replica_narrow_what_engines_export_and_leave_the_gateways_metrics() -> None:
    query = "ray_vllm_a + ray_serve_b + ray_headrace_plans_total + ray_headrace_gateway_c"
    assert filtered(query) == (
        'ray_vllm_a{SessionName=~"$SessionName", ReplicaId=~"$replica"} + '
        'ray_serve_b{SessionName=~"$SessionName", deployment=~"$role"} + '
        'ray_headrace_plans_total{SessionName=~"$SessionName", replica=~"$replica"} + '
        'ray_headrace_gateway_c{SessionName=~"$SessionName"}'
    )


def test_every_panel_asks_its_question_of_the_chosen_source() -> None:
    for document in documents():
        for panel in document["panels"]:
            assert "?" in panel["description"], panel["title"]
            assert panel["datasource"]["uid"] == "${datasource}"
            letters = [target["refId"] for target in panel["targets"]]
            assert letters and len(set(letters)) == len(letters)
            for target in panel["targets"]:
                assert "$SessionName" in target["expr"] or target["expr"].startswith(DCGM)


def test_limits_are_the_alerts_own() -> None:
    """The steps of colour of a panel are numbers in the rules of the alerts that it links to."""
    rules = yaml.safe_load((CHART_FILES / "alerts.yaml").read_text())["groups"][0]["rules"]
    expressions = {rule["alert"]: rule["expr"] for rule in rules}
    drawn = 0
    for spec, document in zip(dashboards(), documents(), strict=True):
        linked = {name for panel in spec.panels for name in panel.alerts}
        for panel, shown in zip(spec.panels, document["panels"], strict=True):
            steps = shown["fieldConfig"]["defaults"]["thresholds"]["steps"]
            values = [step["value"] for step in steps if step["value"] is not None]
            limits = sorted(alerts.T[name].value for name in panel.limits)
            assert values == [limit or 1 for limit in limits], panel.title
            text = " ".join(expressions[f"Headrace{name}"] for name in panel.alerts or linked)
            numbers = {float(n) for n in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", text)}
            if panel.title != "Alerts that fire":
                assert numbers.issuperset(limits), panel.title
            drawn += len(values)
    assert drawn > 15


def test_every_alert_has_a_panel_that_links_to_its_entry_in_the_runbook() -> None:
    page = (CHART_FILES.parents[2] / "docs" / "runbook.md").read_text()
    anchors = {heading.lower() for heading in re.findall(r"^### (\w+)$", page, re.M)}
    found = {
        link["url"].removeprefix("${runbook:raw}#")
        for document in documents()
        for panel in document["panels"]
        for link in panel["links"]
    }
    assert found <= anchors
    assert found == {alert.anchor for alert in alerts.alerts()}


def test_the_list_of_alerts_links_to_the_runbook_by_a_label_of_the_alerts() -> None:
    for alert in alerts.alerts():
        rule = alert.rule()
        assert rule["annotations"]["runbook_url"].endswith(f"#{rule['labels']['runbook']}")
    text = (CHART_FILES / "dashboards" / "headrace-overview.json").read_text()
    assert "${runbook:raw}#${__data.fields.runbook}" in text


def test_every_dashboard_links_to_the_others_the_runbook_and_the_console() -> None:
    for document in documents():
        links = {link["title"]: link for link in document["links"]}
        assert links.keys() == {"Dashboards", "Runbook", "Console"}
        assert links["Dashboards"]["tags"] == document["tags"] == ["headrace"]
        constants = {
            each["name"]: each["query"]
            for each in document["templating"]["list"]
            if each["type"] == "constant"
        }
        assert (CHART_FILES.parents[2] / constants["runbook"]).is_file()
        assert constants["console"].endswith("/console")


def test_every_chart_marks_firing_alerts_and_starts_of_replicas() -> None:
    for made in documents():
        marks = {each["name"]: each["expr"] for each in made["annotations"]["list"]}
        assert marks["Alerts"] == 'ALERTS{alertname=~"Headrace.+", alertstate="firing"}'
        assert "replica_starts_total" in marks["Replica starts"]
        assert "$SessionName" in marks["Replica starts"]


def test_our_metrics_and_their_labels_are_made_by_the_code() -> None:
    ours = of_ours()
    of_us = [one for one in asked() if one.metric.startswith("ray_headrace_")]
    assert len(of_us) > 50
    for one in of_us:
        labels = {name for name, _, _ in one.matchers} | one.labels
        assert labels - RAYS_OWN - MADE_HERE <= ours.get(one.metric, {"no such metric"}), one
        assert one.metric in ours, one


def test_our_metrics_have_the_labels_of_the_replica_that_makes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = SimpleNamespace(app_name="app", deployment="decode", replica_tag="abc")
    monkeypatch.setattr(serve_context, "_get_internal_replica_context", lambda: replica)
    ours = of_ours()
    assert ours and all(labels >= {"deployment", "replica"} for labels in ours.values())


def test_the_page_of_metrics_lists_all_of_ours_with_their_labels() -> None:
    page = (CHART_FILES.parents[2] / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(headrace_\w+)` \| \w+ \| ([^|]*)\|", page, re.M)
    listed = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    made = {
        re.sub(r"_(total|bucket|sum|count)$", "", name.removeprefix("ray_")): labels
        for name, labels in of_ours().items()
    }
    assert listed.items() >= made.items()


def test_others_metrics_that_only_a_fault_makes_are_in_their_code() -> None:
    vllm = importlib.util.find_spec("vllm")  # importing it takes half a minute
    assert vllm is not None and vllm.origin is not None
    source = (Path(vllm.origin).parent / NIXL_FILE).read_text()
    named = {one.metric for one in asked() if one.metric.startswith(NIXL)}
    assert named
    for metric in named:
        assert f'"vllm:{metric.removeprefix("ray_vllm_").removesuffix("_total")}"' in source


def test_rays_metrics_are_in_its_code() -> None:
    rays = importlib.util.find_spec("ray")
    assert rays is not None and rays.origin is not None
    for prefix, folder in RAY_FOLDERS.items():
        code = "".join(
            file.read_text() for file in (Path(rays.origin).parent / folder).glob("*.py")
        )
        named = {one.metric for one in asked() if one.metric.startswith(prefix)}
        assert named
        for metric in named:
            name = re.sub(r"_(total|bucket|sum|count)$", "", metric.removeprefix("ray_"))
            assert f'"{name}"' in code, metric


def test_vllms_metrics_are_in_its_code() -> None:
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None and vllm.origin is not None
    code = (Path(vllm.origin).parent / "v1/metrics/loggers.py").read_text()
    others = (NIXL_PREFIX, "ray_vllm_headrace_")
    for metric in {one.metric for one in asked() if one.metric.startswith("ray_vllm_")}:
        if not metric.startswith(others):
            name = re.sub(r"_(total|bucket|sum|count)$", "", metric.removeprefix("ray_vllm_"))
            assert f'"vllm:{name}"' in code, metric


def test_all_other_metrics_are_alerts_or_a_documented_exporters() -> None:
    named = {one.metric for one in asked() if not one.metric.startswith("ray_")}
    assert named == {"ALERTS", *DCGM_DEFAULTS}
    for spec in dashboards():
        for panel in spec.panels:
            if DCGM in json.dumps(panel.queries):
                assert "dcgm-exporter" in panel.asks


def test_the_ttft_target_is_a_bucket() -> None:
    assert alerts.T["ttft_s"].value in TTFT_BUCKETS_S


def test_each_threshold_has_a_reason_and_a_use() -> None:
    source = Path(inspect.getsourcefile(alerts) or "").read_text()
    for name, threshold in alerts.T.items():
        assert len(threshold.why) > 20
        assert source.count(f'"{name}"') + source.count(f"'{name}'") > 1, f"{name} is not used"


def test_narrowing_a_query_reaches_each_series_that_a_rule_names() -> None:
    query = 'sum(rate(ray_a{b="c"}[5m])) / ray_d'
    rules = [("ray_", 'x="y"'), ("ray_d", 'z="0"')]
    assert promql.narrowed(query, rules) == (
        'sum(rate(ray_a{x="y", b="c"}[5m])) / ray_d{x="y", z="0"}'
    )


def test_a_dashboard_has_no_more_charts_than_one_reads() -> None:
    numbers = (Kind.STAT, Kind.GAUGE)
    for spec in dashboards():
        assert sum(panel.kind not in numbers for panel in spec.panels) <= 10, spec.uid


def test_the_runbook_names_commands_and_settings_that_exist() -> None:
    docs = CHART_FILES.parents[2] / "docs"
    page, commands, settings = (
        (docs / name).read_text() for name in ("runbook.md", "commands.md", "configuration.md")
    )
    named = set(re.findall(r"`headrace ([a-z]+(?: [a-z]+)?)", page))
    assert named >= {"status", "explain", "doctor"}
    for command in named:
        assert f"`headrace {command}`" in commands, command
    for section, field in re.findall(r"`(gateway|store|router|speculation)\.([a-z_]+)", page):
        assert re.search(rf"`(?:{section}\.)?{field}`", settings), f"{section}.{field}"
    assert len(re.findall(r"`(?:gateway|store)\.[a-z_]+`", page)) > 5


def test_the_runbook_names_panels_that_exist() -> None:
    page = (CHART_FILES.parents[2] / "docs" / "runbook.md").read_text()
    titles = [panel.title for spec in dashboards() for panel in spec.panels]
    named = set(re.findall(r"(?<![*\w])\*([^*|\n]+)\*(?![*\w])", page))
    assert len(named) > 5
    for name in named:
        assert any(title.startswith(name) for title in titles), name


def test_the_page_of_dashboards_lists_all_of_them() -> None:
    page = (CHART_FILES.parents[2] / "docs" / "dashboards.md").read_text()
    rows = re.findall(r"^\| ([\w ]+) \| .*\?.* \|$", page, re.M)
    assert [row.lower() for row in rows] == [
        spec.title.removeprefix("Headrace: ").lower() for spec in dashboards()
    ]


def test_a_prompt_that_one_role_prefills_for_the_other_is_shown_once() -> None:
    (panel,) = (
        panel
        for dashboard in dashboards()
        for panel in dashboard.panels
        if panel.title == "Where prompt tokens come from"
    )
    assert "ray_vllm_" not in json.dumps(panel.queries)

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

pytest.importorskip("grafana_foundation_sdk")

from ray.serve import context as serve_context

from headrace.observability.dashboards import alerts, panels, promql
from headrace.observability.dashboards.files import CHART_FILES, files
from headrace.observability.metrics import TTFT_BUCKETS_S, RayGatewayMetrics, RayPlanMetrics
from headrace.observability.speculation import RaySpeculationMetrics
from headrace.observability.store import RayStoreMetrics
from headrace.observability.totals import TotalCounter
from tests.support.promql import MADE_HERE, asked

RAYS_OWN = {promql.CLUSTER, "le"}
NIXL = "ray_vllm_nixl_num_"
"""Counters of failures, in `NIXL_FILE` of vLLM."""
NIXL_FILE = "distributed/kv_transfer/kv_connector/v1/nixl/stats.py"


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

    kinds = (RayPlanMetrics, RaySpeculationMetrics, RayStoreMetrics)
    for made in (RayGatewayMetrics("a-model"), *(kind() for kind in kinds)):
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
        hint = f"{name} is old: run python -m headrace.observability.dashboards"
        assert (CHART_FILES / name).read_text() == text, hint


def test_ids_are_unique_and_panels_do_not_overlap() -> None:
    documents = [json.loads(text) for name, text in files().items() if name.endswith(".json")]
    assert len({document["uid"] for document in documents}) == len(documents) == 5
    for document in documents:
        ids = [panel["id"] for panel in document["panels"]]
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in document["panels"]]
        assert len(set(ids)) == len(ids) == len(set(places))
        assert {variable["name"] for variable in document["templating"]["list"]} == {
            "datasource",
            promql.CLUSTER,
        }


def test_every_panel_asks_its_question_of_the_chosen_source() -> None:
    for document in (json.loads(t) for n, t in files().items() if n.endswith(".json")):
        for panel in document["panels"]:
            assert "?" in panel["description"], panel["title"]
            assert panel["datasource"]["uid"] == "${datasource}"
            letters = [target["refId"] for target in panel["targets"]]
            assert letters and len(set(letters)) == len(letters)
            assert all("$SessionName" in target["expr"] for target in panel["targets"])


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


def test_others_metrics_that_only_a_fault_makes_are_in_their_code() -> None:
    vllm = importlib.util.find_spec("vllm")  # importing it takes half a minute
    assert vllm is not None and vllm.origin is not None
    source = (Path(vllm.origin).parent / NIXL_FILE).read_text()
    named = {one.metric for one in asked() if one.metric.startswith(NIXL)}
    assert named
    for metric in named:
        assert f'"vllm:{metric.removeprefix("ray_vllm_").removesuffix("_total")}"' in source


def test_the_ttft_target_is_a_bucket() -> None:
    assert alerts.T["ttft_s"].value in TTFT_BUCKETS_S


def test_each_threshold_has_a_reason_and_a_use() -> None:
    source = Path(inspect.getsourcefile(alerts) or "").read_text()
    for name, threshold in alerts.T.items():
        assert len(threshold.why) > 20
        assert source.count(f'"{name}"') + source.count(f"'{name}'") > 1, f"{name} is not used"


def test_narrowing_a_query_reaches_each_of_its_series() -> None:
    query = 'sum(rate(ray_a{b="c"}[5m])) / ray_d'
    assert promql.narrowed(query, 'x="y"') == 'sum(rate(ray_a{x="y", b="c"}[5m])) / ray_d{x="y"}'


def test_a_dashboard_has_no_more_panels_than_one_reads() -> None:
    assert all(len(dashboard.panels) <= 10 for dashboard in panels.dashboards())


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


def test_a_prompt_that_one_role_prefills_for_the_other_is_shown_once() -> None:
    (panel,) = (
        panel
        for dashboard in panels.dashboards()
        for panel in dashboard.panels
        if panel.title == "Where prompt tokens come from"
    )
    assert "ray_vllm_" not in json.dumps(panel.queries)

"""A release as a whole: generated files, snapshots, names, size, and `helm test`."""

from __future__ import annotations

from typing import Any

import helm_python as helm
import pytest

from scripts.generate.chart import files
from tests.support.chart import (
    CHART,
    PRESETS,
    REVIEWED,
    SNAPSHOTS,
    merged,
    objects,
    pods,
    preset,
    ray_service,
    rendered,
    snapshot,
    variables,
)
from tests.support.chart_objects import of_kind
from tests.support.chart_sets import SETS

LAPTOP = preset("laptop")
NODE = preset("gpu-node")
CLUSTER = preset("gpu-cluster")


def test_the_generated_files_are_current() -> None:
    """`python -m scripts.generate` writes them."""
    for name, text in files().items():
        assert (CHART / name).read_text("utf-8") == text, name


def test_helm_finds_nothing_to_complain_of() -> None:
    found = helm.lint(str(CHART), values=LAPTOP)
    wrong = [one for one in found["messages"] if one["error"] != "icon is recommended"]
    assert (wrong, found["errors"]) == ([], [])


def test_a_release_is_far_below_the_size_that_kubernetes_takes() -> None:
    whole = sum(map(len, rendered(SETS["everything"]).values()))
    chart = sum(path.stat().st_size for path in CHART.rglob("*") if path.is_file())
    assert whole + chart < 700_000


@pytest.mark.parametrize("name", REVIEWED)
def test_a_preset_renders_what_was_reviewed(name: str) -> None:
    reviewed = (SNAPSHOTS / f"{name}.txt").read_text("utf-8")
    assert snapshot(name) == reviewed, "if it is meant: python -m tests.support.chart"


@pytest.mark.parametrize(
    ("replicas", "conversations", "told"),
    [
        (1, {}, False),
        (2, {}, True),
        (2, {"enabled": False}, False),
        (2, {"object_url": "s3://bucket/conversations"}, False),
    ],
    ids=str,
)
def test_the_notes_say_that_gateways_keep_conversation_state_apart(
    replicas: int, conversations: dict[str, Any], told: bool
) -> None:
    changes = {"config.gateway.replicas": replicas, "config.gateway.conversations": conversations}
    notes = rendered(merged(LAPTOP, changes))["NOTES.txt"]
    assert ("Each gateway pod keeps conversation state of its own" in notes) is told


@pytest.mark.parametrize("values", [LAPTOP, CLUSTER], ids=["laptop", "gpu-cluster"])
def test_rendering_twice_gives_the_same(values: dict[str, Any]) -> None:
    """Argo CD compares: nothing random, nothing asked of a cluster."""
    with helm.Chart.load(str(CHART)) as chart:
        first, second = (chart.render(values, name="demo", namespace="prod") for _ in range(2))
    assert first == second
    for path in (CHART / "templates").rglob("*"):
        if path.is_file():
            text = path.read_text("utf-8")
            for word in ("lookup ", "randAlpha", "genCA", "genSelfSigned", "now "):
                assert word not in text, f"{path.name}: {word}"


@pytest.mark.parametrize("name", PRESETS)
def test_a_first_start_is_never_given_up_unless_asked(name: str) -> None:
    """KubeRay's end of a first start is final: it deletes the pods and ignores later values."""
    key = "ray.io/initializing-timeout"
    assert key not in ray_service(preset(name))["metadata"].get("annotations", {})
    asked = merged(preset(name), {"startup.giveUpSeconds": 7200})
    assert ray_service(asked)["metadata"]["annotations"][key] == "7200"


def test_long_names_that_differ_stay_different() -> None:
    long = "inference-platform-team-a-production-qwen-7b-v"
    names = [ray_service(LAPTOP, f"{long}{n}")["metadata"]["name"] for n in (1, 2)]
    assert len(set(names)) == 2
    assert all(len(name) <= 40 and name.startswith("inference-platform") for name in names)
    short = "a" * 40
    assert ray_service(LAPTOP, short)["metadata"]["name"] == short


def test_the_ray_service_carries_labels_for_queues_and_all_objects_the_common_ones() -> None:
    values = merged(
        CLUSTER,
        {
            "rayService.labels": {"kueue.x-k8s.io/queue-name": "llm"},
            "rayService.annotations": {"a": "b"},
            "commonLabels": {"team": "search"},
            "monitoring.podMonitor": True,
        },
    )
    metadata = ray_service(values)["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "llm"
    assert metadata["annotations"] == {"a": "b"}
    assert all(one["metadata"]["labels"]["team"] == "search" for one in objects(values))
    for one in objects(values):
        assert "team" not in str(one.get("spec", {}).get("selector", ""))
    assert all(each["metadata"]["labels"]["team"] == "search" for each in pods(values).values())


@pytest.mark.parametrize("values", SETS.values(), ids=SETS.keys())
def test_a_release_needs_no_rights_over_the_cluster(values: dict[str, Any]) -> None:
    """docs/kubernetes.md names what an install writes."""
    always = {"ConfigMap", "Service", "ServiceAccount", "NetworkPolicy", "PodDisruptionBudget"}
    switched_on = {"Secret", "PersistentVolumeClaim", "Job", "Ingress", "HTTPRoute", "Pod"}
    switched_on |= {"PodMonitor", "PrometheusRule", "Certificate"}
    kinds = {one["kind"] for one in objects(values)}
    assert kinds - switched_on <= always | {"RayService"}


def test_more_objects_are_rendered_with_the_release() -> None:
    kind = {"apiVersion": "v1", "kind": "ConfigMap"}
    values = merged(
        LAPTOP,
        {
            "extraObjects": [
                {**kind, "metadata": {"name": "{{ .Release.Name }}-more"}},
                "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: second",
            ]
        },
    )
    names = {one["metadata"]["name"] for one in of_kind(objects(values), "ConfigMap")}
    assert {"demo-more", "second"} <= names


def test_the_test_asks_with_a_key_of_the_secret_that_is_named() -> None:
    [pod] = of_kind(objects(merged(NODE, {"apiKeys.testSecret": "mine"})), "Pod")
    [container] = pod["spec"]["containers"]
    assert variables(container)["HEADRACE_API_KEY"] == {
        "secretKeyRef": {"name": "mine", "key": "key"}
    }


def test_the_test_runs_where_gateways_do() -> None:
    wanted = {"nodeSelector": {"pool": "cpu"}, "tolerations": [{"key": "team"}]}
    [pod] = of_kind(objects(merged(LAPTOP, {f"gateway.{k}": v for k, v in wanted.items()})), "Pod")
    assert pod["spec"].items() >= wanted.items()

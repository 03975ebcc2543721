"""The guides for Kubernetes: each values block renders, each value, file and object that they name
exists.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support import chart_rules
from tests.support.chart import CHART, KEYS, objects, pods, preset, ray_service
from tests.support.chart_objects import KUBERNETES, validate_built_in
from tests.support.chart_sets import SETS

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDES = (
    "first-cluster",
    "install",
    "kubernetes",
    "kubernetes-platforms",
    "recovery",
    "upgrades",
)
LAPTOP = preset("laptop")
NODE = preset("gpu-node")


def blocks(page: str) -> list[Any]:
    """The YAML blocks of a page."""
    text = (DOCS / f"{page}.md").read_text("utf-8")
    return [yaml.safe_load(one) for one in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]


def layered(below: Any, above: Any) -> Any:
    """Two values files, as Helm merges them."""
    if isinstance(below, dict) and isinstance(above, dict):
        return {
            key: layered(below.get(key), above[key]) if key in above else below[key]
            for key in below | above
        }
    return above


VALUES = [
    (page, number, block)
    for page in ("kubernetes", "kubernetes-platforms")
    for number, block in enumerate(blocks(page))
    if "kind" not in block
]


@pytest.mark.parametrize(
    "block", [each[2] for each in VALUES], ids=[f"{page}-{n}" for page, n, _ in VALUES]
)
def test_a_values_block_renders_without_a_fault(block: dict[str, Any]) -> None:
    """On top of the preset for one node, which the pages name."""
    values = layered(NODE, block)
    assert chart_rules.faults(objects(values)) == []
    validate_built_in(objects(values))


def test_every_platform_has_its_section() -> None:
    text = (DOCS / "kubernetes-platforms.md").read_text("utf-8")
    for name in ("OpenShift", "GKE Autopilot", "EKS", "AKS", "k3s and RKE2", "Air-gapped", "Argo"):
        assert f"## {name}" in text
    assert len(VALUES) >= 10


def test_the_application_of_argo_cd_names_files_and_values_of_the_chart() -> None:
    [app] = [one for one in blocks("kubernetes-platforms") if one.get("kind") == "Application"]
    helm = app["spec"]["source"]["helm"]
    assert app["spec"]["source"]["path"] == "helm/headrace"
    values: Any = {}
    for name in helm["valueFiles"]:
        values = layered(values, yaml.safe_load((CHART / name).read_text("utf-8")))
    assert chart_rules.faults(objects(layered(values, helm["valuesObject"]))) == []


def test_the_pod_that_fills_a_claim_mounts_it_as_the_release_does() -> None:
    found = [one for one in blocks("kubernetes-platforms") if one.get("kind") == "Pod"]
    [loader] = found
    kubernetes_validate.validate(loader, KUBERNETES, strict=True)
    [mount] = loader["spec"]["containers"][0]["volumeMounts"]
    values = layered(NODE, {"modelCache": {"type": "claim", "claimName": "models"}})
    spec = pods(values)["decode"]["spec"]
    mounts = {each["name"]: each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
    [volume] = [each for each in spec["volumes"] if each["name"] == "models"]
    assert mounts["models"] == mount["mountPath"]
    assert volume["persistentVolumeClaim"]["claimName"] == "models"
    assert loader["spec"]["securityContext"]["runAsUser"] == spec["securityContext"]["runAsUser"]


@pytest.mark.parametrize("page", GUIDES)
def test_files_values_and_objects_that_a_guide_names_exist(page: str) -> None:
    guide = (DOCS / f"{page}.md").read_text("utf-8")
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    for path in re.findall(r"-f (helm/headrace/\S+)", guide):
        assert (CHART.parents[1] / path).is_file(), path
    groups = "|".join(schema["properties"])
    for path in re.findall(rf"(?<![\w.\-/])(?:{groups})(?:\.\w+)+", guide):
        if path.endswith(".io") or ".k8s." in path:
            continue  # the name of an API or an annotation
        node = schema
        for key in path.split("."):
            if "$ref" in node:
                node = schema["$defs"][node["$ref"].rpartition("/")[2]]
            if "properties" not in node:
                break
            assert key in node["properties"] or key == "ROLE", path
            node = node["properties"].get(key, {})
    names = {one["metadata"]["name"] for one in objects(LAPTOP, name="headrace")}
    for kind, name in re.findall(r"\b(rayservice|service)/([a-z][\w-]+)", guide):
        assert name.removesuffix("-head-svc") in names, f"{kind}/{name}"


def test_the_presets_images_are_those_that_the_guides_build() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))["appVersion"]
    first = (DOCS / "first-cluster.md").read_text("utf-8")
    assert f"-t headrace-cpu:{version} ." in first
    assert f"kind load docker-image headrace-cpu:{version}" in first
    found = {preset(name)["image"]["repository"] for name in ("gpu-node", "gpu-cluster")}
    assert found == {"headrace-gpu"}
    assert f"REGISTRY/headrace-gpu:{version}" in (DOCS / "images.md").read_text("utf-8")


@pytest.mark.parametrize("page", ["first-cluster", "install"])
def test_a_laptop_has_the_memory_that_a_guide_asks_for(page: str) -> None:
    cluster = ray_service(LAPTOP)["spec"]["rayClusterConfig"]
    asked = sum(
        int(container["resources"]["requests"]["memory"].removesuffix("Mi")) * 2**20
        for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        for container in group["template"]["spec"]["containers"]
    )
    found = re.findall(r"4 CPUs(?: and|,) (\d+) GiB", (DOCS / f"{page}.md").read_text("utf-8"))
    assert found
    for gib in found:
        assert asked + 1.5 * 2**30 < int(gib) * 2**30, "Kubernetes and the operator need 1.5 GiB"


def test_the_pods_that_the_first_cluster_shows_are_those_of_the_preset() -> None:
    """KubeRay names them after the Ray cluster, the group and the kind."""
    text = (DOCS / "first-cluster.md").read_text("utf-8")
    shown = set(re.findall(r"^headrace-x7k2p-(\w+)", text, re.MULTILINE))
    assert shown == set(pods(LAPTOP))
    # Init containers: the chart's, and KubeRay's wait for the head in workers.
    for role, template in pods(LAPTOP).items():
        count = len(template["spec"]["initContainers"]) + (role != "head")
        assert f"Init:0/{count}" in next(
            line for line in text.splitlines() if line.startswith(f"headrace-x7k2p-{role}")
        )


def test_the_status_names_the_number_of_sets_of_values() -> None:
    assert f"for {len(SETS)} sets of values" in (DOCS / "status.md").read_text("utf-8")


def test_keys_of_the_presets_are_named_as_in_the_guides() -> None:
    assert KEYS["apiKeys"]["existingSecret"] in (DOCS / "install.md").read_text("utf-8")

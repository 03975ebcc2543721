"""Releases on a real API server: it takes all objects and the pods that KubeRay would make of them,
keeps them as they were meant, and nothing is left of them that the guides do not name."""

from __future__ import annotations

import json
from typing import Any

import helm_python as helm
import pytest

from tests.support.apiserver import ApiServer, Refused
from tests.support.apiserver_release import Helm, kuberay_pods, names, rest
from tests.support.chart import PRESETS, merged, objects, preset
from tests.support.chart_objects import Object, cluster_of, of_kind
from tests.support.chart_sets import CASES

LAPTOP = preset("laptop")


@CASES
def test_a_release_is_taken_and_goes_without_a_rest(
    server: ApiServer, namespace: str, values: dict[str, Any]
) -> None:
    release = Helm(server, namespace)
    for one in objects(values):
        server.create(one, namespace, dry_run=True)  # as Helm 3 does
    release.install(values)
    assert release.faults() == []
    for name, pod in kuberay_pods(release.manifest).items():
        made = server.create(pod, namespace, dry_run=True)
        assert made["spec"]["priority"] >= 0, name
    release.uninstall()
    kept = {
        f"{one['kind']} {one['metadata']['name']}"
        for one in release.manifest
        if "helm.sh/resource-policy" in (one["metadata"].get("annotations") or {})
    }
    assert rest(server, namespace) == kept
    if kept:
        release.install(values)  # what was kept is adopted
        assert release.faults() == []
    release.close()


@pytest.mark.parametrize(
    ("name", "level", "refused"),
    [
        ("laptop", "restricted", None),
        ("gpu-node", "restricted", "hostPath"),
        ("gpu-node", "baseline", "hostPath"),
        ("gpu-cluster", "baseline", "IPC_LOCK"),
        ("gpu-cluster", "privileged", None),
    ],
)
def test_which_level_of_pod_security_a_preset_needs(
    server: ApiServer, name: str, level: str, refused: str | None
) -> None:
    """As docs/install.md says: host paths and IPC_LOCK need more than `baseline`."""
    namespace = server.namespace(**{"pod-security.kubernetes.io/enforce": level})
    Helm(server, namespace).install(preset(name))
    pods = kuberay_pods(objects(preset(name)))
    if refused is None:
        for pod in pods.values():
            server.create(pod, namespace, dry_run=True)
        return
    with pytest.raises(Refused, match=f"violates PodSecurity.*{refused}"):
        server.create(pods["decode"], namespace, dry_run=True)


def test_without_host_paths_the_node_preset_passes_the_strictest_level(server: ApiServer) -> None:
    namespace = server.namespace(**{"pod-security.kubernetes.io/enforce": "restricted"})
    values = merged(preset("gpu-node"), {"modelCache.type": "ephemeral"})
    Helm(server, namespace).install(values)
    for pod in kuberay_pods(objects(values)).values():
        server.create(pod, namespace, dry_run=True)


@pytest.mark.parametrize(
    "pair",
    [
        ("demo", "demo-gateway"),
        ("demo", "demo-pods"),
        # 53 characters are Helm's limit.
        (f"{'inference-platform-team-a-production-qwen'}-7b-v1", "i" * 53),
        (
            "inference-platform-team-a-production-qwen-7b-v1",
            "inference-platform-team-a-production-qwen-7b-v2",
        ),
    ],
)
def test_two_releases_share_a_namespace(
    server: ApiServer, namespace: str, pair: tuple[str, str]
) -> None:
    releases = [Helm(server, namespace, name) for name in pair]
    for release in releases:
        release.install(preset("gpu-cluster"))
    assert [release.faults() for release in releases] == [[], []]
    releases[0].uninstall()
    assert releases[1].faults() == [], "the other's objects are still there"


def test_what_kuberay_writes_survives_an_upgrade(server: ApiServer, namespace: str) -> None:
    """Its finalizer and the status."""
    release = Helm(server, namespace)
    release.install(LAPTOP)
    path = server.path("RayService", namespace, "demo")
    merge = "application/merge-patch+json"
    finalizers = {"metadata": {"finalizers": ["ray.io/rayservice-finalizer"]}}
    server.ask("PATCH", path, finalizers, content_type=merge)
    status = {"status": {"serviceStatus": "Running", "observedGeneration": 1}}
    server.ask("PATCH", f"{path}/status", status, content_type=merge)
    release.upgrade(merged(LAPTOP, {"config.router.policy": "local"}))
    live = server.get("RayService", namespace, "demo")
    assert release.faults() == []
    assert live["metadata"]["finalizers"] == finalizers["metadata"]["finalizers"]
    assert live["status"]["serviceStatus"] == "Running"
    assert live["metadata"]["generation"] == 2, "by which KubeRay sees the change"


@pytest.mark.parametrize("name", PRESETS)
def test_an_upgrade_without_a_change_changes_nothing(
    server: ApiServer, namespace: str, name: str
) -> None:
    """KubeRay would otherwise make a new cluster at each `helm upgrade`."""
    release = Helm(server, namespace)
    release.install(preset(name))
    before = server.get("RayService", namespace, "demo")
    release.upgrade(preset(name))
    after = server.get("RayService", namespace, "demo")
    assert after["metadata"]["generation"] == before["metadata"]["generation"] == 1
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


# What the server refuses, that the rules of tests/support/chart_rules.py find without one


def worker(one: Object) -> Object:
    """The main container of the last group of a RayService."""
    template = one["spec"]["rayClusterConfig"]["workerGroupSpecs"][-1]["template"]
    return dict(template["spec"]["containers"][0])


def test_a_variable_that_is_there_twice_is_refused(server: ApiServer, namespace: str) -> None:
    [service] = of_kind(objects(LAPTOP), "RayService")
    worker(service)["env"].append({"name": "HOME", "value": "/"})
    with pytest.raises(Refused, match="Duplicate value"):
        server.create(service, namespace)


def test_a_field_that_kuberay_does_not_have_is_refused(server: ApiServer, namespace: str) -> None:
    [service] = of_kind(objects(LAPTOP), "RayService")
    service["spec"]["rayClusterConfig"]["autoscaling"] = True
    with pytest.raises(Refused, match="unknown field"):
        server.create(service, namespace)


def test_only_one_manager_may_be_named(server: ApiServer, namespace: str) -> None:
    """A rule of KubeRay's CRD in CEL: it is compiled and applied."""
    [service] = of_kind(objects(LAPTOP), "RayService")
    service["spec"]["managedBy"] = "nobody"
    with pytest.raises(Refused, match="managedBy field value must be either"):
        server.create(service, namespace)


def test_a_ray_cluster_of_the_release_is_valid(server: ApiServer, namespace: str) -> None:
    """KubeRay makes it of the RayService's `rayClusterConfig`."""
    for name in PRESETS:
        cluster = {
            "apiVersion": "ray.io/v1",
            "kind": "RayCluster",
            "metadata": {"name": f"demo-{name}"},
            "spec": json.loads(json.dumps(cluster_of(objects(preset(name))))),
        }
        server.create(cluster, namespace)
    assert names(server, "RayCluster", namespace) == {f"demo-{name}" for name in PRESETS}


def test_an_object_of_another_release_is_not_taken_over(server: ApiServer, namespace: str) -> None:
    """Such as one of the same name, by `nameOverride`."""
    Helm(server, namespace, "one").install(merged(LAPTOP, {"nameOverride": "llm"}))
    with pytest.raises(helm.HelmError, match="cannot be imported into the current release"):
        Helm(server, namespace, "two").install(merged(LAPTOP, {"nameOverride": "llm"}))

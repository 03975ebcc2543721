"""Evictions on a real API server with Kubernetes' own controller of disruption budgets: what a
drain of nodes meets. Needs kube-controller-manager beside the other binaries."""

from __future__ import annotations

import pytest

from tests.support.apiserver import ApiServer, Refused
from tests.support.apiserver_release import Helm, kuberay_pods
from tests.support.app import until
from tests.support.chart import preset
from tests.support.chart_objects import Object, cluster_of, groups

CLUSTER = "demo-x7k2p"


@pytest.fixture(scope="module")
def controllers(server: ApiServer) -> None:
    if not server.start_controllers("disruption-controller"):
        pytest.skip("kube-controller-manager is not beside kube-apiserver")


def start_pods(server: ApiServer, namespace: str, manifest: list[Object]) -> list[str]:
    """Make a release's pods as KubeRay and a kubelet would: owned by a RayCluster, and ready."""
    cluster = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": CLUSTER},
        "spec": cluster_of(manifest),
    }
    owner = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "name": CLUSTER,
        "uid": server.create(cluster, namespace)["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    found = []
    for name, pod in kuberay_pods(manifest).items():
        pod["metadata"]["ownerReferences"] = [owner]
        pod["spec"]["nodeName"] = "node-1"
        for _ in range(groups(manifest)[name].get("replicas", 1)):
            made = server.create(pod, namespace)["metadata"]["name"]
            found.append(made)
            set_ready(server, namespace, made)
    return found


def set_ready(server: ApiServer, namespace: str, pod: str, status: str = "True") -> None:
    path = server.path("Pod", namespace, pod) + "/status"
    body = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": status}]}}
    server.ask("PATCH", path, body, content_type="application/merge-patch+json")


def evict(server: ApiServer, namespace: str, pod: str) -> None:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    server.ask("POST", server.path("Pod", namespace, pod) + "/eviction", body)


def of_role(pods: list[str], role: str) -> list[str]:
    return [pod for pod in pods if f"-{role}-" in pod]


def test_a_drain_takes_one_ready_pod_of_each_role_at_a_time(
    server: ApiServer, namespace: str, controllers: None
) -> None:
    release = Helm(server, namespace)
    release.install(preset("gpu-cluster"))
    pods = start_pods(server, namespace, release.manifest)

    def allowed() -> list[int]:
        budgets = server.list("PodDisruptionBudget", namespace)
        return [one.get("status", {}).get("disruptionsAllowed", 0) for one in budgets]

    until(lambda: allowed() == [1, 1, 1], 60, "each role may lose a pod", allowed)
    for role in ("gateway", "prefill", "decode"):
        first, second = of_role(pods, role)[:2]
        evict(server, namespace, first)
        with pytest.raises(Refused, match="violate the pod's disruption budget") as refused:
            evict(server, namespace, second)
        assert refused.value.code == 429, "which makes `kubectl drain` ask again"
    [head] = of_role(pods, "head")
    evict(server, namespace, head)  # the guide says what that costs


def test_pods_that_are_not_ready_can_always_be_evicted(
    server: ApiServer, namespace: str, controllers: None
) -> None:
    """Or a node whose engines do not start could never be drained."""
    release = Helm(server, namespace)
    release.install(preset("gpu-cluster"))
    pods = start_pods(server, namespace, release.manifest)
    for pod in of_role(pods, "decode"):
        set_ready(server, namespace, pod, "False")
    for pod in of_role(pods, "decode"):
        until(lambda pod=pod: try_to_evict(server, namespace, pod), 60, "it is evicted")


def try_to_evict(server: ApiServer, namespace: str, pod: str) -> bool:
    try:
        evict(server, namespace, pod)
    except Refused:
        return False
    return True


def test_a_role_with_one_pod_does_not_hold_up_a_drain(
    server: ApiServer, namespace: str, controllers: None
) -> None:
    release = Helm(server, namespace)
    release.install(preset("laptop"))
    for pod in start_pods(server, namespace, release.manifest):
        evict(server, namespace, pod)


def test_a_budget_by_maximum_would_hold_up_every_drain(
    server: ApiServer, namespace: str, controllers: None
) -> None:
    """The chart's have an integer `minAvailable`, since Kubernetes counts no RayCluster's pods."""
    release = Helm(server, namespace)
    release.install({**preset("gpu-cluster"), "podDisruptionBudget": {"enabled": False}})
    pods = start_pods(server, namespace, release.manifest)
    selector = {"matchLabels": {"headrace/role": "decode"}}
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "by-maximum"},
        "spec": {"maxUnavailable": 1, "selector": selector},
    }
    server.create(budget, namespace)

    def said() -> str:
        status = server.get("PodDisruptionBudget", namespace, "by-maximum").get("status", {})
        return " ".join(one["message"] for one in status.get("conditions", []))

    until(lambda: "does not implement the scale subresource" in said(), 60, "it fails", said)
    with pytest.raises(Refused, match="disruption budget"):
        evict(server, namespace, of_role(pods, "decode")[0])

"""Pods of engines: devices, memory, disks, ranks, and how they end."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.load import validate
from tests.support import chart_rules
from tests.support.chart import main_container, merged, objects, pods, preset
from tests.support.chart_objects import app_of, groups, of_kind
from tests.support.chart_sets import SETS

LAPTOP = preset("laptop")
CLUSTER = preset("gpu-cluster")
ENGINES = ("prefill", "decode")


def test_engines_get_their_devices_memory_and_rights() -> None:
    engine = pods(SETS["everything"])["decode"]["spec"]
    [container] = engine["containers"]
    limits = container["resources"]["limits"]
    assert container["resources"]["requests"] == limits
    assert (limits["nvidia.com/gpu"], limits["rdma/ib"], limits["hugepages-2Mi"]) == (
        *("1", "1", "2Gi"),
    )
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    volumes = {volume["name"]: volume for volume in engine["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{65 * 1024}Mi"}
    assert volumes["kv"]["hostPath"]["path"] == "/var/lib/headrace"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert (mounts["kv"], mounts["shm"], mounts["models"]) == ("/kv", "/dev/shm", "/models")
    assert engine["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert "keys" not in volumes and "tls" not in volumes, "only gateways read these"


def test_engine_pods_of_one_node_share_its_folder_in_which_the_store_gives_each_a_slot() -> None:
    """What they do with it: `test_kv_slots`."""
    folders = set()
    for role in ("prefill", "decode"):
        spec = pods(CLUSTER)[role]["spec"]
        [volume] = [each for each in spec["volumes"] if each["name"] == "kv"]
        [mount] = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "kv"]
        folders.add((volume["hostPath"]["path"], mount["mountPath"]))
    [(_, mounted)] = folders
    assert app_of(objects(CLUSTER))["store"]["nvme_folder"] == mounted


@pytest.mark.parametrize(
    ("values", "source"),
    [
        (LAPTOP, {"emptyDir": {}}),
        (
            SETS["compiled code in a folder of the node"],
            {"hostPath": {"path": "/var/lib/headrace-cache", "type": "DirectoryOrCreate"}},
        ),
        (
            SETS["compiled code in a claim"],
            {"persistentVolumeClaim": {"claimName": "compiled"}},
        ),
    ],
    ids=["ephemeral", "hostPath", "claim"],
)
def test_compiled_code_of_engines_may_outlive_their_pods(
    values: dict[str, Any], source: dict[str, Any]
) -> None:
    """The images keep it in /cache. Other pods compile little."""
    for role, template in pods(values).items():
        [volume] = [each for each in template["spec"]["volumes"] if each["name"] == "cache"]
        mounts = template["spec"]["containers"][0]["volumeMounts"]
        [mount] = [each for each in mounts if each["name"] == "cache"]
        expected = source if role in ENGINES else {"emptyDir": {}}
        assert volume == {"name": "cache", **expected}, role
        assert mount["mountPath"] == "/cache"


def test_claims_of_devices_replace_the_resource_key() -> None:
    spec = pods(SETS["claims of devices with autoscaling"])["decode"]["spec"]
    [container] = spec["containers"]
    assert container["resources"]["claims"] == [{"name": "gpu"}]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({}, ["nvidia.com/gpu"]),
        (
            {"decode.tolerations": [{"key": "team", "operator": "Exists"}]},
            ["nvidia.com/gpu", "team"],
        ),
        (
            {"decode.gpuKey": "nvidia.com/mig-3g.40gb"},
            ["nvidia.com/mig-3g.40gb", "nvidia.com/gpu"],
        ),
        ({"decode.gpuKey": "amd.com/gpu"}, ["amd.com/gpu"]),
        (
            {"decode.resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h100"}]},
            ["nvidia.com/gpu"],
        ),
    ],
    ids=str,
)
def test_engines_tolerate_the_taint_of_their_nodes_and_ones_own(
    changes: dict[str, Any], keys: list[str]
) -> None:
    tolerations = pods(merged(CLUSTER, changes))["decode"]["spec"]["tolerations"]
    assert [each["key"] for each in tolerations] == keys


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"decode.gpuKey": "nvidia.com/mig-3g.40gb"},
        {"decode.resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h100"}]},
    ],
    ids=str,
)
def test_rays_autoscaler_knows_the_gpus_of_an_engine_pod(changes: dict[str, Any]) -> None:
    """Otherwise it reads only keys that end in `gpu`, and never adds a pod with another one."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _get_num_gpus

    group = groups(objects(merged(CLUSTER, changes)))["decode"]
    resources = main_container(merged(CLUSTER, changes), "decode")["resources"]
    found = _get_num_gpus(group["resources"], group["rayStartParams"], resources, "decode")
    assert found == 1


@pytest.mark.parametrize("gpus", [2, 8])
def test_a_tensor_parallel_engine_has_the_gpus_and_queues_of_one_pod(gpus: int) -> None:
    changes: dict[str, Any] = {}
    for role in ENGINES:
        changes[f"config.{role}.gpus"] = gpus
        changes[f"config.{role}.engine.tensor_parallel_size"] = gpus
    values = merged(CLUSTER, changes)
    container = main_container(values, "decode")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(gpus)
    [shm] = [v for v in pods(values)["decode"]["spec"]["volumes"] if v["name"] == "shm"]
    assert shm["emptyDir"]["sizeLimit"] == f"{(64 + gpus) * 1024}Mi"
    group = groups(objects(values))["decode"]
    assert (group["resources"]["GPU"], group["resources"]["headrace_decode"]) == (str(gpus),) * 2
    config = validate(app_of(objects(values)), files_here=False)
    asked = config.decode.cpus * config.decode.gpus
    assert asked <= float(container["resources"]["limits"]["cpu"])


@pytest.mark.parametrize(("replicas", "ranks"), [(1, 2), (2, 4)])
def test_a_data_parallel_role_has_a_pod_for_each_rank(replicas: int, ranks: int) -> None:
    """Serve multiplies the replicas by it, and gives each a place of its own."""
    changes = {
        "config.decode.replicas": replicas,
        "config.decode.engine.data_parallel_size": ranks,
        "config.decode.engine.enable_expert_parallel": True,
    }
    group = groups(objects(merged(CLUSTER, changes)))["decode"]
    counts = {group[name] for name in ("replicas", "minReplicas", "maxReplicas")}
    assert counts == {replicas * ranks}
    scaling = {"config.decode.autoscaling": {"min_replicas": 1, "max_replicas": 3}}
    group = groups(objects(merged(merged(CLUSTER, changes), scaling)))["decode"]
    assert (group["minReplicas"], group["maxReplicas"]) == (ranks, 3 * ranks)


def test_the_budget_follows_the_minimum_of_pods_and_one_pod_has_none() -> None:
    def budgets(values: dict[str, Any]) -> dict[str, int]:
        found = of_kind(objects(values), "PodDisruptionBudget")
        specs = [one["spec"] for one in found]
        assert all(s["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for s in specs)
        return {s["selector"]["matchLabels"]["headrace/role"]: s["minAvailable"] for s in specs}

    assert budgets(LAPTOP) == {}
    assert budgets(CLUSTER) == {"gateway": 1, "prefill": 1, "decode": 3}
    scaling = {"config.decode.autoscaling": {"min_replicas": 3, "max_replicas": 9}}
    assert budgets(merged(LAPTOP, scaling)) == {"decode": 2}
    assert budgets(merged(CLUSTER, {"podDisruptionBudget.enabled": False})) == {}


@pytest.mark.parametrize("drain_s", [0, 7, 600.5])
def test_a_pod_that_ends_leaves_its_requests_the_drain(drain_s: float) -> None:
    """Ray's own limit is 30 s. The grace period holds Ray's drain and the gateway's preStop."""
    assert list(chart_rules.unready(objects(merged(LAPTOP, {"config.drain_s": drain_s})))) == []

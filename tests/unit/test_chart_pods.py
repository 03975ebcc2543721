"""Values of all pods: variables, users, text, and the template that is merged into them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chart import (
    GROUPS,
    main_container,
    merged,
    objects,
    pods,
    preset,
    variables,
)
from tests.support.chart_objects import of_kind

LAPTOP = preset("laptop")
CLUSTER = preset("gpu-cluster")
ENGINES = ("prefill", "decode")


@pytest.mark.parametrize("role", ["head", *GROUPS])
@pytest.mark.parametrize("name", ["HOME", "PYTHONHASHSEED", "RAY_worker_niceness", "NEW"])
def test_a_variable_of_ones_own_wins(role: str, name: str) -> None:
    values = merged(LAPTOP, {f"{role}.env": {name: "mine"}})
    names = [each["name"] for each in main_container(values, role)["env"]]
    assert names.count(name) == 1
    assert variables(main_container(values, role))[name] == "mine"


@pytest.mark.parametrize("role", ENGINES)
def test_a_folder_for_the_hub_and_a_token_may_be_ones_own(role: str) -> None:
    secret = {"valueFrom": {"secretKeyRef": {"name": "mine", "key": "token"}}}
    values = merged(
        LAPTOP,
        {
            "modelCache.tokenSecret": "hub",
            f"{role}.env": {"HF_HOME": "/mnt/hf", "HF_TOKEN": secret},
        },
    )
    found = variables(main_container(values, role))
    assert (found["HF_HOME"], found["HF_TOKEN"]) == ("/mnt/hf", secret["valueFrom"])


@pytest.mark.parametrize(
    ("written", "text"),
    [(1, "1"), (True, "true"), (0.5, "0.5"), (20261127, "20261127"), ("a", "a")],
)
def test_numbers_and_booleans_are_taken_where_kubernetes_wants_text(
    written: Any, text: str
) -> None:
    values = merged(
        LAPTOP,
        {
            "decode.env": {"NCCL_IB_DISABLE": written},
            "decode.nodeSelector": {"gpu": written},
            "decode.podTemplate": {
                "metadata": {"annotations": {"a": written}, "labels": {"b": written}},
                "spec": {
                    "containers": [{"name": "ray-worker", "env": [{"name": "C", "value": written}]}]
                },
            },
            "service.annotations": {"d": written},
            "commonLabels": {"e": written},
        },
    )
    decode = pods(values)["decode"]
    assert variables(main_container(values, "decode"))["NCCL_IB_DISABLE"] == text
    assert variables(main_container(values, "decode"))["C"] == text
    assert decode["spec"]["nodeSelector"] == {"gpu": text}
    assert decode["metadata"]["annotations"] == {"a": text}
    assert (decode["metadata"]["labels"]["b"], decode["metadata"]["labels"]["e"]) == (text, text)
    [service] = of_kind(objects(values), "Service")
    assert service["metadata"]["annotations"] == {"d": text}


def test_cpus_memory_and_tags_may_be_numbers() -> None:
    values = merged(LAPTOP, {"image.tag": 20261127, "decode.cpu": 8, "decode.memory": 17179869184})
    container = main_container(values, "decode")
    assert container["image"] == "headrace-cpu:20261127"
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "17179869184"}


def test_the_cluster_may_choose_the_user() -> None:
    """OpenShift gives each namespace a range, and refuses others."""
    values = merged(CLUSTER, {"podSecurity.userId": None})
    specs = [template["spec"] for template in pods(values).values()]
    specs += [job["spec"]["template"]["spec"] for job in of_kind(objects(values), "Job")]
    specs += [pod["spec"] for pod in of_kind(objects(values), "Pod")]
    for spec in specs:
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & spec["securityContext"].keys()
        assert spec["securityContext"]["runAsNonRoot"] is True
    chosen = merged(CLUSTER, {"podSecurity.userId": 1000660000})
    assert pods(chosen)["head"]["spec"]["securityContext"]["fsGroup"] == 1000660000


def test_a_pod_template_is_merged_as_kubernetes_would() -> None:
    values = merged(
        CLUSTER,
        {
            "decode.podTemplate": {
                "metadata": {"labels": {"a": "b"}},
                "spec": {
                    "runtimeClassName": "nvidia",
                    "schedulerName": "volcano",
                    "hostNetwork": True,
                    "dnsPolicy": "ClusterFirstWithHostNet",
                    "terminationGracePeriodSeconds": 900,
                    "tolerations": [{"key": "spot"}],
                    "securityContext": {"fsGroupChangePolicy": None, "supplementalGroups": [5]},
                    "volumes": [
                        {"name": "cache", "persistentVolumeClaim": {"claimName": "compiled"}},
                        {"name": "weights", "image": {"reference": "registry.corp/weights:1"}},
                    ],
                    "initContainers": [{"name": "fetch", "image": "tool"}],
                    "containers": [
                        {
                            "name": "ray-worker",
                            "envFrom": [{"secretRef": {"name": "s3"}}],
                            "volumeMounts": [{"name": "weights", "mountPath": "/weights"}],
                            "livenessProbe": {"tcpSocket": {"port": 52365}},
                        },
                        {"name": "sidecar", "image": "proxy"},
                    ],
                },
            }
        },
    )
    template = pods(values)["decode"]
    spec = template["spec"]
    assert template["metadata"]["labels"].items() >= {"a": "b", "headrace/role": "decode"}.items()
    assert (spec["runtimeClassName"], spec["schedulerName"]) == ("nvidia", "volcano")
    assert spec["hostNetwork"] is True and spec["terminationGracePeriodSeconds"] == 900
    assert [each["key"] for each in spec["tolerations"]] == ["nvidia.com/gpu", "spot"]
    assert spec["securityContext"]["supplementalGroups"] == [5]
    assert "fsGroupChangePolicy" not in spec["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    volumes = {volume.pop("name"): volume for volume in spec["volumes"]}
    assert volumes["cache"] == {"persistentVolumeClaim": {"claimName": "compiled"}}
    assert {"tmp", "shm", "weights"} <= volumes.keys()
    assert [each["name"] for each in spec["containers"]] == ["ray-worker", "sidecar"]
    container = spec["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["livenessProbe"] and container["readinessProbe"]
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert {"/tmp", "/weights"} <= set(mounted)
    fetch, preflight = spec["initContainers"]
    assert fetch["name"] == "fetch", "the preflight checks what it has fetched"
    assert preflight["envFrom"] == container["envFrom"]
    assert [mount["mountPath"] for mount in preflight["volumeMounts"]] == mounted


def test_a_pod_template_concerns_its_group_alone() -> None:
    change = {"decode.podTemplate": {"spec": {"priorityClassName": "high"}}}
    before, after = pods(CLUSTER), pods(merged(CLUSTER, change))
    assert {role for role in before if before[role] != after[role]} == {"decode"}

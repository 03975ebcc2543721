"""The Job that downloads the model before engines start."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chart import (
    merged,
    objects,
    preset,
    variables,
)
from tests.support.chart_objects import of_kind

CLUSTER = preset("gpu-cluster")


@pytest.mark.parametrize(
    "changes",
    [
        {"image.repository": "registry.corp/headrace-gpu"},
        {"image.pullSecrets": ["registry"]},
        {"image.pullPolicy": "Always"},
        {"modelCache.tokenSecret": "hub"},
        {"modelCache.type": "claim", "modelCache.claimName": "models"},
        {"podSecurity.userId": 1001},
        {"serviceAccount.name": "own"},
        {"prefill.env": {"HF_ENDPOINT": "https://mirror.corp"}},
        {"prefill.nodeSelector": {"pool": "llm"}},
        {"config.model.source": "org/other"},
        {"config.prefill.engine.revision": "main"},
        {"commonLabels": {"team": "search"}},
    ],
    ids=str,
)
def test_a_changed_download_is_another_job(changes: dict[str, Any]) -> None:
    """A Job's pod cannot be changed: under the same name, `helm upgrade` would fail."""
    [before], [after] = (
        of_kind(objects(CLUSTER), "Job"),
        of_kind(objects(merged(CLUSTER, changes)), "Job"),
    )
    assert before["spec"]["template"] != after["spec"]["template"]
    assert before["metadata"]["name"] != after["metadata"]["name"]


@pytest.mark.parametrize(
    "changes",
    [
        {"config.decode.replicas": 7},
        {"config.router.policy": "local"},
        {"config.store.dram_gb": 8},
        {"decode.memory": "99Gi"},
    ],
    ids=str,
)
def test_an_unchanged_download_is_the_same_job(changes: dict[str, Any]) -> None:
    assert of_kind(objects(CLUSTER), "Job") == of_kind(objects(merged(CLUSTER, changes)), "Job")


def test_the_download_runs_as_a_prefill_pod_would_and_stays() -> None:
    """With its variables and tolerations, and without its devices. A Job that a time-out deleted
    would be made again by Argo CD each day."""
    values = merged(
        CLUSTER,
        {
            "prefill.env": {"HTTPS_PROXY": "http://proxy:3128"},
            "prefill.nodeSelector": {"pool": "llm"},
            "prefill.tolerations": [{"key": "team", "operator": "Exists"}],
            "prefill.podTemplate": {
                "spec": {
                    "priorityClassName": "high",
                    "initContainers": [{"name": "own", "image": "busybox"}],
                    "containers": [
                        {"name": "ray-worker", "envFrom": [{"secretRef": {"name": "s"}}]}
                    ],
                }
            },
            "config.prefill.engine.revision": "abc",
        },
    )
    [job] = of_kind(objects(values), "Job")
    spec = job["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert "ttlSecondsAfterFinished" not in job["spec"]
    assert variables(container)["HTTPS_PROXY"] == "http://proxy:3128"
    assert container["envFrom"] == [{"secretRef": {"name": "s"}}]
    assert (spec["nodeSelector"], spec["priorityClassName"]) == ({"pool": "llm"}, "high")
    assert {each["key"] for each in spec["tolerations"]} == {"nvidia.com/gpu", "team"}
    assert not {"nvidia.com/gpu", "rdma/ib"} & container["resources"]["limits"].keys()
    assert "initContainers" not in spec
    command = container["command"]
    assert command[:3] == ["hf", "download", "Qwen/Qwen2.5-7B-Instruct"]
    assert "original/*" in command, "a second copy of the weights"
    assert command[-2:] == ["--revision", "abc"]


def test_each_of_several_models_is_downloaded_once() -> None:
    """By its own revision. One that lies in a folder is not, nor is one twice for two names."""
    engine = {"prefill": {"engine": {"revision": "abc"}}}
    models = {
        "a": {"model": {"source": "org/a"}, **engine},
        "b": {"model": {"id": "org/b"}},
        "c": {"model": {"id": "c", "source": "org/b"}},
        "d": {"model": {"source": "/weights/d"}},
    }
    jobs = of_kind(objects(merged(CLUSTER, {"config.models": models})), "Job")
    commands = [job["spec"]["template"]["spec"]["containers"][0]["command"] for job in jobs]
    found = sorted((command[2], "abc" in command) for command in commands)
    assert found == [("org/a", True), ("org/b", False)]
    assert len({job["metadata"]["name"] for job in jobs}) == 2

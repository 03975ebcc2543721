"""The chart on clusters as they are: drains, corrected installs, networks, and engines that fit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.config.load import validate
from scripts.generate.chart import CONFIG
from tests.support.chart import (
    PRESETS,
    main_container,
    merged,
    of_kind,
    pods,
    preset,
    ray_service,
    refusal,
    rendered,
    serve_config,
    variables,
    worker_groups,
)
from tests.unit.test_chart import CASES

LAPTOP = preset("laptop")
NODE = preset("gpu-node")
CLUSTER = preset("gpu-cluster")
ENGINES = ("prefill", "decode")


# Drains of nodes


@CASES
def test_a_budget_has_an_integer_that_lets_one_pod_go(values: dict[str, Any]) -> None:
    """Kubernetes cannot count the pods of a RayCluster, which has no `scale` subresource: for them
    `maxUnavailable` and percentages allow no eviction, ever."""
    pods_now = {role: group["replicas"] for role, group in worker_groups(values).items()}
    for budget in of_kind("PodDisruptionBudget", values):
        spec = budget["spec"]
        assert "maxUnavailable" not in spec and isinstance(spec["minAvailable"], int)
        role = spec["selector"]["matchLabels"]["headrace/role"]
        assert 0 < spec["minAvailable"] < pods_now[role]
        assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_the_budget_follows_the_minimum_of_pods_and_one_pod_has_none() -> None:
    def budgets(values: dict[str, Any]) -> dict[str, int]:
        found = of_kind("PodDisruptionBudget", values)
        specs = [one["spec"] for one in found]
        return {s["selector"]["matchLabels"]["headrace/role"]: s["minAvailable"] for s in specs}

    assert budgets(LAPTOP) == {}
    assert budgets(CLUSTER) == {"gateway": 1, "prefill": 1, "decode": 3}
    scaling = {"config.decode.autoscaling": {"min_replicas": 3, "max_replicas": 9}}
    assert budgets(merged(LAPTOP, scaling)) == {"decode": 2}
    assert budgets(merged(CLUSTER, {"podDisruptionBudget.enabled": False})) == {}


@pytest.mark.parametrize("drain_s", [None, 0, 7, 600.5])
def test_a_pod_that_ends_leaves_its_requests_the_drain(drain_s: float | None) -> None:
    """Ray's own limit is 30 s. The grace period holds Ray's drain and the gateway's preStop."""
    values = LAPTOP if drain_s is None else merged(LAPTOP, {"config.drain_s": drain_s})
    wanted = 120 if drain_s is None else math.ceil(drain_s)
    for role, template in pods(values).items():
        container = main_container(values, role)
        rays = float(variables(container)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        before = 0.0
        if role == "gateway":
            before = float(container["lifecycle"]["preStop"]["exec"]["command"][-1])
        assert wanted < rays
        assert rays + before < template["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("role", ENGINES)
def test_an_engine_pod_is_ready_by_its_engine(role: str) -> None:
    """Without a probe, KubeRay's asks Serve's proxy, which is ready when any gateway runs. How the
    file is kept: `test_ready_file`."""
    container = main_container(LAPTOP, role)
    [path] = [
        word
        for word in str(container["readinessProbe"]["exec"]["command"]).split()
        if "/tmp/" in word
    ]
    assert path == variables(container)["HEADRACE_READY_FILE"]
    folders = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(path.startswith(f"{folder}/") for folder in folders), "the rest is read-only"


# Corrected installs


@pytest.mark.parametrize("name", PRESETS)
def test_a_first_start_is_never_given_up_unless_asked(name: str) -> None:
    """KubeRay's end of a first start is final: it deletes the pods and ignores later values."""
    key = "ray.io/initializing-timeout"
    assert key not in ray_service(preset(name))["metadata"].get("annotations", {})
    asked = merged(preset(name), {"startup.giveUpSeconds": 7200})
    assert ray_service(asked)["metadata"]["annotations"][key] == "7200"


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
    [before], [after] = of_kind("Job", CLUSTER), of_kind("Job", merged(CLUSTER, changes))
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
    assert of_kind("Job", CLUSTER) == of_kind("Job", merged(CLUSTER, changes))


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
    [job] = of_kind("Job", values)
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


def test_a_folder_is_not_downloaded() -> None:
    found = refusal(merged(CLUSTER, {"config.model.source": "/mnt/model"}))
    assert "modelCache.warmUp: config.model.source is the folder /mnt/model" in found


# Networks


def egress(values: dict[str, Any]) -> set[tuple[str, int]]:
    """Protocol and port of what pods may reach anywhere."""
    policies = of_kind("NetworkPolicy", values)
    rules = [rule for each in policies for rule in each["spec"].get("egress", [])]
    return {(p["protocol"], p["port"]) for rule in rules for p in rule.get("ports", [])}


ALWAYS = {("UDP", 53), ("TCP", 53), ("UDP", 5353), ("TCP", 5353), ("TCP", 443), ("TCP", 6443)}


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, set()),
        ({"gcsFaultTolerance.redisAddress": "redis:6379"}, {6379}),
        ({"gcsFaultTolerance.redisAddress": "rediss://r.corp:6380"}, {6380}),
        ({"gcsFaultTolerance.redisAddress": "a:7000,b:7001"}, {7000, 7001}),
        ({"gcsFaultTolerance.redisAddress": "redis"}, {6379}),
        ({"gcsFaultTolerance.redisAddress": "[fd00::1]:6379"}, {6379}),
        ({"config.observability.otlp_endpoint": "http://otel:4317"}, {4317}),
        ({"config.observability.otlp_endpoint": "https://otel.corp"}, set()),
        ({"config.observability.otlp_endpoint": "http://otel"}, {80}),
        ({"config.store.object_options": {"endpoint": "http://minio:9000"}}, {9000}),
        ({"prefill.env": {"HTTPS_PROXY": "http://proxy:3128/"}}, {3128}),
        ({"config.decode.env": {"HF_ENDPOINT": "http://mirror:8081/hub"}}, {8081}),
        ({"decode.env": {"NCCL_SOCKET_IFNAME": "eth0", "N": 7}}, set()),
    ],
    ids=str,
)
def test_the_network_policy_allows_what_other_values_name(
    changes: dict[str, Any], more: set[int]
) -> None:
    assert egress(merged(LAPTOP, changes)) == ALWAYS | {("TCP", port) for port in more}


def test_redis_gets_its_user_and_namespace_and_can_be_cleaned_after_an_uninstall() -> None:
    """KubeRay's Job that cleans Redis is a copy of the head's pod, which needs both objects."""
    values = merged(
        LAPTOP,
        {
            "gcsFaultTolerance": {
                "redisAddress": "redis:6379",
                "username": "ray",
                "passwordSecret": "redis",
                "namespace": "llm",
            }
        },
    )
    options = ray_service(values)["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["redisUsername"] == {"value": "ray"}
    assert options["externalStorageNamespace"] == "llm"
    head = pods(values)["head"]["spec"]
    [account] = of_kind("ServiceAccount", values)
    [config] = of_kind("ConfigMap", values)
    assert head["serviceAccountName"] == account["metadata"]["name"]
    for one in (account, config):
        assert one["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    [config] = of_kind("ConfigMap", LAPTOP)
    assert "annotations" not in config["metadata"]


def test_pods_with_ipv6_only_are_reached() -> None:
    values = merged(LAPTOP, {"ipv6Only": True})
    assert serve_config(values)["http_options"]["host"] == "::"
    head = ray_service(values)["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert head["rayStartParams"]["dashboard-host"] == "::"
    assert serve_config(LAPTOP)["http_options"]["host"] == "0.0.0.0"


# Several releases


def test_long_names_that_differ_stay_different() -> None:
    long = "inference-platform-team-a-production-qwen-7b-v"
    names = [ray_service(LAPTOP, f"{long}{n}")["metadata"]["name"] for n in (1, 2)]
    assert len(set(names)) == 2
    assert all(len(name) <= 40 and name.startswith("inference-platform") for name in names)
    short = "a" * 40
    assert ray_service(LAPTOP, short)["metadata"]["name"] == short


def test_the_test_asks_with_a_key_of_the_secret_that_is_named() -> None:
    [pod] = of_kind("Pod", merged(NODE, {"apiKeys.testSecret": "mine"}))
    [container] = pod["spec"]["containers"]
    assert variables(container)["HEADRACE_API_KEY"] == {
        "secretKeyRef": {"name": "mine", "key": "key"}
    }


def test_the_test_runs_where_gateways_do() -> None:
    wanted = {"nodeSelector": {"pool": "cpu"}, "tolerations": [{"key": "team"}]}
    [pod] = of_kind("Pod", merged(LAPTOP, {f"gateway.{k}": v for k, v in wanted.items()}))
    assert pod["spec"].items() >= wanted.items()


# Values that cannot work


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config.model.id": "Qwen/Qwen3-8B"}, "config.model.source: is still the chart's own"),
        ({"config.model.source": "s3://bucket/model"}, "config.model.source: must be a name on"),
        ({"config.model.source": "oci://registry/model"}, "config.model.source: must be a name on"),
        ({"config.gateway.api_keys": ["k"]}, "config.gateway.api_keys: would stand in a ConfigMap"),
        (
            {"config.store.object_options": {"secret_access_key": "s"}},
            "config.store.object_options.secret_access_key: would stand in a ConfigMap",
        ),
        ({"prefill.env": {"HF_TOKEN": "hf_x"}}, "prefill.env.HF_TOKEN: would stand in"),
        (
            {"config.decode.env": {"AWS_SECRET_ACCESS_KEY": "s"}},
            "config.decode.env.AWS_SECRET_ACCESS_KEY: would stand in the RayService",
        ),
        (
            {"prefill.env": {"HTTPS_PROXY": "http://me:pw@proxy:3128"}},
            "prefill.env.HTTPS_PROXY: has a password",
        ),
        (
            {"gcsFaultTolerance.redisAddress": "rediss://:pw@redis:6379"},
            "gcsFaultTolerance.redisAddress: has a password",
        ),
        ({"decode.memory": "1Gi"}, "decode.memory: is 1Gi, but /dev/shm takes"),
        (
            {"disk.type": "ephemeral", "config.store.nvme_gb": 500},
            "disk.size: must be at least config.store.nvme_gb",
        ),
    ],
    ids=str,
)
def test_values_that_cannot_work_are_refused(changes: dict[str, Any], said: str) -> None:
    model = CONFIG["model"] if "config.model.id" in changes else {}
    values = merged(LAPTOP, {"config.model": {**LAPTOP["config"]["model"], **model}})
    assert said in refusal(merged(values, changes))


@pytest.mark.parametrize(
    "env",
    [
        {"TOKENIZERS_PARALLELISM": "false"},
        {"HF_TOKEN": {"valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}},
        {"HF_TOKEN_PATH": "/secrets/token"},
    ],
    ids=str,
)
def test_variables_without_secrets_are_taken(env: dict[str, Any]) -> None:
    rendered(merged(LAPTOP, {"prefill.env": env}))


# Engines larger than one GPU


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
    group = worker_groups(values)["decode"]
    assert (group["resources"]["GPU"], group["resources"]["headrace_decode"]) == (str(gpus),) * 2
    config = validate(serve_config(values)["applications"][0]["args"], files_here=False)
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
    group = worker_groups(merged(CLUSTER, changes))["decode"]
    counts = {group[name] for name in ("replicas", "minReplicas", "maxReplicas")}
    assert counts == {replicas * ranks}
    scaling = {"config.decode.autoscaling": {"min_replicas": 1, "max_replicas": 3}}
    group = worker_groups(merged(merged(CLUSTER, changes), scaling))["decode"]
    assert (group["minReplicas"], group["maxReplicas"]) == (ranks, 3 * ranks)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"config.decode.gpus": 8, "config.decode.engine.tensor_parallel_size": 8},
            "decode.cpu: must be at least 8, which config.decode.cpus asks Ray for",
        ),
        ({"config.decode.gpus": 2}, "config.decode.gpus: is 2, but config.decode.engine.tensor"),
        (
            {"config.decode.engine.tensor_parallel_size": 2},
            "config.decode.gpus: is 1, but config.decode.engine.tensor_parallel_size is 2",
        ),
        (
            {"config.prefill.engine.pipeline_parallel_size": 2},
            "config.prefill.engine.pipeline_parallel_size: must be 1: an engine of this chart",
        ),
        ({"config.decode.engine.nnodes": 2}, "config.decode.engine.nnodes: must be 1"),
        (
            {"config.decode.engine.data_parallel_size_local": 2},
            "config.decode.engine.data_parallel_size_local: Ray Serve sets it",
        ),
    ],
    ids=str,
)
def test_an_engine_that_does_not_fit_into_a_pod_is_refused_by_name(
    changes: dict[str, Any], said: str
) -> None:
    assert said in refusal(merged(NODE, changes))


def test_a_data_parallel_role_without_gpus_is_refused() -> None:
    found = refusal(merged(LAPTOP, {"config.decode.engine": {"data_parallel_size": 2}}))
    assert "config.decode.engine.data_parallel_size: needs config.decode.gpus" in found

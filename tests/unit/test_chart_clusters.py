"""The chart on clusters as they are: drains, corrected installs, other users' pods and networks."""

from __future__ import annotations

import math
from typing import Any

import helm_python as helm
import pytest

from headrace.config.load import validate
from scripts.generate.chart import CONFIG
from tests.support.chart import (
    GROUPS,
    PRESETS,
    merged,
    objects,
    of_kind,
    pods,
    preset,
    ray_service,
    rendered,
    serve_config,
)
from tests.unit.test_chart import CASES

LAPTOP = preset("laptop")
NODE = preset("gpu-node")
CLUSTER = preset("gpu-cluster")
ENGINES = ("prefill", "decode")


def main(values: dict[str, Any], role: str) -> dict[str, Any]:
    """The main container of a role's pods."""
    return dict(pods(values)[role]["spec"]["containers"][0])


def env(container: dict[str, Any]) -> dict[str, Any]:
    """The variables of a container: a value, or where it comes from."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def groups(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The worker groups by role."""
    found = ray_service(values)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return {each["groupName"]: each for each in found}


def refusal(values: dict[str, Any]) -> str:
    """What `helm template` says of values that it refuses."""
    with pytest.raises(helm.HelmError) as refused:
        rendered(values)
    return str(refused.value)


# Drains of nodes


@CASES
def test_a_budget_has_an_integer_that_lets_one_pod_go(values: dict[str, Any]) -> None:
    """Kubernetes cannot count the pods of a RayCluster, which has no `scale` subresource: for them
    `maxUnavailable` and percentages allow no eviction, ever."""
    pods_now = {role: group["replicas"] for role, group in groups(values).items()}
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
        container = main(values, role)
        rays = float(env(container)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        before = 0.0
        if role == "gateway":
            before = float(container["lifecycle"]["preStop"]["exec"]["command"][-1])
        assert wanted < rays
        assert rays + before < template["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("role", ENGINES)
def test_an_engine_pod_is_ready_by_its_engine(role: str) -> None:
    """Without a probe, KubeRay's asks Serve's proxy, which is ready when any gateway runs. How the
    file is kept: `test_ready_file`."""
    container = main(LAPTOP, role)
    [path] = [
        word
        for word in str(container["readinessProbe"]["exec"]["command"]).split()
        if "/tmp/" in word
    ]
    assert path == env(container)["HEADRACE_READY_FILE"]
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
    assert env(container)["HTTPS_PROXY"] == "http://proxy:3128"
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


# What the values say of pods


@CASES
def test_lists_with_keys_name_nothing_twice(values: dict[str, Any]) -> None:
    """The API server refuses it (`x-kubernetes-list-map-keys`); Helm's own checks do not."""
    keys = {
        "env": "name",
        "volumes": "name",
        "volumeMounts": "mountPath",
        "containers": "name",
        "initContainers": "name",
        "ports": "containerPort",
    }

    def check(node: Any, path: str) -> None:
        if isinstance(node, dict):
            for name, value in node.items():
                check(value, f"{path}.{name}")
        elif isinstance(node, list):
            field = keys.get(path.rpartition(".")[2])
            names = [each.get(field) for each in node] if field else []
            assert len(names) == len(set(names)), path
            for each in node:
                check(each, path)

    for one in objects(values):
        if one["kind"] in ("RayService", "Job", "Pod"):
            check(one, one["kind"])


@pytest.mark.parametrize("role", ["head", *GROUPS])
@pytest.mark.parametrize("name", ["HOME", "PYTHONHASHSEED", "RAY_worker_niceness", "NEW"])
def test_a_variable_of_ones_own_wins(role: str, name: str) -> None:
    values = merged(LAPTOP, {f"{role}.env": {name: "mine"}})
    names = [each["name"] for each in main(values, role)["env"]]
    assert names.count(name) == 1
    assert env(main(values, role))[name] == "mine"


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
    found = env(main(values, role))
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
    assert env(main(values, "decode"))["NCCL_IB_DISABLE"] == text
    assert env(main(values, "decode"))["C"] == text
    assert decode["spec"]["nodeSelector"] == {"gpu": text}
    assert decode["metadata"]["annotations"] == {"a": text}
    assert (decode["metadata"]["labels"]["b"], decode["metadata"]["labels"]["e"]) == (text, text)
    [service] = of_kind("Service", values)
    assert service["metadata"]["annotations"] == {"d": text}


def test_cpus_memory_and_tags_may_be_numbers() -> None:
    values = merged(LAPTOP, {"image.tag": 20261127, "decode.cpu": 8, "decode.memory": 17179869184})
    container = main(values, "decode")
    assert container["image"] == "headrace-cpu:20261127"
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "17179869184"}


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

    group = groups(merged(CLUSTER, changes))["decode"]
    resources = main(merged(CLUSTER, changes), "decode")["resources"]
    found = _get_num_gpus(group["resources"], group["rayStartParams"], resources, "decode")
    assert found == 1


def test_the_cluster_may_choose_the_user() -> None:
    """OpenShift gives each namespace a range, and refuses others."""
    values = merged(CLUSTER, {"podSecurity.userId": None})
    specs = [template["spec"] for template in pods(values).values()]
    specs += [job["spec"]["template"]["spec"] for job in of_kind("Job", values)]
    specs += [pod["spec"] for pod in of_kind("Pod", values)]
    for spec in specs:
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & spec["securityContext"].keys()
        assert spec["securityContext"]["runAsNonRoot"] is True
    chosen = merged(CLUSTER, {"podSecurity.userId": 1000660000})
    assert pods(chosen)["head"]["spec"]["securityContext"]["fsGroup"] == 1000660000


# The generic pod template


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
    names = {one["metadata"]["name"] for one in of_kind("ConfigMap", values)}
    assert {"demo-more", "second"} <= names


def test_the_service_and_its_account_take_what_clouds_ask_for() -> None:
    spec = {
        "loadBalancerClass": "service.k8s.aws/nlb",
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "externalTrafficPolicy": "Local",
        "ipFamilyPolicy": "PreferDualStack",
    }
    role = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/llm"}
    values = merged(
        LAPTOP,
        {"service.type": "LoadBalancer", "service.spec": spec, "serviceAccount.annotations": role},
    )
    [service] = of_kind("Service", values)
    assert service["spec"].items() >= {**spec, "type": "LoadBalancer"}.items()
    [account] = of_kind("ServiceAccount", values)
    assert account["metadata"]["annotations"] == role


@pytest.mark.parametrize(("secret", "name"), [("", "http"), ("tls", "https")])
def test_the_services_port_says_what_it_speaks(secret: str, name: str) -> None:
    [service] = of_kind("Service", merged(LAPTOP, {"tls.existingSecret": secret}))
    [port] = service["spec"]["ports"]
    assert (port["name"], port["appProtocol"]) == (name, name)


def test_the_autoscalers_options_are_merged_with_its_rights() -> None:
    scaling = {"min_replicas": 1, "max_replicas": 2}
    options = {"resources": {"limits": {"memory": "1Gi"}}, "idleTimeoutSeconds": 300}
    values = merged(LAPTOP, {"config.decode.autoscaling": scaling, "autoscalerOptions": options})
    found = ray_service(values)["spec"]["rayClusterConfig"]["autoscalerOptions"]
    assert found.items() >= options.items()
    assert found["securityContext"]["allowPrivilegeEscalation"] is False


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
    assert env(container)["HEADRACE_API_KEY"] == {"secretKeyRef": {"name": "mine", "key": "key"}}


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
    container = main(values, "decode")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(gpus)
    [shm] = [v for v in pods(values)["decode"]["spec"]["volumes"] if v["name"] == "shm"]
    assert shm["emptyDir"]["sizeLimit"] == f"{(64 + gpus) * 1024}Mi"
    group = groups(values)["decode"]
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
    group = groups(merged(CLUSTER, changes))["decode"]
    counts = {group[name] for name in ("replicas", "minReplicas", "maxReplicas")}
    assert counts == {replicas * ranks}
    scaling = {"config.decode.autoscaling": {"min_replicas": 1, "max_replicas": 3}}
    group = groups(merged(merged(CLUSTER, changes), scaling))["decode"]
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

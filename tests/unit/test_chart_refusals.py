"""Values that the chart refuses, each by its path and, where no schema does, with what would be
right."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.generate.chart import CONFIG
from tests.support.chart import merged, preset, refusal, rendered
from tests.support.chart_sets import Changes, both, in_pods

LAPTOP = preset("laptop")
NODE = preset("gpu-node")
CLUSTER = preset("gpu-cluster")
TWO_MODELS = merged(LAPTOP, {"config.models": {"a": {}, "b": {}}})
IN_STEPS = {"upgrade.type": "NewClusterWithIncrementalUpgrade"}

BY_THE_SCHEMA: list[tuple[Changes, str]] = [
    ({"imge": {}}, "imge"),
    ({"keda.enabled": True}, "keda"),
    ({"image.tags": "1"}, "/image"),
    ({"image.digest": "sha256:1"}, "/image/digest"),
    ({"image.pullPolicy": "Sometimes"}, "/image/pullPolicy"),
    ({"rayVersion": "two"}, "/rayVersion"),
    ({"config.prefill.replicas": 0}, "/config/prefill/replicas"),
    ({"config.decode.gpu": 1}, "/config/decode"),
    ({"config.decode.gpus": "one"}, "/config/decode/gpus"),
    ({"config.gateway.host": "127.0.0.1"}, "/config/gateway"),
    ({"config.gateway.max_concurrent": 0}, "/config/gateway/max_concurrent"),
    ({"config.ray": {"num_cpus": 4}}, "/config"),
    ({"config.router.policy": "fastest"}, "/config/router/policy"),
    ({"config.store.dram_gb": -1}, "/config/store/dram_gb"),
    ({"monitoring.runbookUrl": "docs.example.com"}, "/monitoring/runbookUrl"),
    ({"monitoring.consoleUrl": "llm.example.com/console"}, "/monitoring/consoleUrl"),
    ({"head.cpu": "two"}, "/head/cpu"),
    ({"decode.memory": "16 GB"}, "/decode/memory"),
    ({"decode.ipcLock": "yes"}, "/decode/ipcLock"),
    ({"decode.numOfHosts": 2}, "/decode"),
    ({"disk.type": "nfs"}, "/disk/type"),
    ({"disk.hostPath": "kv"}, "/disk/hostPath"),
    ({"service.port": 70_000}, "/service/port"),
    ({"upgrade.type": "Rolling"}, "/upgrade/type"),
    ({"startup.giveUpSeconds": -1}, "/startup/giveUpSeconds"),
    ({"decode.podTemplate": {"containers": []}}, "/decode/podTemplate"),
    ({"decode.env": {"A": {"value": "b"}}}, "/decode/env/A"),
    ({"podSecurity.userId": 0}, "/podSecurity/userId"),
]
BY_THE_CHART: dict[str, tuple[dict[str, Any], Changes, str]] = {
    # Models
    "a model's name without its source": (
        merged(LAPTOP, {"config.model": CONFIG["model"]}),
        {"config.model.id": "Qwen/Qwen3-8B"},
        "config.model.source: is still the chart's own",
    ),
    "a model from the web": (
        NODE,
        {"config.model.source": "https://files.corp/qwen"},
        "config.model.source: must be a name on the hub, a folder, or an address that begins",
    ),
    "a download of an OCI image": (
        CLUSTER,
        {"config.model.source": "oci://registry.corp/qwen:1"},
        "modelCache.warmUp: config.model.source is the folder oci://registry.corp/qwen:1",
    ),
    "one of several models from the web": (
        TWO_MODELS,
        {"config.models.a": {"model": {"source": "http://b/m"}}},
        "config.models.a.model.source: must be a name",
    ),
    "a download without a claim": (
        CLUSTER,
        {"modelCache.type": "ephemeral"},
        "modelCache.warmUp: needs modelCache.type claim or new",
    ),
    "a download of a folder": (
        CLUSTER,
        {"config.model.source": "/mnt/model"},
        "modelCache.warmUp: config.model.source is the folder /mnt/model",
    ),
    "a download of several folders": (
        CLUSTER,
        {"config.models": {"a": {"model": {"source": "/a"}}, "b": {"model": {"source": "/b"}}}},
        "modelCache.warmUp: config.models.a.model.source is the folder /a, config.models.b",
    ),
    # Engines that do not fit into a pod
    "pipeline parallel": (
        CLUSTER,
        {"config.decode.engine.pipeline_parallel_size": 2, "config.decode.gpus": 16},
        "config.decode.engine.pipeline_parallel_size: must be 1: an engine of this chart",
    ),
    "an engine over nodes": (
        CLUSTER,
        {"config.decode.engine.nnodes": 2},
        "config.decode.engine.nnodes: must be 1",
    ),
    "an engine of one of several models over nodes": (
        TWO_MODELS,
        {"config.models.a": {"decode": {"engine": {"nnodes": 2}}}},
        "config.models.a.decode.engine.nnodes: must be 1",
    ),
    "tensor parallel without the GPUs": (
        CLUSTER,
        both("config.ROLE.engine.tensor_parallel_size", 4),
        "config.prefill.gpus: is 1, but config.prefill.engine.tensor_parallel_size is 4",
    ),
    "GPUs without tensor parallel": (
        NODE,
        {"config.decode.gpus": 2},
        "config.decode.gpus: is 2, but config.decode.engine.tensor_parallel_size is 1",
    ),
    "GPUs of one of several models without tensor parallel": (
        TWO_MODELS,
        {"config.models.a": {"decode": {"gpus": 2}}},
        "config.models.a.decode.gpus: is 2, but",
    ),
    "tensor parallel with too few CPUs": (
        NODE,
        {**both("config.ROLE.gpus", 8), **both("config.ROLE.engine.tensor_parallel_size", 8)},
        "prefill.cpu: must be at least 8, which config.prefill.cpus asks Ray for",
    ),
    "data parallel without GPUs": (
        LAPTOP,
        {"config.decode.engine": {"data_parallel_size": 2}},
        "config.decode.engine.data_parallel_size: needs config.decode.gpus",
    ),
    "data parallel by vLLM alone": (
        NODE,
        {"config.decode.engine.data_parallel_size_local": 2},
        "config.decode.engine.data_parallel_size_local: Ray Serve sets it",
    ),
    "an arena larger than the pod": (
        NODE,
        {"config.store.dram_gb": 100},
        "prefill.memory: is 64Gi, but /dev/shm takes",
    ),
    "more shared memory than the pod has": (
        NODE,
        in_pods(volumes=[{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "96Gi"}}]),
        "prefill.memory: is 64Gi, but the pod's volumes in memory, such as shm of podTemplate, "
        "take 98304 MiB",
    ),
    # Disks
    "a disk tier without a disk": (
        LAPTOP,
        {"config.store.nvme_folder": "/kv"},
        "disk.type: is none, but",
    ),
    "a disk smaller than the tier": (
        CLUSTER,
        {"disk.type": "ephemeral"},
        "disk.size: must be at least config.store.nvme_gb",
    ),
    "a claimed disk without its claim": (
        LAPTOP,
        {"disk.type": "claim"},
        "disk.claimName: name the claim",
    ),
    "claimed models without their claim": (
        LAPTOP,
        {"modelCache.type": "claim"},
        "modelCache.claimName: name the claim",
    ),
    "claimed compiled code without its claim": (
        LAPTOP,
        {"compileCache.type": "claim"},
        "compileCache.claimName: name the claim",
    ),
    # Secrets
    "no keys": (NODE, {"apiKeys": {}}, "apiKeys.existingSecret: name a Secret"),
    "keys in the configuration": (
        LAPTOP,
        {"config.gateway.api_keys": ["k"]},
        "config.gateway.api_keys: would stand in a ConfigMap",
    ),
    "S3's key in the configuration": (
        CLUSTER,
        {"config.store.object_options": {"secret_access_key": "s"}},
        "config.store.object_options.secret_access_key: would stand in a ConfigMap",
    ),
    "a token in a pod's variables": (
        LAPTOP,
        {"prefill.env": {"HF_TOKEN": "hf_x"}},
        "prefill.env.HF_TOKEN: would stand in",
    ),
    "a key in an engine's variables": (
        LAPTOP,
        {"config.decode.env": {"AWS_SECRET_ACCESS_KEY": "s"}},
        "config.decode.env.AWS_SECRET_ACCESS_KEY: would stand in the RayService",
    ),
    "a token in the variables of one of several models": (
        TWO_MODELS,
        {"config.models.a": {"prefill": {"env": {"HF_TOKEN": "x"}}}},
        "config.models.a.prefill.env.HF_TOKEN: would",
    ),
    "a token in a variable of a pod template": (
        LAPTOP,
        in_pods(initContainers=[{"name": "fetch", "env": [{"name": "HF_TOKEN", "value": "x"}]}]),
        "prefill.podTemplate: the variable HF_TOKEN of fetch would stand in the RayService",
    ),
    "a password in an address of a pod template": (
        LAPTOP,
        in_pods(
            containers=[
                {"name": "agent", "env": [{"name": "DB", "value": "postgres://me:pw@db/x"}]},
            ]
        ),
        "prefill.podTemplate: the variable DB of agent would stand in the RayService",
    ),
    "a password in a proxy's address": (
        LAPTOP,
        {"prefill.env": {"HTTPS_PROXY": "http://me:pw@proxy:3128"}},
        "prefill.env.HTTPS_PROXY: has a password",
    ),
    "a password in Redis's address": (
        LAPTOP,
        {"gcsFaultTolerance.redisAddress": "rediss://:pw@redis:6379"},
        "gcsFaultTolerance.redisAddress: has a password",
    ),
    "clients' certificates": (
        NODE,
        {"config.gateway.tls_client_ca_file": "/ca"},
        "config.gateway.tls_client_ca_file: not in this chart",
    ),
    # Variables that KubeRay refuses in the head
    "Redis by variables": (
        LAPTOP,
        {"head.env": {"RAY_REDIS_ADDRESS": "redis:6379"}},
        "head.env.RAY_REDIS_ADDRESS: KubeRay sets it",
    ),
    "Redis's user by a variable": (
        LAPTOP,
        {"head.env": {"REDIS_USERNAME": "ray"}},
        "head.env.REDIS_USERNAME: KubeRay sets it",
    ),
    "Redis's password by a variable": (
        LAPTOP,
        {"head.env": {"REDIS_PASSWORD": {"valueFrom": {"secretKeyRef": {"name": "r"}}}}},
        "head.env.REDIS_PASSWORD: KubeRay sets it",
    ),
    "the autoscaler's version by a variable": (
        LAPTOP,
        {"head.env": {"RAY_enable_autoscaler_v2": True}},
        "head.env.RAY_enable_autoscaler_v2: KubeRay sets it",
    ),
    # Names and ways in
    "a name that begins with a digit": (
        LAPTOP,
        {"nameOverride": "7b"},
        "nameOverride: set a name of lower-case letters",
    ),
    "an Ingress without a host": (LAPTOP, {"ingress.enabled": True}, "ingress.host: name the host"),
    "a route without a Gateway": (
        LAPTOP,
        {"httpRoute.enabled": True},
        "httpRoute.parentRefs: name at least one",
    ),
    # Upgrades
    "upgrades in steps without a Gateway": (
        LAPTOP,
        IN_STEPS,
        "upgrade.gatewayClassName: name the class",
    ),
    "steps larger than the surge": (
        LAPTOP,
        {**IN_STEPS, "upgrade.gatewayClassName": "istio", "upgrade.maxSurgePercent": 20},
        "upgrade.stepSizePercent: must be at most",
    ),
}


@pytest.mark.parametrize(
    ("changes", "path"), BY_THE_SCHEMA, ids=[str(changes)[:60] for changes, _ in BY_THE_SCHEMA]
)
def test_a_value_of_a_wrong_name_or_kind_is_refused_with_its_path(
    changes: Changes, path: str
) -> None:
    text = refusal(merged(LAPTOP, changes))
    assert path in text or path in text.replace(".", "/"), text


@pytest.mark.parametrize(
    ("base", "changes", "said"), BY_THE_CHART.values(), ids=BY_THE_CHART.keys()
)
def test_what_cannot_work_is_refused_by_its_path(
    base: dict[str, Any], changes: Changes, said: str
) -> None:
    assert said in refusal(merged(base, changes))


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

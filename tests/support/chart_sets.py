"""Sets of values that users want. Each must render to objects without a fault, or be refused.

`EVERYTHING` switches on all that the chart has; the others are what users of charts ask for.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chart import merged, preset

LAPTOP = preset("laptop")
NODE = preset("gpu-node")
CLUSTER = preset("gpu-cluster")

Changes = dict[str, Any]


def both(path: str, value: Any) -> Changes:
    """One change of both roles: `config.ROLE.gpus`."""
    return {path.replace("ROLE", role): value for role in ("prefill", "decode")}


def in_pods(**spec: Any) -> Changes:
    """A change of the specification of all engine pods."""
    return both("ROLE.podTemplate", {"spec": spec})


def secret(name: str, key: str) -> Changes:
    """A variable's source."""
    return {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}


def main(**container: Any) -> list[Changes]:
    """A change of the main container."""
    return [{"name": "ray-worker", **container}]


MODELS = [{"name": "models", "mountPath": "/models"}]

EVERYTHING = {
    "monitoring.podMonitor": True,
    "monitoring.prometheusRule": True,
    "monitoring.dashboards": True,
    "ingress.enabled": True,
    "ingress.host": "llm.example.com",
    "ingress.tlsSecret": "llm-tls",
    "httpRoute.enabled": True,
    "httpRoute.parentRefs": [{"name": "public"}],
    "networkPolicy.clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    "tls.existingSecret": "headrace-tls",
    "gcsFaultTolerance.redisAddress": "redis:6379",
    "gcsFaultTolerance.passwordSecret": "redis",
    "modelCache.tokenSecret": "hub",
    "image.pullSecrets": ["registry"],
    "service.type": "LoadBalancer",
    "decode.nodeSelector": {"gpu": "h100"},
    "decode.resources": {"hugepages-2Mi": "2Gi", "rdma/ib": 1},
    "commonLabels": {"team": "search"},
    "rayService.labels": {"kueue.x-k8s.io/queue-name": "llm"},
    "serviceAccount.annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/llm"},
    "service.spec": {
        "loadBalancerClass": "service.k8s.aws/nlb",
        "ipFamilyPolicy": "PreferDualStack",
    },
    "extraObjects": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "more", "labels": {}}}
    ],
    "prefill.podTemplate": {
        "metadata": {"annotations": {"karpenter.sh/do-not-disrupt": True}},
        "spec": {
            "runtimeClassName": "nvidia",
            "schedulerName": "volcano",
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "96Gi"}}],
        },
    },
}


_CHANGES: dict[str, tuple[Changes, Changes]] = {
    # Images and models
    "laptop": (LAPTOP, {}),
    "one node with GPUs": (NODE, {}),
    "several nodes with RDMA": (CLUSTER, {}),
    "everything": (CLUSTER, EVERYTHING),
    "a private registry": (
        CLUSTER,
        {"image.repository": "registry.corp:5000/llm/headrace-gpu", "image.pullSecrets": ["reg"]},
    ),
    "an image by digest": (CLUSTER, {"image.digest": f"sha256:{'0' * 64}"}),
    "a tag that is a number": (CLUSTER, {"image.tag": 20261127}),
    "a gated model": (CLUSTER, {"modelCache.tokenSecret": "hub"}),
    "a claim that exists": (NODE, {"modelCache": {"type": "claim", "claimName": "models"}}),
    "a claim that exists, with a download before": (
        LAPTOP,
        {"modelCache": {"type": "claim", "claimName": "models", "warmUp": True}},
    ),
    "several models": (
        LAPTOP,
        {
            "config.models": {
                "small": {"decode": {"replicas": 2, "autoscaling": {"max_replicas": 4}}},
                "large-x": {"model": {"id": "org/large"}, "prefill": {"replicas": 3}},
            }
        },
    ),
    "several models, downloaded before": (
        CLUSTER,
        {"config.models": {"a": {"model": {"id": "org/a"}}, "b": {"model": {"id": "org/b"}}}},
    ),
    "a model in NFS": (
        NODE,
        {
            "config.model.source": "/weights/qwen",
            **in_pods(
                volumes=[{"name": "weights", "nfs": {"server": "nas", "path": "/w"}}],
                containers=main(volumeMounts=[{"name": "weights", "mountPath": "/weights"}]),
            ),
        },
    ),
    "a model in a bucket": (
        NODE,
        {
            "config.model.source": "s3://models/qwen/",
            **both("ROLE.env", {"AWS_SECRET_ACCESS_KEY": secret("s3", "secret")}),
        },
    ),
    "models in buckets of other clouds, one copied before": (
        CLUSTER,
        {
            "config.models": {
                "a": {"model": {"source": "gs://models/a"}},
                "b": {"model": {"source": "oci://registry.corp/b:1"}},
            },
        },
    ),
    "a folder that an init container fills": (
        NODE,
        {
            "config.model.source": "/models/qwen",
            **in_pods(
                initContainers=[{"name": "fetch", "image": "tool:2", "volumeMounts": MODELS}]
            ),
        },
    ),
    "a model in an OCI image": (
        NODE,
        {"config.model.source": "oci://registry.corp:5000/qwen:1", "modelCache.size": "1Gi"},
    ),
    "several models in OCI images": (
        NODE,
        {
            "config.models": {
                "a": {"model": {"source": "oci://registry.corp/a:1"}},
                "b": {"model": {"source": "oci://registry.corp/b@sha256:0#models/b"}},
                "c": {"model": {"source": "org/c"}},
            }
        },
    ),
    "a mirror of the hub, with a download before": (
        CLUSTER,
        both("ROLE.env", {"HF_ENDPOINT": "http://mirror.corp:8081"}),
    ),
    "air-gapped": (
        NODE,
        {
            "modelCache": {"type": "claim", "claimName": "models"},
            **both("ROLE.env", {"HF_HUB_OFFLINE": 1}),
        },
    ),
    "a proxy": (
        CLUSTER,
        both(
            "ROLE.env",
            {"HTTPS_PROXY": "http://proxy.corp:3128", "NO_PROXY": "localhost,127.0.0.1,.svc"},
        ),
    ),
    "a folder of one's own for the hub": (NODE, both("ROLE.env", {"HF_HOME": "/models/hf"})),
    "a revision": (CLUSTER, both("config.ROLE.engine.revision", "main")),
    # Devices and nodes
    "L4 of GKE": (
        NODE,
        both("ROLE.nodeSelector", {"cloud.google.com/gke-accelerator": "nvidia-l4"}),
    ),
    "GKE Autopilot": (NODE, {"preflight.enabled": False, "modelCache.type": "ephemeral"}),
    "tainted pools": (CLUSTER, both("ROLE.tolerations", [{"key": "team", "operator": "Exists"}])),
    "spot nodes, and the head on others": (
        CLUSTER,
        {
            "head.nodeSelector": {"pool": "on-demand"},
            **both("ROLE.tolerations", [{"key": "spot", "operator": "Exists"}]),
        },
    ),
    "TP 2": (
        CLUSTER,
        {**both("config.ROLE.gpus", 2), **both("config.ROLE.engine.tensor_parallel_size", 2)},
    ),
    "TP 8": (
        CLUSTER,
        {**both("config.ROLE.gpus", 8), **both("config.ROLE.engine.tensor_parallel_size", 8)},
    ),
    "TP 8 in decode, 2 in prefill": (
        CLUSTER,
        {
            "config.decode.gpus": 8,
            "config.decode.engine.tensor_parallel_size": 8,
            "config.prefill.gpus": 2,
            "config.prefill.engine.tensor_parallel_size": 2,
        },
    ),
    "data parallel, wide expert parallel": (
        CLUSTER,
        {
            "config.decode.replicas": 1,
            "config.decode.engine.data_parallel_size": 16,
            "config.decode.engine.enable_expert_parallel": True,
        },
    ),
    "MIG with autoscaling": (
        NODE,
        {
            **both("ROLE.gpuKey", "nvidia.com/mig-3g.40gb"),
            "config.decode.autoscaling": {"min_replicas": 1, "max_replicas": 4},
        },
    ),
    "claims of devices with autoscaling": (
        NODE,
        {
            "decode.resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h100"}],
            "config.decode.autoscaling": {"min_replicas": 1, "max_replicas": 4},
        },
    ),
    "EFA and hugepages": (
        CLUSTER,
        both("ROLE.resources", {"vpc.amazonaws.com/efa": 4, "hugepages-2Mi": "5Gi"}),
    ),
    "shared RDMA devices": (CLUSTER, both("ROLE.resources", {"rdma/hca_shared_devices_a": 1})),
    "a runtime class": (NODE, in_pods(runtimeClassName="nvidia")),
    "the host's network": (
        CLUSTER,
        in_pods(hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet"),
    ),
    "more shared memory": (
        NODE,
        in_pods(volumes=[{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "40Gi"}}]),
    ),
    "spread over zones": (
        CLUSTER,
        in_pods(
            topologySpreadConstraints=[
                {
                    "maxSkew": 1,
                    "topologyKey": "topology.kubernetes.io/zone",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": {"headrace/role": "decode"}},
                }
            ]
        ),
    ),
    "a priority class": (CLUSTER, in_pods(priorityClassName="high")),
    "affinity": (
        CLUSTER,
        in_pods(
            affinity={
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {
                                "matchExpressions": [
                                    {"key": "gpu", "operator": "In", "values": ["a"]}
                                ]
                            }
                        ]
                    }
                }
            }
        ),
    ),
    # Disks
    "no disk": (CLUSTER, {"disk.type": "none"}),
    "an ephemeral disk": (
        CLUSTER,
        {"disk": {"type": "ephemeral", "storageClassName": "local", "size": "600Gi"}},
    ),
    "a claimed disk": (NODE, {"disk": {"type": "claim", "claimName": "kv"}}),
    "a volume of the chart that is replaced": (
        CLUSTER,
        in_pods(
            volumes=[
                {
                    "name": "cache",
                    "hostPath": {"path": "/var/cache/headrace", "type": "DirectoryOrCreate"},
                }
            ]
        ),
    ),
    "compiled code in a folder of the node": (NODE, {"compileCache.type": "hostPath"}),
    "compiled code in a claim": (
        CLUSTER,
        {"compileCache": {"type": "claim", "claimName": "compiled"}},
    ),
    # Queues and schedulers
    "Kueue": (CLUSTER, {"rayService.labels": {"kueue.x-k8s.io/queue-name": "llm"}}),
    "Volcano": (
        CLUSTER,
        {
            "rayService.labels": {"ray.io/gang-scheduling-enabled": True},
            **in_pods(schedulerName="volcano"),
        },
    ),
    "YuniKorn": (CLUSTER, {"rayService.labels": {"yunikorn.apache.org/app-id": "llm"}}),
    "Karpenter": (
        CLUSTER,
        both(
            "ROLE.podTemplate", {"metadata": {"annotations": {"karpenter.sh/do-not-disrupt": True}}}
        ),
    ),
    # Users, secrets, policies
    "keys in the values": (
        LAPTOP,
        {"apiKeys.file": "keys: []\n", "config.gateway.insecure": False},
    ),
    "OpenShift": (NODE, {"podSecurity.userId": None, "modelCache.type": "ephemeral"}),
    "a user of a namespace's range": (NODE, {"podSecurity.userId": 1000660000}),
    "an identity of the cloud": (
        CLUSTER,
        {"serviceAccount.annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/llm"}},
    ),
    "an account of one's own": (CLUSTER, {"serviceAccount.name": "own"}),
    "variables of Secrets": (CLUSTER, both("ROLE.env", {"AWS_ACCESS_KEY_ID": secret("s3", "id")})),
    "envFrom": (CLUSTER, in_pods(containers=main(envFrom=[{"secretRef": {"name": "s3"}}]))),
    "an object tier with keys": (
        CLUSTER,
        {
            "config.store.object_url": "s3://kv/headrace",
            "config.store.object_options": {"endpoint": "http://minio.s3.svc:9000"},
            **both("ROLE.env", {"AWS_SECRET_ACCESS_KEY": secret("s3", "secret")}),
        },
    ),
    "a sidecar": (CLUSTER, in_pods(containers=[{"name": "agent", "image": "agent:1"}])),
    "probes of one's own": (
        CLUSTER,
        in_pods(
            containers=main(livenessProbe={"tcpSocket": {"port": 8000}, "initialDelaySeconds": 9})
        ),
    ),
    "no policies": (CLUSTER, {"networkPolicy.enabled": False}),
    "clients of one network, another operator": (
        CLUSTER,
        {
            "networkPolicy.clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
            "networkPolicy.operatorNamespace": "ray-system",
            "networkPolicy.monitoringNamespace": "",
        },
    ),
    "no budgets": (CLUSTER, {"podDisruptionBudget.enabled": False}),
    "Istio, without sidecars in engines": (
        CLUSTER,
        both("ROLE.podTemplate", {"metadata": {"labels": {"sidecar.istio.io/inject": "false"}}}),
    ),
    # Ways in
    "TLS at the gateways": (NODE, {"tls.existingSecret": "llm-tls"}),
    "an Ingress": (NODE, {"ingress": {"enabled": True, "host": "llm.corp", "className": "nginx"}}),
    "the Gateway API": (
        NODE,
        {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["a.b"]}},
    ),
    "a load balancer": (
        CLUSTER,
        {
            "service.type": "LoadBalancer",
            "service.spec": {
                "loadBalancerClass": "service.k8s.aws/nlb",
                "loadBalancerSourceRanges": ["10.0.0.0/8"],
                "externalTrafficPolicy": "Local",
            },
        },
    ),
    "a node port": (NODE, {"service.type": "NodePort"}),
    "IPv6 only": (NODE, {"ipv6Only": True}),
    "both families": (NODE, {"service.spec": {"ipFamilyPolicy": "PreferDualStack"}}),
    "cert-manager": (
        NODE,
        {
            "tls.existingSecret": "llm-tls",
            "extraObjects": [
                {
                    "apiVersion": "cert-manager.io/v1",
                    "kind": "Certificate",
                    "metadata": {"name": "llm-tls"},
                    "spec": {"secretName": "llm-tls", "dnsNames": ["llm.corp"]},
                }
            ],
        },
    ),
    # The cluster
    "Redis": (CLUSTER, {"gcsFaultTolerance": {"redisAddress": "redis:6379"}}),
    "Redis with TLS, a user and a password": (
        CLUSTER,
        {
            "gcsFaultTolerance": {
                "redisAddress": "rediss://redis.db.svc:6380",
                "username": "ray",
                "passwordSecret": "redis",
            }
        },
    ),
    "autoscaling from zero prefill": (
        CLUSTER,
        {
            "config.prefill.autoscaling": {"min_replicas": 0, "max_replicas": 4},
            "config.decode.autoscaling": {"min_replicas": 2, "max_replicas": 8},
            "autoscalerOptions": {"resources": {"limits": {"memory": "1Gi"}}},
        },
    ),
    "upgrades in steps": (
        CLUSTER,
        {
            "upgrade.type": "NewClusterWithIncrementalUpgrade",
            "upgrade.gatewayClassName": "istio",
            "upgrade.maxSurgePercent": 25,
        },
    ),
    "no new clusters": (CLUSTER, {"upgrade.type": "None"}),
    "a token of one's own": (CLUSTER, {"rayToken.existingSecret": "ray-token"}),
    "traces to a collector": (
        CLUSTER,
        {"config.observability.otlp_endpoint": "http://otel.monitoring.svc:4317"},
    ),
    "Prometheus and Grafana": (
        CLUSTER,
        {"monitoring.labels": {"release": "prometheus"}, "commonLabels": {"team": "search"}},
    ),
    "annotations for Prometheus": (
        NODE,
        both("ROLE.podTemplate", {"metadata": {"annotations": {"prometheus.io/scrape": True}}}),
    ),
    "many gateways": (CLUSTER, {"config.gateway.replicas": 8}),
    "LoRA adapters": (
        NODE,
        {"config.model.adapters": {"sql": "hf://org/sql-lora"}},
    ),
    "a name of its own": (NODE, {"nameOverride": "llm"}),
}
SETS = {name: merged(base, changes) for name, (base, changes) in _CHANGES.items()}
"""Values by what they are for."""
CASES = pytest.mark.parametrize("values", SETS.values(), ids=SETS.keys())
"""Runs a test with each set."""

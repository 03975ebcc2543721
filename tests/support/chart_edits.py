"""Changes of a release's values that users make, and those that no upgrade can make."""

from __future__ import annotations

from typing import Any

Changes = dict[str, Any]
"""Values by dotted path."""
EDITS: dict[str, Changes] = {
    "another image": {"image.repository": "registry.corp/headrace", "image.tag": "next"},
    "an image by digest": {"image.digest": f"sha256:{'1' * 64}"},
    "a pull secret": {"image.pullSecrets": ["registry"]},
    "a token of the hub": {"modelCache.tokenSecret": "hub"},
    "another model": {"config.model.id": "m", "config.model.source": "org/m"},
    "a larger store": {"config.store.dram_gb": 1.5},
    "more replicas": {"config.decode.replicas": 9, "config.gateway.replicas": 3},
    "one replica": {"config.decode.replicas": 1, "config.prefill.replicas": 1},
    "autoscaling": {"config.decode.autoscaling": {"min_replicas": 2, "max_replicas": 5}},
    "upgrades in steps": {
        "upgrade.type": "NewClusterWithIncrementalUpgrade",
        "upgrade.gatewayClassName": "istio",
    },
    "other variables": {"decode.env": {"NCCL_DEBUG": "INFO", "HOME": "/tmp"}},
    "a sidecar and a volume": {
        "decode.podTemplate": {
            "spec": {
                "containers": [{"name": "agent", "image": "agent:1"}],
                "volumes": [
                    {"name": "cache", "hostPath": {"path": "/c", "type": "Directory"}},
                    {"name": "more", "emptyDir": {}},
                ],
            }
        }
    },
    "other tolerations": {"decode.tolerations": [{"key": "team", "operator": "Exists"}]},
    "a disk": {"disk.type": "hostPath", "disk.hostPath": "/mnt/nvme"},
    "models in a claim": {
        "modelCache": {"type": "claim", "claimName": "models", "warmUp": True},
    },
    "models in a folder": {"modelCache.type": "hostPath", "modelCache.warmUp": False},
    "a model in an OCI image": {
        "config.model.id": "m",
        "config.model.source": "oci://registry.corp/m:1",
        "modelCache.warmUp": False,
    },
    "compiled code in a claim": {"compileCache": {"type": "claim", "claimName": "compiled"}},
    "another port and type": {"service.port": 80, "service.type": "NodePort"},
    "a load balancer": {
        "service.type": "LoadBalancer",
        "service.spec": {"loadBalancerSourceRanges": ["10.0.0.0/8"]},
        "service.annotations": {"a": "b"},
    },
    "TLS": {"tls.existingSecret": "tls"},
    "another key file": {"apiKeys.existingSecret": "others"},
    "an Ingress": {"ingress.enabled": True, "ingress.host": "a.b", "ingress.className": "nginx"},
    "no policies": {"networkPolicy.enabled": False},
    "other clients": {"networkPolicy.clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
    "no budgets": {"podDisruptionBudget.enabled": False},
    "an identity of the cloud": {"serviceAccount.annotations": {"role": "llm"}},
    "an account of one's own": {"serviceAccount.name": "own"},
    "labels": {"commonLabels": {"team": "search"}, "rayService.labels": {"queue": "llm"}},
    "a user that the cluster chooses": {"podSecurity.userId": None},
    "Redis": {"gcsFaultTolerance.redisAddress": "redis:6379"},
    "no monitoring": {
        "monitoring.podMonitor": False,
        "monitoring.prometheusRule": False,
        "monitoring.dashboards": False,
    },
    "no preflight, another drain": {"preflight.enabled": False, "config.drain_s": 7},
    "Ray without a token": {"rayToken.enabled": False},
}
UNCHANGEABLE: dict[str, tuple[Changes, Changes, str]] = {
    "a smaller claim": (
        {},
        {"modelCache.size": "10Gi"},
        "PersistentVolumeClaim demo-models: spec.resources cannot shrink",
    ),
    "another class of a claim": (
        {},
        {"modelCache.storageClassName": "fast"},
        "PersistentVolumeClaim demo-models: spec.storageClassName is immutable",
    ),
    "another class of a load balancer": (
        {"service.type": "LoadBalancer"},
        {"service.spec": {"loadBalancerClass": "service.k8s.aws/nlb"}},
        "Service demo: spec.loadBalancerClass is immutable",
    ),
    "another first family": (
        {},
        {"service.spec": {"ipFamilies": ["IPv6"]}},
        "Service demo: spec.ipFamilies[0] is immutable",
    ),
}
"""The release's values before, the change, and what the rules say of it."""

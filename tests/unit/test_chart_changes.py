"""Changed values of the chart: which are refused, and which need a new Ray cluster."""

from __future__ import annotations

from typing import Any

import helm_python as helm
import pytest

from tests.support.chart import merged, preset, ray_service, rendered
from tests.support.kuberay import compared

LAPTOP = preset("laptop")

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"imge": {}}, "imge"),
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
    ({"disk.type": "nfs"}, "/disk/type"),
    ({"disk.hostPath": "kv"}, "/disk/hostPath"),
    ({"service.port": 70_000}, "/service/port"),
    ({"upgrade.type": "Rolling"}, "/upgrade/type"),
    ({"startup.giveUpSeconds": -1}, "/startup/giveUpSeconds"),
    ({"decode.podTemplate": {"containers": []}}, "/decode/podTemplate"),
    ({"decode.env": {"A": {"value": "b"}}}, "/decode/env/A"),
    ({"podSecurity.userId": 0}, "/podSecurity/userId"),
    # What no schema says:
    ({"config.gateway.insecure": False}, "apiKeys.existingSecret: name a Secret"),
    ({"config.gateway.tls_client_ca_file": "/ca"}, "config.gateway.tls_client_ca_file: not in"),
    ({"config.store.nvme_folder": "/kv"}, "disk.type: is none, but"),
    ({"disk.type": "claim"}, "disk.claimName: name the claim"),
    ({"modelCache.type": "claim"}, "modelCache.claimName: name the claim"),
    ({"modelCache.warmUp": True}, "modelCache.warmUp: needs"),
    ({"nameOverride": "7b"}, "nameOverride: set a name of lower-case letters"),
    ({"ingress.enabled": True}, "ingress.host: name the host"),
    ({"httpRoute.enabled": True}, "httpRoute.parentRefs: name at least one"),
    (
        {"upgrade.type": "NewClusterWithIncrementalUpgrade"},
        "upgrade.gatewayClassName: name the class",
    ),
    (
        {
            "upgrade.type": "NewClusterWithIncrementalUpgrade",
            "upgrade.gatewayClassName": "istio",
            "upgrade.maxSurgePercent": 20,
        },
        "upgrade.stepSizePercent: must be at most",
    ),
]


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[str(each[0])[:60] for each in WRONG])
def test_a_wrong_value_is_refused_with_its_path(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError) as refused:
        rendered(merged(LAPTOP, changes))
    text = str(refused.value)
    assert said in text or said in text.replace(".", "/"), text


@pytest.mark.parametrize(
    ("changes", "new_cluster"),
    [
        ({"config.router.policy": "local"}, False),
        ({"config.gateway.max_concurrent": 7}, False),
        ({"config.speculation.enabled": True}, False),
        ({"config.model.source": "org/other"}, False),
        ({"config.decode.engine": {"max_num_seqs": 7}}, False),
        ({"config.decode.replicas": 7}, False),
        ({"config.gateway.replicas": 3}, False),
        ({"decode.tolerations": [{"operator": "Exists"}]}, False),
        ({"upgrade.deletionDelaySeconds": 7}, False),
        ({"service.port": 80}, False),
        ({"networkPolicy.enabled": False}, False),
        ({"monitoring.podMonitor": True}, False),
        ({"config.decode.gpus": 1}, True),
        ({"config.store.dram_gb": 2}, True),
        ({"decode.podTemplate": {"metadata": {"labels": {"model": "v2"}}}}, True),
        ({"rayService.labels": {"team": "search"}}, False),
        ({"startup.giveUpSeconds": 7200}, False),
        ({"config.drain_s": 7}, True),
        ({"image.tag": "next"}, True),
        ({"rayVersion": "2.61.0"}, True),
        ({"decode.memory": "7Gi"}, True),
        ({"disk.type": "hostPath"}, True),
        ({"preflight.enabled": False}, True),
        ({"rayToken.enabled": False}, True),
    ],
    ids=str,
)
def test_which_changes_need_a_new_ray_cluster(changes: dict[str, Any], new_cluster: bool) -> None:
    """As docs/upgrades.md states it."""
    before, after = ray_service(LAPTOP), ray_service(merged(LAPTOP, changes))
    assert (compared(before) != compared(after)) is new_cluster

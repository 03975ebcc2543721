"""Ways into and out of a release: Services, policies, Redis, IPv6, Ray's autoscaler."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chart import merged, objects, pods, preset, ray_service, serve_config
from tests.support.chart_objects import app_of, of_kind
from tests.support.chart_sets import SETS

LAPTOP = preset("laptop")


def test_the_service_leads_to_the_gateways_that_answer() -> None:
    values = SETS["everything"]
    [service] = of_kind(objects(values), "Service")
    gateway = pods(values)["gateway"]
    assert service["spec"]["selector"].items() <= gateway["metadata"]["labels"].items()
    [container] = gateway["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    [wanted] = service["spec"]["ports"]
    config = app_of(objects(values))["gateway"]
    assert ports[wanted["targetPort"]] == config["port"]
    assert container["readinessProbe"]["httpGet"] == {
        "path": "/health",
        "port": "http",
        "scheme": "HTTPS",
    }
    others = set(ports.values()) - {config["port"]}
    assert config["port"] not in others


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
    [service] = of_kind(objects(values), "Service")
    assert service["spec"].items() >= {**spec, "type": "LoadBalancer"}.items()
    [account] = of_kind(objects(values), "ServiceAccount")
    assert account["metadata"]["annotations"] == role


@pytest.mark.parametrize(("secret", "name"), [("", "http"), ("tls", "https")])
def test_the_services_port_says_what_it_speaks(secret: str, name: str) -> None:
    [service] = of_kind(objects(merged(LAPTOP, {"tls.existingSecret": secret})), "Service")
    [port] = service["spec"]["ports"]
    assert (port["name"], port["appProtocol"]) == (name, name)


def egress(values: dict[str, Any]) -> set[tuple[str, int]]:
    """Protocol and port of what pods may reach anywhere."""
    policies = of_kind(objects(values), "NetworkPolicy")
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
    [account] = of_kind(objects(values), "ServiceAccount")
    [config] = of_kind(objects(values), "ConfigMap")
    assert head["serviceAccountName"] == account["metadata"]["name"]
    for one in (account, config):
        assert one["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    [config] = of_kind(objects(LAPTOP), "ConfigMap")
    assert "annotations" not in config["metadata"]


def test_pods_with_ipv6_only_are_reached() -> None:
    values = merged(LAPTOP, {"ipv6Only": True})
    assert serve_config(values)["http_options"]["host"] == "::"
    head = ray_service(values)["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert head["rayStartParams"]["dashboard-host"] == "::"
    assert serve_config(LAPTOP)["http_options"]["host"] == "0.0.0.0"


def test_rays_autoscaler_reaches_the_api_and_gets_no_rights() -> None:
    """KubeRay adds it to the head's pod. Most clusters' API listens on 6443 behind port 443."""
    values = SETS["autoscaling from zero prefill"]
    options = ray_service(values)["spec"]["rayClusterConfig"]["autoscalerOptions"]
    assert options["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    [policy, _] = of_kind(objects(values), "NetworkPolicy")
    rules = policy["spec"]["egress"]
    assert 6443 in {port["port"] for rule in rules for port in rule.get("ports", [])}


def test_the_autoscalers_options_are_merged_with_its_rights() -> None:
    scaling = {"min_replicas": 1, "max_replicas": 2}
    options = {"resources": {"limits": {"memory": "1Gi"}}, "idleTimeoutSeconds": 300}
    values = merged(LAPTOP, {"config.decode.autoscaling": scaling, "autoscalerOptions": options})
    found = ray_service(values)["spec"]["rayClusterConfig"]["autoscalerOptions"]
    assert found.items() >= options.items()
    assert found["securityContext"]["allowPrivilegeEscalation"] is False

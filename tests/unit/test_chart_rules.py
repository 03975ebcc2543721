"""The rules for rendered objects find the faults that charts have, this one's former ones first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support import chart_rules as rules
from tests.support.chart import merged, objects, preset
from tests.support.chart_objects import groups, of_kind, pod_templates

CLUSTER = preset("gpu-cluster")
Objects = list[dict[str, Any]]
Change = Callable[[Objects], None]


def main(release: Objects, name: str) -> dict[str, Any]:
    """The main container of a group; changes of it are changes of the release."""
    found: dict[str, Any] = groups(release)[name]["template"]["spec"]["containers"][0]
    return found


def one(release: Objects, kind: str, suffix: str = "") -> dict[str, Any]:
    """The object of a kind whose name ends so."""
    return next(o for o in of_kind(release, kind) if o["metadata"]["name"].endswith(suffix))


def resource(release: Objects, key: str, limit: str, request: str | None = None) -> None:
    """Change a resource of the decode engine."""
    resources = main(release, "decode")["resources"]
    resources["limits"][key], resources["requests"][key] = limit, request or limit


def variable(release: Objects, name: str, value: str, role: str = "decode") -> None:
    """Append a variable to the main container of a group."""
    main(release, role)["env"].append({"name": name, "value": value})


def without(release: Objects, role: str, field: str) -> None:
    """Remove a field of the main container of a group."""
    del main(release, role)[field]


def budget(release: Objects, **spec: Any) -> None:
    """Change decode's disruption budget; None removes a field."""
    found = one(release, "PodDisruptionBudget", "-decode")["spec"]
    found.update(spec)
    for field in [name for name, value in spec.items() if value is None]:
        del found[field]


def replicas(release: Objects, count: int) -> None:
    """Change the number of decode pods."""
    changed = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), count)
    groups(release)["decode"].update(changed)


def offers(release: Objects, role: str, **resources: str | None) -> None:
    """Change what Ray's autoscaler is told of a group's pods; None removes a key."""
    told = groups(release)[role]["resources"]
    for key, value in resources.items():
        told[key] = value
        if value is None:
            del told[key]


def shm(release: Objects, size: str) -> None:
    """Change the size of /dev/shm of decode pods."""
    volumes = groups(release)["decode"]["template"]["spec"]["volumes"]
    [found] = [volume for volume in volumes if volume["name"] == "shm"]
    found["emptyDir"]["sizeLimit"] = size


def ports(release: Objects, keep: set[int]) -> None:
    """Leave these ports of the first policy's rules of egress without a peer."""
    for rule in one(release, "NetworkPolicy", "-pods")["spec"]["egress"]:
        if "to" not in rule:
            rule["ports"] = [port for port in rule["ports"] if port["port"] in keep]


def only_from(release: Objects, role: str) -> None:
    """Let only pods of a role in."""
    policy = one(release, "NetworkPolicy", "-pods")["spec"]
    policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"]["headrace/role"] = role


FAULTS: list[tuple[str, Change, str]] = [
    # Lists with keys (x-kubernetes-list-map-keys)
    ("a variable twice", lambda r: variable(r, "HF_HOME", "/mnt"), "env: ('HF_HOME',) twice"),
    (
        "a mount twice",
        lambda r: main(r, "decode")["volumeMounts"].append({"name": "tmp", "mountPath": "/tmp"}),
        "volumeMounts: ('/tmp',) twice",
    ),
    (
        "a port twice, once with the default protocol",
        lambda r: main(r, "decode")["ports"].append({"containerPort": 8000, "protocol": "TCP"}),
        "ports: (8000, 'TCP') twice",
    ),
    (
        "a variable of the download twice",
        lambda r: one(r, "Job")["spec"]["template"]["spec"]["containers"][0]["env"].append(
            {"name": "HOME", "value": "/"}
        ),
        "Job.spec.template.spec.containers.env: ('HOME',) twice",
    ),
    # Disruption budgets
    (
        "a budget that Kubernetes cannot count",
        lambda r: budget(r, minAvailable=None, maxUnavailable=1),
        "no integer minAvailable",
    ),
    ("a percentage", lambda r: budget(r, minAvailable="50%"), "no integer minAvailable"),
    ("a budget of all pods", lambda r: budget(r, minAvailable=4), "is 4, and the pods are 4"),
    ("fewer pods than the budget", lambda r: replicas(r, 2), "is 3, and the pods are 2"),
    (
        "two budgets for a pod",
        lambda r: budget(r, selector={"matchLabels": {"app.kubernetes.io/instance": "demo"}}),
        "prefill: has 2 budgets",
    ),
    # Names
    (
        "a service whose name begins with a digit",
        lambda r: one(r, "Service")["metadata"].update(name="7b"),
        "Service 7b: not a name",
    ),
    (
        "a name for which KubeRay has no room",
        lambda r: one(r, "RayService")["metadata"].update(name="a" * 48),
        "48 characters",
    ),
    (
        "a label of 64 characters",
        lambda r: one(r, "Service")["metadata"]["labels"].update(team="a" * 64),
        "label team is",
    ),
    (
        "a label that is a number",
        lambda r: groups(r)["decode"]["template"]["metadata"]["labels"].update(rack=7),
        "label rack is 7",
    ),
    (
        "a port's name of 16 characters",
        lambda r: main(r, "decode")["ports"][0].update(name="a" * 16),
        "port aaaaaaaaaaaaaaaa",
    ),
    # Objects that name each other
    (
        "a mount without a volume",
        lambda r: main(r, "decode")["volumeMounts"].append({"name": "x", "mountPath": "/x"}),
        "decode ray-worker: no volume x",
    ),
    (
        "a claim that nobody makes",
        lambda r: r.remove(one(r, "PersistentVolumeClaim")),
        "no claim demo-models",
    ),
    (
        "an account that nobody makes",
        lambda r: r.remove(one(r, "ServiceAccount")),
        "no ServiceAccount demo",
    ),
    (
        "a Service to a port that no pod has",
        lambda r: one(r, "Service")["spec"]["ports"][0].update(targetPort="https"),
        "no port https",
    ),
    (
        "a Service to no pod",
        lambda r: one(r, "Service")["spec"]["selector"].update({"headrace/role": "door"}),
        "chooses no pods",
    ),
    # Networks
    ("no DNS on OpenShift", lambda r: ports(r, {53, 443, 6443}), "UDP port 5353"),
    ("no hub", lambda r: ports(r, {53, 5353, 6443}), "does not reach TCP port 443"),
    (
        "a proxy that the policy forbids",
        lambda r: variable(r, "HTTPS_PROXY", "http://me@proxy.corp:3128/"),
        "decode does not reach TCP port 3128",
    ),
    (
        "Redis that the policy forbids",
        lambda r: one(r, "RayService")["spec"]["rayClusterConfig"].update(
            gcsFaultToleranceOptions={"redisAddress": "a:7000"}
        ),
        "head does not reach TCP port 7000",
    ),
    ("gateways that reach no engine", lambda r: only_from(r, "decode"), "gateway does not reach"),
    (
        "a dashboard that is open",
        lambda r: one(r, "NetworkPolicy", "-pods")["spec"]["ingress"].append(
            {"ports": [{"port": 8265}]}
        ),
        "everyone reaches port 8265 of head",
    ),
    (
        "an operator that sees nothing",
        lambda r: one(r, "NetworkPolicy", "-pods")["spec"]["ingress"].pop(1),
        "KubeRay's operator reaches no dashboard",
    ),
    # Readiness
    (
        "engines that are ready by Serve's proxy",
        lambda r: without(r, "prefill", "readinessProbe"),
        "prefill: no readiness of the engine",
    ),
    (
        "a gateway that is always ready",
        lambda r: without(r, "gateway", "readinessProbe"),
        "gateway: no readiness of the gateway's own port",
    ),
    (
        "Ray's own 30 s",
        lambda r: main(r, "decode").update(
            env=[e for e in main(r, "decode")["env"] if "DRAIN" not in e["name"]]
        ),
        "decode: drains 120",
    ),
    (
        "a grace period that ends before",
        lambda r: groups(r)["gateway"]["template"]["spec"].update(
            terminationGracePeriodSeconds=140
        ),
        "gateway: drains 120",
    ),
    # Resources
    (
        "a request above its limit",
        lambda r: main(r, "decode")["resources"]["requests"].update(cpu="9000m"),
        "requests more cpu",
    ),
    ("half a GPU", lambda r: resource(r, "nvidia.com/gpu", "500m"), "a part of nvidia.com/gpu"),
    (
        "hugepages whose request and limit differ",
        lambda r: resource(r, "hugepages-2Mi", "4Gi", request="2Gi"),
        "request and limit of hugepages-2Mi differ",
    ),
    ("an arena larger than the pod", lambda r: shm(r, "200Gi"), "volumes in memory"),
    # Ray and Serve
    (
        "CPUs for fewer GPUs",
        lambda r: offers(r, "decode", CPU="0"),
        "decode: a replica asks for",
    ),
    (
        "GPUs that the autoscaler does not count",
        lambda r: offers(r, "decode", GPU="0"),
        "which fits into []",
    ),
    ("a quarter of the pods", lambda r: replicas(r, 1), "decode: 4 replicas, 1 places"),
    (
        "engines in pods of another role",
        lambda r: offers(r, "prefill", headrace_decode="1"),
        "which fits into ['prefill', 'decode']",
    ),
    (
        "no place for gateways",
        lambda r: offers(r, "gateway", headrace_gateway="1"),
        "4 replicas, 2",
    ),
]


def test_the_release_itself_has_no_fault() -> None:
    assert rules.faults(objects(CLUSTER)) == []


@pytest.mark.parametrize(
    ("change", "said"), [each[1:] for each in FAULTS], ids=[each[0] for each in FAULTS]
)
def test_a_fault_is_found(change: Change, said: str) -> None:
    release = objects(CLUSTER)
    change(release)
    found = rules.faults(release)
    assert any(said in fault for fault in found), found


# Several releases


LONG = "inference-platform-team-a-production-qwen-7b-v"


@pytest.mark.parametrize(
    "names",
    [
        ("demo", "other"),
        ("demo", "demo-2"),
        ("demo", "demo-gateway"),
        ("demo", "demo-decode", "demo-models"),
        (f"{LONG}1", f"{LONG}2"),
        ("a" * 53, "a" * 52, "a" * 41),
    ],
    ids=str,
)
def test_releases_of_one_namespace_do_not_meet(names: tuple[str, ...]) -> None:
    values = merged(CLUSTER, {"monitoring.dashboards": False})
    releases = [objects(values, name) for name in names]
    assert [fault for release in releases for fault in rules.faults(release)] == []
    assert list(rules.collisions(*releases)) == []


def test_names_and_selectors_that_meet_are_found() -> None:
    ours, theirs = objects(CLUSTER, "demo"), objects(CLUSTER, "other")
    one(theirs, "Service")["metadata"]["name"] = "demo-head-svc"
    for template in pod_templates(theirs).values():
        template["metadata"]["labels"]["app.kubernetes.io/instance"] = "demo"
    found = list(rules.collisions(ours, theirs))
    assert "both make Service demo-head-svc" in found
    assert "PodDisruptionBudget demo-decode chooses decode of another release" in found
    assert "NetworkPolicy demo-pods chooses head of another release" in found

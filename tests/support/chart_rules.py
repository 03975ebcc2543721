"""Rules of Kubernetes, KubeRay, Ray and Serve that no schema states, over the objects of a release.

Each rule yields one line for each fault. `faults` applies all rules to one release, `collisions`
compares releases of one namespace.

KubeRay's rules are those of 1.7.0 (`ray-operator/controllers/ray`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)

from headrace.config.app_args import llm_config
from headrace.config.load import validate
from tests.support.chart_network import unreachable
from tests.support.chart_objects import (
    Object,
    app_of,
    cluster_of,
    groups,
    key_of,
    map_keys,
    matches,
    of_kind,
    pod_templates,
    quantity,
    role_of,
    schema_of,
)

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
LABEL_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
)


def faults(objects: list[Object]) -> list[str]:
    """All faults of one release."""
    rules = (
        repeated_keys,
        wrong_names,
        unmeetable_budgets,
        unmounted,
        unreachable,
        unready,
        overcommitted,
        unplaced,
    )
    return [f"{rule.__name__}: {fault}" for rule in rules for fault in rule(objects)]


def repeated_keys(objects: list[Object]) -> Iterator[str]:
    """The API server refuses two items of one key."""

    def walk(node: Any, schema: Object | None, path: str) -> Iterator[str]:
        if isinstance(node, dict):
            fields = (schema or {}).get("properties") or {}
            for name, value in node.items():
                yield from walk(value, fields.get(name), f"{path}.{name}")
        elif isinstance(node, list):
            if keys := map_keys(schema):
                counts = Counter(key_of(item, keys, schema) for item in node)
                yield from (f"{path}: {key} twice" for key, n in counts.items() if n > 1)
            for item in node:
                yield from walk(item, (schema or {}).get("items"), path)

    for one in objects:
        yield from walk(one, schema_of(one["kind"]), one["kind"])


# Names


def made_by_kuberay(name: str) -> dict[str, list[str]]:
    """The objects that KubeRay makes for a RayService, by kind; `-xxxxx` is random."""
    cluster = f"{name}-xxxxx"
    return {
        "RayCluster": [cluster],
        "Service": [f"{name}-head-svc", f"{name}-serve-svc", f"{cluster}-head-svc"],
        "Secret": [cluster],
    }


def wrong_names(objects: list[Object]) -> Iterator[str]:
    """Names and labels that Kubernetes or KubeRay refuses or cuts."""
    patterns = {"Service": SERVICE_NAME, "RayService": SERVICE_NAME}
    limits = {"RayService": 47, "Service": 63, "Job": 63, "Pod": 63}
    for one in objects:
        kind, name = one["kind"], one["metadata"]["name"]
        if len(name) > limits.get(kind, 253):
            yield f"{kind} {name}: {len(name)} characters"
        if not patterns.get(kind, SUBDOMAIN).fullmatch(name):
            yield f"{kind} {name}: not a name"
        yield from _wrong_labels(f"{kind} {name}", one["metadata"])
    [service] = of_kind(objects, "RayService")
    owner = service["metadata"]["name"]
    for kind, names in made_by_kuberay(owner).items():
        yield from (f"{kind} {name}: {len(name)} characters" for name in names if len(name) > 63)
    for group in groups(objects):
        if not DNS_LABEL.fullmatch(group) or len(group) > 63:
            yield f"group {group}: not a name"
    for where, template in pod_templates(objects).items():
        yield from _wrong_labels(where, template["metadata"])
        yield from _wrong_pod_names(where, template["spec"])


def _wrong_labels(where: str, metadata: Object) -> Iterator[str]:
    for key, value in (metadata.get("labels") or {}).items():
        if not isinstance(value, str) or len(value) > 63 or not LABEL_VALUE.fullmatch(value):
            yield f"{where}: label {key} is {value!r}"
        if not LABEL_KEY.fullmatch(key) or len(key.rpartition("/")[2]) > 63:
            yield f"{where}: label {key} is no key"
    for key, value in (metadata.get("annotations") or {}).items():
        if not isinstance(value, str):
            yield f"{where}: annotation {key} is {value!r}"


def _wrong_pod_names(where: str, spec: Object) -> Iterator[str]:
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    named = [("container", one["name"]) for one in containers]
    named += [("volume", one["name"]) for one in spec.get("volumes", [])]
    for what, name in named:
        if len(name) > 63 or not DNS_LABEL.fullmatch(name):
            yield f"{where}: {what} {name}"
    if len({one["name"] for one in containers}) < len(containers):
        yield f"{where}: two containers of one name"
    for one in containers:
        names = [port["name"] for port in one.get("ports", []) if "name" in port]
        if len(set(names)) < len(names):
            yield f"{where}: two ports of one name"
        yield from (
            f"{where}: port {name}"
            for name in names
            if len(name) > 15 or not DNS_LABEL.fullmatch(name) or not re.search("[a-z]", name)
        )


def collisions(*releases: list[Object]) -> Iterator[str]:
    """Objects that two releases of one namespace both make, KubeRay's included, and selectors of
    one that choose pods of another."""

    def made(objects: list[Object]) -> set[tuple[str, str]]:
        own = {(one["kind"], one["metadata"]["name"]) for one in objects}
        [service] = of_kind(objects, "RayService")
        theirs = made_by_kuberay(service["metadata"]["name"])
        return own | {(kind, name) for kind, names in theirs.items() for name in names}

    for one, other in combinations(releases, 2):
        yield from (f"both make {kind} {name}" for kind, name in sorted(made(one) & made(other)))
        for ours, theirs in ((one, other), (other, one)):
            for what, selector in _selectors(ours):
                for name, template in pod_templates(theirs).items():
                    if matches(selector, template["metadata"]["labels"]):
                        yield f"{what} chooses {name} of another release"


def _selectors(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    for one in objects:
        spec, what = one.get("spec") or {}, f"{one['kind']} {one['metadata']['name']}"
        if one["kind"] == "Service":
            yield what, {"matchLabels": spec["selector"]}
        elif one["kind"] in ("PodDisruptionBudget", "PodMonitor"):
            yield what, spec["selector"]
        elif one["kind"] == "NetworkPolicy":
            yield what, spec["podSelector"]
            for rule in [*spec.get("ingress", []), *spec.get("egress", [])]:
                for peer in [*rule.get("from", []), *rule.get("to", [])]:
                    if "podSelector" in peer and "namespaceSelector" not in peer:
                        yield what, peer["podSelector"]


# Disruption budgets


def unmeetable_budgets(objects: list[Object]) -> Iterator[str]:
    """A budget must let one of its pods go, and a pod may have one budget only, or evictions fail.

    Kubernetes cannot count the pods of a RayCluster, which has no `scale` subresource, so only an
    integer `minAvailable` works.
    """
    budgets = of_kind(objects, "PodDisruptionBudget")
    chosen: Counter[str] = Counter()
    for budget in budgets:
        spec, name = budget["spec"], budget["metadata"]["name"]
        fewest = 0
        for role, group in groups(objects).items():
            if matches(spec["selector"], group["template"]["metadata"]["labels"]):
                chosen[role] += 1
                fewest += _fewest(objects, role, group)
        least = spec.get("minAvailable")
        if "maxUnavailable" in spec or type(least) is not int:
            yield f"{name}: no integer minAvailable"
        elif not 0 < least < fewest:
            yield f"{name}: minAvailable is {least}, and the pods are {fewest}"
    yield from (f"{role}: has {n} budgets" for role, n in chosen.items() if n > 1)


def _fewest(objects: list[Object], name: str, group: Object) -> int:
    """The fewest pods of a group outside of upgrades. In steps, a new cluster begins with none."""
    if name == "head":
        return 1
    [service] = of_kind(objects, "RayService")
    steps = service["spec"]["upgradeStrategy"]["type"] == "NewClusterWithIncrementalUpgrade"
    return int(group["replicas" if steps else "minReplicas"])


# Objects that name each other


def unmounted(objects: list[Object]) -> Iterator[str]:
    """Mounts, claims, ports, routes and accounts that name nothing of the release."""
    made = {(one["kind"], one["metadata"]["name"]) for one in objects}
    [service] = of_kind(objects, "RayService")
    owner = service["metadata"]["name"]
    for where, template in pod_templates(objects).items():
        spec = template["spec"]
        volumes = {one["name"] for one in spec.get("volumes", [])}
        claims = {one["name"] for one in spec.get("resourceClaims", [])}
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            at = f"{where} {container['name']}"
            mounts = container.get("volumeMounts", [])
            yield from (f"{at}: no volume {m['name']}" for m in mounts if m["name"] not in volumes)
            asked = (container.get("resources") or {}).get("claims", [])
            yield from (f"{at}: no claim {c['name']}" for c in asked if c["name"] not in claims)
        for volume in spec.get("volumes", []):
            claim = (volume.get("persistentVolumeClaim") or {}).get("claimName", "")
            if claim.startswith(f"{owner}-") and ("PersistentVolumeClaim", claim) not in made:
                yield f"{where}: no claim {claim}"
            config = (volume.get("configMap") or {}).get("name")
            if volume["name"] == "config" and ("ConfigMap", config) not in made:
                yield f"{where}: no ConfigMap {config}"
        account = spec.get("serviceAccountName")
        if account == owner and ("ServiceAccount", account) not in made:
            yield f"{where}: no ServiceAccount {account}"
    yield from _dead_routes(objects)


def _dead_routes(objects: list[Object]) -> Iterator[str]:
    ports = {}
    for one in of_kind(objects, "Service"):
        name = one["metadata"]["name"]
        behind = [
            group["template"]
            for group in groups(objects).values()
            if matches(
                {"matchLabels": one["spec"]["selector"]}, group["template"]["metadata"]["labels"]
            )
        ]
        if not behind:
            yield f"Service {name}: chooses no pods"
        for port in one["spec"]["ports"]:
            ports[name, port["port"]] = True
            for template in behind:
                open_ports = template["spec"]["containers"][0]["ports"]
                known = {each.get(key) for each in open_ports for key in ("name", "containerPort")}
                if port["targetPort"] not in known:
                    yield f"Service {name}: no port {port['targetPort']}"
    backends = [
        (one, path["backend"]["service"]["name"], path["backend"]["service"]["port"]["number"])
        for one in of_kind(objects, "Ingress")
        for rule in one["spec"]["rules"]
        for path in rule["http"]["paths"]
    ]
    backends += [
        (one, ref["name"], ref["port"])
        for one in of_kind(objects, "HTTPRoute")
        for rule in one["spec"]["rules"]
        for ref in rule["backendRefs"]
    ]
    for one, name, port in backends:
        if (name, port) not in ports:
            yield f"{one['kind']} {one['metadata']['name']}: no Service {name} with port {port}"


# Readiness and ends of pods


def unready(objects: list[Object]) -> Iterator[str]:
    """Pods that are ready before they serve, are killed while they load, or end too early."""
    drain_s = float(app_of(objects).get("drain_s", 120))
    for name, group in groups(objects).items():
        spec = group["template"]["spec"]
        main = spec["containers"][0]
        role = role_of(group)
        probe = main.get("readinessProbe") or {}
        if role == "gateway":
            names = {port.get("name") for port in main["ports"]}
            if (probe.get("httpGet") or {}).get("port") not in names:
                yield f"{name}: no readiness of the gateway's own port"
        elif role != "head":
            command = str((probe.get("exec") or {}).get("command", ""))
            env = {each["name"]: each.get("value") for each in main["env"]}
            file = env.get("HEADRACE_READY_FILE") or "none"
            if file not in command:
                yield f"{name}: no readiness of the engine"
            folders = [mount["mountPath"] for mount in main["volumeMounts"]]
            if not any(file.startswith(f"{folder}/") for folder in folders):
                yield f"{name}: the ready file is on a read-only file system"
        if main.get("livenessProbe") is None and "startupProbe" in main:
            yield f"{name}: a startup probe without a liveness probe"
        env = {each["name"]: each.get("value") for each in main["env"]}
        ray_s = float(env.get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S") or 30)
        hook = ((main.get("lifecycle") or {}).get("preStop") or {}).get("exec", {})
        before_s = float((hook.get("command") or [0])[-1])
        grace_s = spec.get("terminationGracePeriodSeconds", 30)
        if not drain_s < ray_s < grace_s - before_s:
            yield f"{name}: drains {drain_s} s, Ray {ray_s} s, the pod {grace_s - before_s} s"


# Resources


def overcommitted(objects: list[Object]) -> Iterator[str]:
    """Containers that Kubernetes refuses, or that it kills when they use what they may."""
    for where, template in pod_templates(objects).items():
        spec = template["spec"]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            at, resources = f"{where} {container['name']}", container.get("resources") or {}
            limits, requests = resources.get("limits", {}), resources.get("requests", {})
            for key, asked in requests.items():
                if key in limits and quantity(asked) > quantity(limits[key]):
                    yield f"{at}: requests more {key} than its limit"
            for key, limit in limits.items():
                counted = "/" in key or key.startswith("hugepages-")
                if counted and quantity(requests.get(key, limit)) != quantity(limit):
                    yield f"{at}: request and limit of {key} differ"
                if "/" in key and quantity(limit) % 1:
                    yield f"{at}: a part of {key}"
        memory = (spec["containers"][0].get("resources") or {}).get("limits", {}).get("memory")
        mounted = {mount["name"] for mount in spec["containers"][0].get("volumeMounts", [])}
        used = sum(
            quantity(volume["emptyDir"].get("sizeLimit", 0))
            for volume in spec.get("volumes", [])
            if volume["name"] in mounted
            and (volume.get("emptyDir") or {}).get("medium") == "Memory"
        )
        if memory is not None and used > quantity(memory):
            yield f"{where}: volumes in memory of {used:.0f} bytes, memory {memory}"


def unplaced(objects: list[Object]) -> Iterator[str]:
    """Replicas for which Ray finds no pod, or makes none.

    What a pod offers is read by the code of Ray's own autoscaler, which also tells what KubeRay
    starts Ray with.
    """
    cluster = cluster_of(objects)
    config = validate(app_of(objects), files_here=False)
    derived = _derive_autoscaling_config_from_ray_cr(
        {"metadata": {"name": "c", "namespace": "n"}, "spec": cluster}
    )
    offers = {name: each["resources"] for name, each in derived["available_node_types"].items()}
    offers["head"] = offers.pop("headgroup")
    # A gateway replica asks for its place only (headrace.app).
    wanted = {"gateway": (config.gateway.replicas, 1, [dict(config.gateway.resources)])}
    for model, one in config.served_models().items():
        for role, settings in one.roles().items():
            ranks = int(settings.engine.get("data_parallel_size", 1))
            bundles = llm_config(one, role)["placement_group_config"]["bundles"]
            name = f"{role}-{model}" if model else role
            wanted[name] = (settings.bounds[1], ranks, bundles)
    for name, (replicas, ranks, bundles) in wanted.items():
        total: Counter[str] = Counter()
        for bundle in bundles:
            total.update(bundle)  # one engine is in one pod
        fitting = [group for group in offers if _fits(total, offers[group]) > 0]
        if fitting != [name]:
            yield f"{name}: a replica asks for {dict(total)}, which fits into {fitting}"
            continue
        places = _fits(total, offers[name]) * groups(objects)[name]["maxReplicas"]
        if replicas * ranks > places:
            yield f"{name}: {replicas * ranks} replicas, {places} places"
        if name != "gateway" and _fits(total, offers[name]) > 1 and len(bundles) > 1:
            yield f"{name}: two engines in one pod"


def _fits(asked: Mapping[str, float], offered: Mapping[str, float]) -> int:
    """How many replicas fit into a pod."""
    return min(
        (math.floor(offered.get(key, 0) / each) for key, each in asked.items() if each), default=0
    )

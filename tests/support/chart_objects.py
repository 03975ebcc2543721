"""Rendered objects of a release: how to find them, and what the schemas say of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

Object = dict[str, Any]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
KUBERNETES = "1.34"
"""Version of the schemas."""
CUSTOM_GROUPS = (
    "ray.io",
    "monitoring.coreos.com",
    "gateway.networking.k8s.io",
    "cert-manager.io",
    "route.openshift.io",
)
"""Groups of APIs that are not Kubernetes' own."""
RAY_SERVICE_SCHEMA = Path(__file__).resolve().parents[1] / "data" / "rayservice_v1.json"
UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18} | {
    f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", 1)
}


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    """The objects of one kind."""
    return [one for one in objects if one["kind"] == kind]


def cluster_of(objects: list[Object]) -> Object:
    """The Ray cluster's specification."""
    [service] = of_kind(objects, "RayService")
    return dict(service["spec"]["rayClusterConfig"])


def groups(objects: list[Object]) -> dict[str, Object]:
    """Groups of the Ray cluster by name; the head's is `head`."""
    cluster = cluster_of(objects)
    workers = {each["groupName"]: each for each in cluster["workerGroupSpecs"]}
    return {"head": {**cluster["headGroupSpec"], "minReplicas": 1, "maxReplicas": 1}, **workers}


def role_of(group: Object) -> str:
    """Role of a group's pods: head, gateway, prefill or decode."""
    return str(group["template"]["metadata"]["labels"]["headrace/role"])


def pod_templates(objects: list[Object]) -> dict[str, Object]:
    """The template of all pods that the release makes, by a name."""
    found = {name: group["template"] for name, group in groups(objects).items()}
    found |= {
        f"Job {one['metadata']['name']}": one["spec"]["template"] for one in of_kind(objects, "Job")
    }
    return found | {f"Pod {one['metadata']['name']}": one for one in of_kind(objects, "Pod")}


def app_of(objects: list[Object]) -> Object:
    """The arguments of Serve's app: Headrace's configuration."""
    [service] = of_kind(objects, "RayService")
    [app] = yaml.load(service["spec"]["serveConfigV2"], LOADER)["applications"]
    return dict(app["args"])


def quantity(value: str | int | float) -> float:
    """A quantity of Kubernetes as a number."""
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(value)).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


def matches(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a selector of `matchLabels` chooses these labels. An empty one chooses all."""
    wanted = (selector or {}).get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items())


# Schemas


def validate_built_in(objects: list[Object]) -> None:
    """Validate the objects of Kubernetes' own kinds, and the pods of the RayService, by Kubernetes'
    schemas without unknown fields.

    Raises:
        kubernetes_validate.ValidationError: one is not valid.
    """
    for one in objects:
        if one["apiVersion"].partition("/")[0] not in CUSTOM_GROUPS:
            _validate(json.dumps(one))
    for name, group in groups(objects).items():
        template = group["template"]
        pod = {**template, "metadata": {"name": name, **template["metadata"]}}
        _validate(json.dumps({"apiVersion": "v1", "kind": "Pod", **pod}))


@cache
def _validate(text: str) -> None:
    """Validate the JSON of an object; many releases have the same."""
    kubernetes_validate.validate(json.loads(text), KUBERNETES, strict=True)


@cache
def ray_service_schema() -> Object:
    """KubeRay's schema of a RayService."""
    return dict(json.loads(RAY_SERVICE_SCHEMA.read_text("utf-8")))


def schema_of(kind: str) -> Object | None:
    """The schema of a kind, as far as it says how lists are merged. Pods have the schema that
    KubeRay copies from Kubernetes."""
    service = ray_service_schema()
    head = service["properties"]["spec"]["properties"]["rayClusterConfig"]["properties"]
    pod = head["headGroupSpec"]["properties"]["template"]
    ports = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["port", "protocol"]}
    pulls = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
    job = {"properties": {"spec": {"properties": {"template": pod}}}}
    return {
        "RayService": service,
        "Pod": pod,
        "Job": job,
        "Service": {"properties": {"spec": {"properties": {"ports": ports}}}},
        "ServiceAccount": {"properties": {"secrets": pulls, "imagePullSecrets": pulls}},
    }.get(kind)


def map_keys(schema: Object | None) -> list[str] | None:
    """The fields that name the items of a list; None if the list has no keys."""
    keys = (schema or {}).get("x-kubernetes-list-map-keys")
    return None if keys is None else list(keys)


def key_of(item: Object, keys: list[str], schema: Object | None) -> tuple[Any, ...]:
    """The name of an item, with the defaults that the API server sets."""
    fields = ((schema or {}).get("items") or {}).get("properties") or {}
    defaults = {"protocol": "TCP"} | {
        name: field["default"] for name, field in fields.items() if "default" in field
    }
    return tuple(item.get(key, defaults.get(key)) for key in keys)

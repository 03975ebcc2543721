"""What `helm upgrade` makes of the objects in a cluster, by the rules of the API server.

Helm 4 and Argo CD send the new object as a server-side apply; Helm 3 sends a patch, three-way
strategic for Kubernetes' own kinds and a JSON merge for others. Both leave alone what neither the
old nor the new manifest names, such as a Service's address.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.support.chart_objects import Object, key_of, map_keys, quantity, schema_of

CUSTOM = ("RayService", "PodMonitor", "PrometheusRule", "HTTPRoute")


def created(manifest: Object) -> Object:
    """An object as the API server keeps it: with the defaults that later patches must respect."""
    made: Object = json.loads(json.dumps(manifest))
    made["metadata"]["uid"] = "u"
    spec = made.get("spec", {})
    if made["kind"] == "Service":
        address = {"clusterIP": "10.0.0.7", "clusterIPs": ["10.0.0.7"], "ipFamilies": ["IPv4"]}
        made["spec"] = {**address, "sessionAffinity": "None", **spec}
        for number, port in enumerate(made["spec"]["ports"]):
            port.setdefault("protocol", "TCP")
            if spec["type"] != "ClusterIP":
                port.setdefault("nodePort", 30000 + number)
    elif made["kind"] == "PersistentVolumeClaim":
        default: Object = {"storageClassName": "standard", "volumeMode": "Filesystem"}
        made["spec"] = {**default, "volumeName": "pvc-1", **spec}
    elif made["kind"] == "Job":
        default = {"completions": 1, "completionMode": "NonIndexed", "parallelism": 1}
        made["spec"] = {**default, "selector": {"matchLabels": {"controller-uid": "u"}}, **spec}
    elif made["kind"] == "RayService":
        made["status"] = {"serviceStatus": "Running"}
    return made


def server_side_apply(live: Object, old: Object, new: Object) -> Object:
    """The object after the manager of `old` has applied `new`: what it named before and no longer
    names is removed, lists with keys are merged by their items, other lists are replaced."""
    return dict(_apply(live, old, new, schema_of(new["kind"])))


def _apply(live: Any, old: Any, new: Any, schema: Object | None) -> Any:
    if isinstance(new, dict):
        live, old = (each if isinstance(each, dict) else {} for each in (live, old))
        fields = (schema or {}).get("properties") or {}
        merged = {}
        for name in {**live, **new}:
            if name in new:
                merged[name] = _apply(live.get(name), old.get(name), new[name], fields.get(name))
            elif name not in old:
                merged[name] = live[name]
            elif isinstance(live[name], dict) and (rest := _unowned(live[name], old[name])):
                merged[name] = rest
        return merged
    keys = map_keys(schema)
    if isinstance(new, list) and keys:

        def by_key(items: Any) -> dict[tuple[Any, ...], Any]:
            return {key_of(item, keys, schema): item for item in items or []}

        now, before, wanted = by_key(live), by_key(old), by_key(new)
        item_schema = (schema or {}).get("items")
        merged_items = [
            _apply(now.get(key), before.get(key), item, item_schema) for key, item in wanted.items()
        ]
        return merged_items + [
            item for key, item in now.items() if key not in wanted and key not in before
        ]
    return new


def _unowned(live: Object, old: Any) -> Object:
    """The fields of a mapping that the old manifest did not name."""
    if not isinstance(old, dict):
        return {}
    return {name: value for name, value in live.items() if name not in old}


def helm3_patch(live: Object, old: Object, new: Object) -> Object:
    """The object after Helm 3's patch.

    Kubernetes' own kinds of this chart have one list with a merge key each, which the strategic
    merge treats as the server-side apply does. Of custom resources, lists are replaced.
    """
    schema = None if new["kind"] in CUSTOM else schema_of(new["kind"])
    return dict(_apply(live, old, new, schema))


def refusals(live: Object, after: Object) -> Iterator[str]:
    """Why the API server refuses an update: one line for each field that cannot be changed."""
    kind, name = after["kind"], after["metadata"]["name"]
    before, now = live.get("spec", {}), after.get("spec", {})
    fixed: list[str] = []
    if kind == "Job":
        fixed = ["template", "selector", "completions", "completionMode", "podFailurePolicy"]
    elif kind == "RayService":
        fixed = ["managedBy"]
    elif kind == "Service":
        fixed = ["clusterIP"]
        if before["type"] == now["type"] == "LoadBalancer":
            fixed.append("loadBalancerClass")
        if before["ipFamilies"][0] != now["ipFamilies"][0]:
            yield f"{kind} {name}: spec.ipFamilies[0] is immutable"
    elif kind == "PersistentVolumeClaim":
        fixed = sorted({*before, *now} - {"resources"})
        sizes = [quantity(each["resources"]["requests"]["storage"]) for each in (before, now)]
        if sizes[1] < sizes[0]:
            yield f"{kind} {name}: spec.resources cannot shrink"
    for field in fixed:
        if before.get(field) != now.get(field):
            yield f"{kind} {name}: spec.{field} is immutable"
    if live.get("type") != after.get("type"):
        yield f"{kind} {name}: type is immutable"


def leftovers(after: Any, old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Fields of the old manifest that are still there though the new one does not name them, and
    fields of the new one that are missing or different. Lists are compared as they are."""
    if isinstance(new, dict) and isinstance(after, dict):
        for name, value in new.items():
            if name not in after:
                yield f"{path}.{name}: missing"
            else:
                before = old.get(name) if isinstance(old, dict) else None
                yield from leftovers(after[name], before, value, f"{path}.{name}")
        for name in (old if isinstance(old, dict) else {}).keys() & after.keys() - new.keys():
            yield f"{path}.{name}: still there"
    elif isinstance(new, list) and isinstance(after, list) and len(new) == len(after):
        was = old if isinstance(old, list) and len(old) == len(new) else [None] * len(new)
        for number, pair in enumerate(zip(after, was, new, strict=True)):
            yield from leftovers(*pair, f"{path}[{number}]")
    elif after != new:
        yield f"{path}: is {str(after)[:60]}, not {str(new)[:60]}"


def upgraded(old: list[Object], new: list[Object]) -> Iterator[tuple[Object, Object, Object]]:
    """(live, old, new) of each object that an upgrade patches. Others are made or deleted; a hook
    is deleted before it is made again."""
    before = {(one["kind"], one["metadata"]["name"]): one for one in old}
    for one in new:
        found = before.get((one["kind"], one["metadata"]["name"]))
        is_hook = "helm.sh/hook" in (one["metadata"].get("annotations") or {})
        if found is not None and not is_hook:
            yield created(found), found, one

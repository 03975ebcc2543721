"""The Helm chart, rendered by Helm's own engine.

`python -m tests.support.chart` writes the snapshots again: do so after a change that is meant, and
read what it changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from tests.support.chart_objects import LOADER, groups, of_kind

CHART = Path(__file__).resolve().parents[2] / "helm" / "headrace"
PRESETS = ("laptop", "gpu-node", "gpu-cluster")
SNAPSHOTS = Path(__file__).resolve().parents[1] / "data" / "chart"
REVIEWED = ("laptop", "gpu-cluster")
KEYS = {"apiKeys": {"existingSecret": "headrace-keys"}}
GROUPS = ("gateway", "prefill", "decode")


def preset(name: str) -> dict[str, Any]:
    """The values of a preset, with API keys where it needs them."""
    values = yaml.safe_load((CHART / f"values-{name}.yaml").read_text("utf-8"))
    return dict(values) if name == "laptop" else {**values, **KEYS}


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with changes by dotted path: `{"disk.type": "hostPath"}`."""
    made = json.loads(json.dumps(values))
    for path, value in changes.items():
        *above, last = path.split(".")
        node = made
        for key in above:
            node = node.setdefault(key, {})
        node[last] = value
    return dict(made)


def rendered(values: Mapping[str, Any], name: str = "demo") -> dict[str, str]:
    """The text of each template by its name, as `helm template` prints it.

    Raises:
        helm.HelmError: the values are refused, with the reason.
    """
    return dict(_rendered(json.dumps(values), name))


@lru_cache(maxsize=64)
def _rendered(values: str, name: str) -> tuple[tuple[str, str], ...]:
    given = json.loads(values)
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(given)
        texts = chart.render(given, name=name, namespace="prod")
    return tuple((path.partition("/templates/")[2], text) for path, text in texts.items())


def objects(values: Mapping[str, Any], name: str = "demo") -> list[dict[str, Any]]:
    """All objects of a release."""
    return list(json.loads(_objects(json.dumps(values), name)))


@lru_cache(maxsize=256)
def _objects(values: str, name: str) -> str:
    """JSON of the objects, which each caller may change."""
    return json.dumps(
        [
            one
            for path, text in _rendered(values, name)
            if path.endswith(".yaml")
            for one in yaml.load_all(text, LOADER)
            if one
        ]
    )


def ray_service(values: Mapping[str, Any], name: str = "demo") -> dict[str, Any]:
    """The RayService."""
    [found] = of_kind(objects(values, name), "RayService")
    return found


def pods(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The pod template of each group, by the group's name: head, gateway, prefill, decode."""
    return {name: group["template"] for name, group in groups(objects(values)).items()}


def serve_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """What Serve deploys."""
    return dict(yaml.safe_load(ray_service(values)["spec"]["serveConfigV2"]))


def snapshot(name: str) -> str:
    """All that a preset renders, but dashboards and alerts, which lie in the chart as they are."""
    texts = {path: text for path, text in rendered(preset(name)).items() if text.strip()}
    return "".join(
        f"--- # {path}\n{text.strip()}\n"
        for path, text in sorted(texts.items())
        if path != "monitoring.yaml"
    )


def main_container(values: dict[str, Any], role: str) -> dict[str, Any]:
    """The main container of a role's pods."""
    return dict(pods(values)[role]["spec"]["containers"][0])


def variables(container: dict[str, Any]) -> dict[str, Any]:
    """The variables of a container: a value, or where it comes from."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def refusal(values: dict[str, Any]) -> str:
    """What `helm template` says of values that it refuses."""
    with pytest.raises(helm.HelmError) as refused:
        rendered(values)
    return str(refused.value)


if __name__ == "__main__":
    SNAPSHOTS.mkdir(exist_ok=True)
    for reviewed in REVIEWED:
        (SNAPSHOTS / f"{reviewed}.txt").write_text(snapshot(reviewed), "utf-8")

"""A release on a real API server: installed, changed and removed by Helm 4 or by `kubectl apply`,
and compared with what the server keeps of it."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

from tests.support.apiserver import ACCOUNTS, KINDS, ApiServer, assets
from tests.support.chart import CHART
from tests.support.chart_objects import LOADER, Object, cluster_of, groups, quantity
from tests.support.chart_patches import leftovers

KEEP = "helm.sh/resource-policy"
TOOLS = ("meta.helm.sh/", "kubectl.kubernetes.io/")
"""Annotations that Helm and kubectl add."""
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?")


class Helm:
    """A release of Helm 4, which applies on the server's side as Argo CD does."""

    def __init__(self, server: ApiServer, namespace: str, name: str = "demo") -> None:
        self.server, self.namespace, self.name = server, namespace, name
        self._config = helm.Config(kubeconfig_path=server.kubeconfig, namespace=namespace)
        self._revision = 0
        self._old: dict[int, list[Object]] = {}

    def install(self, values: dict[str, Any]) -> None:
        """Install the release.

        Raises:
            helm.HelmError: with the server's reason.
        """
        options: Any = {"namespace": self.namespace, "timeout": 60}
        self._done(self._config.install(CHART, self.name, values, **options))

    def upgrade(self, values: dict[str, Any]) -> None:
        """Upgrade the release to other values.

        Raises:
            helm.HelmError: with the server's reason.
        """
        options: Any = {"namespace": self.namespace, "timeout": 60, "reset_values": True}
        self._done(self._config.upgrade(CHART, self.name, values, **options))

    def rollback(self, revision: int) -> None:
        """Go back to a revision."""
        self._config.rollback(self.name, version=revision, timeout=60)
        self._done(self._config.status(self.name))

    def uninstall(self) -> None:
        """Remove the release."""
        self._config.uninstall(self.name, timeout=60)

    def close(self) -> None:
        """Close the connection."""
        self._config.close()

    @property
    def revision(self) -> int:
        """The newest revision."""
        return self._revision

    @property
    def manifest(self) -> list[Object]:
        """The objects of the newest revision, as rendered."""
        return self._old[self._revision]

    def faults(self) -> list[str]:
        """What the server keeps otherwise than the newest revision says, or keeps of the one before
        though this one does not name it."""
        before = {_id(one): one for one in self._old.get(self._revision - 1, [])}
        found = []
        for one in self.manifest:
            live = self.server.get(one["kind"], self.namespace, one["metadata"]["name"])
            found += differences(live, before.pop(_id(one), {}), one)
        for kind, name in before:
            kept = KEEP in (before[kind, name]["metadata"].get("annotations") or {})
            if not kept and name in names(self.server, kind, self.namespace):
                found.append(f"{kind} {name}: still there")
        return found

    def _done(self, release: Object) -> None:
        self._revision = int(release["revision"])
        self._old[self._revision] = [
            one for one in yaml.load_all(release["manifest"], LOADER) if one
        ]


def apply(server: ApiServer, namespace: str, objects: list[Object]) -> None:
    """Patch objects as Helm 3 does, which shares the code with `kubectl apply`: three-way strategic
    for Kubernetes' own kinds, three-way JSON for others.

    Raises:
        RuntimeError: the server refuses, with its reason.
    """
    text = yaml.safe_dump_all(objects)
    command = [str(kubectl()), f"--kubeconfig={server.kubeconfig}", f"--namespace={namespace}"]
    command += ["apply", "--server-side=false", "--filename=-"]
    env = {**os.environ, "HOME": str(server.folder)}
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=env, timeout=120)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)


def kubectl() -> Path | None:
    """The kubectl beside the server's binaries, or the one on the PATH."""
    beside = (assets() or Path("/nowhere")) / "kubectl"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("kubectl")
    return Path(found) if found else None


def names(server: ApiServer, kind: str, namespace: str) -> set[str]:
    """Names of all objects of a kind, without those that the namespace had."""
    first = {"kube-root-ca.crt", *ACCOUNTS}
    return {one["metadata"]["name"] for one in server.list(kind, namespace)} - first


def rest(server: ApiServer, namespace: str) -> set[str]:
    """What is left in a namespace, as `KIND NAME`."""
    return {f"{kind} {name}" for kind in KINDS for name in names(server, kind, namespace)}


def kuberay_pods(objects: list[Object]) -> dict[str, Object]:
    """The pods that KubeRay makes of a RayService's groups, by the group's name, with its own
    containers in them."""
    made, cluster = {}, cluster_of(objects)
    for name, group in groups(objects).items():
        template = json.loads(json.dumps(group["template"]))
        spec, main = template["spec"], template["spec"]["containers"][0]
        if name != "head":
            wait = pick(main, "image", "imagePullPolicy", "securityContext", "env", "volumeMounts")
            limits = {"cpu": "200m", "memory": "256Mi"}
            wait |= {"name": "wait-gcs-ready", "resources": {"limits": limits, "requests": limits}}
            spec.setdefault("initContainers", []).append(wait)
        elif cluster["enableInTreeAutoscaling"]:
            limits = {"cpu": "500m", "memory": "512Mi"}
            options = pick(cluster["autoscalerOptions"], "resources", "securityContext", "env")
            scaler = {"name": "autoscaler", "resources": {"limits": limits, "requests": limits}}
            spec["containers"].append({**scaler, **pick(main, "image"), **options})
        metadata = {**template["metadata"], "generateName": f"demo-{name}-"}
        made[name] = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata}
    return made


def pick(source: Object, *fields: str) -> Object:
    """Some fields of an object, as far as it has them."""
    return {name: source[name] for name in fields if name in source}


def differences(live: Object, old: Object, new: Object) -> list[str]:
    """How an object of the server differs from its manifest. The server leaves out what is empty,
    and writes quantities in its own way."""
    path = f"{new['kind']} {new['metadata']['name']}"
    live = json.loads(json.dumps(live))
    for name in list(live["metadata"].get("annotations") or {}):
        if name.startswith(TOOLS):
            del live["metadata"]["annotations"][name]
    if new["kind"] == "Secret":
        live, old, new = (_with_data(one) for one in (live, old, new))
    return list(leftovers(*(_canonical(one) for one in (live, old, new)), path))


def _canonical(node: Any, key: str = "") -> Any:
    if isinstance(node, dict):
        kept = {name: _canonical(value, name) for name, value in node.items()}
        return {name: value for name, value in kept.items() if value not in (None, "", [], {})}
    if isinstance(node, list):
        return [_canonical(item) for item in node]
    is_text = isinstance(node, bool) or key in ("value", "name")
    return node if is_text or not QUANTITY.fullmatch(str(node)) else quantity(node)


def _with_data(secret: Object) -> Object:
    text = secret.get("stringData") or {}
    data = {name: base64.b64encode(value.encode()).decode() for name, value in text.items()}
    without = {name: value for name, value in secret.items() if name != "stringData"}
    return json.loads(json.dumps({**without, "data": {**(secret.get("data") or {}), **data}}))


def _id(one: Object) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]

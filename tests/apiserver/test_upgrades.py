"""Upgrades on a real API server: between any two presets, by many edits and back, as Helm 4 and
Argo CD apply and as Helm 3 patches; what the server keeps is what the values say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest

from tests.support.apiserver import ApiServer
from tests.support.apiserver_release import Helm, apply, differences, kubectl, kuberay_pods
from tests.support.chart import PRESETS, merged, objects, preset
from tests.support.chart_edits import EDITS, UNCHANGEABLE, Changes
from tests.support.chart_objects import Object

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "recovery.md").read_text("utf-8")
CLUSTER = preset("gpu-cluster")


@pytest.mark.parametrize(("old", "new"), list(permutations(PRESETS, 2)))
def test_a_preset_becomes_any_other_and_back(
    server: ApiServer, namespace: str, old: str, new: str
) -> None:
    release = Helm(server, namespace)
    release.install(preset(old))
    release.upgrade(preset(new))
    assert release.faults() == []
    for pod in kuberay_pods(release.manifest).values():
        server.create(pod, namespace, dry_run=True)
    release.rollback(1)
    assert release.faults() == []
    release.close()


@pytest.fixture(scope="module", params=PRESETS)
def preset_release(server: ApiServer, request: pytest.FixtureRequest) -> Iterator[tuple[Any, Helm]]:
    """A release of each preset, which the edits change and give back."""
    level = {"pod-security.kubernetes.io/enforce": "privileged"}
    release = Helm(server, server.namespace(**level))
    values = preset(request.param)
    release.install(values)
    yield values, release
    release.close()


@pytest.mark.parametrize("changes", EDITS.values(), ids=EDITS.keys())
def test_an_edit_takes_effect_and_can_be_rolled_back(
    server: ApiServer, preset_release: tuple[dict[str, Any], Helm], changes: Changes
) -> None:
    values, release = preset_release
    before = release.revision
    release.upgrade(merged(values, changes))
    assert release.faults() == []
    for pod in kuberay_pods(release.manifest).values():
        server.create(pod, release.namespace, dry_run=True)
    release.rollback(before)
    assert release.faults() == []


@pytest.mark.parametrize("changes", EDITS.values(), ids=EDITS.keys())
def test_an_edit_takes_effect_by_helm_3s_patches_and_back(
    server: ApiServer, namespace: str, changes: Changes
) -> None:
    if kubectl() is None:
        pytest.skip("there is no kubectl")
    old, new = without_hooks(CLUSTER), without_hooks(merged(CLUSTER, changes))
    apply(server, namespace, old)
    apply(server, namespace, new)
    assert kept(server, namespace, old, new) == []
    apply(server, namespace, old)
    assert kept(server, namespace, new, old) == []


def without_hooks(values: dict[str, Any]) -> list[Object]:
    """The objects of a release that Helm patches."""
    return [
        one
        for one in objects(values)
        if "helm.sh/hook" not in (one["metadata"].get("annotations") or {})
    ]


def kept(server: ApiServer, namespace: str, old: list[Object], new: list[Object]) -> list[str]:
    """How the server's objects differ from the new ones."""
    before = {(one["kind"], one["metadata"]["name"]): one for one in old}
    found = []
    for one in new:
        kind, name = one["kind"], one["metadata"]["name"]
        live = server.get(kind, namespace, name)
        found += differences(live, before.get((kind, name), {}), one)
    return found


@pytest.mark.parametrize(
    ("base", "changes", "said"), UNCHANGEABLE.values(), ids=UNCHANGEABLE.keys()
)
def test_a_field_that_no_upgrade_can_change_is_refused_and_the_guides_way_works(
    server: ApiServer, namespace: str, base: Changes, changes: Changes, said: str
) -> None:
    """docs/recovery.md: nothing was changed, and without the object the upgrade succeeds."""
    release = Helm(server, namespace)
    values = merged(CLUSTER, base)
    release.install(values)
    kind, name = said.replace(":", "").split()[:2]
    before = server.get("RayService", namespace, "demo")["metadata"]["generation"]
    with pytest.raises(helm.HelmError) as refused:
        release.upgrade(merged(values, changes))
    assert name in str(refused.value)
    assert re.search(r"immutable|may not change", str(refused.value)), refused.value
    assert server.get("RayService", namespace, "demo")["metadata"]["generation"] == before
    path = server.path(kind, namespace, name)
    server.ask("DELETE", path)
    # The controller that lets go of a claim which no running pod has.
    if kind == "PersistentVolumeClaim":
        none = {"metadata": {"finalizers": None}}
        server.ask("PATCH", path, none, content_type="application/merge-patch+json")
    release.upgrade(merged(values, changes))
    assert release.faults() == []

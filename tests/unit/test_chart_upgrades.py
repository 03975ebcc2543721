"""`helm upgrade` between any two presets, and by edits and back: which objects Helm 3, Helm 4 and
Argo CD can patch to the new ones, and which changes make a new Ray cluster."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from tests.support import chart_rules as rules
from tests.support.chart import PRESETS, merged, objects, preset, ray_service
from tests.support.chart_edits import EDITS, UNCHANGEABLE, Changes
from tests.support.chart_objects import Object
from tests.support.chart_patches import (
    created,
    helm3_patch,
    leftovers,
    refusals,
    server_side_apply,
    upgraded,
)
from tests.support.kuberay import needs_new_cluster

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "recovery.md").read_text("utf-8")


def wrong(old: list[Object], new: list[Object]) -> list[str]:
    """What an upgrade from one release's objects to another's leaves wrong."""
    found = []
    for live, before, after in upgraded(old, new):
        for patch in (server_side_apply, helm3_patch):
            result = patch(live, before, after)
            name = f"{patch.__name__} {after['kind']} {after['metadata']['name']}"
            found += list(refusals(live, result))
            found += [f"{name}{fault}" for fault in leftovers(result, before, after)]
            found += [f"{name}: {fault}" for fault in rules.repeated_keys([result])]
    return found


@pytest.mark.parametrize(("old", "new"), list(permutations(PRESETS, 2)))
def test_a_preset_can_be_changed_to_any_other(old: str, new: str) -> None:
    assert wrong(objects(preset(old)), objects(preset(new))) == []


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("changes", EDITS.values(), ids=EDITS.keys())
def test_an_edit_takes_effect_and_can_be_rolled_back(name: str, changes: Changes) -> None:
    before, after = objects(preset(name)), objects(merged(preset(name), changes))
    assert wrong(before, after) == []
    assert wrong(after, before) == []


@pytest.mark.parametrize(
    ("base", "changes", "said"), UNCHANGEABLE.values(), ids=UNCHANGEABLE.keys()
)
def test_a_field_that_no_upgrade_can_change_is_known(
    base: Changes, changes: Changes, said: str
) -> None:
    values = merged(preset("gpu-cluster"), base)
    assert said in wrong(objects(values), objects(merged(values, changes)))
    assert said.split()[2] in GUIDE, "it says what to do"


@pytest.mark.parametrize(
    ("changes", "new_cluster"),
    [
        ({"config.router.policy": "local"}, False),
        ({"config.gateway.max_concurrent": 7}, False),
        ({"config.speculation.enabled": True}, False),
        ({"config.model.source": "org/other"}, False),
        ({"config.model.source": "oci://registry.corp/other:1"}, True),
        ({"config.model.source": "s3://models/other"}, True),
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
        ({"compileCache.type": "hostPath"}, True),
        ({"preflight.enabled": False}, True),
        ({"rayToken.enabled": False}, True),
    ],
    ids=str,
)
def test_which_changes_make_a_new_ray_cluster(changes: dict[str, Any], new_cluster: bool) -> None:
    """As docs/upgrades.md states it."""
    laptop = preset("laptop")
    before, after = ray_service(laptop), ray_service(merged(laptop, changes))
    assert needs_new_cluster(before, after) is new_cluster


@pytest.mark.parametrize(
    ("models", "new_cluster"),
    [(["b", "c"], False), (["a", "b"], True), ([], True), (["c"], True)],
    ids=["one more, last", "one more, not last", "none", "another"],
)
def test_which_models_make_a_new_ray_cluster(models: list[str], new_cluster: bool) -> None:
    """Beside a release with the model `b`. Groups of pods are in the order of their names."""
    before, after = (
        merged(preset("laptop"), {"config.models": {name: {} for name in names}})
        for names in (["b"], models)
    )
    assert needs_new_cluster(ray_service(before), ray_service(after)) is new_cluster


# The rules by which patches are made


def service_of(containers: list[Any]) -> Object:
    head = {"template": {"spec": {"containers": containers}}}
    return {
        "kind": "RayService",
        "metadata": {"name": "a"},
        "spec": {"rayClusterConfig": {"headGroupSpec": head}},
    }


def containers(release: Object) -> list[Any]:
    head = release["spec"]["rayClusterConfig"]["headGroupSpec"]
    return list(head["template"]["spec"]["containers"])


@pytest.mark.parametrize("patch", [server_side_apply, helm3_patch])
def test_an_item_and_a_field_that_are_named_no_more_are_removed(patch: Any) -> None:
    old = service_of([{"name": "a", "env": [{"name": "X", "value": "1"}]}, {"name": "b"}])
    new = service_of([{"name": "a", "env": [{"name": "Y", "value": "1"}]}])
    assert containers(patch(created(old), old, new)) == containers(new)


def test_an_apply_leaves_items_of_others_and_a_json_merge_does_not() -> None:
    """Such as a sidecar that an admission webhook has put in."""
    old, new = (
        service_of([{"name": "a", "image": "1"}]),
        service_of([{"name": "a", "image": "2"}]),
    )
    live = service_of([{"name": "a", "image": "1"}, {"name": "injected"}])
    applied = containers(server_side_apply(live, old, new))
    assert applied == [{"name": "a", "image": "2"}, {"name": "injected"}]
    assert containers(helm3_patch(live, old, new)) == containers(new)


def test_what_the_server_has_set_stays() -> None:
    old = next(o for o in objects(preset("laptop")) if o["kind"] == "Service")
    new = merged(old, {"spec.type": "LoadBalancer"})
    live = created(old)
    for patch in (server_side_apply, helm3_patch):
        after = patch(live, old, new)
        assert after["spec"]["clusterIP"] == live["spec"]["clusterIP"]
        assert after["metadata"]["uid"] == live["metadata"]["uid"]
        assert list(refusals(live, after)) == []


def test_a_changed_job_under_its_old_name_is_refused() -> None:
    """A Job's name therefore changes with its pod."""
    [job] = [o for o in objects(preset("gpu-cluster")) if o["kind"] == "Job"]
    image = {"spec.template.spec.containers": [{"name": "model", "image": "registry.corp/other"}]}
    found = list(refusals(created(job), merged(created(job), image)))
    assert found == [f"Job {job['metadata']['name']}: spec.template is immutable"]

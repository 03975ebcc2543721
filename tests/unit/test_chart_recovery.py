"""What a release does when something is wrong with it, by KubeRay's own rules, as docs/recovery.md
says it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.chart import merged, objects, pods, preset, ray_service, variables
from tests.support.chart_objects import of_kind
from tests.support.kuberay import Cluster, Operator, needs_new_cluster

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "recovery.md").read_text("utf-8")
NODE = preset("gpu-node")
WRONG = {"image.repository": "registry.corp/no-such-image"}
RIGHT = {"image.repository": "registry.corp/headrace-gpu"}


def service(changes: dict[str, Any]) -> dict[str, Any]:
    """The RayService with changes of the values."""
    return ray_service(merged(NODE, changes))


def image(cluster: Cluster) -> str:
    """The image of a cluster's pods."""
    head = cluster.service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    return str(head["containers"][0]["image"])


def pulls(cluster: Cluster) -> bool:
    """Whether nodes can pull the cluster's image, so that it answers."""
    return "no-such-image" not in image(cluster) and cluster.app is not None


def operator(changes: dict[str, Any], room: int = 2) -> Operator:
    """An operator in a cluster with GPUs for `room` Ray clusters; the oldest have them."""
    made = Operator(service(changes), lambda cluster: pulls(cluster) and has_gpus(cluster))

    def has_gpus(cluster: Cluster) -> bool:
        return any(one is cluster for one in list(made.clusters.values())[:room])

    return made


def run(op: Operator, seconds: float) -> list[bool]:
    """Let time pass; whether clients got answers at each step."""
    steps = []
    for _ in range(int(seconds // 2)):
        op.reconcile()
        steps.append(op.serving())
    return steps


def upgrade(op: Operator, changes: dict[str, Any]) -> None:
    op.apply(service(changes))


def test_a_start_with_a_wrong_image_waits_and_a_corrected_upgrade_starts() -> None:
    op = operator(WRONG)
    assert not any(run(op, 7200)), "it waits, and is never given up"
    upgrade(op, RIGHT)
    run(op, 10)
    assert op.serving() and image(op.clusters[op.active]).startswith("registry.corp/headrace-gpu")


def test_with_gpus_for_one_cluster_the_corrected_one_waits_for_the_deletion_of_the_first() -> None:
    op = operator(WRONG, room=1)
    run(op, 600)
    upgrade(op, RIGHT)
    delay = NODE.get("upgrade", {}).get("deletionDelaySeconds", 120)
    assert not any(run(op, delay)), "the first cluster still has them"
    assert run(op, 30)[-1]
    assert len(op.clusters) == 1
    assert f"{delay} s" in GUIDE


def test_an_engine_that_starts_slowly_is_waited_for_by_one_cluster() -> None:
    """However long it takes, at a first start as in an upgrade."""
    ready_s = 3 * 3600.0
    op = Operator(service({}), lambda cluster: pulls(cluster) and op.now_s >= ready_s)
    assert not any(run(op, ready_s - 60))
    assert run(op, 120)[-1] and list(op.clusters) == [op.active]
    first, ready_s = op.active, op.now_s + 7200
    op.answers = lambda cluster: cluster is op.clusters.get(first) or op.now_s >= ready_s
    upgrade(op, {"decode.memory": "99Gi"})
    assert all(run(op, 7100)), "the old cluster answers"
    assert op.active == first and len(op.clusters) == 2
    run(op, 120)
    assert op.active != first


def test_a_start_that_is_given_up_ignores_corrections() -> None:
    op = operator({**WRONG, "startup.giveUpSeconds": 1200})
    run(op, 1300)
    assert op.gave_up
    upgrade(op, RIGHT)
    assert not any(run(op, 600)) and op.clusters == {}


def test_without_upgrades_a_wrong_first_start_stays_until_its_cluster_is_deleted() -> None:
    op = operator({**WRONG, "upgrade.type": "None"})
    run(op, 60)
    upgrade(op, {**RIGHT, "upgrade.type": "None"})
    assert not any(run(op, 600))
    op.clusters.clear()
    assert run(op, 10)[-1]


def test_an_upgrade_with_a_wrong_image_leaves_the_old_cluster_serving() -> None:
    op = operator(RIGHT)
    run(op, 20)
    upgrade(op, WRONG)
    assert all(run(op, 7200))
    upgrade(op, {**RIGHT, "image.tag": "next"})
    assert all(run(op, 200))
    assert image(op.clusters[op.active]).endswith(":next")


def test_a_rollback_makes_a_third_cluster_and_the_old_one_serves_until_it_answers() -> None:
    """KubeRay compares with the cluster that waits. The guide says that a rollback needs GPUs."""
    op = operator(RIGHT, room=2)
    run(op, 20)
    first = op.active
    upgrade(op, WRONG)
    run(op, 60)
    upgrade(op, RIGHT)
    assert all(run(op, 400))
    assert op.active != first and not op.pending
    assert len(op.clusters) == 1, "the failed one and the first one are deleted"


def test_while_a_new_cluster_waits_changes_of_the_configuration_reach_only_that_one() -> None:
    op = operator(RIGHT)
    run(op, 20)
    old = op.clusters[op.active].app
    upgrade(op, WRONG)
    run(op, 20)
    upgrade(op, {**WRONG, "config.router.policy": "local"})
    run(op, 20)
    assert op.clusters[op.active].app == old
    assert "policy: local" in str(op.clusters[op.pending].app)


def test_a_head_that_lost_its_state_gets_the_app_again() -> None:
    op = operator(RIGHT)
    run(op, 20)
    op.lose_head()
    assert not op.serving()
    assert run(op, 4)[-1]


def test_serve_tries_an_engine_20_times_before_it_stops() -> None:
    """Serve's controller runs in the head. By its own number, a role of one replica would stay down
    after three failed starts, however short the cause."""
    from ray.serve._private.config import DeploymentConfig

    head = pods(NODE)["head"]["spec"]["containers"][0]
    name = "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT"
    read = "from ray.serve._private.constants import MAX_PER_REPLICA_RETRY_COUNT as n; print(n)"
    command = [sys.executable, "-c", read]
    env = {**os.environ, name: str(variables(head)[name])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    tries = min(int(done.stdout), DeploymentConfig().max_constructor_retry_count)
    assert f"after {tries} failed starts" in GUIDE


def test_a_drain_takes_a_ready_pod_only_when_another_one_has_come_back() -> None:
    """Each node has one pod of a role. An eviction is granted if enough pods stay ready."""
    for budget in of_kind(objects(preset("gpu-cluster")), "PodDisruptionBudget"):
        least = budget["spec"]["minAvailable"]
        ready = count = least + 1
        for _ in range(count):
            assert ready - 1 >= least, "granted"
            ready -= 1
            assert not ready - 1 >= least, "the next one waits"
            ready += 1  # KubeRay made another pod, and its engine has loaded


@pytest.mark.parametrize(
    ("changes", "new_cluster"),
    [
        ({"modelCache.tokenSecret": "hub"}, True),
        ({"modelCache.storageClassName": "fast"}, False),
        ({"prefill.tolerations": [{"operator": "Exists"}]}, False),
        ({"prefill.nodeSelector": {"pool": "gpu"}}, True),
    ],
    ids=str,
)
def test_which_corrections_make_new_pods(changes: dict[str, Any], new_cluster: bool) -> None:
    """A corrected claim is bound to by the pods that wait for it."""
    assert needs_new_cluster(service({}), service(changes)) is new_cluster


def test_pods_that_wait_for_the_claim_name_it_and_not_its_class() -> None:
    cluster = preset("gpu-cluster")
    other = merged(cluster, {"modelCache.storageClassName": "fast"})
    [before], [after] = (
        of_kind(objects(values), "PersistentVolumeClaim") for values in (cluster, other)
    )
    assert before["spec"] != after["spec"]
    assert pods(cluster) == pods(other)


def test_a_missing_secret_is_waited_for() -> None:
    """The kubelet starts the container when the Secret is there; nothing must be upgraded."""
    container = pods(merged(NODE, {"modelCache.tokenSecret": "hub"}))["prefill"]["spec"][
        "containers"
    ][0]
    [token] = [each for each in container["env"] if each["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}


def test_the_guide_has_a_section_for_each_case() -> None:
    sections = re.findall(r"^## (.+)$", GUIDE, re.MULTILINE)
    assert {
        "A node is drained",
        "An upgrade does not finish",
        "Ray's head is lost",
        "An engine starts slowly, or not at all",
        "The image is wrong",
        "The model hub's token is missing",
        "A claim is Pending",
    } <= set(sections)
    for section in re.split(r"^## ", GUIDE, flags=re.MULTILINE)[1:]:
        if not section.startswith("Nothing helps"):
            assert "You see" in section and "Do" in section, section.splitlines()[0]

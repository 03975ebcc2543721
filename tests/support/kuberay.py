"""KubeRay 1.7.0's decisions about the Ray clusters of one RayService, as a machine that is stepped.

The rules are those of `ray-operator/controllers/ray/rayservice_controller.go` for the upgrade types
NewCluster and None: `shouldPrepareNewCluster`, `reconcileRayCluster`, `cleanUpRayClusterInstance`,
`reconcilePromotionAndServingStatus`, `checkIfNeedSubmitServeApplications`, `calculateConditions`.
Whether a cluster answers is the caller's to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.chart_objects import Object


def needs_new_cluster(before: Object, after: Object) -> bool:
    """Whether a change of a RayService needs a new Ray cluster. Groups at the end of the list are
    added in place."""
    count = len(before["spec"]["rayClusterConfig"]["workerGroupSpecs"])
    return _compared(before) != _compared(after, count)


def _compared(service: Object, groups: int | None = None) -> str:
    """The part of a RayService that is compared, with so many of its first worker groups
    (`GenerateHashWithoutReplicasAndWorkersToDelete`)."""
    cluster: Object = json.loads(json.dumps(service["spec"]["rayClusterConfig"]))
    cluster["workerGroupSpecs"] = cluster["workerGroupSpecs"][:groups]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        for in_place in ("replicas", "minReplicas", "maxReplicas"):
            group.pop(in_place, None)
        for of_others in ("tolerations", "schedulingGates"):
            group["template"]["spec"].pop(of_others, None)
    return json.dumps(cluster, sort_keys=True)


@dataclass
class Cluster:
    """A Ray cluster."""

    service: Object
    """The RayService that it follows."""
    app: str | None = None
    """The Serve configuration that it was given last; None after its head was lost."""


@dataclass
class Operator:
    """The operator with one RayService.

    `answers` says whether a cluster's app answers; it is asked at each step for the pending and the
    active cluster.
    """

    service: Object
    answers: Callable[[Cluster], bool]
    clusters: dict[str, Cluster] = field(default_factory=dict)
    active: str = ""
    pending: str = ""
    gave_up: bool = False
    now_s: float = 0.0
    _made: int = 0
    _started_s: float = 0.0
    _was_ready: bool = False
    _ends_s: dict[str, float] = field(default_factory=dict)
    _same: dict[str, bool] = field(default_factory=dict)
    """Which clusters need no replacement, as far as it is known since the last change."""

    def apply(self, service: Object) -> None:
        """Change the RayService, as `helm upgrade` does."""
        self.service, self._same = service, {}

    def reconcile(self, seconds: float = 2.0) -> None:
        """Let time pass, and take one step."""
        self.now_s += seconds
        self._clean_up()
        if self.gave_up:
            return
        if self.pending and self.pending not in self.clusters:
            self.clusters[self.pending] = Cluster(self.service)
        for name in (self.active, self.pending):
            if name in self.clusters and self._is_same(name):
                # What is changed in place: numbers of pods, tolerations, groups at the end.
                self.clusters[name].service = self.service
        served = False
        # With a pending cluster, only that one gets Serve's configuration.
        name = self.pending or self.active
        if name in self.clusters and (self.pending or not self._wants_new_cluster()):
            cluster = self.clusters[name]
            if cluster.app != self.service["spec"]["serveConfigV2"]:
                cluster.app = self.service["spec"]["serveConfigV2"]
            served = self.answers(cluster)
            if served and self.pending:
                self.active, self.pending = self.pending, ""
        if self._wants_new_cluster():
            self._made += 1
            self.pending = f"cluster-{self._made}"
        self._was_ready = self._was_ready or served
        self._give_up()

    def lose_head(self) -> None:
        """Replace the active cluster's head by one without its state."""
        self.clusters[self.active].app = None

    def serving(self) -> bool:
        """Whether the cluster to which the Services lead answers."""
        return self.active in self.clusters and self.answers(self.clusters[self.active])

    def _is_same(self, name: str) -> bool:
        if name not in self._same:
            before = self.clusters[name].service
            self._same[name] = not needs_new_cluster(before, self.service)
        return self._same[name]

    def _wants_new_cluster(self) -> bool:
        if not self.active and not self.pending:
            return True
        # The one that waits is compared, not the one that serves.
        name = self.pending or self.active
        if name not in self.clusters or self._is_same(name):
            return False
        return bool(self.service["spec"]["upgradeStrategy"]["type"] != "None")

    def _clean_up(self) -> None:
        delay_s = float(self.service["spec"]["rayClusterDeletionDelaySeconds"])
        for name in [name for name in self.clusters if name not in (self.active, self.pending)]:
            ends_s = self._ends_s.setdefault(name, self.now_s + delay_s)
            if self.now_s > ends_s:
                del self.clusters[name]

    def _give_up(self) -> None:
        annotations = self.service["metadata"].get("annotations") or {}
        timeout_s = annotations.get("ray.io/initializing-timeout")
        if timeout_s and not self._was_ready and self.now_s - self._started_s >= float(timeout_s):
            self.gave_up, self.active, self.pending = True, "", ""

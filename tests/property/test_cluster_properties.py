"""A `Cluster` that reads only the newest report of each replica, against one that reads each."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.replica_health import Probe
from headrace.router.cluster import Cluster, Prompt
from headrace.router.placement.cluster_view import ClusterView
from headrace.router.placement.request import NoDecodeReplicaError
from headrace.router.plan import Plan, RouterSettings
from headrace_engine.reporting.report import Report
from headrace_kvstore.lookup.availability import AvailableRun
from headrace_lab.simulate.hardware import default_steps

BLOCK = 16
REPLICAS = ("d0", "d1", "d2", "p0", "p1")
MACHINES = ("m0", "m1")
WINDOWS = {"d2": (4,), "p1": (4,)}
"""Replicas with two KV cache groups, by the blocks of their window."""
STEPS = default_steps().to_dict()
ACTIONS = ["report"] * 8 + ["plan"] * 4 + ["store"] * 3 + ["evict", "source", "clear"]
ACTIONS += ["withdraw", "expire", "remove", "probe"]


def view_of(cluster: Cluster) -> ClusterView | None:
    """Its view, without `drift`: a mean over the reports that are read."""
    if cluster.view is not None:
        cluster.view.engines["drift"] = 0.0
    return cluster.view


class World:
    """Replicas whose reports and KV events reach several clusters alike.

    Attributes:
        clusters: the first reads its view after each report.
        plans: the latest plans that were not withdrawn.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clusters = [
            Cluster(RouterSettings(remeasure_s=20.0), random.Random(seed)) for _ in range(2)
        ]
        self.now_s, self.seq, self.epoch = 0.0, 0, 0
        self.plans: list[Plan] = []
        self.reports: dict[str, dict[str, Any]] = {}

    def each(self, act: Callable[[Cluster], object]) -> None:
        for cluster in self.clusters:
            act(cluster)

    def step(self) -> None:
        self.now_s += self.random.choice([0.0, 0.02, 0.3, 1.0])
        name = self.random.choice(REPLICAS)
        getattr(self, self.random.choice(ACTIONS))(name)

    def source(self, name: str) -> None:
        """A replica's KV events begin, or begin again: its holder may be another one."""
        self.epoch += 1
        self.each(lambda cluster: cluster.view)
        windows = WINDOWS.get(name, ())
        restart = self.random.random() < 0.5
        for cluster in self.clusters:
            if restart:
                cluster.events.remove_source(name)
            cluster.events.add_source(name, f"e{self.epoch}", self.now_s, windows)
        self.seq += 1
        self.report(name)  # a view has a replica's holder from its next report on

    def report(self, name: str) -> None:
        chance = self.random.random
        self.seq += self.random.choice([1, 1, 1, 0])
        fields = self.reports.setdefault(name, {"machine": self.random.choice(MACHINES)})
        fields |= {
            "running": self.random.randrange(4),
            "context": self.random.randrange(4000),
            "prompts": self.random.randrange(3),
            "queued_tokens": self.random.choice([0, 0, 700, 20_000]),
            "queued_pairs": self.random.choice([0.0, 1e6]),
            "free_blocks": self.random.choice([10, 300, 10_000]),
            "draining": chance() < 0.05,
            "kv": self.random.choice(["", "a", "a", "b"]),
            "adapters": self.random.choice([(), ("x",)]),
            "adapter_slots": 1,
            "adapter_load_s": 0.5,
            "heard": tuple(plan.request_id for plan in self.plans if chance() < 0.5),
        }
        # What a replica has measured once is in all of its later reports.
        if chance() < 0.3:
            fields["steps"] = STEPS | {"square": self.random.choice([0.1, 0.2])}
        if chance() < 0.3:
            fields["loads"] = {
                medium: (self.random.random(), 1e-9) for medium in ("dram", "nvme", "object")
            }
        if chance() < 0.3:
            fields["transfer"] = self.random.random(), 1e-9, 0.1
            fields["call"] = fields["handoff"] = self.random.random(), 0.1
        if chance() < 0.3:
            fields["computed_s"] = 0.0
        if name.startswith("d") and chance() < 0.1:
            fields["policy"] = self.random.choice(["cost", "local", "remote"])
        role = "decode" if name.startswith("d") else "prefill"
        report = Report(
            replica=name,
            role=role,
            seq=self.seq,
            block_tokens=BLOCK,
            token_bytes=1000.0,
            step_tokens=2048,
            **fields,
        )
        self.each(lambda cluster: cluster.report(report, self.now_s))
        assert self.clusters[0].view is not None

    def keys(self) -> np.ndarray:
        start = self.random.randrange(4) * 1000 + 1
        return np.arange(start, start + self.random.randrange(1, 40), dtype=np.uint64)

    def store(self, name: str) -> None:
        keys, windows = self.keys(), WINDOWS.get(name, ())
        for cluster in self.clusters:
            if name in cluster.events._sources:
                holder = cluster.events.holder(name)
                for group in range(1 + len(windows)):
                    cluster.index.stored(holder, None, keys, group)

    def evict(self, name: str) -> None:
        keys = self.keys()
        for cluster in self.clusters:
            if name in cluster.events._sources:
                cluster.index.removed(cluster.events.holder(name), keys[len(keys) // 2 :])

    def clear(self, name: str) -> None:
        for cluster in self.clusters:
            if name in cluster.events._sources:
                cluster.index.cleared(cluster.events.holder(name))

    def plan(self, _name: str) -> None:
        keys = self.keys()
        stored = [AvailableRun("dram", len(keys) // 2 * BLOCK)]
        prompt = Prompt(
            keys,
            len(keys) * BLOCK + 3,
            machine=self.random.choice(["", *MACHINES]),
            stored=stored,
            adapter=self.random.choice(["", "x", "y"]),
        )
        made: list[Plan | None] = []
        for cluster in self.clusters:
            view_of(cluster)
            try:
                made.append(cluster.plan(prompt, self.now_s))
            except NoDecodeReplicaError:
                made.append(None)
        assert made[0] == made[1]
        if made[0] is not None:
            self.plans = [*self.plans[-8:], made[0]]

    def withdraw(self, _name: str) -> None:
        if self.plans:
            plan = self.plans.pop(self.random.randrange(len(self.plans)))
            self.each(lambda cluster: cluster.withdraw(plan, self.now_s))

    def expire(self, _name: str) -> None:
        self.each(lambda cluster: cluster.expire(self.now_s))

    def remove(self, name: str) -> None:
        if self.random.random() < 0.5:
            self.reports.pop(name, None)
            self.each(lambda cluster: cluster.remove_replica(name))

    def probe(self, name: str) -> None:
        probe = self.random.choice([Probe.PASSED, Probe.MISSED, Probe.REFUSED])
        self.each(lambda cluster: cluster.replica_health.on_probe(name, probe, self.now_s))

    def check(self) -> None:
        views = [view_of(cluster) for cluster in self.clusters]
        assert (views[0] is None) == (views[1] is None)
        if views[0] is None or views[1] is None:
            return
        assert views[0].names == views[1].names and views[0].settings == views[1].settings
        for field in ("engines", "curves", "padded", "loads", "fits"):
            one, other = (getattr(view, field) for view in views)
            assert one.tolist() == other.tolist(), field
        stats = [cluster.stats(self.now_s) for cluster in self.clusters]
        assert stats[0] == stats[1]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_plans_are_the_same_if_each_report_is_read(seed: int) -> None:
    world = World(seed)
    for _ in range(80):
        world.step()
        if world.random.random() < 0.1:
            world.check()
    world.check()

"""The KV store's metrics: the statistics of its nodes, as Ray's counters and gauges.

Values are sums over the machines, so that no series ends when a machine leaves. `headrace status`
shows each machine.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Collection, Mapping
from typing import Any

from ray.serve.metrics import Gauge

from headrace.observability.totals import TotalCounter

TIERS = ("dram", "nvme", "object")
STATES = ("on", "read-only", "off")
EVENTS = {
    ("dram", "stored_total"): "stored",
    ("dram", "evicted_total"): "evicted",
    ("dram", "discarded_total"): "discarded",
    ("nvme", "writes"): "stored",
    ("nvme", "writes_failed"): "write_failed",
    ("nvme", "blocks_evicted"): "evicted",
    ("nvme", "reads_unreadable"): "read_failed",
    ("nvme", "reads_corrupt"): "corrupt",
    ("nvme", "hits"): "hit",
    ("nvme", "misses"): "miss",
    ("object", "objects_evicted"): "evicted",
    ("object", "reads_good"): "hit",
    ("object", "reads_corrupt"): "corrupt",
    ("object", "breaker_opened"): "breaker_opened",
}
"""Event of each count, by tier and name in a node's `stats`."""


def state(tier: Mapping[str, Any]) -> str:
    """Return a tier's state from its node's statistics. The object tier has two states: of reads
    and of writes."""
    read_only = tier["state"] == "on" and tier.get("writing") == "off"
    return "read-only" if read_only else str(tier["state"])


class RayStoreMetrics:
    """Exporter that is called with the last statistics of each machine's node, about every five
    seconds.

    Args:
        tiers: the configured tiers; others are not exported.
    """

    def __init__(self, tiers: Collection[str] = TIERS) -> None:
        self._names = tuple(tiers)
        name = "headrace_store_"
        self._nodes = Gauge(
            f"{name}nodes",
            "Machines with engines: whether their node answers.",
            tag_keys=("up",),
        )
        self._tiers = Gauge(
            f"{name}tiers",
            "Machines by the state of their tier: on, read-only or off.",
            tag_keys=("tier", "state"),
        )
        self._bytes = Gauge(f"{name}bytes", "Bytes of KV held.", tag_keys=("tier",))
        self._size = Gauge(f"{name}size_bytes", "Room for KV.", tag_keys=("tier",))
        self._blocks = Gauge(f"{name}blocks", "KV blocks held.", tag_keys=("tier",))
        self._backlog = Gauge(f"{name}backlog_bytes", "Bytes of DRAM that wait to be written.")
        self._peers = Gauge(
            f"{name}peers", "Links between machines' nodes, by state.", tag_keys=("state",)
        )
        self._events = TotalCounter(
            f"{name}block_events",
            "What became of blocks (of the object tier's evictions: objects).",
            tag_keys=("tier", "event"),
        )

    def __call__(self, nodes: Mapping[str, Mapping[str, Any] | None]) -> None:
        """Export the statistics.

        Args:
            nodes: `Operations.stats` by machine; None for a node that did not answer.
        """
        up = {machine: stats for machine, stats in nodes.items() if stats is not None}
        self._nodes.set(len(up), tags={"up": "yes"})
        self._nodes.set(len(nodes) - len(up), tags={"up": "no"})
        self._backlog.set(
            sum(stats.get("write_behind", {}).get("backlog_bytes", 0) for stats in up.values())
        )
        remotes = (stats.get("remote", {}) for stats in up.values())
        peers = [peer for remote in remotes for peer in remote.get("peers", {}).values()]
        alive = sum(peer["state"] == "up" and not peer["left_alone"] for peer in peers)
        self._peers.set(alive, tags={"state": "up"})
        self._peers.set(len(peers) - alive, tags={"state": "down"})
        for tier in self._names:
            self._tier(tier, [stats["tiers"][tier] for stats in up.values()])
        self._events.keep(nodes)
        for machine, stats in up.items():
            for (tier, counted), event in EVENTS.items():
                total = stats["tiers"][tier].get(counted, 0)
                self._events.follow(total, {"tier": tier, "event": event}, source=machine)

    def _tier(self, tier: str, stats: list[Mapping[str, Any]]) -> None:
        states = Tally(map(state, stats))
        for word in STATES:
            self._tiers.set(states[word], tags={"tier": tier, "state": word})
        for gauge, key in (
            (self._bytes, "bytes"),
            (self._size, "size_bytes"),
            (self._blocks, "blocks"),
        ):
            gauge.set(sum(one.get(key, 0) for one in stats), tags={"tier": tier})

"""Outcomes of an engine's KV blocks, as vLLM's connector statistics and Prometheus counters.

One counter, `vllm:headrace_kv_blocks`, by `event`:

    loaded_dram, loaded_nvme                    copied into the engine's cache, verified
    direct_nvme                                 of loaded_nvme, read straight into the device
    lost_gone                                   evicted between the offer and the load, or not
                                                to be opened
    lost_corrupt_dram, lost_corrupt_nvme        the checksum did not match
    lost_unreadable_nvme                        the disk or the file failed
    lost_slow_nvme                              did not arrive in the time that computing takes
    lost_error                                  the load as a whole failed; the log says why
    declined_nvme                               computing was predicted to be faster
    node_unanswered                             the StoreNode was asked for them in vain
    saved, save_failed
    save_not_needed                             another engine has stored it, or is storing it
    save_no_room                                no slot can be evicted
    save_busy                                   released unsaved: the engine's cache was needed

Blocks that were lost or declined are computed. No request fails because of them. In an engine of
several workers the first worker counts all events, and each other worker only its own losses and
failed saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

COUNTER = "vllm:headrace_kv_blocks"
LOSSES = frozenset(
    [
        *("lost_gone", "lost_corrupt_dram", "lost_corrupt_nvme", "lost_unreadable_nvme"),
        *("lost_slow_nvme", "lost_error", "save_failed"),
    ]
)
"""Events that may happen to one worker's part of a block alone."""


class LoadTime(NamedTuple):
    """One step's load: its medium, its size, and its own duration without the step's."""

    medium: str
    bytes: int
    seconds: float


class StoreStats(KVConnectorStats):
    """Statistics since the last report.

    `data` is {event: blocks}. For planners it also has `loads`, lists as `LoadTime`, once
    `digest`, the namespace of the engine's blocks in hex, and `states`, the numbers of its cache
    groups of recurrent layers if there are any; and after each reset `epochs`, in hex.
    Then the engine no longer finds blocks by their hashes in this namespace.
    """

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value if name in self.data else value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(blocks_by_event(self.data).items()))

    def is_empty(self) -> bool:
        return not self.data


def blocks_by_event(data: Mapping[str, Any]) -> dict[str, int]:
    """Return the counts among a report's data."""
    return {event: blocks for event, blocks in data.items() if isinstance(blocks, int)}


class Reporter:
    """Reporter of the differences between growing counts and their last report."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def report(self, counts: Mapping[str, int]) -> StoreStats | None:
        """Return the increase of `counts` since the last report, or None. Other threads may be
        counting."""
        now = dict(counts)
        if now == self._told:
            return None
        before, self._told = self._told, now
        new = {event: n - before.get(event, 0) for event, n in now.items()}
        new = {event: n for event, n in new.items() if n}
        return StoreStats(new) if new else None


class StorePromMetrics(KVConnectorPromMetrics):
    """Prometheus counter of block outcomes in vLLM's own export."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._blocks = self._counter_cls(
            name=COUNTER,
            documentation="KV blocks by what became of them in the store.",
            labelnames=[*labelnames, "event"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for event, blocks in blocks_by_event(transfer_stats_data).items():
            labels = [*self.per_engine_labelvalues[engine_idx], event]
            self._blocks.labels(*labels).inc(blocks)

"""What an engine's store did, on its way from the worker to whoever plans and to Prometheus.

vLLM carries a connector's statistics from the worker's step to the engine's front end, beside those
of other connectors. Ours are plain numbers and lists, summed over workers and steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

COUNTS = {
    "blocks_loaded": "KV blocks loaded from the store",
    "blocks_saved": "KV blocks saved to the store",
    "blocks_failed": "KV blocks that were gone, late or wrong, and were computed",
}


class LoadTime(NamedTuple):
    """One step's load: from which medium, how much, how long it took by itself."""

    medium: str
    bytes: int
    seconds: float


@dataclass
class StoreStats(KVConnectorStats):
    """Counts since the last report, loads one by one, and under which namespaces blocks stand.

    data: the counts of `COUNTS`; `loads`, lists as `LoadTime`; `digests`, one a worker, in hex.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value if name in self.data else value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: self.data.get(name, 0) for name in COUNTS}

    def is_empty(self) -> bool:
        return not self.data


class StoreMetrics(KVConnectorPromMetrics):
    """The counts, and loaded bytes and seconds, as Prometheus counters."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(f"vllm:headrace_store_{name}", text, self._labelnames),
                self.per_engine_labelvalues,
            )
            for name, text in {
                **COUNTS,
                "load_bytes": "Bytes loaded from the store",
                "load_seconds": "Seconds that loads from the store took, computing beside them",
            }.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data = transfer_stats_data
        loads = [LoadTime(*load) for load in data.get("loads", ())]
        amounts = {name: data.get(name, 0) for name in COUNTS}
        amounts["load_bytes"] = sum(load.bytes for load in loads)
        amounts["load_seconds"] = sum(load.seconds for load in loads)
        for name, amount in amounts.items():
            if amount:
                self._counters[name][engine_idx].inc(amount)

"""Selective recompute's entry in vLLM's statistics: the seconds that it took of a step.

The step-time model (`headrace_engine`) subtracts them: the step's own tokens do not take this time.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

COUNTER = "vllm:headrace_blending_seconds"


class BlendingStats(KVConnectorStats):
    """Statistics of recompute; `data` is {"recompute_s": seconds since the last report}."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0.0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class BlendingPromMetrics(KVConnectorPromMetrics):
    """The counter in vLLM's own export."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._seconds = self._counter_cls(
            name=COUNTER,
            documentation="Seconds of engine steps in which reused KV was placed and computed.",
            labelnames=labelnames,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        self._seconds.labels(*labels).inc(transfer_stats_data.get("recompute_s", 0.0))

"""Results of pulls, as vLLM's connector statistics and Prometheus counters.

vllm:headrace_transfers                 by `event`: proved, checked (also byte for byte), and
                                        unproved_<kind> (`identity.Unproved`)
vllm:headrace_transfer_proof_seconds    from the arrival of the bytes to the proof
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

from headrace_engine.pull_events import EPOCHS, PIECES, PROVED, UNPROVED, transfers_by_event
from headrace_engine.vllm.connectors import NixlKVConnectorStats, NixlPromMetrics


class TransferStats(NixlKVConnectorStats):
    """vLLM's statistics with four more lists: `proved` of [seconds, checked], `unproved` of
    [request id of the engine, id of the producing engine, kind, why], `pieces` of a number for each
    transfer (`meter.Transfer`), and `epochs`, in hex, one after each reset of the engine's caches.
    """

    def reset(self) -> None:
        super().reset()
        self.data |= {PROVED: [], UNPROVED: [], PIECES: [], EPOCHS: []}

    def record_transfer(self, res: Any) -> None:
        super().record_transfer(res)
        self.data[PIECES].append(getattr(res, "pieces", 1))

    def is_empty(self) -> bool:
        told = self.data[PROVED] or self.data[UNPROVED] or self.data[EPOCHS]
        return super().is_empty() and not told


class TransferPromMetrics(NixlPromMetrics):
    """vLLM's metrics, and two of our own."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._transfers = self._counter_cls(
            name="vllm:headrace_transfers",
            documentation="KV transfers by what came of their proof.",
            labelnames=[*labelnames, "event"],
        )
        self._seconds = self._counter_cls(
            name="vllm:headrace_transfer_proof_seconds",
            documentation="Seconds from the arrival of transferred KV to its proof.",
            labelnames=labelnames,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        labels = self.per_engine_labelvalues[engine_idx]
        for event, count in transfers_by_event(transfer_stats_data).items():
            self._transfers.labels(*labels, event).inc(count)
        seconds = sum(took for took, _ in transfer_stats_data.get(PROVED, ()))
        if seconds:
            self._seconds.labels(*labels).inc(seconds)

"""`NixlConnector`: vLLM's own with proved pulls, and without busy threads on a CPU engine.

    kv_connector: NixlConnector
    kv_connector_module_path: headrace_engine.pull_proof.connector

vLLM's class only makes its two sides and passes calls on. This class does the same with our
sides.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

from headrace_engine.kv_transfer.nixl_cpu_usage import limit_cpu_usage
from headrace_engine.pull_events import EPOCHS
from headrace_engine.pull_proof.scheduler_connector import ProvenScheduler
from headrace_engine.pull_proof.stats import TransferPromMetrics, TransferStats
from headrace_engine.pull_proof.worker_connector import ProvenWorker
from headrace_engine.vllm.connectors import NixlBaseConnector
from headrace_engine.vllm.connectors import NixlConnector as VllmNixlConnector


class NixlConnector(VllmNixlConnector):
    """vLLM's connector with our sides. vLLM finds it by the module path; Ray and vLLM know it by
    the name.

    Raises:
        ValueError: this engine cannot do what `headrace_integrity` asks for.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        args = vllm_config, self.engine_id, kv_cache_config
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = ProvenScheduler(*args)
            return
        cores = os.sched_getaffinity(0)
        self.connector_worker = ProvenWorker(*args)
        if vllm_config.device_config.device_type == "cpu":
            limit_cpu_usage(self.connector_worker, cores)

    def reset_cache(self) -> bool:
        """Stop proving KV that was computed so far. vLLM calls this when the weights change or all
        caches are cleared."""
        scheduler = self.connector_scheduler
        return scheduler.reset() if isinstance(scheduler, ProvenScheduler) else True

    def kv_sources(self, request_id: str) -> Mapping[str, int]:
        """Implement `usage.scheduler_usage.KvSources`."""
        scheduler = self.connector_scheduler
        tokens = scheduler.pulled.get(request_id) if isinstance(scheduler, ProvenScheduler) else 0
        return {"pulled": tokens} if tokens else {}

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if not isinstance(self.connector_scheduler, ProvenScheduler):
            return super().get_kv_connector_stats()
        stats = TransferStats()
        stats.data[EPOCHS] = self.connector_scheduler.digests.take_epochs()
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return TransferStats() if data is None else TransferStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return TransferPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

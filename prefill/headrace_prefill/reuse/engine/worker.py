"""The worker class that hands its connector the model, so that the connector can compute rows.

    worker_cls="headrace_prefill.reuse.engine.worker.ReusingWorker"

A connector that wants the model has a method `bind_rows(RowEngine)`. One within a MultiConnector is
found there. Engines in which rows cannot be computed start as ever: their connector is told why
by `no_rows(reason)`, and their requests are computed.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from headrace_prefill.reuse.engine._vllm_compat import (
    Contexts,
    check_engine,
    decoder,
    paged_kv,
)
from headrace_prefill.reuse.engine.rows import RowEngine

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class ModelInReach:
    """Mixed into a worker class of vLLM's, before it."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """As vLLM's; then binds the connectors that ask for the model."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        wanting = [c for c in _connectors() if hasattr(c, "bind_rows")]
        for connector in wanting:
            try:
                connector.bind_rows(row_engine(self, kv_cache_config))
            except ValueError as error:
                connector.no_rows(str(error))


class ReusingWorker(ModelInReach, PlatformWorker):  # type: ignore[misc]
    """vLLM's worker of the platform."""


def row_engine(worker: Any, kv_cache_config: Any) -> RowEngine:
    """The rows of a worker's model.

    Raises:
        Unsupported: they cannot be computed; the text says why.
    """
    check_engine(worker.vllm_config, kv_cache_config)
    opened = decoder(worker.get_model())
    kv = paged_kv(opened, kv_cache_config)
    contexts = Contexts(worker.vllm_config, kv_cache_config, opened, kv.kernel_tokens)
    return RowEngine(opened, kv, contexts)


def _connectors() -> list[Any]:
    """The worker's connector, or those within it."""
    if not has_kv_transfer_group():
        return []
    group = get_kv_transfer_group()
    return list(getattr(group, "_connectors", [group]))

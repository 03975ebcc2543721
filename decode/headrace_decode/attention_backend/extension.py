"""Sparse attention, offloading and compression as one extension of an engine.

They share an attention backend, and the blocks of the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace_decode.attention.private_answers import PrivateAnswers
from headrace_engine.extensions.extension import SchedulerPart, WorkerPart

if TYPE_CHECKING:
    from headrace_decode.attention.settings import SparseSettings
    from headrace_decode.compression.engine.settings import CompressionSettings


class AttentionExtension:
    """Implements `EngineExtension`."""

    def scheduler(self, scheduler: Any) -> Sequence[SchedulerPart]:
        """Implement `EngineExtension.scheduler`."""
        parts: list[SchedulerPart] = [PrivateAnswers()]
        settings, compression = _settings(scheduler.vllm_config)
        if settings is None or (compression is None and not settings.offload_gib):
            return parts
        from headrace_decode.attention.offload.scheduler import (
            OffloadSchedulerPart,
            offload_manager,
        )

        # The cache has one if the workers' part chose `OffloadSpec` in `kv_cache_specs`.
        manager = offload_manager(scheduler)
        if manager is None:
            return parts
        offload = OffloadSchedulerPart(scheduler, manager, settings)
        parts.insert(0, offload)  # excludes a request from connectors before it is made private
        if compression is not None:
            from headrace_decode.compression.engine.scheduler import CompressionSchedulerPart

            # Decides first whose KV it drops during the prefill, since these are not offloaded.
            parts.insert(0, CompressionSchedulerPart(scheduler, offload, compression))
        return parts

    def worker(self, worker: Any) -> WorkerPart | None:
        """Implement `EngineExtension.worker`."""
        settings, compression = _settings(worker.vllm_config)
        if settings is None:
            return None
        from headrace_decode.attention_backend.worker import AttentionWorkerPart

        return AttentionWorkerPart(worker, settings, compression)


def _settings(config: Any) -> tuple[SparseSettings | None, CompressionSettings | None]:
    """Return an engine's settings of sparse attention, and of compression."""
    if not config.additional_config:
        return None, None
    from headrace_decode.attention.settings import settings_of
    from headrace_decode.compression.engine.settings import settings_of as compression_settings_of

    additional = config.additional_config
    return settings_of(additional), compression_settings_of(additional)

"""Speculative decoding as an extension of an engine that drafts by a class of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace_engine.extensions.extension import SchedulerPart, WorkerPart


class SpeculativeExtension:
    """Implements `EngineExtension`."""

    def scheduler(self, scheduler: Any) -> Sequence[SchedulerPart]:
        """Implement `EngineExtension.scheduler`: vLLM's scheduler does all that is needed."""
        return []

    def worker(self, worker: Any) -> WorkerPart | None:
        """Implement `EngineExtension.worker`."""
        speculative = worker.vllm_config.speculative_config
        if speculative is None or speculative.method != "custom_class":
            return None
        from headrace_decode.speculative.speculative_worker import SpeculativeWorkerPart

        return SpeculativeWorkerPart(worker)

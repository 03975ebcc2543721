"""Blending as an extension of an engine, if one of its connectors blends KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace_engine.extensions.extension import SchedulerPart, WorkerPart


class BlendingExtension:
    """Implements `EngineExtension`."""

    def scheduler(self, scheduler: Any) -> Sequence[SchedulerPart]:
        """Implement `EngineExtension.scheduler`: the connector does all that is needed."""
        return []

    def worker(self, worker: Any) -> WorkerPart | None:
        """Implement `EngineExtension.worker`."""
        from headrace_prefill.blending.engine.worker import BlendingWorkerPart

        return BlendingWorkerPart(worker)

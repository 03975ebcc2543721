"""Resumed requests as an extension of an engine. Every engine has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace_engine.extensions.extension import SchedulerPart, WorkerPart


class ResumeExtension:
    """Implements `EngineExtension`."""

    def scheduler(self, scheduler: Any) -> Sequence[SchedulerPart]:
        """Implement `EngineExtension.scheduler`."""
        from headrace_decode.resume.scheduler import ResumeSchedulerPart

        return [ResumeSchedulerPart(scheduler)]

    def worker(self, worker: Any) -> WorkerPart | None:
        """Implement `EngineExtension.worker`. The second model runner gets all tokens of a new
        request, and needs no part."""
        from headrace_decode.resume.worker import ResumeWorkerPart

        return None if worker.vllm_config.use_v2_model_runner else ResumeWorkerPart(worker)

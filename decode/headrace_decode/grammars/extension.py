"""Grammars as an extension of an engine: each is compiled with the backend that enforces it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace_engine.extensions.extension import SchedulerPart, WorkerPart


class GrammarExtension:
    """Implements `EngineExtension`."""

    def scheduler(self, scheduler: Any) -> Sequence[SchedulerPart]:
        """Install the combined backend in the scheduler, which needs no part besides."""
        from headrace_decode.grammars.combined_backend import install_combined_backend

        install_combined_backend(scheduler.structured_output_manager)
        return []

    def worker(self, worker: Any) -> WorkerPart | None:
        """Implement `EngineExtension.worker`."""
        return None

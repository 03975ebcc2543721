"""Chooses the scheduler and worker classes of a decode engine: those that run our extensions."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from headrace_engine.extensions.extension import EXTENSIBLE_SCHEDULERS, EXTENSIBLE_WORKER

PLATFORM_WORKERS = frozenset(
    {"vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker"}
)
"""vLLM's worker classes, which `EXTENSIBLE_WORKER` can replace."""


def choose_engine_classes(config: Any) -> str | None:
    """Set the scheduler and worker classes in vLLM's configuration of an engine.

    Returns:
        Why the engine cannot resume streams; None if it can.
    """
    scheduler, parallel = config.scheduler_config, config.parallel_config
    if scheduler.scheduler_cls is not None:
        return f"the engine runs with scheduler_cls {scheduler.scheduler_cls}"
    if not config.use_v2_model_runner:
        if parallel.worker_cls in PLATFORM_WORKERS:
            parallel.worker_cls = EXTENSIBLE_WORKER
        elif not _runs_extensions(parallel.worker_cls):
            return f"the engine runs with worker_cls {parallel.worker_cls}"
    scheduler.scheduler_cls = EXTENSIBLE_SCHEDULERS[bool(scheduler.async_scheduling)]
    return None


def _runs_extensions(worker_cls: Any) -> bool:
    if worker_cls == EXTENSIBLE_WORKER:
        return True
    if isinstance(worker_cls, str):
        worker_cls = resolve_name(worker_cls)
    from headrace_engine.extensions.worker import WorkerWithExtensions

    return isinstance(worker_cls, type) and issubclass(worker_cls, WorkerWithExtensions)

"""Chooses the scheduler and worker classes of a decode engine."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from headrace_engine.connector.identity.engine_identity import BOUNDED_KEY, SPARSE_KEY

SCHEDULERS = {
    False: "headrace_decode.resume.scheduler.ResumeScheduler",
    True: "headrace_decode.resume.scheduler.AsyncResumeScheduler",
}
"""Path of the scheduler class, by whether the engine schedules steps ahead."""
OFFLOADING_SCHEDULERS = {
    False: "headrace_decode.attention.offload.scheduler.OffloadingScheduler",
    True: "headrace_decode.attention.offload.scheduler.AsyncOffloadingScheduler",
}
"""Subclasses of `SCHEDULERS` for engines that may offload KV."""
COMPRESSION_SCHEDULERS = {
    False: "headrace_decode.compression.engine.scheduler.CompressionScheduler",
    True: "headrace_decode.compression.engine.scheduler.AsyncCompressionScheduler",
}
"""Subclasses of `OFFLOADING_SCHEDULERS` for engines whose requests may drop KV."""
WORKER = "headrace_decode.resume.worker.ResumeWorker"
PLATFORM_WORKERS = frozenset(
    {"vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker"}
)
"""vLLM's worker classes, which `WORKER` can replace."""


def choose_engine_classes(config: Any) -> str | None:
    """Set the scheduler and worker classes in vLLM's configuration of an engine.

    An app's techniques choose the worker class; its attribute `resumes_requests` says whether it
    can resume streams.

    Returns:
        Why the engine cannot resume streams; None if it can.
    """
    scheduler, parallel = config.scheduler_config, config.parallel_config
    if scheduler.scheduler_cls is not None:
        return f"the engine runs with scheduler_cls {scheduler.scheduler_cls}"
    if not config.use_v2_model_runner:
        if parallel.worker_cls in PLATFORM_WORKERS:
            parallel.worker_cls = WORKER
        elif not _resumes_requests(parallel.worker_cls):
            return f"the engine runs with worker_cls {parallel.worker_cls}"
    settings = config.additional_config if isinstance(config.additional_config, dict) else {}
    offloads = (settings.get(SPARSE_KEY) or {}).get("offload_gib")
    schedulers = OFFLOADING_SCHEDULERS if offloads else SCHEDULERS
    schedulers = COMPRESSION_SCHEDULERS if BOUNDED_KEY in settings else schedulers
    scheduler.scheduler_cls = schedulers[bool(scheduler.async_scheduling)]
    return None


def _resumes_requests(worker_cls: Any) -> bool:
    if worker_cls == WORKER:
        return True
    if isinstance(worker_cls, str):
        worker_cls = resolve_name(worker_cls)
    return bool(getattr(worker_cls, "resumes_requests", False))

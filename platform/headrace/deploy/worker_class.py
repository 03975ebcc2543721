"""The worker class of an engine whose extensions an app needs."""

from __future__ import annotations

from typing import Any

from headrace_engine.extensions.extension import EXTENSIBLE_WORKER


def use_extension_worker(engine: dict[str, Any], field: str) -> None:
    """Have an engine run with the worker class that runs our extensions.

    Args:
        engine: `engine_kwargs`; changed in place.
        field: path of the configuration field that needs it.

    Raises:
        ValueError: the engine has a worker class of its own.
    """
    worker = engine.get("worker_cls", "auto")
    if worker not in ("auto", EXTENSIBLE_WORKER):
        raise ValueError(f"{field}: the engine has worker_cls {worker}; remove it")
    engine["worker_cls"] = EXTENSIBLE_WORKER

"""Puts sparse attention into an app: its worker class and settings into each engine.

Both roles get it, since the unit decides where bytes lie in the KV cache. Prefill engines attend
densely all the same: they compute prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.config.calibration import FIELD, share_of
from headrace.config.techniques import SparseSection
from headrace_decode.sparse.engine.settings import SparseSettings

_ENGINE = "headrace_decode.sparse.engine.worker"
_WORKERS = {
    "auto": f"{_ENGINE}.SparseTakingUpWorker",
    "headrace_decode.speculation.drafting_worker.SpeculatingWorker": (
        f"{_ENGINE}.SparseSpeculatingWorker"
    ),
    "headrace.reuse_workers.ReusingTakingUpWorker": (
        "headrace.reuse_workers.SparseReusingTakingUpWorker"
    ),
    "headrace.reuse_workers.ReusingSpeculatingWorker": (
        "headrace.reuse_workers.SparseReusingSpeculatingWorker"
    ),
}


def add_sparse(
    section: SparseSection,
    engines: list[dict[str, Any]],
    offloading: Sequence[dict[str, Any]] = (),
) -> None:
    """Have engines attend sparsely where requests ask for it.

    Args:
        engines: `engine_kwargs` of all roles, with drafting and reuse in them; changed in place.
        offloading: those of them whose KV may leave the cache. A prefill engine's may not: decode
            engines pull it from there.

    Raises:
        ValueError: an engine has a worker class of its own, or the calibration cannot be used.
    """
    if section.mode == "off":
        return
    try:
        share = share_of(section)
    except ValueError as error:
        raise ValueError(f"{FIELD}: {error}") from None
    settings = SparseSettings(section.mode, share, section.unit_tokens, section.calibration)
    for engine in engines:
        worker = engine.get("worker_cls", "auto")
        if worker not in _WORKERS:
            raise ValueError(
                f"techniques.sparse.mode: the engine has worker_cls {worker}; remove it"
            )
        engine["worker_cls"] = _WORKERS[worker]
        told = engine.get("additional_config") or {}
        offloads = any(engine is each for each in offloading)
        mine = replace(settings, offload_gib=section.offload_gib) if offloads else settings
        engine["additional_config"] = {**told, **mine.additional_config()}

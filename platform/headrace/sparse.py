"""Puts sparse attention and bounded contexts into an app: their worker class and settings into
engines.

Both roles get the size of units, which decides where bytes lie in the KV cache. Prefill engines
attend densely, since they compute prompts. Contexts are bounded where answers are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.config.calibration import FIELD, share_of
from headrace.config.techniques import TechniquesSection
from headrace_decode.compression.engine.settings import BoundedSettings
from headrace_decode.sparse.engine.settings import SparseSettings

_ENGINE = "headrace_decode.sparse.engine.worker"
_WORKERS = {
    "auto": f"{_ENGINE}.SparseTakingUpWorker",
    "headrace_decode.speculative.drafting_worker.SpeculatingWorker": (
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
    techniques: TechniquesSection,
    engines: list[dict[str, Any]],
    answering: Sequence[dict[str, Any]] = (),
) -> None:
    """Have engines attend sparsely, and bound contexts, where requests ask for it.

    Args:
        engines: `engine_kwargs` of all roles, with drafting and reuse in them; changed in place.
        answering: those of them whose KV may leave the cache or be dropped. A prefill engine's may
            not: decode engines pull it from there.

    Raises:
        ValueError: an engine has a worker class of its own, or the calibration cannot be used.
    """
    section, bounded = techniques.sparse, techniques.bounded
    modes = {"sparse": section.mode, "bounded": bounded.mode}
    used = [name for name, mode in modes.items() if mode != "off"]
    if not used:
        return
    settings = SparseSettings("off", unit_tokens=section.unit_tokens)
    if section.mode != "off":
        try:
            share = share_of(section)
        except ValueError as error:
            raise ValueError(f"{FIELD}: {error}") from None
        settings = SparseSettings(section.mode, share, section.unit_tokens, section.calibration)
    for engine in engines:
        worker = engine.get("worker_cls", "auto")
        if worker not in _WORKERS:
            raise ValueError(
                f"techniques.{used[0]}.mode: the engine has worker_cls {worker}; remove it"
            )
        engine["worker_cls"] = _WORKERS[worker]
        told = dict(engine.get("additional_config") or {})
        told |= settings.additional_config()
        if any(engine is each for each in answering):
            told |= replace(settings, offload_gib=section.offload_gib).additional_config()
            if bounded.mode != "off":
                told |= BoundedSettings(
                    bounded.mode, bounded.share, bounded.calibration, bounded.stream
                ).additional_config()
        engine["additional_config"] = told

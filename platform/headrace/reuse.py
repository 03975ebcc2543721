"""Puts reuse of KV at other positions into an app: its connector and worker class into each engine,
and the finder of stored runs into decode replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config.techniques import ReuseSection
from headrace_decode.reusing import Reusing
from headrace_prefill.blending.finding.finder import Finder

BYTES_PER_TOKEN = 6.4
"""Memory of the finder, with blocks of 128 tokens (`python -m benchmarks.reuse.finding`)."""
_WORKERS = {
    "headrace_decode.speculative.drafting_worker.SpeculatingWorker": "ReusingSpeculatingWorker",
    "auto": "ReusingTakingUpWorker",
}


_SINGLE = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Engine arguments that must be 1: a side pass runs in one worker."""


@dataclass(frozen=True)
class MakeReusing:
    """Maker of the object by which a decode replica decides about reuse."""

    mode: str
    budget: float
    memory_mb: int

    def __call__(
        self, hashes: Callable[[Sequence[int], str], list[bytes]], block_tokens: int
    ) -> Reusing:
        tokens = int(self.memory_mb * 1e6 / BYTES_PER_TOKEN)
        return Reusing(Finder(tokens, block_tokens), hashes, self.mode, self.budget)


def add_reuse(section: ReuseSection, engines: list[dict[str, Any]]) -> MakeReusing | None:
    """Have engines reuse stored KV. Return None if reuse is switched off.

    Args:
        engines: `engine_kwargs` of all roles, with store and drafting in them; changed in place.

    Raises:
        ValueError: an engine has a worker class of its own or no store, or cannot reuse.
    """
    if section.mode == "off":
        return None
    for engine in engines:
        _add(engine)
    return MakeReusing(section.mode, section.budget, section.memory_mb)


def _add(engine: dict[str, Any]) -> None:
    several = [name for name in _SINGLE if engine.get(name, 1) > 1]
    if engine.get("enable_lora"):
        several.append("enable_lora")
    if several:
        raise ValueError(f"techniques.reuse.mode: cannot be on with {several[0]}; set it to off")
    worker = engine.get("worker_cls", "auto")
    if worker not in _WORKERS:
        raise ValueError(f"techniques.reuse.mode: the engine has worker_cls {worker}; remove it")
    transfer = engine.get("kv_transfer_config")
    if not isinstance(transfer, dict) or transfer.get("kv_connector") != "HeadracePDConnector":
        raise ValueError(
            "techniques.reuse.mode: the engine has connectors of its own, and so no store"
        )
    engine["worker_cls"] = f"headrace.reuse_workers.{_WORKERS[worker]}"
    connectors = transfer["kv_connector_extra_config"]["connectors"]
    store = next(each for each in connectors if each["kv_connector"] == "HeadraceConnector")
    connectors.append(
        {
            **store,
            "kv_connector": "StoredReuseConnector",
            "kv_connector_module_path": "headrace_prefill.blending.engine.stored",
        }
    )

"""KV blending in an app's arguments: its connector for each engine, and decode replicas' finder of
stored runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config.techniques import BlendingSection
from headrace.deploy.worker_class import use_extension_worker
from headrace_decode.planning.blending_planner import BlendingPlanner
from headrace_prefill.blending.finding.finder import Finder

BYTES_PER_TOKEN = 6.4
"""Memory of the finder, with blocks of 128 tokens (`python -m benchmarks.blending.finding`)."""
_SINGLE = ("pipeline_parallel_size", "data_parallel_size")
"""Engine arguments that must be 1: each worker computes rows through all layers."""


@dataclass(frozen=True)
class BlendingFactory:
    """Maker of the planner by which a decode replica decides about blending."""

    mode: str
    recompute_ratio: float
    memory_mb: int

    def __call__(
        self, hashes: Callable[[Sequence[int], str], list[bytes]], block_tokens: int
    ) -> BlendingPlanner:
        tokens = int(self.memory_mb * 1e6 / BYTES_PER_TOKEN)
        return BlendingPlanner(
            Finder(tokens, block_tokens), hashes, self.mode, self.recompute_ratio
        )


def add_blending(section: BlendingSection, engines: list[dict[str, Any]]) -> BlendingFactory | None:
    """Have engines blend stored KV. Return None if blending is off.

    Args:
        engines: `engine_kwargs` of all roles, with store and speculative decoding in them; changed
            in place.

    Raises:
        ValueError: an engine has a worker class of its own or no store, or cannot blend.
    """
    if section.mode == "off":
        return None
    for engine in engines:
        _add(engine)
    return BlendingFactory(section.mode, section.recompute_ratio, section.memory_mb)


def _add(engine: dict[str, Any]) -> None:
    several = [name for name in _SINGLE if engine.get(name, 1) > 1]
    if engine.get("enable_lora"):
        several.append("enable_lora")
    if several:
        raise ValueError(f"techniques.blending.mode: cannot be on with {several[0]}; set it to off")
    use_extension_worker(engine, "techniques.blending.mode")
    transfer = engine.get("kv_transfer_config")
    if not isinstance(transfer, dict) or transfer.get("kv_connector") != "HeadracePDConnector":
        raise ValueError(
            "techniques.blending.mode: the engine has connectors of its own, and so no store"
        )
    connectors = transfer["kv_connector_extra_config"]["connectors"]
    store = next(each for each in connectors if each["kv_connector"] == "HeadraceConnector")
    connectors.append(
        {
            **store,
            "kv_connector": "StoredBlendingConnector",
            "kv_connector_module_path": "headrace_prefill.blending.engine.stored_connector",
        }
    )

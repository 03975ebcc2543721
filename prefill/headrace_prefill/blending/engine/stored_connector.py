"""The connector that reuses runs in the node's KV store, as the request says.

The runs were found when the request was planned; this connector knows no tenants and no texts. The
request's `kv_transfer_params` have, under `headrace_engine.kv_transfer.handoff.BLENDING_KEY`:

    runs             [[new, old, length, offset, digests], ...]: positions of the run's first token
                     in this prompt and in the stored one, its length in tokens, the position of its
                     first token in its first block, and its blocks' hashes, concatenated
    last             first position of the prompt's last tokens, which the probe computes
    recompute_ratio  part of the runs' KV that is computed again, the probe included

A request whose blocks are not all in DRAM when it is admitted is served as if it had not asked.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from headrace_engine.connector.arena.engine_arena import EngineArena
from headrace_engine.connector.identity.engine_identity import first_epoch
from headrace_engine.kv_transfer.handoff import BLENDING_KEY
from headrace_engine.vllm.connectors import KVConnectorFactory
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_prefill.blending.engine.connector import BlendingConnector, LoadStart, RecomputePlan
from headrace_prefill.blending.engine.kv_scatter import KvScatter, LostKV, StoredRun
from headrace_prefill.blending.engine.rows import RowEngine
from headrace_prefill.blending.token_selection import DRAFT_TOKENS, SelectionRule, offsets_of

logger = logging.getLogger("headrace.blending")

DIGEST_BYTES = 32

# MultiConnector finds the class of its children's statistics by name.
KVConnectorFactory.register_connector(
    "StoredBlendingConnector", __name__, "StoredBlendingConnector"
)


class StoredBlendingConnector(BlendingConnector):
    """The connector's scheduler side and worker side; it has the settings of the store's one."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._opened = EngineArena.of(vllm_config, role, kv_cache_config)
        self._num_blocks = kv_cache_config.num_blocks
        self._shares = not first_epoch(vllm_config)
        """Whether the store's blocks were computed with this engine's weights."""

    def find(self, request: Any, computed_tokens: int) -> Any:
        """Return the request's runs and settings, or None if the store does not have all blocks."""
        found = (request.kv_transfer_params or {}).get(BLENDING_KEY) if self._shares else None
        if not found or found["runs"][0][0] < computed_tokens:
            return None
        digests = [digest for run in found["runs"] for digest in _digests(run)]
        return found if self._opened.holds(digests) else None

    def exact_tokens(self, found: Any) -> int:
        """Return the length of the run that begins both prompts."""
        new, old, length, *_ = found["runs"][0]
        return int(length) if new == old == 0 else 0

    def planned(self, begin: LoadStart) -> RecomputePlan:
        """Lease the runs' blocks.

        Raises:
            LostKV: a block has left the store.
        """
        found, n = begin.found, len(begin.token_ids)
        runs = [self._run(run) for run in found["runs"]]
        last = found["last"] if found["last"] < n else None
        moved = [(run.new, run.length) for run in runs if run.moved]
        exact = [run.length for run in runs if not run.moved]
        offsets, ratio = offsets_of(n, moved), float(found["recompute_ratio"])
        probe = 0 if last is None else n - last + 1 + DRAFT_TOKENS
        ratio = max(0.0, ratio - probe / max(1, int((offsets >= 0).sum())))

        def choose(mass: NDArray[np.float32] | None) -> NDArray[np.int64]:
            assert self._rows is not None
            depths = SelectionRule().depths(offsets, mass, self._rows.layers, ratio)
            depths[: sum(exact)] = 0
            return depths

        return RecomputePlan(runs, choose, last)

    def reset_cache(self) -> bool:
        """Stop reusing stored KV: from now on the weights may differ from those of the store's."""
        self._shares = False
        return True

    def scatter(self, rows: RowEngine) -> KvScatter:
        caches = {f"layers.{n}": cache for n, cache in enumerate(rows.kv.caches)}
        layout = BlockLayout.of_tensors(caches, self._num_blocks, self._opened.held)
        return KvScatter(rows.kv, layout, rows.rope)

    def shutdown(self) -> None:
        self._opened.close()

    def _run(self, run: list[Any]) -> StoredRun:
        new, old, length, offset, _ = run
        digests = _digests(run)
        slots = self._opened.leased(digests)
        if (slots < 0).any():
            raise LostKV(f"{int((slots < 0).sum())} of {len(slots)} blocks have left the store")
        arena, seeds = self._opened.arena, self._opened.seeds(digests)
        payloads = arena.addresses(slots).astype(np.uint64)
        return StoredRun(payloads, arena.sums(slots), seeds, offset, length, old, new)


def _digests(run: list[Any]) -> list[bytes]:
    joined = bytes(run[4])
    return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]

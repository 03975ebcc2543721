"""Engines of several ranks without a model: vLLM's caches, filled by hand, under real connectors.

The scheduler's side and one worker side a rank are `HeadraceConnector`s in one process. What a
model would compute is one array [layers, blocks, KV heads, tokens, content]; each rank's caches
hold its heads of it, as vLLM shares them out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from headrace_engine.connector.messages import StepMetadata
from headrace_engine.connector.store_work import BlockLoad, BlockSave, StoreWork
from headrace_engine.store_connector import HeadraceConnector
from tests.support.engineconfig import engine_config

BLOCKS, TOKENS, HEAD_DIM, LATENT = 6, 32, 32, 96
HASHES = [bytes([n + 1]) * 32 for n in range(BLOCKS)]
DRAM_BYTES = 8 << 20


@dataclass(frozen=True)
class Model:
    """What matters of a model.

    Attributes:
        own: layers with a cache. borrowed: by layers without one, whose they read.
    """

    heads: int
    own: tuple[int, ...] = (0, 1, 2, 3)
    borrowed: tuple[tuple[int, int], ...] = ()
    latent: bool = False

    @property
    def content(self) -> int:
        return LATENT if self.latent else 2 * HEAD_DIM

    def kv(self, seed: int) -> np.ndarray:
        """Made-up KV, as bits of bfloat16."""
        shape = (len(self.own), BLOCKS, self.heads, TOKENS, self.content)
        return np.random.default_rng(seed).integers(-(2**15), 2**15, shape, np.int16)

    def config(self, ranks: int, rank: int, store: dict[str, Any]) -> Any:
        """vLLM's configuration of a rank."""
        return engine_config(
            model_config__dtype=torch.bfloat16,
            model_config__get_num_layers=lambda _: len(self.own) + len(self.borrowed),
            model_config__get_head_size=lambda: HEAD_DIM,
            model_config__get_total_num_kv_heads=lambda: self.heads,
            cache_config__block_size=TOKENS,
            cache_config__prefix_caching_hash_algo="sha256_cbor",
            parallel_config__tensor_parallel_size=ranks,
            parallel_config__rank=rank,
            kv_transfer_config=SimpleNamespace(
                kv_load_failure_policy="recompute", kv_connector_extra_config=store, engine_id=""
            ),
        )

    def spec(self, ranks: int) -> FullAttentionSpec:
        """A rank's layer."""
        if self.latent:
            return MLAAttentionSpec(
                block_size=TOKENS, num_kv_heads=1, head_size=LATENT, dtype=torch.bfloat16
            )
        heads = max(1, self.heads // ranks)
        return FullAttentionSpec(
            block_size=TOKENS, num_kv_heads=heads, head_size=HEAD_DIM, dtype=torch.bfloat16
        )

    def name(self, layer: int) -> str:
        return f"model.layers.{layer}.self_attn.attn"


class RankedEngine:
    """An engine of some ranks.

    Args:
        store: settings of the connector.
        seed: of what its caches hold at first.
        groups: number of cache groups; layers take turns. `fill` and `content` are for one.
    """

    def __init__(
        self,
        model: Model,
        ranks: int,
        store: dict[str, Any],
        seed: int,
        layout: KVCacheLayout = KVCacheLayout.LBHNC,
        groups: int = 1,
    ) -> None:
        self._model, self._ranks, self._groups = model, ranks, groups
        self._failed: set[str] = set()
        self._job, spec = 0, model.spec(ranks)
        names = [model.name(layer) for layer in model.own]
        own = [names[group::groups] for group in range(groups)]
        layer_stride, block_stride, *_ = compute_layout_strides(spec, BLOCKS, len(own[0]), layout)
        size = BLOCKS * len(own[0]) * spec.page_size_bytes
        cache_config = KVCacheConfig(
            BLOCKS,
            [KVCacheTensor(size, each, layer_stride, block_stride) for each in own],
            [KVCacheGroupSpec(each, spec) for each in own],
            kv_cache_layout=layout.name,
        )

        def connector(role: KVConnectorRole, rank: int) -> HeadraceConnector:
            config: Any = model.config(ranks, rank, {"dram_bytes": DRAM_BYTES, **store})
            config.kv_transfer_config.engine_id = f"engine {id(self)}"
            return HeadraceConnector(config, role, cache_config)

        self.scheduler = connector(KVConnectorRole.SCHEDULER, 0)
        self.workers = [connector(KVConnectorRole.WORKER, rank) for rank in range(ranks)]
        self.caches: list[list[torch.Tensor]] = []
        for worker in self.workers:
            caches = allocate_kv_cache(cache_config, torch.device("cpu"), layout, None)
            self.caches.append([caches[name] for name in names])
            lent = {model.name(a): caches[model.name(b)] for a, b in model.borrowed}
            worker.register_kv_caches(caches | lent)
        if groups == 1:
            self.fill(model.kv(seed))

    def fill(self, kv: np.ndarray) -> None:
        """Have the caches hold this KV."""
        for rank, caches in enumerate(self.caches):
            for layer, cache in enumerate(caches):
                mine = torch.from_numpy(kv[layer][:, self._heads(rank)])
                cache.view(torch.int16)[:] = mine

    def place(self, kv: np.ndarray, blocks: Sequence[int], ids: Sequence[Sequence[int]]) -> None:
        """Have the caches hold some blocks of this KV, where `ids` says for each group."""
        for layer, rank, cache, id_, block in self._placed(blocks, ids):
            cache[id_] = torch.from_numpy(kv[layer, block, self._heads(rank)])

    def placed(self, blocks: Sequence[int], ids: Sequence[Sequence[int]]) -> np.ndarray:
        """The KV that the caches hold in these places; 0 where an id is negative."""
        shape = len(self._model.own), BLOCKS, self._model.heads, TOKENS, self._model.content
        kv = np.zeros(shape, np.int16)
        for layer, rank, cache, id_, block in self._placed(blocks, ids):
            kv[layer, block, self._heads(rank)] = cache[id_].numpy()
        return kv

    def _placed(self, blocks: Sequence[int], ids: Sequence[Sequence[int]]) -> Iterator[Any]:
        for rank, caches in enumerate(self.caches):
            for layer, cache in enumerate(caches):
                for id_, block in zip(ids[layer % self._groups], blocks, strict=True):
                    if id_ >= 0:
                        yield layer, rank, cache.view(torch.int16), id_, block

    def content(self) -> np.ndarray:
        """The KV that the caches hold. Ranks that hold the same heads hold the same KV."""
        shape = len(self._model.own), BLOCKS, self._model.heads, TOKENS, self._model.content
        kv, known = np.zeros(shape, np.int16), np.zeros(self._model.heads, np.bool_)
        for rank, caches in enumerate(self.caches):
            heads = self._heads(rank)
            mine = np.stack([cache.view(torch.int16).numpy() for cache in caches])
            assert not known[heads].any() or (kv[:, :, heads] == mine).all()
            kv[:, :, heads], known[heads] = mine, True
        return kv

    def _heads(self, rank: int) -> slice:
        """As vLLM's QKVParallelLinear: shares in order, or one head for several ranks."""
        heads, ranks = self._model.heads, self._ranks
        if heads >= ranks:
            return slice(rank * heads // ranks, (rank + 1) * heads // ranks)
        first = rank // (ranks // heads)
        return slice(first, first + 1)

    def save(
        self,
        blocks: Sequence[int],
        ranks: Sequence[int] | None = None,
        ids: Sequence[Sequence[int]] = (),
    ) -> None:
        """Save blocks; `ranks` says which workers do, in which order; `ids`, where each group has
        them."""
        self._job += 1
        parents = [HASHES[block - 1] if block else b"" for block in blocks]
        save = BlockSave(
            [list(each) for each in ids or [blocks]],
            [HASHES[block] for block in blocks],
            parents,
            list(blocks),
        )
        for rank in range(self._ranks) if ranks is None else ranks:
            self._step(rank, StoreWork(saves={self._job: save}))
            deadline = time.monotonic() + 20
            while not self.workers[rank].build_connector_worker_meta():
                assert time.monotonic() < deadline, "the save did not end"
                time.sleep(0.001)

    def load(self, blocks: Sequence[int], places: dict[bytes, Any] | None = None) -> set[int]:
        """Load blocks; which of them any worker could not load."""
        load = BlockLoad([list(blocks)], [HASHES[block] for block in blocks], places or {})
        failed: list[set[int]] = []
        for rank, worker in enumerate(self.workers):
            self._step(rank, StoreWork(load=load))
            failed.append(worker.get_block_ids_with_load_errors())
        return reduce(set.union, failed)

    def load_ahead(
        self,
        blocks: Sequence[int],
        ids: Sequence[Sequence[int]] = (),
        places: dict[bytes, Any] | None = None,
    ) -> set[int | str]:
        """As `load`, ahead of the step that needs them; or which request failed."""
        into = [list(each) for each in ids or [blocks]]
        load = BlockLoad(into, [HASHES[block] for block in blocks], places or {})
        failed: set[int | str] = set()
        for rank, worker in enumerate(self.workers):
            received = self._step(rank, StoreWork(ahead={"waits": load}))
            deadline = time.monotonic() + 20
            while not received:
                assert time.monotonic() < deadline, "the load did not end"
                time.sleep(0.001)
                received = self._step(rank, StoreWork())
            assert received == {"waits"}
            failed |= worker.get_block_ids_with_load_errors() | self._failed
        return failed

    def _step(self, rank: int, work: StoreWork) -> set[str]:
        """Returns the requests whose load ahead has ended."""
        worker = self.workers[rank]
        worker.bind_connector_metadata(StepMetadata(work))
        worker.start_load_kv(None)
        layers = [*self._model.own, *(layer for layer, _ in self._model.borrowed)]
        for layer in sorted(layers):
            worker.wait_for_layer_load(self._model.name(layer))
        results = worker.get_transfer_results(set())
        self._failed = results.failed_recving
        worker.clear_connector_metadata()
        return results.finished_recving

    def close(self) -> None:
        for connector in (*self.workers, self.scheduler):
            connector.shutdown()

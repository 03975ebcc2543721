"""`HeadraceConnector`, which passes vLLM's calls to its scheduler side or its worker side.

The two sides of an engine may live in different processes; each maps the arena for itself. Blocks
are found by vLLM's own block hashes, within a namespace that both sides derive from the same
configuration.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

from headrace_engine.connector.arena.arena_index import ArenaIndex
from headrace_engine.connector.arena.arena_reporter import ArenaReporter
from headrace_engine.connector.arena.engine_arena import EngineArena
from headrace_engine.connector.caches.engine_cache import EngineCache
from headrace_engine.connector.caches.quantized_cache import QuantizedCache
from headrace_engine.connector.identity.adapters import BlockNames
from headrace_engine.connector.load_price import LoadPrice
from headrace_engine.connector.loading.file_loader import DIRECT_BACKEND, FileLoader
from headrace_engine.connector.messages import LoadSample, StepMetadata, StepSample, WorkerReport
from headrace_engine.connector.node_tiers import NodeTiers
from headrace_engine.connector.scheduler_connector import SchedulerConnector
from headrace_engine.connector.stats import (
    LOSSES,
    LoadTime,
    Reporter,
    StorePromMetrics,
    StoreStats,
)
from headrace_engine.connector.worker_connector import WorkerConnector
from headrace_engine.step_time import StepTime
from headrace_engine.vllm.kv_cache import pool_pages, recovers_failed_loads, runs_layer_hooks
from headrace_kvstore.arena.arena import LockBusyError
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.blocks.sharding import WHOLE_LAYER

logger = logging.getLogger("headrace.kvstore")

ARENA_CHECK_S, ARENA_RETRY_S = 1.0, 60.0
"""Time between checks whether the arena was replaced (3 us each), and after a failed move."""
REPORTER_END_S = 1.0
"""Maximum wait, once, for a thread that reports to the replaced arena."""


class HeadraceConnector(KVConnectorBase_V1, SupportsHMA):
    """The node's KV store as a connector; settings as `StoreSettings`.

    KV in a slow tier is computed if that is faster, by the engine's step times.

    Attributes:
        may_wait: whether an offer may take time, as `HeadracePDConnector` asks.

    Raises:
        SettingsError: a setting is unknown or impossible.
        ValueError: this engine's cache cannot be stored (layers of other kinds, pipeline stages).
    """

    may_wait = True

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        if transfer.kv_load_failure_policy != "recompute":
            raise ValueError(
                f'kv_transfer_config.kv_load_failure_policy: is "{transfer.kv_load_failure_policy}"'
                ', which fails a request whose KV was lost; give "recompute"'
            )
        self._opened = opened = EngineArena.of(vllm_config, role, kv_cache_config)
        self._settings, self.arena = opened.settings, opened.arena
        self._cache_config = kv_cache_config
        self._reporter = Reporter()
        self._scheduler: SchedulerConnector | None = None
        self._price: LoadPrice | None = None
        self._arena_reporter: ArenaReporter | None = None
        self._node: NodeTiers | None = None
        self._worker: WorkerConnector | None = None
        self._introduced = False
        self._look_at_s = 0.0
        self._moves_to: EngineArena | None = None
        self._epochs: list[str] = []
        if role == KVConnectorRole.SCHEDULER:
            self._workers = opened.parts.ranks
            self._ended: dict[int, int] = {}
            self._names = BlockNames.of(vllm_config)
            if self._names.epoch:
                self._tell_epoch()
            self._scheduler = self._make_scheduler(
                vllm_config.cache_config.block_size,
                opened.groups.recovers_blocks and recovers_failed_loads(vllm_config),
            )

    def _make_scheduler(self, block_tokens: int, under_steps: bool) -> SchedulerConnector:
        opened, settings, ranks = self._opened, self._settings, self._opened.parts.ranks
        logger.info("KV store %s: %s", settings.name, opened.about or "not used")
        if settings.node and settings.load:
            self._node = NodeTiers(settings, opened.digest)
        self._price = LoadPrice(block_tokens, opened.layers, StepTime())
        priced = self._node is not None and settings.priced
        self._report_to_arena()
        self._index = ArenaIndex(self.arena, opened.row, settings.lease_s, ranks)
        return SchedulerConnector(
            self._index,
            block_tokens,
            load=settings.load,
            save=settings.save,
            slow=self._node,
            most_slow=max(1, settings.staging_bytes // (opened.held.count * opened.part_bytes)),
            price=self._price if priced else None,
            window_tokens=opened.codec.window_tokens,
            costs=self._price,
            record_prompt=self._prompted,
            ended=self._give_up if opened.parts.writers > 1 else None,
            retain=self._retain,
            under_steps=under_steps,
            frees_early=opened.groups.frees_early,
            states=opened.groups.states,
            names=self._names,
        )

    # The scheduler's side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.scheduler.bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self.scheduler.added(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self.scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens) and self.scheduler.loads_ahead(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def kv_sources(self, request_id: str) -> Mapping[str, int]:
        """Implement `usage.scheduler_usage.KvSources`."""
        return self.scheduler.sources.get(request_id, {})

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self._follow_arena()
        return StepMetadata(self.scheduler.step(scheduler_output))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request, block_ids)
        return False, None

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler.confirm()
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, WorkerReport):
            return
        if meta.bad_in_files and self._node is not None:
            self._node.report_bad(meta.bad_in_files)
        if self._price is not None:
            for sample in meta.samples:
                if isinstance(sample, StepSample):
                    self._price.computed(*sample)
                else:
                    self._loaded(self._price, sample)
        for job, workers in meta.jobs.items():
            self._ended[job] = self._ended.get(job, 0) + workers
            if self._ended[job] >= self._workers:
                del self._ended[job]
                self.scheduler.saved([job])

    def _loaded(self, price: LoadPrice, sample: LoadSample) -> None:
        price.loaded(*sample)
        more_s = price.more_s(sample.medium)
        if more_s is not None:
            self.arena.set_load_cost(sample.medium, more_s / self._opened.block_bytes)

    @classmethod
    def exact_scheduler(cls, connector: Any) -> SchedulerConnector | None:
        """Return the scheduler's side of the store in a scheduler's connector, unless its codec is
        lossy.

        Args:
            connector: vLLM's, or None; the store's may be one of several in it.
        """
        found = [c for c in getattr(connector, "_connectors", [connector]) if isinstance(c, cls)]
        return found[0].scheduler if found and not found[0]._opened.codec.lossy else None

    def reset_cache(self) -> bool:
        """Stop using all KV so far. vLLM calls this when the weights change or all caches are
        cleared.

        The weights may then be any. So from now on this engine finds none of the blocks that are
        stored already, and no other engine finds the blocks that it stores. The engine shares
        blocks again after its next start.
        """
        if self._scheduler is None:
            return True
        done = self.scheduler.reset()
        self._tell_epoch()
        if not done:
            logger.warning(
                "the store is reset, but the engine's own cache still holds KV; nothing is saved "
                "until a later reset finds it empty"
            )
        return done

    def _tell_epoch(self) -> None:
        self._epochs = [self._names.epoch.hex()]
        logger.info("the KV of this engine is its own from now on: its weights may change")

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.busy

    def has_pending_block_frees(self) -> bool:
        return self.scheduler.frees_blocks

    def _counts(self) -> dict[str, int]:
        """Return the scheduler side's counts."""
        unanswered = 0 if self._node is None else self._node.unanswered
        return {**self.scheduler.counts, "node_unanswered": unanswered}

    def _give_up(self, hashes: Sequence[bytes]) -> None:
        """Free the slots of these blocks that are not filled: all workers have ended their
        parts."""
        try:
            self.arena.give_up(self._opened.row, hashes, self._opened.group)
        except LockBusyError as error:
            logger.warning("blocks that were not saved whole keep their room a while: %s", error)

    @property
    def scheduler(self) -> SchedulerConnector:
        """The scheduler's side, in a scheduler."""
        assert self._scheduler is not None, "a call for the scheduler's side"
        return self._scheduler

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        # vLLM also names layers that read another layer's cache: that is stored once.
        opened, held, groups = self._opened, self._opened.held, self._opened.groups
        of_layer: dict[str, int] | None = groups.of_layer
        if groups.states is None:
            kv_caches = {name: kv_caches[name] for name in groups.of_layer}
        else:
            kv_caches, of_layer = pool_pages(kv_caches, self._cache_config), None
        shard = held if opened.shape is None else WHOLE_LAYER
        blocks = self._cache_config.num_blocks
        layout = BlockLayout.of_tensors(kv_caches, blocks, shard, of_layer)
        if layout.block_bytes != opened.engine_block_bytes:
            raise ValueError(
                f"the engine's blocks have {layout.block_bytes} bytes, not the "
                f"{opened.engine_block_bytes} that its configuration says"
            )
        device = next(iter(kv_caches.values())).device
        cache: EngineCache
        if device.type != "cpu":
            # Triton is installed on machines with a GPU.
            from headrace_engine.connector.caches.device_cache import DeviceCache

            cache = DeviceCache(kv_caches, layout, opened.codec, opened.shape, held)
            cache.warm()
        elif opened.shape is not None:
            cache = QuantizedCache(layout, opened.codec, opened.shape, held)
        else:
            cache = EngineCache(layout, self._settings.copy_threads)
        files = partial(
            FileLoader,
            staging_bytes=self._settings.staging_bytes,
            backend="" if device.type == "cpu" else DIRECT_BACKEND,
        )
        self._worker = WorkerConnector(
            *(self.arena, opened.row, cache, opened.seeds, self._settings, files),
            writes=opened.writes,
            writer=opened.writer,
            recovers_blocks=groups.recovers_blocks,
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StepMetadata):
            self._follow_arena()
            self._worker.open(ahead=bool(connector_metadata.work.ahead))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        if self._worker is not None and isinstance(meta, StepMetadata):
            self._worker.begin(meta.work, runs_layer_hooks(forward_context))

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.wait(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """Do nothing: the block pool holds the blocks that are being copied."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        self._worker.end()
        return None, self._worker.loaded_ahead() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving = self._worker.failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.failed_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._worker is None:
            return None
        jobs, bad = self._worker.finished_jobs(), self._worker.bad_in_files()
        samples = self._worker.samples()
        if not (jobs or bad or samples):
            return None
        return WorkerReport(dict.fromkeys(jobs, 1), bad, samples)

    # Both sides

    def _follow_arena(self) -> None:
        """Move to the arena that has taken this one's name, once nothing uses this one; called
        between steps. Until all of the engine's processes have moved, lookups may miss blocks."""
        now_s = time.monotonic()
        if self._moves_to is None:
            if now_s < self._look_at_s:
                return
            self._look_at_s = now_s + ARENA_CHECK_S
            try:
                self._moves_to = self._opened.follow()
            except (OSError, ValueError, LockBusyError) as error:
                logger.error("the arena %s was replaced: %s", self._settings.name, error)
                self._look_at_s = now_s + ARENA_RETRY_S
            if self._moves_to is None:
                return
        if self._worker is not None and not self._worker.prepare_to_move():
            return
        opened, self._moves_to, before = self._moves_to, None, self.arena
        self._opened, self.arena = opened, opened.arena
        if self._worker is not None:
            self._worker.move(opened.arena, opened.row)
        elif self._scheduler is not None:
            self._index.move(opened.arena, opened.row)
            ended = self._arena_reporter is None or self._arena_reporter.close(REPORTER_END_S)
            self._report_to_arena()
            if ended:
                before.close()
        logger.warning("the arena %s was replaced, and the new one is used", self._settings.name)

    def _report_to_arena(self) -> None:
        """Begin to report to the arena, if the engine's blocks are there."""
        opened = self._opened
        self._arena_reporter = ArenaReporter(self.arena, opened.row) if opened.about else None

    def _prompted(self, hashes: Sequence[bytes]) -> None:
        if self._arena_reporter is not None:
            self._arena_reporter.record_prompt(hashes)

    def _retain(self, names: Sequence[bytes], until_s: float, salt: str) -> None:
        if self._arena_reporter is not None:
            self._arena_reporter.retain(names, until_s, salt)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._worker is None:
            if self._scheduler is None:
                return None
            told = self._reporter.report(self._counts()) or StoreStats({})
            if self._epochs:
                told.data["epochs"], self._epochs = self._epochs, []
            return None if told.is_empty() else told
        first, counts = self._opened.rank == 0, dict(self._worker.counts)
        if not first:  # the first worker counts blocks, the others their losses
            counts = {event: n for event, n in counts.items() if event in LOSSES}
        stats = self._reporter.report(counts) or StoreStats({})
        loads = [
            LoadTime(medium, blocks * self._opened.whole_block_bytes, seconds)
            for medium, blocks, seconds in self._worker.loads()
        ]
        if loads and first:
            stats.data["loads"] = loads
        if first and not self._introduced:
            self._introduced = True
            if self._opened.about:
                stats.data["digest"] = self._opened.digest.hex()
                if self._opened.groups.states is not None:
                    stats.data["states"] = [*self._opened.groups.states.recurrent]
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return StoreStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return StorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._arena_reporter is not None:
            self._arena_reporter.close()
        if self._scheduler is not None:
            self._names.close()
        if self._node is not None:
            self._node.close()
        if self._moves_to is not None:
            self._moves_to.close()
        self.arena.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False: a step that a full graph computes waits for its load before it begins."""
        return False

"""Decides which requests of a scheduler stream, when each chooses the KV to keep, and which KV each
begins with.

In an engine with a predictor, a compressed request streams (`IncrementalJob`) if the settings say
that all do, or if its context and answer are longer than the cache. It begins with the KV that
an earlier request kept of the same first tokens, if that is still in the cache (`context_cache`) or
in the node's store (`stored_context_loader`). vLLM then treats it like a request whose first tokens
came from elsewhere.
"""

from __future__ import annotations

import itertools
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from headrace_decode.attention.offload.scheduler import (
    MAX_CONSIDERED,
    OffloadSchedulerPart,
    exclude_from_connectors,
)
from headrace_decode.compression.engine.calibration import digest
from headrace_decode.compression.engine.compression_job import IncrementalJob
from headrace_decode.compression.engine.context_cache import CachedContext, ContextCache, min_blocks
from headrace_decode.compression.engine.metadata import CompressionMetadata, Retention
from headrace_decode.compression.engine.settings import CompressionSettings
from headrace_decode.compression.engine.stored_context import RetainedLayout, StoredContext
from headrace_decode.compression.engine.stored_context_loader import StoredContextLoader
from headrace_decode.techniques import COMPRESSION, keep_ratio_in
from headrace_engine.connector.connector import HeadraceConnector
from headrace_engine.vllm.private_blocks import stop_naming
from headrace_engine.vllm.scheduling import admissible, await_kv


class _Begin(NamedTuple):
    """Retained KV that a request may begin with.

    Attributes:
        blocks: number of the prompt's first blocks that it stands for.
        held: number of blocks that it takes.
        where: its entry in the engine or in the store.
    """

    blocks: int
    held: int
    where: CachedContext | StoredContext


class IncrementalScheduler:
    """Incremental requests of a scheduler.

    Args:
        scheduler: vLLM's. offload: its offloaded requests.
        settings: settings that name a predictor.
    """

    def __init__(
        self, scheduler: Any, offload: OffloadSchedulerPart, settings: CompressionSettings
    ) -> None:
        self._scheduler, self._offload, self._all = scheduler, offload, settings.stream
        self._manager = manager = offload.manager
        page_tokens = offload.settings.page_tokens
        self._layout = RetainedLayout.of(scheduler.kv_cache_config, page_tokens)
        store = HeadraceConnector.exact_scheduler(scheduler.connector)
        assert settings.calibration is not None
        about = b"" if store is None else self._layout.identity + digest(Path(settings.calibration))
        self._stored_loader = StoredContextLoader(manager, store, about)
        self._incremental: dict[str, IncrementalJob] = {}
        self._hashes: dict[str, list[bytes]] = {}
        """Hashes of the full blocks of each request's prompt."""
        self._untold: set[str] = set()
        """Requests that the worker does not know yet."""
        self._context_cache = ContextCache(manager.has_slots)
        self._worker_erred = False
        self._cached: dict[str, int] = {}
        """By request that may begin in this step: the number of the retained KV to begin with."""

    def __contains__(self, name: str) -> bool:
        return name in self._incremental

    def __len__(self) -> int:
        return len(self._incremental)

    def before_add(self, request: Any) -> None:
        """Have a new request stream if it can.

        vLLM's prefix cache and connectors are disabled for one that streams, since its KV depends
        on what it drops.
        """
        stream, name = self._stream(request), request.request_id
        if stream is None:
            return
        self._incremental[name] = stream
        self._untold.add(name)
        self._manager.windows[name] = self._window(stream)
        exclude_from_connectors(request)
        request.skip_reading_prefix_cache = True
        # The retained KV depends on the keep ratio, and vLLM's hashes do not.
        keep_ratio = b"%r|" % keep_ratio_in(request.sampling_params, COMPRESSION)
        self._hashes[name] = [sha256(keep_ratio + bytes(h)).digest() for h in request.block_hashes]
        stop_naming(request)

    def _description_blocks(self, stream: IncrementalJob) -> int:
        """Return the number of blocks that will describe the retained KV; 0 without a store."""
        return self._layout.description_blocks_for(stream.kept) if self._stored_loader else 0

    def _window(self, stream: IncrementalJob) -> int:
        return stream.window(self._offload.step_tokens) + self._description_blocks(stream)

    def _stream(self, request: Any) -> IncrementalJob | None:
        keep_ratio = keep_ratio_in(request.sampling_params, COMPRESSION)
        block_tokens = self._manager.block_size
        if keep_ratio is None or request.prompt_token_ids is None:
            return None
        usable = self._manager.block_pool.num_gpu_blocks - 1
        stream = IncrementalJob(request.num_prompt_tokens, keep_ratio, block_tokens)
        behind = self._offload.max_tokens(request) - stream.blocks * block_tokens
        whole = stream.kept + self._description_blocks(stream) - (-behind // block_tokens)
        most = max(self._window(stream), whole)
        wanted = self._all or self._offload.is_too_long(request)
        return stream if wanted and stream.is_worthwhile and most <= usable else None

    def dropped_tokens(self, name: str) -> int:
        """Return the number of tokens of a request's context that its rows do not attend to."""
        stream = self._incremental.get(name)
        if stream is None or not stream.dropped:
            return 0
        return (stream.dropped - stream.kept) * int(self._manager.block_size)

    def before_schedule(self, metadata: CompressionMetadata) -> None:
        """Prepare a step that is about to be scheduled.

        Requests whose context has grown by a segment, or is complete, choose the KV to keep. The
        first waiting requests begin with KV that the engine or the store has.
        """
        metadata.incremental, self._untold = self._untold, set()
        if self._worker_erred:
            metadata.evicted |= self._context_cache.clear()
            self._worker_erred = False
        size = self._manager.block_size
        for name, stream in list(self._incremental.items()):
            request = self._scheduler.requests.get(name)
            if request is None:
                del self._incremental[name], self._hashes[name], self._manager.windows[name]
                self._stored_loader.remove(name)
                continue
            due = stream.due(request.num_computed_tokens, request.num_preemptions)
            if due is None:
                continue
            description_blocks = self._description_blocks(stream)
            held = stream.kept + description_blocks
            if self._manager.may_drop(name, held, due):
                stream.dropped = due
                blocks = self._manager.drop(name, held, due)
                number = self._cache_slots(name, due, held)
                metadata.retentions[name] = Retention(
                    due * size, blocks, number, description_blocks
                )
                metadata.evicted |= self._context_cache.evict()
                if min_blocks(self._hashes[name]) <= due <= len(self._hashes[name]):
                    self._stored_loader.request_save(name, self._hashes[name][due - 1], due * size)
        self._use_cached()

    def _cache_slots(self, name: str, blocks: int, held: int) -> int | None:
        """Remember the KV that a request keeps of so many blocks of its context. Return its number;
        None if it is not cached."""
        if len(self._hashes[name]) < blocks:
            return None
        kept = self._context_cache.add(self._hashes[name][blocks - 1], held)
        if kept is None:
            return None
        self._manager.cache_slots(name, kept.number)
        return kept.number

    def _use_cached(self) -> None:
        scheduler, pool = self._scheduler, self._manager.block_pool
        room = max(0, scheduler.max_num_active_reqs - len(scheduler.running))
        if not ((self._context_cache or self._stored_loader) and room):
            return
        free, usable = pool.get_num_free_blocks(), pool.num_gpu_blocks - 1
        considered = min(room, MAX_CONSIDERED)
        for request in list(itertools.islice(admissible(scheduler), considered)):
            name = request.request_id
            window = self._manager.windows.get(name)
            free -= self._offload.min_blocks(request, usable) if window is None else window
            if free < 0:
                return  # an earlier request may need the free blocks that this one would begin with
            if window is None or request.num_computed_tokens:
                continue
            begin, stream = self._longest_start(request), self._incremental[name]
            if begin is None:
                continue
            own = stream.kept + self._description_blocks(stream)
            more = max(0, begin.held - own)  # above 0 if it was kept for a longer prompt
            if more > free or window + more > usable:
                continue
            free -= more
            self._manager.windows[name] = window + more
            if isinstance(begin.where, CachedContext):
                self._manager.assign_cached_slots(name, *begin.where, begin.blocks)
                self._cached[name] = begin.where.number
            else:
                description_blocks = self._layout.description_blocks_of(begin.held)
                self._stored_loader.start_load(name, begin.where, description_blocks)
                await_kv(scheduler, request)
            self._start_at(request, begin.blocks)

    def _longest_start(self, request: Any) -> _Begin | None:
        """Return the longest retained KV that a request may begin with. The store's is used only if
        it stands for more blocks than the engine's."""
        name, hashes = request.request_id, self._hashes[request.request_id]
        most = (request.num_prompt_tokens - 1) // self._manager.block_size
        found: _Begin | None = None
        if (own := self._context_cache.longest(hashes, most)) is not None:
            found = _Begin(own[0], own[1].held, own[1])
        stored = self._stored_loader.find_stored(name, hashes, min_blocks(hashes), most)
        if stored is not None and (found is None or stored.blocks > found.blocks):
            return _Begin(stored.blocks, len(stored.names), stored)
        return found

    def _start_at(self, request: Any, blocks: int) -> None:
        request.num_computed_tokens = blocks * self._manager.block_size
        self._incremental[request.request_id].begin_at(blocks, request.num_preemptions)

    def after_schedule(self, metadata: CompressionMetadata, output: Any) -> None:
        """Tell the worker which KV the requests of a scheduled step begin with. Requests that were
        not scheduled give it back."""
        for name in [*self._cached, *self._stored_loader.finished_loads()]:
            request, cached = self._scheduler.requests[name], 0
            if name not in output.num_scheduled_tokens:
                self._give_back(name)
                continue
            tokens = self._incremental[name].dropped * self._manager.block_size
            if name in self._cached:
                metadata.cached[name], cached = self._cached[name], tokens
            elif (came := self._stored_loader.pop(name)) is not None:
                metadata.loaded[name] = came
            if request.prefill_stats and not request.num_preemptions:
                request.prefill_stats.set(request.num_prompt_tokens, cached, tokens - cached)
        self._cached = {}
        # The worker does not drop KV of requests that were preempted in the same step.
        preempted = metadata.retentions.keys() & (output.preempted_req_ids or set())
        if lost := {metadata.retentions[name].cached_id for name in preempted}:
            metadata.evicted |= self._context_cache.evict(lost)
        self._stored_loader.on_scheduled(self._scheduler.requests, preempted)

    def on_lost(self) -> None:
        """Forget all cached KV before the next step, since the worker lost a request's KV."""
        self._worker_erred = True

    def on_loads_finished(self, output: Any) -> None:
        """Have requests whose load from the store failed compute their prompts.

        Args:
            output: vLLM's KVConnectorOutput of a step that is over, or None.
        """
        for name in self._stored_loader.on_loads_finished(output):
            if not self._scheduler.requests[name].is_finished():
                self._give_back(name)

    def _give_back(self, name: str) -> None:
        """Have a request that was to begin with retained KV compute all of its prompt."""
        self._stored_loader.pop(name)
        self._manager.free(name)
        self._manager.windows[name] = self._window(self._incremental[name])
        self._start_at(self._scheduler.requests[name], 0)

"""Decides which requests of a scheduler stream, when each chooses the KV to keep, and which KV each
begins with.

In an engine with a gate, a bounded request streams (`course.Stream`) if the settings say that all
do, or if its context and answer are longer than the cache. It begins with the KV that an earlier
request kept of the same first tokens, if that is still in the cache (`remembered`) or in the node's
store (`arrivals`). vLLM then treats it like a request whose first tokens came from elsewhere.
"""

from __future__ import annotations

import itertools
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from vllm.v1.request import RequestStatus

from headrace_decode.compression.engine.arrivals import Arrivals
from headrace_decode.compression.engine.calibration import digest
from headrace_decode.compression.engine.course import Stream
from headrace_decode.compression.engine.following import Drop, Told
from headrace_decode.compression.engine.remembered import Kept, Remembered, least_of
from headrace_decode.compression.engine.settings import BoundedSettings
from headrace_decode.compression.engine.stored import Found, Layout
from headrace_decode.sparse.engine.offload.manager import OffloadManager
from headrace_decode.sparse.engine.offload.scheduler import CONSIDERED, keep_to_itself
from headrace_decode.techniques import BOUNDED, share_in
from headrace_engine.connector.connector import StoreConnector

BEGINS = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED})


class _Begin(NamedTuple):
    """Kept KV that a request may begin with.

    Attributes:
        blocks: number of the prompt's first blocks that it stands for.
        held: number of blocks that it takes.
        where: its entry in the engine or in the store.
    """

    blocks: int
    held: int
    where: Kept | Found


class Streams:
    """Streamed requests of a scheduler.

    Args:
        scheduler: scheduler that offloads. manager: manager of its blocks.
        settings: settings that name a gate. unit_tokens: tokens of a unit that heads keep.
    """

    def __init__(
        self, scheduler: Any, manager: OffloadManager, settings: BoundedSettings, unit_tokens: int
    ) -> None:
        self._scheduler, self._manager, self._all = scheduler, manager, settings.stream
        self._layout = Layout.of(scheduler.kv_cache_config, unit_tokens)
        store = StoreConnector.exact_half(scheduler.connector)
        assert settings.calibration is not None
        about = b"" if store is None else self._layout.told + digest(Path(settings.calibration))
        self._arrivals = Arrivals(manager, store, about)
        self._streams: dict[str, Stream] = {}
        self._hashes: dict[str, list[bytes]] = {}
        """Hashes of the full blocks of each request's prompt."""
        self._untold: set[str] = set()
        """Requests that the worker does not know yet."""
        self._remembered = Remembered(manager.is_there)
        self._worker_erred = False
        self._recalled: dict[str, int] = {}
        """By request that may begin in this step: the number of the kept KV to begin with."""

    def __contains__(self, name: str) -> bool:
        return name in self._streams

    def __len__(self) -> int:
        return len(self._streams)

    def begin(self, request: Any) -> bool:
        """Return whether a new request streams.

        If so, vLLM's prefix cache and connectors are disabled for it, since its KV depends on what
        it drops.
        """
        stream, name = self._stream(request), request.request_id
        if stream is None:
            return False
        self._streams[name] = stream
        self._untold.add(name)
        self._manager.windows[name] = self._window(stream)
        keep_to_itself(request)
        request.skip_reading_prefix_cache = True
        # The kept KV depends on the share, and vLLM's hashes do not.
        share = b"%r|" % share_in(request.sampling_params, BOUNDED)
        self._hashes[name] = [sha256(share + bytes(h)).digest() for h in request.block_hashes]
        request.block_hashes, request._block_hasher = [], None
        return True

    def _described(self, stream: Stream) -> int:
        """Return the number of blocks that will describe the kept KV; 0 without a store."""
        return self._layout.described_in(stream.kept) if self._arrivals else 0

    def _window(self, stream: Stream) -> int:
        return stream.window(self._scheduler._step_tokens) + self._described(stream)

    def _stream(self, request: Any) -> Stream | None:
        share, block_tokens = share_in(request.sampling_params, BOUNDED), self._manager.block_size
        if share is None or request.prompt_token_ids is None:
            return None
        scheduler, usable = self._scheduler, self._manager.block_pool.num_gpu_blocks - 1
        stream = Stream(request.num_prompt_tokens, share, block_tokens)
        behind = scheduler._most_tokens(request) - stream.blocks * block_tokens
        whole = stream.kept + self._described(stream) - (-behind // block_tokens)
        most = max(self._window(stream), whole)
        wanted = self._all or scheduler._too_long(request)
        return stream if wanted and stream.worthwhile and most <= usable else None

    def gone(self, name: str) -> int:
        """Return the number of tokens of a request's context that its rows do not attend to."""
        stream = self._streams.get(name)
        if stream is None or not stream.dropped:
            return 0
        return (stream.dropped - stream.kept) * int(self._manager.block_size)

    def before(self, told: Told) -> None:
        """Prepare a step that is about to be scheduled.

        Requests whose context has grown by a segment, or is complete, choose the KV to keep. The
        first waiting requests begin with KV that the engine or the store has.
        """
        told.streams, self._untold = self._untold, set()
        if self._worker_erred:
            told.forgotten |= self._remembered.clear()
            self._worker_erred = False
        size = self._manager.block_size
        for name, stream in list(self._streams.items()):
            request = self._scheduler.requests.get(name)
            if request is None:
                del self._streams[name], self._hashes[name], self._manager.windows[name]
                self._arrivals.forget(name)
                continue
            due = stream.due(request.num_computed_tokens, request.num_preemptions)
            if due is None:
                continue
            described = self._described(stream)
            held = stream.kept + described
            if self._manager.may_drop(name, held, due):
                stream.dropped = due
                blocks = self._manager.drop(name, held, due)
                number = self._remember(name, due, held)
                told.drops[name] = Drop(due * size, blocks, number, described)
                told.forgotten |= self._remembered.forget()
                if least_of(self._hashes[name]) <= due <= len(self._hashes[name]):
                    self._arrivals.save(name, self._hashes[name][due - 1], due * size)
        self._recall()

    def _remember(self, name: str, blocks: int, held: int) -> int | None:
        """Remember the KV that a request keeps of so many blocks of its context. Return its number;
        None if it is not remembered."""
        if len(self._hashes[name]) < blocks:
            return None
        kept = self._remembered.add(self._hashes[name][blocks - 1], held)
        if kept is None:
            return None
        self._manager.remember(name, kept.number)
        return kept.number

    def _recall(self) -> None:
        scheduler, pool = self._scheduler, self._manager.block_pool
        room = max(0, scheduler.max_num_running_reqs - len(scheduler.running))
        if not ((self._remembered or self._arrivals) and room):
            return
        free, usable = pool.get_num_free_blocks(), pool.num_gpu_blocks - 1
        for request in itertools.islice(scheduler.waiting, min(room, CONSIDERED)):
            name = request.request_id
            window = self._manager.windows.get(name)
            free -= scheduler._least_blocks(request, usable) if window is None else window
            if free < 0:
                return  # an earlier request may need the free blocks that this one would begin with
            if window is None or request.num_computed_tokens or request.status not in BEGINS:
                continue
            begin, stream = self._begin_of(request), self._streams[name]
            if begin is None:
                continue
            own = stream.kept + self._described(stream)
            more = max(0, begin.held - own)  # above 0 if it was kept for a longer prompt
            if more > free or window + more > usable:
                continue
            free -= more
            self._manager.windows[name] = window + more
            if isinstance(begin.where, Kept):
                self._manager.recall(name, *begin.where, begin.blocks)
                self._recalled[name] = begin.where.number
            else:
                described = self._layout.described_of(begin.held)
                self._arrivals.begin(request, begin.where, described)
            self._begin_at(request, begin.blocks)

    def _begin_of(self, request: Any) -> _Begin | None:
        """Return the longest kept KV that a request may begin with. The store's is used only if it
        stands for more blocks than the engine's."""
        name, hashes = request.request_id, self._hashes[request.request_id]
        most = (request.num_prompt_tokens - 1) // self._manager.block_size
        found: _Begin | None = None
        if (own := self._remembered.longest(hashes, most)) is not None:
            found = _Begin(own[0], own[1].held, own[1])
        stored = self._arrivals.find(name, hashes, least_of(hashes), most)
        if stored is not None and (found is None or stored.blocks > found.blocks):
            return _Begin(stored.blocks, len(stored.names), stored)
        return found

    def _begin_at(self, request: Any, blocks: int) -> None:
        request.num_computed_tokens = blocks * self._manager.block_size
        self._streams[request.request_id].begin_at(blocks, request.num_preemptions)

    def behind(self, told: Told, output: Any) -> None:
        """Tell the worker which KV the requests of a scheduled step begin with. Requests that were
        not scheduled give it back."""
        for name in [*self._recalled, *self._arrivals.here()]:
            request, cached = self._scheduler.requests[name], 0
            if name not in output.num_scheduled_tokens:
                self._give_back(name)
                continue
            tokens = self._streams[name].dropped * self._manager.block_size
            if name in self._recalled:
                told.recalls[name], cached = self._recalled[name], tokens
            elif (came := self._arrivals.pop(name)) is not None:
                told.came[name] = came
            if request.prefill_stats and not request.num_preemptions:
                request.prefill_stats.set(request.num_prompt_tokens, cached, tokens - cached)
        self._recalled = {}
        # The worker does not drop KV of requests that were preempted in the same step.
        preempted = told.drops.keys() & (output.preempted_req_ids or set())
        if lost := {told.drops[name].remembered for name in preempted}:
            told.forgotten |= self._remembered.forget(lost)
        self._arrivals.scheduled(self._scheduler.requests, preempted)

    def on_lost(self) -> None:
        """Forget all remembered KV before the next step, since the worker lost a request's KV."""
        self._worker_erred = True

    def loaded(self, output: Any) -> None:
        """Have requests whose load from the store failed compute their prompts.

        Args:
            output: vLLM's KVConnectorOutput of a step that is over, or None.
        """
        for name in self._arrivals.loaded(output):
            if not self._scheduler.requests[name].is_finished():
                self._give_back(name)

    def _give_back(self, name: str) -> None:
        """Have a request that was to begin with kept KV compute all of its prompt."""
        self._arrivals.pop(name)
        self._manager.free(name)
        self._manager.windows[name] = self._window(self._streams[name])
        self._begin_at(self._scheduler.requests[name], 0)

"""Which requests of a scheduler stream, when each chooses what it holds, and what each begins with.

A request streams (`course.Stream`) where an engine with a gate is told that all do, and where its
context and answer are longer than the cache. It begins with what an earlier one held of the same
first tokens, if that is still there (`remembered`). vLLM takes it then for one whose first tokens
came from elsewhere.
"""

from __future__ import annotations

import itertools
from typing import Any

from vllm.v1.request import RequestStatus

from headrace_decode.bounded.engine.course import Stream
from headrace_decode.bounded.engine.following import Drop, Told
from headrace_decode.bounded.engine.remembered import Remembered
from headrace_decode.sparse.engine.offload.manager import OffloadManager
from headrace_decode.sparse.engine.offload.scheduler import CONSIDERED, keep_to_itself
from headrace_decode.techniques import BOUNDED, share_in

BEGINS = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED})


class Streams:
    """All of a scheduler's.

    Args:
        scheduler: that offloads. manager: its blocks.
        all_stream: whether all bounded requests do that free enough.
    """

    def __init__(self, scheduler: Any, manager: OffloadManager, all_stream: bool) -> None:
        self._scheduler, self._manager, self._all = scheduler, manager, all_stream
        self._streams: dict[str, Stream] = {}
        self._hashes: dict[str, list[bytes]] = {}
        """Of their prompts' full blocks."""
        self._untold: set[str] = set()
        """Those that the worker does not know."""
        self._remembered = Remembered(manager.is_there)
        self._recalled: dict[str, int] = {}
        """By request that may begin in this step: the number of what it begins with."""

    def __contains__(self, name: str) -> bool:
        return name in self._streams

    def __len__(self) -> int:
        return len(self._streams)

    def begin(self, request: Any) -> bool:
        """Whether a new request streams. It is changed then: no prefix of vLLM's is it, nor does it
        have one, since what it computes depends on what it drops."""
        stream, name = self._stream(request), request.request_id
        if stream is None:
            return False
        self._streams[name] = stream
        self._untold.add(name)
        self._manager.windows[name] = self._window(stream)
        keep_to_itself(request)
        request.skip_reading_prefix_cache = True
        self._hashes[name] = request.block_hashes
        request.block_hashes, request._block_hasher = [], None
        return True

    def _window(self, stream: Stream) -> int:
        return stream.window(self._scheduler._step_tokens)

    def _stream(self, request: Any) -> Stream | None:
        share, block_tokens = share_in(request.sampling_params, BOUNDED), self._manager.block_size
        if share is None or request.prompt_token_ids is None:
            return None
        scheduler, usable = self._scheduler, self._manager.block_pool.num_gpu_blocks - 1
        stream = Stream(request.num_prompt_tokens, share, block_tokens)
        behind = scheduler._most_tokens(request) - stream.blocks * block_tokens
        whole = stream.kept - (-behind // block_tokens)
        most = max(self._window(stream), whole)
        wanted = self._all or scheduler._too_long(request)
        return stream if wanted and stream.worthwhile and most <= usable else None

    def gone(self, name: str) -> int:
        """Tokens of a request's context that its rows do not attend to."""
        stream = self._streams.get(name)
        if stream is None or not stream.dropped:
            return 0
        return (stream.dropped - stream.kept) * int(self._manager.block_size)

    def before(self, told: Told) -> None:
        """A step is about to be scheduled: have requests choose what they hold that are a segment
        longer, or all there, and those that wait first begin with what is remembered."""
        told.streams, self._untold = self._untold, set()
        for name, stream in list(self._streams.items()):
            request = self._scheduler.requests.get(name)
            if request is None:
                del self._streams[name], self._hashes[name], self._manager.windows[name]
                continue
            due = stream.due(request.num_computed_tokens, request.num_preemptions)
            if due is not None:
                kept = self._manager.drop(name, stream.kept, due)
                number = self._remember(name, due)
                told.drops[name] = Drop(due * self._manager.block_size, kept, number)
                told.forgotten |= self._remembered.forget()
        self._recall()

    def _remember(self, name: str, blocks: int) -> int | None:
        """Remember what a request holds of so many blocks of its context; the number of that."""
        if len(self._hashes[name]) < blocks:
            return None
        kept = self._remembered.add(self._hashes[name][blocks - 1], self._streams[name].kept)
        if kept is None:
            return None
        self._manager.remember(name, kept.number)
        return kept.number

    def _recall(self) -> None:
        scheduler, pool = self._scheduler, self._manager.block_pool
        room = max(0, scheduler.max_num_running_reqs - len(scheduler.running))
        if not (self._remembered and room):
            return
        free, usable = pool.get_num_free_blocks(), pool.num_gpu_blocks - 1
        for request in itertools.islice(scheduler.waiting, min(room, CONSIDERED)):
            name = request.request_id
            window = self._manager.windows.get(name)
            free -= scheduler._least_blocks(request, usable) if window is None else window
            if free < 0:
                return  # what this one holds may be what one before it lacks
            if window is None or request.num_computed_tokens or request.status not in BEGINS:
                continue
            most = (request.num_prompt_tokens - 1) // self._manager.block_size
            found = self._remembered.longest(self._hashes[name], most)
            if found is None:
                continue
            blocks, kept = found
            more = max(0, kept.held - self._streams[name].kept)  # of a prompt that was longer
            if more <= free and window + more <= usable:
                free -= more
                self._manager.windows[name] = window + more
                self._manager.recall(name, *kept, blocks)
                self._begin_at(request, blocks)
                self._recalled[name] = kept.number

    def _begin_at(self, request: Any, blocks: int) -> None:
        request.num_computed_tokens = blocks * self._manager.block_size
        self._streams[request.request_id].begin_at(blocks, request.num_preemptions)

    def behind(self, told: Told, output: Any) -> None:
        """A step was scheduled: tell what requests begin with. Those that wait on give it back."""
        for name, number in self._recalled.items():
            request = self._scheduler.requests[name]
            if name in output.num_scheduled_tokens:
                told.recalls[name] = number
                if request.prefill_stats and not request.num_preemptions:
                    cached = self._streams[name].dropped * self._manager.block_size
                    request.prefill_stats.set(request.num_prompt_tokens, cached, 0)
            else:
                self._manager.free(name)
                self._manager.windows[name] = self._window(self._streams[name])
                self._begin_at(request, 0)
        self._recalled = {}
        # The worker does not drop of those that lost their blocks in the same step.
        preempted = told.drops.keys() & (output.preempted_req_ids or set())
        if lost := {told.drops[name].remembered for name in preempted}:
            told.forgotten |= self._remembered.forget(lost)

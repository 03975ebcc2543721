"""The choice of a request's blocks that an engine saves, and when.

A block is saved once it is confirmed (`scheduler_connector`). A running request keeps its blocks
until its end, unless vLLM frees them early because they leave an attention window. Then the blocks
that a step fills are held until its output has arrived (`step_holds`), and only held blocks are
saved. The states of recurrent layers are always held (`state_saver`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace_engine.connector.identity.adapters import BlockNames
from headrace_engine.connector.load_price import LoadPrice
from headrace_engine.connector.request_state import RequestState
from headrace_engine.connector.save_queue import SaveQueue
from headrace_engine.connector.state_groups import StateGroups
from headrace_engine.connector.state_saver import Offer, StateSaver
from headrace_engine.connector.step_holds import StepHolds
from headrace_engine.connector.store_work import BlockSave
from headrace_kvstore.identity.private_blocks import shared_blocks


class RequestSaver:
    """Saves of one engine's requests.

    Args:
        queue: takes the blocks.
        names: names blocks in the store.
        block_tokens: tokens a block.
        costs: as `SchedulerConnector`.
        saves: whether blocks are saved at all.
        frees_early: whether vLLM frees blocks of a request that still runs.
        states: cache groups of an engine with recurrent layers.
    """

    def __init__(
        self,
        queue: SaveQueue,
        names: BlockNames,
        block_tokens: int,
        costs: LoadPrice | None,
        saves: bool,
        frees_early: bool,
        states: StateGroups | None = None,
    ) -> None:
        self._queue, self._names, self._block_tokens = queue, names, block_tokens
        self._costs, self._saves, self._is_clean = costs, saves, True
        self._holds = StepHolds(queue) if frees_early else None
        self._states: StateSaver | None = None
        if states is not None:
            self._states = StateSaver(states, queue, names, block_tokens, self.compute_s)

    @property
    def may_save(self) -> bool:
        """Whether blocks may be saved at all."""
        return self._saves and self._is_clean

    @property
    def frees_blocks(self) -> bool:
        """Whether blocks that no request has any more will be free when their copies have ended, so
        that a request that needs blocks should wait for them."""
        return bool(self._holds or self._states) and self._queue.frees_blocks

    def reset(self) -> bool:
        """Stop saving until no block of the engine is in use; return whether none is."""
        for holds in (self._holds, self._states):
            if holds is not None:
                holds.clear()
        self._is_clean = self._queue.is_pool_free
        return self._is_clean

    def restart(self, request_id: str) -> None:
        """Handle that a request has lost its blocks."""
        for holds in (self._holds, self._states):
            if holds is not None:
                holds.release(request_id)

    def confirm(self, requests: Mapping[str, RequestState]) -> None:
        """Queue or release the held blocks of steps whose output has arrived."""
        for request_id in [] if self._holds is None else self._holds.requests:
            self._save(requests[request_id])
        for request_id in [] if self._states is None else self._states.requests:
            self._save_states(requests[request_id])

    def schedule(
        self,
        scheduled: Mapping[str, int],
        requests: Mapping[str, RequestState],
        offers: Mapping[str, Sequence[Offer]],
    ) -> None:
        """Queue the confirmed blocks of the requests in a step that is being scheduled.

        Args:
            scheduled: the step's tokens of each request.
            offers: the states of recurrent layers that vLLM has cached, by request.
        """
        self.confirm(requests)
        if self._states is not None and self.may_save and self._queue.has_pool:
            for request_id in offers:
                if request_id in requests:
                    self._states.hold(request_id, offers[request_id])
        known = [(requests[each], n) for each, n in scheduled.items() if each in requests]
        for request, tokens in known:
            if self._holds is None:
                self._save(request, is_limited=True)
            else:
                self._hold(self._holds, request, tokens)
        for request, tokens in known:
            request.scheduled += tokens

    def finish(self, known: RequestState, block_ids: Sequence[Sequence[int]]) -> None:
        """Queue the blocks of a request that has ended, which are about to be freed.

        Args:
            block_ids: a list for each cache group.
        """
        if self._holds is None:
            known.blocks = [list(group) for group in block_ids]
        self._save(known)
        self._save_states(known)
        self.restart(known.request.request_id)
        # An engine whose cache is full needs blocks before its next step.
        kept = self._queue.held(self._names.of_request(known.request, 0, None) or ())
        freed = sum(sum(map(bool, group)) for group in block_ids)
        freed -= sum(bool(group[i]) for group in block_ids for i in kept if i < len(group))
        self._queue.yield_room(freed=freed)

    def compute_s(self, first: int, end: int) -> float:
        """Return the predicted seconds to compute tokens; 0 before anything was measured."""
        return (self._costs and self._costs.compute_s(first, end)) or 0.0

    def _hold(self, holds: StepHolds, known: RequestState, tokens: int) -> None:
        """Hold the blocks that the next step fills, and at the request's admission those that it
        has already. Their names may not be known yet."""
        end = min((known.request.num_computed_tokens + tokens) // self._block_tokens, known.length)
        if end > known.hold_end and self.may_save and self._queue.has_pool:
            holds.hold(known, range(known.hold_end, end))
            known.hold_end = end

    def _save(self, known: RequestState, is_limited: bool = False) -> None:
        """Queue the copies of a request's confirmed blocks that may be saved and that the store
        lacks; release those that are held.

        Args:
            is_limited: whether no more are queued than can be copied now.
        """
        request, in_flight = known.request, known.request.num_in_flight_tokens
        if known.scheduled <= in_flight:
            return
        confirmed = max(0, request.num_computed_tokens - in_flight) // self._block_tokens
        if confirmed > known.saved and self.may_save and self._queue.has_pool:
            end = min(confirmed, shared_blocks(request.block_hashes), known.length)
            if is_limited:
                end = min(end, known.saved + self._queue.room // len(known.blocks))
            self._queue_blocks(known, end)
        if self._holds is not None:
            self._holds.release(request.request_id, confirmed)

    def _save_states(self, known: RequestState) -> None:
        """Queue or release the held states that are confirmed."""
        request, in_flight = known.request, known.request.num_in_flight_tokens
        if self._states is not None and known.scheduled > in_flight:
            self._states.save(known, request.num_computed_tokens - in_flight, self.may_save)

    def _queue_blocks(self, known: RequestState, end: int) -> None:
        if end <= known.saved:
            return
        request, before, size = known.request, max(0, known.saved - 1), self._block_tokens
        hashes = self._names.of_request(request, before, end)
        if hashes is None:
            return
        first, known.saved = known.saved, end
        names = hashes[first - before :]
        places = [first + i for i, lacks in enumerate(self._queue.lacking(names)) if lacks]
        if self._holds is not None:
            places = [i for i in places if self._holds.holds(request.request_id, i)]
        if not places:
            return
        self._queue.add(
            BlockSave(
                blocks=[[group[i] for i in places] for group in known.blocks],
                hashes=[names[i - first] for i in places],
                parents=[hashes[i - 1 - before] if i else b"" for i in places],
                depths=places,
                tenant=request.cache_salt or "",
                compute_s=[self.compute_s(i * size, (i + 1) * size) for i in places],
            )
        )

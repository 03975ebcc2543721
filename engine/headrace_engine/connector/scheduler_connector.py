"""The choice of the KV blocks that an engine loads from the store and saves there.

This is the scheduler's side of the connector without its vLLM shell. It decides by block hashes
alone and moves no bytes. The worker's side carries out its `StoreWork`.

A block is wrong if it was computed from KV that failed to load, and vLLM learns of such a failure
only with the output of the step. So a request's full blocks are saved after the output of a step of
that request has arrived, and only blocks that lie below

    confirmed tokens = num_computed_tokens - num_in_flight_tokens

Slower tiers offer blocks. `load_price.LoadPrice` predicts for how many of them loading takes fewer
seconds than computing, and only these are loaded. It also decides whether a request's blocks are
loaded ahead of its step or under it. If vLLM does not recover a load that fails under a step
(`under_steps`), all loads are made ahead of steps. After a load ahead, a request makes no further
one until it was in a step, even if blocks did not arrive.

The engine's block pool holds the blocks that are being copied, and those that an ended request has
left to copy (`save_queue`). Nothing else waits for a copy: requests finish, are preempted or
aborted as they would without a store. `request_saver` chooses the blocks.

With recurrent layers, a hit also needs the states after its last block (`state_groups`).

Some blocks are neither loaded nor saved: those of a request whose salt is marked
(`headrace_kvstore.identity.salts`) or whose adapter is not known by its content
(`identity.adapters`), and a request's private blocks (`headrace_kvstore.identity.private_blocks`).

An engine's scheduler may also save and load blocks that belong to no prompt, under names that it
makes itself (`lacking`, `load`, `save`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from headrace_engine.connector.arena.arena_index import ArenaIndex
from headrace_engine.connector.identity.adapters import BlockNames
from headrace_engine.connector.load_price import LoadPrice, TierRun
from headrace_engine.connector.node_tiers import NodeTiers
from headrace_engine.connector.request_saver import RequestSaver
from headrace_engine.connector.request_state import (
    BlockOffer,
    RequestState,
    TierBlocks,
    TierQuestion,
)
from headrace_engine.connector.retention import RequestRetention, Retain
from headrace_engine.connector.save_queue import SaveQueue
from headrace_engine.connector.state_groups import StateGroups
from headrace_engine.connector.store_work import BlockLoad, BlockSave, StoreWork, step_shape
from headrace_kvstore.identity.private_blocks import shared_blocks
from headrace_kvstore.identity.salts import is_isolated

NO_BLOCK = -1
"""Block id in a load where vLLM has its null block, whose id is 0."""


class SchedulerConnector:
    """Scheduler of one engine's loads and saves.

    Args:
        index: the store.
        block_tokens: tokens a block, as the engine's cache has them.
        load, save: switch either direction off.
        slow: the tiers below DRAM.
        most_slow: maximum number of blocks that a request may load from there at once.
        price: decides how many of the blocks offered there are loaded; None loads all.
        window_tokens: tokens at the end of a prompt that are always computed, never loaded, so that
            a lossy codec does not touch them.
        costs: predicts how long blocks take to compute, for the eviction policy, and whether loads
            pay ahead of their step.
        record_prompt: called with each new prompt's full blocks, root first; must not wait.
        ended: called with the blocks of each save that all workers have ended; must not wait.
        retain: retains blocks of requests whose KV hints ask for it; None ignores the hints.
        names: names blocks in the store.
        under_steps: whether a load may be made under the step that needs it.
        frees_early: whether vLLM frees blocks of a request that still runs.
        states: cache groups of an engine with recurrent layers, which makes no loads under steps.
        clock: seconds, as `time.monotonic`.

    Attributes:
        counts: blocks by what became of them, since the start.
        sources: by request, the tokens of its last load by `TierBlocks.source`, until it ends.
    """

    def __init__(
        self,
        index: ArenaIndex,
        block_tokens: int,
        *,
        load: bool = True,
        save: bool = True,
        slow: NodeTiers | None = None,
        most_slow: int = 1024,
        price: LoadPrice | None = None,
        window_tokens: int = 0,
        costs: LoadPrice | None = None,
        record_prompt: Callable[[Sequence[bytes]], None] | None = None,
        ended: Callable[[Sequence[bytes]], None] | None = None,
        retain: Retain | None = None,
        names: BlockNames | None = None,
        under_steps: bool = True,
        frees_early: bool = False,
        states: StateGroups | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index, self._under_steps, self._clock = index, under_steps, clock
        self._names, self._states = names or BlockNames(), states
        self._slow, self._most_slow, self._price = slow, most_slow, price
        self._left_tokens = max(1, window_tokens)
        self.counts: Counter[str] = Counter()
        self._asked: dict[str, TierQuestion] = {}
        self._taken: dict[str, TierBlocks] = {}
        self._states_below: dict[str, frozenset[bytes] | None] = {}
        self._block_tokens = block_tokens
        self._costs, self._prompted = costs, record_prompt
        self._loads = load
        self._ended = ended
        self._retention = None if retain is None else RequestRetention(retain, clock)
        self.save_queue = SaveQueue(index, self.counts, self._save_ended)
        self._saver = RequestSaver(
            self.save_queue, self._names, block_tokens, costs, save, frees_early, states
        )
        self._requests: dict[str, RequestState] = {}
        self._offered: dict[str, BlockOffer] = {}
        self._running: frozenset[str] = frozenset()
        self.sources: dict[str, dict[str, int]] = {}
        self._work = StoreWork()

    def bind(self, pool: Any) -> None:
        """Set vLLM's block pool, which holds blocks; before this call nothing is saved."""
        self.save_queue.bind(pool)

    def reset(self) -> bool:
        """Stop using all KV that was computed or stored so far: its weights may have changed.

        Returns:
            False if the engine's own cache still holds some: then nothing is saved until a later
            reset finds it empty.
        """
        self._names.renew()
        for each in (self._asked, self._taken, self._offered, self._states_below):
            each.clear()
        return self._saver.reset()

    @property
    def busy(self) -> bool:
        """Whether blocks are held, so that the engine must run steps until they are released."""
        return self.save_queue.busy

    @property
    def frees_blocks(self) -> bool:
        """Whether a request that needs blocks should wait (`RequestSaver.frees_blocks`)."""
        return self._saver.frees_blocks

    def matched(self, request: Any, computed_tokens: int) -> int | None:
        """Return how many tokens the store holds after those in the engine's own cache.

        At least one token is left to compute. vLLM may call this any number of times.

        Args:
            computed_tokens: a multiple of the block size.

        Returns:
            The tokens, or None while a slower tier is being asked.
        """
        if not self._loads or request.skip_reading_prefix_cache or _is_apart(request):
            return 0
        if not self._under_steps and not self._may_load_ahead(request):
            return 0
        if not self._is_answered(request):
            return None
        start = computed_tokens // self._block_tokens
        end = (request.num_tokens - self._left_tokens) // self._block_tokens
        end = min(end, shared_blocks(request.block_hashes))
        hashes = self._names.of_request(request, start, max(start, end))
        if not hashes:
            return 0
        there = self._index.leading(hashes)
        if self._states is None:
            slower = self._placed(request, start + there, hashes[there:])
            found = None if slower is None else there + slower
        else:
            found = self._hit_with_states(self._states, request, start, hashes, there)
        if found is None:
            return None
        ahead = not self._under_steps or self._pays_ahead(request, start, hashes[:found], there)
        names, missing = tuple(hashes[:found]), len(hashes) - found
        self._offered[request.request_id] = BlockOffer(start, ahead, names, missing)
        return found * self._block_tokens

    def loads_ahead(self, request: Any) -> bool:
        """Whether the blocks that `matched` has just offered are loaded ahead of the step."""
        return self._offered.get(request.request_id, BlockOffer()).ahead

    def _may_load_ahead(self, request: Any) -> bool:
        known = self._requests.get(request.request_id)
        return known is not None and not known.ahead

    def _pays_ahead(self, request: Any, start: int, hashes: Sequence[bytes], in_dram: int) -> bool:
        if self._costs is None or not self._may_load_ahead(request):
            return False
        places = self._taken.get(request.request_id, TierBlocks()).places
        media = ["dram"] * in_dram
        media += [medium_of(places[h]) if h in places else "dram" for h in hashes[in_dram:]]
        runs = [TierRun(medium, len(list(run))) for medium, run in groupby(media)]
        first = (start + len(hashes)) * self._block_tokens
        others = len(self._running - {request.request_id})
        return self._costs.ahead(runs, first, request.num_tokens, others)

    def _hit_with_states(
        self, states: StateGroups, request: Any, start: int, hashes: list[bytes], in_dram: int
    ) -> int | None:
        """Return how many leading blocks of a request can be loaded together with the states after
        them; None: not known yet. Slower tiers are asked for their states first, and then for
        everything that the longest hit lacks in DRAM.

        Args:
            start: number of the prompt's blocks before these.
            in_dram: number of leading blocks that DRAM has.
        """
        lacking = self._index.lacking
        here = states.hit(hashes[:in_dram], lacking)
        if self._slow is None or here == len(hashes):
            return here
        held = self._held_states(states, request, hashes)
        if held is None:
            return None

        def lacks(names: Sequence[bytes]) -> list[bool]:
            each = zip(names, lacking(names), strict=True)
            return [absent and name not in held for name, absent in each]

        end = states.hit(hashes[: in_dram + self._most_slow - len(states.recurrent)], lacks)
        if end <= here:
            return here
        after = states.names(hashes[end - 1])
        wanted = hashes[in_dram:end]
        wanted += [name for name, absent in zip(after, lacking(after), strict=True) if absent]
        slower = self._placed(request, start + in_dram, wanted)
        if slower is None:
            return None
        return end if slower == len(wanted) else here

    def _held_states(
        self, states: StateGroups, request: Any, hashes: Sequence[bytes]
    ) -> frozenset[bytes] | None:
        """Return the states after the last ones of these blocks that slower tiers have; None: not
        known yet."""
        assert self._slow is not None
        name = request.request_id
        if name not in self._states_below:
            self._slow.find_held(name, states.last_names(hashes))
            self._states_below[name] = None
        if self._states_below[name] is None:
            self._states_below[name] = self._slow.held(name)
        return self._states_below[name]

    def _placed(self, request: Any, first: int, hashes: list[bytes]) -> int | None:
        """Return how many leading ones of these blocks slower tiers supply; None: not known yet.

        Args:
            first: number of the prompt's blocks before them.
        """
        if self._slow is None or not hashes:
            return 0
        name = request.request_id
        known = self._taken.get(name)
        if known is not None and self._clock() > known.until_s - self._slow.lease_s / 2:
            known = None  # the request waited so long that the load might not end within the lease
        if known is None:
            asked = hashes[: self._most_slow]
            block_s = 0.0
            if self._price is not None:
                block_s = self._price.block_s(first, len(asked)) or 0.0
            self._asked[name] = TierQuestion(asked, first, self._clock())
            self._slow.ask(name, asked, block_s)
            if not self._is_answered(request):
                return None
        places = self._taken[name].places
        lacking = self._index.lacking(hashes)  # by now a peer's blocks are in DRAM
        missing = (n for n, h in enumerate(hashes) if lacking[n] and h not in places)
        return next(missing, len(hashes))

    def _is_answered(self, request: Any) -> bool:
        """Whether a request has no open question to slower tiers; take the answer if there is
        one."""
        name = request.request_id
        question = self._asked.get(name)
        if question is None or self._slow is None:
            return True
        answer = self._slow.answer(name)
        if answer is None:
            return False
        del self._asked[name]
        self._taken[name] = self._take(question, answer, request.num_tokens)
        return True

    def _take(self, question: TierQuestion, answer: Sequence[Any], tokens: int) -> TierBlocks:
        """Choose the offered blocks to load."""
        assert self._slow is not None
        if not answer:
            return TierBlocks(asked=frozenset(question.hashes))
        blocks, limit_s = len(answer), math.inf
        if self._price is not None:
            media = [medium_of(place) for place in answer]
            runs = [TierRun(medium, len(list(run))) for medium, run in groupby(media)]
            ahead = not self._under_steps
            choice = self._price.choose(question.first, runs, tokens, ahead)
            for medium in media[choice.blocks :]:
                self.counts[f"declined_{medium}"] += 1
            blocks, limit_s = choice.blocks, choice.limit_s
        places = dict(zip(question.hashes, answer[:blocks], strict=False))
        until_s = question.asked_s + self._slow.lease_s if places else math.inf
        return TierBlocks(places, limit_s, until_s, frozenset(question.hashes))

    def allocated(
        self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """Queue the load of the blocks found in the store, and count those that are not there: the
        engine admits the request.

        Args:
            block_ids: of all of the request's blocks, a list for each cache group.
        """
        start, ahead, names, missing = self._offered.pop(request.request_id, BlockOffer())
        if missing:
            self._index.record_misses(missing)
        taken = self._taken.pop(request.request_id, TierBlocks())
        self._states_below.pop(request.request_id, None)
        if not external_tokens:
            return
        end = start + external_tokens // self._block_tokens
        sources = Counter(map(taken.source, names[: end - start]))
        self.sources[request.request_id] = {
            source: blocks * self._block_tokens for source, blocks in sources.items()
        }
        hashes, tables = list(names[: end - start]), [[*ids[start:end]] for ids in block_ids]
        if self._states is not None:
            ids, hashes = self._states.of_prefix(hashes, block_ids, start)
            tables = [ids]
        self._index.lease(hashes)
        load = self._work.load
        if ahead:
            load = self._work.ahead[request.request_id] = BlockLoad()
            self._requests[request.request_id].ahead = True
        if not load.blocks:
            load.blocks.extend([] for _ in tables)
        for blocks, ids in zip(load.blocks, tables, strict=True):
            blocks.extend(block or NO_BLOCK for block in ids)
        load.hashes.extend(hashes)
        load.places.update((h, taken.places[h]) for h in hashes if h in taken.places)
        if taken.places:
            load.limits_s.append(taken.limit_s)
            load.until_s.append(taken.until_s)

    def added(self, request: Any) -> None:
        """Register a new request; its blocks become known when it is scheduled."""
        if _is_apart(request):
            return
        self._requests[request.request_id] = RequestState(request)
        # If the prefill was remote, the engine that did it has reported this prompt.
        transfer = getattr(request, "kv_transfer_params", None) or {}
        if self._prompted is not None and not transfer.get("do_remote_prefill"):
            exact = shared_blocks(request.block_hashes)
            hashes = self._names.of_request(request, 0, exact)
            if hashes:
                self._prompted(hashes)

    def step(self, output: Any) -> StoreWork:
        """Return the worker side's work beside the step that vLLM has just put together.

        Args:
            output: vLLM's SchedulerOutput.
        """
        self._follow(output)
        self.save_queue.yield_room()
        told = getattr(output, "kv_connector_block_state", None)
        offers = {} if told is None else told.boundary_state_offloads
        self._saver.schedule(output.num_scheduled_tokens, self._requests, offers)
        self._running = frozenset(output.num_scheduled_tokens)
        work, self._work = replace(self._work, saves=self.save_queue.step()), StoreWork()
        if self._price is not None or self._costs is not None:
            shape = step_shape(output)
            if shape.prompt:
                work = replace(work, shape=shape)
        return work

    def confirm(self) -> None:
        """Handle the output of a step."""
        self._saver.confirm(self._requests)

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """Handle the end of a request, well or not; its blocks are about to be freed.

        Args:
            block_ids: as `allocated`.
        """
        self._offered.pop(request.request_id, None)
        self._asked.pop(request.request_id, None)
        self._taken.pop(request.request_id, None)
        self._states_below.pop(request.request_id, None)
        self.sources.pop(request.request_id, None)
        known = self._requests.pop(request.request_id, None)
        if known is not None:
            self._saver.finish(known, self._tables(block_ids))
            self._retain(request)

    def _retain(self, request: Any) -> None:
        """Retain the blocks of a request that has ended, if its hints ask for it."""
        if self._retention is None or not (seconds := self._retention.seconds(request)):
            return
        shared = shared_blocks(request.block_hashes)
        names = self._names.of_request(request, 0, shared) or []
        if self._states is not None:
            names = [each for name in names for each in (name, *self._states.names(name))]
        held = self.save_queue.held(names)
        self._retention.finish(names, held, seconds, request.cache_salt or "")

    def _save_ended(self, names: Sequence[bytes]) -> None:
        if self._ended is not None:
            self._ended(names)
        if self._retention is not None:
            self._retention.saved(names)

    def saved(self, jobs: Iterable[int]) -> None:
        """Release the blocks of these jobs, whose copies have ended, well or not."""
        self.save_queue.end(jobs)

    def _follow(self, output: Any) -> None:
        """Keep the requests' block ids."""
        for new in output.scheduled_new_reqs:
            known = self._requests.get(new.req_id)
            if known is not None:
                self._restart(known, self._tables(new.block_ids))
        for request_id in getattr(output, "preempted_req_ids", None) or ():
            self._saver.restart(request_id)
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            known = self._requests.get(request_id)
            if known is None:
                continue
            if request_id in cached.resumed_req_ids:
                again = self._tables(blocks) if blocks else [[] for _ in known.blocks]
                self._restart(known, again)
            elif blocks is not None:
                known.extend(self._tables(blocks))

    def _tables(self, block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the block ids of the groups whose blocks hold the KV of single tokens."""
        return block_ids if self._states is None else [block_ids[self._states.attention]]

    def _restart(self, known: RequestState, blocks: Sequence[Sequence[int]]) -> None:
        """Begin again with a request, which the engine has (re)admitted."""
        known.admit(blocks)
        self._saver.restart(known.request.request_id)

    def lacking(self, names: Sequence[bytes]) -> list[bool]:
        """Return for each block whether DRAM lacks it; True for all if loading is off."""
        return self._index.lacking(self._names.own(names)) if self._loads else [True] * len(names)

    def load(self, request_id: str, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Copy blocks from DRAM ahead of a request's step; vLLM learns of the end as of other
        loads."""
        own = self._names.own(names)
        self._index.lease(own)
        self._work.ahead[request_id] = BlockLoad([list(blocks)], own)

    def save(self, blocks: Sequence[int], names: Sequence[bytes], salt: str, tokens: int) -> None:
        """Copy blocks to DRAM as soon as the next step is computed, unless they are there or too
        many others are being copied.

        Args:
            salt: their request's.
            tokens: number of prompt tokens that would have to be computed without them.
        """
        names = self._names.own(names)
        if not self._saver.may_save or not any(self._index.lacking(names)):
            return
        each_s = self._saver.compute_s(0, tokens) / len(names)
        parents = [b"", *names[:-1]]
        save = BlockSave([[*blocks]], [*names], parents, [*range(len(names))], salt, each_s)
        if not self.save_queue.add_at_once(save):
            self.counts["save_busy"] += len(names)


def _is_apart(request: Any) -> bool:
    return is_isolated(request.cache_salt or "")


def medium_of(place: Any) -> str:
    """Return a place's tier: its own `medium`, or the node's files if it has none."""
    return str(getattr(place, "medium", "nvme"))

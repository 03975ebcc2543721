"""Decides in the scheduler which requests are offloaded, and tells the worker.

A request is offloaded if its maximum length does not fit in the KV cache, or if it is sparse and
offloading lowers the total latency (`decision`). The first rule holds for exact requests as well.
In each step in which requests wait, the scheduler decides again, for waiting requests and for those
that answer from the cache. KV from a prefill engine arrives in the cache as a whole, and may leave
it afterwards. An offloaded request stays offloaded until it ends or is preempted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from headrace_decode.attention.lost_requests import end_lost
from headrace_decode.attention.offload.block_manager import OffloadBlockManager
from headrace_decode.attention.offload.decision import (
    AttentionMode,
    OffloadCandidate,
    RunningRequest,
    ServingOption,
    StepCosts,
    cheapest_option,
    choose_offloads,
)
from headrace_decode.attention.offload.footprint import Footprint, footprint
from headrace_decode.attention.offload.ledger import Ledger, cold_blocks
from headrace_decode.attention.page_counts import selected_page_count
from headrace_decode.attention.settings import SparseSettings
from headrace_decode.techniques import SPARSE, keep_ratio_in
from headrace_engine.extensions.extension import SchedulerPart, metadata_of
from headrace_engine.vllm.scheduling import admissible
from headrace_kvstore.identity.salts import is_isolated, isolated_salt

OFFLOAD, TIMING = "offload", "timing"
"""Keys of a step's metadata: `OffloadMetadata`, and `StepTiming`, which the scheduler itself reads
again."""
MAX_CONSIDERED = 16
"""Maximum number of waiting requests that a step considers; no step admits many more."""


@dataclass(frozen=True)
class OffloadMetadata:
    """Message to the worker about the offloaded requests of a step.

    Attributes:
        working_sets: blocks of the working set, by request that is offloaded from this step on.
        copy_first: number of tokens to copy first, by request of these that was in the cache.
    """

    working_sets: Mapping[str, Sequence[int]]
    copy_first: Mapping[str, int]


class StepTiming(NamedTuple):
    """When a step began; and the rows and contexts of a step that computes answers alone."""

    began_s: float
    answers: tuple[int, list[float]] | None


class CompressionView(Protocol):
    """Facts that offloading needs about requests that drop KV of their context."""

    def stays(self, request: Any) -> bool:
        """Return whether a request that is too long for the cache is served without offloading."""

    def dropped(self, request: Any) -> int:
        """Return the number of tokens of a request's context that it has dropped."""


class OffloadSchedulerPart(SchedulerPart):
    """Offloaded requests of a scheduler.

    Args:
        scheduler: vLLM's. manager: manager of its blocks. settings: settings of the engine.

    Attributes:
        costs: durations of steps, as learned.
        clock: returns the time in seconds.
        returned_s: when vLLM had processed the last output.
        compression: tells about requests that drop KV; None if none does.
    """

    def __init__(
        self, scheduler: Any, manager: OffloadBlockManager, settings: SparseSettings
    ) -> None:
        self._scheduler, self.manager, self.settings = scheduler, manager, settings
        layers = scheduler.kv_cache_config.kv_cache_groups[0].layer_names
        block_bytes = manager.kv_cache_spec.page_size_bytes * len(layers)
        ranks = scheduler.vllm_config.parallel_config.tensor_parallel_size
        manager.ledger = Ledger(settings.host_blocks(block_bytes, ranks))
        self.costs = StepCosts()
        self.clock = time.perf_counter
        self.returned_s = 0.0
        self.compression: CompressionView | None = None
        self._copy_first: dict[str, int] = {}

    def before_add(self, request: Any) -> None:
        """Plan to offload a request if it is too long for the cache."""
        manager = self.manager
        if not self.is_too_long(request):
            return
        if self.compression is not None and self.compression.stays(request):
            return
        needed = self.smallest(request)
        if needed.blocks > manager.block_pool.num_gpu_blocks - 1:
            needed = self._footprint(self.max_tokens(request), None)
        manager.ledger.plan(request.request_id, needed)
        exclude_from_connectors(request)

    def is_too_long(self, request: Any) -> bool:
        """Return whether the cache cannot hold a request as a whole."""
        usable = self.manager.block_pool.num_gpu_blocks - 1
        return self.max_tokens(request) > usable * self.manager.block_size

    def max_tokens(self, request: Any) -> int:
        """Return the maximum number of tokens of a request, prompt and answer."""
        longest: int = self._scheduler.max_model_len
        return min(request.num_prompt_tokens + request.max_tokens, longest)

    def smallest(self, request: Any) -> Footprint:
        """Return the footprint of a request if it is offloaded."""
        return self._footprint(self.max_tokens(request), _keep_ratio(request))

    def before_schedule(self) -> None:
        """Decide about the next step."""
        self._copy_first = self.decide()

    def decide(self) -> dict[str, int]:
        """Decide how to serve each sparse request that may be admitted now. Offload running
        requests if that admits others and pays; return these, as `OffloadMetadata.copy_first`."""
        manager, running = self.manager, self._scheduler.running
        most: int = self._scheduler.max_num_active_reqs
        waiting = list(itertools.islice(admissible(self._scheduler), most))
        room = min(max(most - len(running), 0), MAX_CONSIDERED)
        if not (waiting and room):
            return {}
        usable = manager.block_pool.num_gpu_blocks - 1
        least = [self.min_blocks(each, usable) for each in waiting]
        step_s, busy = self._busy()
        if left := self._make_room(busy, least[:room]):
            step_s, busy = self._busy()
        free = manager.block_pool.get_num_free_blocks()
        for number, each in enumerate(waiting[:room]):
            tokens, keep_ratio = self.max_tokens(each), _keep_ratio(each)
            whole = -(-tokens // manager.block_size)
            offloaded = self.smallest(each)
            decided = whole > usable or manager.ledger.is_admitted(each.request_id)
            if keep_ratio is None or decided or not offloaded.slots or each.kv_transfer_params:
                continue
            ways = [
                ServingOption(whole, self.costs.added_s(AttentionMode.SPARSE, tokens)),
                ServingOption(
                    offloaded.blocks, self.costs.added_s(AttentionMode.OFFLOADED, tokens)
                ),
            ]
            steps = each.max_tokens - each.num_output_tokens
            way = cheapest_option(ways, steps, step_s, free, busy, least[number + 1 :])
            if way and manager.ledger.has_room(offloaded):
                manager.ledger.plan(each.request_id, offloaded)
            else:
                manager.ledger.remove(each.request_id)
            free -= ways[way].blocks
        return left

    def _busy(self) -> tuple[float, list[RunningRequest]]:
        """Predict the seconds of a step of all running requests, and when each of them ends."""
        manager, running = self.manager, self._scheduler.running
        context = [0.0] * len(AttentionMode)
        for each in running:
            context[self.mode(each)] += self.attended(each)
        step_s = self.costs.seconds(max(len(running), 1), context)
        held = (manager.held(each.request_id) for each in running)
        return step_s, [
            RunningRequest(blocks, step_s * _steps(each))
            for blocks, each in zip(held, running, strict=True)
        ]

    def _make_room(self, busy: Sequence[RunningRequest], queue: Sequence[int]) -> dict[str, int]:
        """Offload requests that answer from the cache, if that pays; return these, as
        `OffloadMetadata.copy_first`."""
        manager = self.manager
        free, ledger = manager.block_pool.get_num_free_blocks(), manager.ledger
        if queue[0] <= free:
            return {}
        candidates, leavers = [], []
        for each in self._scheduler.running:
            if _keep_ratio(each) is None or ledger.planned(each.request_id) is not None:
                continue
            tokens, offloaded = self.max_tokens(each), self.smallest(each)
            freed = cold_blocks(_final(each), manager.block_size) - offloaded.slots
            if freed <= 0 or not offloaded.slots or _final(each) < each.num_prompt_tokens:
                continue
            modes = AttentionMode.OFFLOADED, AttentionMode.SPARSE
            slow_s, fast_s = (self.costs.added_s(mode, tokens) for mode in modes)
            candidates.append((each, offloaded))
            leavers.append(OffloadCandidate(freed, _steps(each) * (slow_s - fast_s)))
        left = {}
        for number in choose_offloads(leavers, free, busy, queue):
            request, offloaded = candidates[number]
            if manager.may_offload(request.request_id, offloaded, _final(request)):
                manager.offload(request.request_id, offloaded, _final(request))
                left[request.request_id] = _final(request)
        return left

    def min_blocks(self, request: Any, usable: int) -> int:
        """Return the minimum number of blocks over all ways to serve a request."""
        whole = -(-self.max_tokens(request) // self.manager.block_size)
        stays = _keep_ratio(request) is None or request.kv_transfer_params
        return whole if stays and whole <= usable else min(whole, self.smallest(request).blocks)

    def mode(self, request: Any) -> AttentionMode:
        """Return how a row of the request's answer attends."""
        planned = self.manager.ledger.planned(request.request_id)
        sparse = _keep_ratio(request) is not None
        if planned is None:
            return AttentionMode.SPARSE if sparse else AttentionMode.DENSE
        return AttentionMode.OFFLOADED if sparse and planned.slots else AttentionMode.STAGED

    def attended(self, request: Any) -> int:
        """Return the number of tokens that a row of the request's answer attends to, or chooses
        from."""
        dropped = 0 if self.compression is None else self.compression.dropped(request)
        return int(request.num_computed_tokens) - dropped

    def _footprint(self, max_tokens: int, keep_ratio: float | None) -> Footprint:
        page_tokens = self.settings.page_tokens
        return footprint(
            max_tokens,
            None
            if keep_ratio is None
            else selected_page_count(max_tokens, page_tokens, keep_ratio),
            page_tokens,
            self.manager.block_size,
            self._scheduler.vllm_config.max_in_flight_tokens,
        )

    @property
    def step_tokens(self) -> int:
        """Maximum tokens of one prompt in a step: all of them, if no other request is there.

        vLLM's `long_prefill_token_threshold` bounds a prompt only beside other requests.
        """
        return int(self._scheduler.vllm_config.scheduler_config.max_num_batched_tokens)

    def after_schedule(self, step: Any, metadata: dict[str, Any]) -> None:
        """Tell the worker which requests are offloaded from this step on."""
        metadata[OFFLOAD] = newly_offloaded(self.manager, step, self._copy_first)
        answers = self._answers(step)
        metadata[TIMING] = StepTiming(self.clock(), answers)

    def _answers(self, output: Any) -> tuple[int, list[float]] | None:
        """Return the rows and contexts of a step that computes answers alone; None for another."""
        context = [0.0] * len(AttentionMode)
        for name, count in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[name]
            if count != 1 or request.num_computed_tokens <= request.num_prompt_tokens:
                return None
            context[self.mode(request)] += self.attended(request)
        return len(output.num_scheduled_tokens), context

    def before_update(self, step: Any, output: Any) -> None:
        """End the requests whose KV is lost, and learn from the step's duration."""
        now_s, timing = self.clock(), metadata_of(step, TIMING)
        end_lost(self._scheduler, output)
        if timing is not None and timing.answers is not None:
            rows, context = timing.answers
            self.costs.observe(rows, context, now_s - max(timing.began_s, self.returned_s))

    def after_update(self) -> None:
        """Remember when vLLM had processed the output."""
        self.returned_s = self.clock()


def exclude_from_connectors(request: Any) -> None:
    """Keep connectors from loading or saving a request's KV.

    A connector loads a prompt as a whole, which the cache cannot hold. It saves blocks a step after
    they are full, when other requests may have them. The block hashes have been computed already,
    so the changed salt has one effect only: it marks the request for the store.
    """
    request.kv_transfer_params, salt = None, request.cache_salt or ""
    request.cache_salt = salt if is_isolated(salt) else isolated_salt(salt, "offload")


def _keep_ratio(request: Any) -> float | None:
    return keep_ratio_in(request.sampling_params, SPARSE)


def _final(request: Any) -> int:
    """Return the number of tokens whose KV is final before the next step."""
    return int(request.num_computed_tokens - request.num_in_flight_tokens)


def _steps(request: Any) -> int:
    """Return the maximum number of steps that the request's answer still has."""
    return max(0, int(request.max_tokens - request.num_output_tokens))


def newly_offloaded(
    manager: OffloadBlockManager, step: Any, copy_first: Mapping[str, int]
) -> OffloadMetadata:
    """Return what the worker must know about a scheduled step's offloaded requests.

    Args:
        copy_first: as in `OffloadMetadata`; requests that the step preempted may be among them.
    """
    ledger = manager.ledger
    for request_id in step.finished_req_ids:
        ledger.remove(request_id)
    left = {name: tokens for name, tokens in copy_first.items() if ledger.is_admitted(name)}
    working_sets = {name: manager.slots(name) for name in left}
    for request_id in step.num_scheduled_tokens:
        if ledger.is_admitted(request_id):
            if not ledger.is_known(request_id):
                working_sets[request_id] = manager.slots(request_id)
            ledger.worker_knows(request_id, len(manager.req_to_blocks[request_id]))
    return OffloadMetadata(working_sets, left)


def offload_manager(scheduler: Any) -> OffloadBlockManager | None:
    """Return a scheduler's manager of blocks; None if it cannot offload."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return (
        managers[0] if len(managers) == 1 and isinstance(managers[0], OffloadBlockManager) else None
    )

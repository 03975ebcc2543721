"""Schedulers that decide which requests are offloaded, and tell the worker.

A request is offloaded if its maximum length does not fit in the KV cache, or if it is sparse and
offloading lowers the total latency (`decision`). The first rule holds for exact requests as well.
In each step in which requests wait, the scheduler decides again, for waiting requests and for those
that answer from the cache. KV from a prefill engine arrives in the cache as a whole, and may leave
it afterwards. An offloaded request stays offloaded until it ends or is preempted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from headrace_decode.attention.settings import SparseSettings, settings_of
from headrace_decode.resume.scheduler import AsyncResumeScheduler, ResumeScheduler
from headrace_decode.techniques import SPARSE, keep_ratio_in
from headrace_kvstore.identity.salts import is_isolated, isolated_salt

OFFLOADED = "headrace_offloaded"
"""Attribute of a step's `SchedulerOutput`: the blocks of the working set, by request that is
offloaded from this step on."""
COPY_FIRST = "headrace_left"
"""Attribute of the same: number of tokens to copy first, by request of these that was in the
cache."""
STEP_TIMING = "headrace_step"
"""Attribute of the same: rows and contexts of a step that computes answers alone (None for another
step), and when it began."""
MAX_CONSIDERED = 16
"""Maximum number of waiting requests that a step considers; no step admits many more."""


class _OffloadingMixin:
    """Mixin for a vLLM scheduler."""

    offloads_blocks = True
    """Ability that `worker.why_scheduler_unable` looks for."""
    _clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offloads = _manager_of(self)
        if self._offloads is None:
            return
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        settings = settings_of(config.additional_config)
        assert settings is not None
        cache: Any = self.kv_cache_config  # type: ignore[attr-defined]
        block_bytes = self._offloads.kv_cache_spec.page_size_bytes * len(
            cache.kv_cache_groups[0].layer_names
        )
        self._settings: SparseSettings = settings
        self._offloads.ledger = Ledger(settings.host_blocks(block_bytes))
        self._block_tokens: int = self._offloads.block_size
        self.costs = StepCosts()
        self._returned_s = 0.0

    def add_request(self, request: Any) -> None:
        """Add a request like vLLM. Plan to offload it if it is too long for the cache."""
        manager = self._offloads
        if manager is not None and self._too_long(request) and not self._stays(request):
            needed = self._smallest(request)
            if needed.blocks > manager.block_pool.num_gpu_blocks - 1:
                needed = self._footprint(self._max_tokens(request), None)
            manager.ledger.plan(request.request_id, needed)
            exclude_from_connectors(request)
        super().add_request(request)  # type: ignore[misc]

    def _too_long(self, request: Any) -> bool:
        """Return whether the cache cannot hold a request as a whole."""
        assert self._offloads is not None
        usable = self._offloads.block_pool.num_gpu_blocks - 1
        return self._max_tokens(request) > usable * self._offloads.block_size

    def _stays(self, request: Any) -> bool:
        """Return whether a request that is too long is served without being offloaded."""
        return False

    def _max_tokens(self, request: Any) -> int:
        longest: int = self.max_model_len  # type: ignore[attr-defined]
        return min(request.num_prompt_tokens + request.max_tokens, longest)

    def _smallest(self, request: Any) -> Footprint:
        """Return the footprint of a request if it is offloaded."""
        return self._footprint(self._max_tokens(request), _share(request))

    def _switch(self, manager: OffloadBlockManager) -> dict[str, int]:
        """Decide how to serve each sparse request that may be admitted now. Offload running
        requests if that admits others and pays; return these, as `COPY_FIRST`."""
        running: list[Any] = self.running  # type: ignore[attr-defined]
        most: int = self.max_num_running_reqs  # type: ignore[attr-defined]
        waiting = list(itertools.islice(self.waiting, most))  # type: ignore[attr-defined]
        room = min(max(most - len(running), 0), MAX_CONSIDERED)
        if not (waiting and room):
            return {}
        usable = manager.block_pool.num_gpu_blocks - 1
        least = [self._min_blocks(each, usable) for each in waiting]
        step_s, busy = self._busy(manager)
        if left := self._make_room(manager, busy, least[:room]):
            step_s, busy = self._busy(manager)
        free = manager.block_pool.get_num_free_blocks()
        for number, each in enumerate(waiting[:room]):
            tokens, share = self._max_tokens(each), _share(each)
            whole = -(-tokens // manager.block_size)
            offloaded = self._smallest(each)
            decided = whole > usable or manager.ledger.is_admitted(each.request_id)
            if share is None or decided or not offloaded.slots or each.kv_transfer_params:
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

    def _busy(self, manager: OffloadBlockManager) -> tuple[float, list[RunningRequest]]:
        """Predict the seconds of a step of all running requests, and when each of them ends."""
        running: list[Any] = self.running  # type: ignore[attr-defined]
        context = [0.0] * len(AttentionMode)
        for each in running:
            context[self._mode(manager, each)] += self._attended(each)
        step_s = self.costs.seconds(max(len(running), 1), context)
        held = (manager.held(each.request_id) for each in running)
        return step_s, [
            RunningRequest(blocks, step_s * _steps(each))
            for blocks, each in zip(held, running, strict=True)
        ]

    def _make_room(
        self, manager: OffloadBlockManager, busy: Sequence[RunningRequest], queue: Sequence[int]
    ) -> dict[str, int]:
        """Offload requests that answer from the cache, if that pays; return these, as
        `COPY_FIRST`."""
        free, ledger = manager.block_pool.get_num_free_blocks(), manager.ledger
        if queue[0] <= free:
            return {}
        candidates, leavers = [], []
        running: list[Any] = self.running  # type: ignore[attr-defined]
        for each in running:
            if _share(each) is None or ledger.planned(each.request_id) is not None:
                continue
            tokens, offloaded = self._max_tokens(each), self._smallest(each)
            freed = cold_blocks(_final(each), manager.block_size) - offloaded.slots
            if freed <= 0 or not offloaded.slots or _final(each) < each.num_prompt_tokens:
                continue
            modes = AttentionMode.OFFLOADED, AttentionMode.SPARSE
            slow_s, fast_s = (self.costs.added_s(mode, tokens) for mode in modes)
            candidates.append((each, offloaded))
            leavers.append(OffloadCandidate(freed, _steps(each) * max(0.0, slow_s - fast_s)))
        left = {}
        for number in choose_offloads(leavers, free, busy, queue):
            request, offloaded = candidates[number]
            if manager.may_offload(request.request_id, offloaded, _final(request)):
                manager.offload(request.request_id, offloaded, _final(request))
                left[request.request_id] = _final(request)
        return left

    def _min_blocks(self, request: Any, usable: int) -> int:
        """Return the minimum number of blocks over all ways to serve a request."""
        whole = -(-self._max_tokens(request) // self._block_tokens)
        stays = _share(request) is None or request.kv_transfer_params
        return whole if stays and whole <= usable else min(whole, self._smallest(request).blocks)

    def _mode(self, manager: OffloadBlockManager, request: Any) -> AttentionMode:
        """Return how a row of the request's answer attends."""
        sparse, planned = _share(request) is not None, manager.ledger.planned(request.request_id)
        if planned is None:
            return AttentionMode.SPARSE if sparse else AttentionMode.DENSE
        return AttentionMode.OFFLOADED if sparse and planned.slots else AttentionMode.STAGED

    def _attended(self, request: Any) -> int:
        """Return the number of tokens that a row of the request's answer attends to, or chooses
        from."""
        return int(request.num_computed_tokens)

    def _footprint(self, max_tokens: int, share: float | None) -> Footprint:
        assert self._offloads is not None
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        steps = config.max_in_flight_tokens // config.scheduler_config.max_num_batched_tokens
        page_tokens = self._settings.page_tokens
        return footprint(
            max_tokens,
            None if share is None else selected_page_count(max_tokens, page_tokens, share),
            page_tokens,
            self._offloads.block_size,
            steps * self._step_tokens,
        )

    @property
    def _step_tokens(self) -> int:
        """Maximum tokens of one prompt in a step."""
        config: Any = self.vllm_config.scheduler_config  # type: ignore[attr-defined]
        limit, batch = config.long_prefill_token_threshold, config.max_num_batched_tokens
        return int(min(limit, batch) if limit > 0 else batch)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step like vLLM, and tell the worker which requests are offloaded."""
        manager = self._offloads
        if manager is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        left = self._switch(manager)
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        _announce(manager, output, left)
        setattr(output, STEP_TIMING, (self._answers(manager, output), self._clock()))
        return output

    def _answers(self, manager: OffloadBlockManager, output: Any) -> tuple[int, list[float]] | None:
        """Return the rows and contexts of a step that computes answers alone; None for another."""
        context = [0.0] * len(AttentionMode)
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests[name]  # type: ignore[attr-defined]
            if count != 1 or request.num_computed_tokens <= request.num_prompt_tokens:
                return None
            context[self._mode(manager, request)] += self._attended(request)
        return len(output.num_scheduled_tokens), context

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Process a step's output like vLLM, and learn from its duration."""
        now_s = self._clock()
        end_lost(self, model_runner_output)
        step: Any = getattr(scheduler_output, STEP_TIMING, None)
        if step is not None and step[0] is not None:
            (rows, context), begun_s = step
            self.costs.observe(rows, context, now_s - max(begun_s, self._returned_s))
        found = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output, *args, **kwargs
        )
        self._returned_s = self._clock()
        return found


def exclude_from_connectors(request: Any) -> None:
    """Keep connectors from loading or saving a request's KV.

    A connector loads a prompt as a whole, which the cache cannot hold. It saves blocks a step after
    they are full, when other requests may have them. The block hashes have been computed already,
    so the changed salt has one effect only: it marks the request for the store.
    """
    request.kv_transfer_params, salt = None, request.cache_salt or ""
    request.cache_salt = salt if is_isolated(salt) else isolated_salt(salt, "offload")


def _share(request: Any) -> float | None:
    return keep_ratio_in(request.sampling_params, SPARSE)


def _final(request: Any) -> int:
    """Return the number of tokens whose KV is final before the next step."""
    return int(request.num_computed_tokens - request.num_in_flight_tokens)


def _steps(request: Any) -> int:
    """Return the maximum number of steps that the request's answer still has."""
    return max(0, int(request.max_tokens - request.num_output_tokens))


def _announce(manager: OffloadBlockManager, output: Any, left: Mapping[str, int]) -> None:
    """Tell the worker which requests are newly offloaded in this step."""
    ledger = manager.ledger
    for request_id in output.finished_req_ids:
        ledger.remove(request_id)
    left = {name: tokens for name, tokens in left.items() if ledger.is_admitted(name)}
    newly_offloaded = {name: manager.slots(name) for name in left}
    for request_id in output.num_scheduled_tokens:
        if ledger.is_admitted(request_id):
            if not ledger.is_known(request_id):
                newly_offloaded[request_id] = manager.slots(request_id)
            ledger.worker_knows(request_id, len(manager.req_to_blocks[request_id]))
    setattr(output, OFFLOADED, newly_offloaded)
    setattr(output, COPY_FIRST, left)


def _manager_of(scheduler: Any) -> OffloadBlockManager | None:
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return (
        managers[0] if len(managers) == 1 and isinstance(managers[0], OffloadBlockManager) else None
    )


class OffloadingScheduler(_OffloadingMixin, ResumeScheduler):
    """Scheduler in which a step waits for the one before."""


class AsyncOffloadingScheduler(_OffloadingMixin, AsyncResumeScheduler):
    """Scheduler that schedules steps ahead."""

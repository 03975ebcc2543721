"""Schedulers in which bounded requests drop the KV that their context needs least.

The scheduler adds internal requests that read a context again. vLLM schedules these like any
prompt. They go before waiting requests, since they lead to free memory. While no other request
waits, they run in small chunks (`pace`), so that answers continue. Their output is not used.

In engines with a gate, requests may stream instead (`streams`).
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from headrace_decode.compression.engine.course import Course, Part
from headrace_decode.compression.engine.following import TOLD, Drop, Fit, Told
from headrace_decode.compression.engine.pace import Pace
from headrace_decode.compression.engine.settings import settings_of
from headrace_decode.compression.engine.streams import Streams
from headrace_decode.compression.scores import PART_TOKENS
from headrace_decode.sparse.engine.lost import LOST
from headrace_decode.sparse.engine.offload.scheduler import (
    OffloadingTakingUp,
    OffloadingTakingUpAsync,
    keep_to_itself,
)
from headrace_decode.sparse.offload.switch import Mode
from headrace_decode.techniques import BOUNDED, share_in

PACED = "headrace_paced"
"""Attribute of a step that reads as many rows again as `Pace` allows: the predicted seconds of its
answers alone, and when the step began."""


class _Bounds:
    """Mixin that precedes a scheduler that offloads among the bases."""

    drops_blocks = True
    """Ability that `worker.why_scheduler_unable` looks for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._courses: dict[str, Course] = {}
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        settings = settings_of(config.additional_config)
        self._gated = settings is not None and settings.calibration is not None
        manager = self._offloads  # type: ignore[attr-defined]
        self._streams: Streams | None = None
        if settings is not None and settings.calibration is not None and manager is not None:
            self._streams = Streams(self, manager, settings, self._settings.unit_tokens)  # type: ignore[attr-defined]
        self._pace = Pace(1 + self.num_spec_tokens)  # type: ignore[attr-defined]
        # vLLM reads a step's maximum tokens of a prompt from here in each step. `schedule` changes
        # this copy.
        self.scheduler_config: Any = copy.copy(self.scheduler_config)  # type: ignore[has-type]
        self._chunk: int = self.scheduler_config.long_prefill_token_threshold

    def add_request(self, request: Any) -> None:
        """Add a request like vLLM; a bounded one streams, or is read again."""
        streams = self._streams is not None and self._streams.begin(request)
        super().add_request(request)  # type: ignore[misc]
        if not streams:
            self._begin_course(request)

    def _stays(self, request: Any) -> bool:
        """Implement `_Offloads._stays`: a streamed request is not offloaded."""
        return self._streams is not None and request.request_id in self._streams

    def _begin_course(self, request: Any) -> None:
        share = share_in(request.sampling_params, BOUNDED)
        manager = self._offloads  # type: ignore[attr-defined]
        if share is None or manager is None or request.prompt_token_ids is None:
            return
        if manager.ledger.planned(request.request_id) is not None:
            return  # too long for the cache: it is offloaded
        groups = self.kv_cache_config.kv_cache_groups  # type: ignore[attr-defined]
        course = Course(
            *(request.request_id, list(request.prompt_token_ids), share, manager.block_size),
            self.max_model_len,  # type: ignore[attr-defined]
            len(groups[0].layer_names),
            self._gated,
        )
        if course.worthwhile:
            self._courses[request.request_id] = course

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step like vLLM, with the step's work on bounded requests."""
        told = Told()
        if self._streams is not None:
            self._streams.before(told)
        course = self._go_on(told)
        reading = course is not None and course.reader in self.requests  # type: ignore[attr-defined]
        paced = reading and not self._others_wait()
        if paced:
            self.scheduler_config.long_prefill_token_threshold = self._pace.rows
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.scheduler_config.long_prefill_token_threshold = self._chunk
        if self._streams is not None:
            self._streams.behind(told, output)
        if course is not None and course.all_scored and not course.all_fitted:
            rows = PART_TOKENS if self._others_wait() else self._pace.rows
            told.fits[course.request_id] = Fit(course.kept, course.fit(rows))
        elif course is not None:
            rows = output.num_scheduled_tokens.get(course.reader, 0)
            told.layers = course.score(rows or self._pace.rows, reading)
            if paced and rows == self._pace.rows:
                setattr(output, PACED, (self._alone_s(output), self._clock()))  # type: ignore[attr-defined]
        setattr(output, TOLD, told)
        return output

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Process a step's output like vLLM, and adapt the number of rows that read again."""
        if self._streams is not None:
            self._streams.loaded(model_runner_output.kv_connector_output)
            if hasattr(model_runner_output, LOST):
                self._streams.on_lost()
        paced: Any = getattr(scheduler_output, PACED, None)
        if paced is not None:
            alone_s, begun_s = paced
            begun_s = max(begun_s, self._returned_s)  # type: ignore[attr-defined]
            self._pace.saw(self._clock() - begun_s, alone_s)  # type: ignore[attr-defined]
        return super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output, *args, **kwargs
        )

    def _others_wait(self) -> bool:
        """Return whether another request waits, usually for memory, or has its prompt computed."""
        readers = {course.reader for course in self._courses.values()}
        running: list[Any] = self.running  # type: ignore[attr-defined]
        waiting: Any = self.waiting  # type: ignore[attr-defined]
        prompts = (each for each in running if each.num_computed_tokens < each.num_prompt_tokens)
        return any(each.request_id not in readers for each in itertools.chain(waiting, prompts))

    def _alone_s(self, output: Any) -> float:
        """Predict the seconds that a step's answers would take alone."""
        rows, context = 0, [0.0] * len(Mode)
        for name in output.num_scheduled_tokens:
            request = self.requests[name]  # type: ignore[attr-defined]
            if request.num_computed_tokens > request.num_prompt_tokens:
                rows += 1
                context[self._mode(self._offloads, request)] += self._attended(request)  # type: ignore[attr-defined]
        found: float = self.costs.seconds(rows, context)  # type: ignore[attr-defined]
        return found

    def _attended(self, request: Any) -> int:
        """Implement `_Offloads._attended`, without the tokens that the request dropped."""
        name, tokens = request.request_id, int(request.num_computed_tokens)
        if self._streams is not None:
            tokens -= self._streams.gone(name)
        course = self._courses.get(name)
        if course is None or not course.dropped:
            return tokens
        return tokens - (course.blocks - course.kept) * self._offloads.block_size  # type: ignore[attr-defined]

    def _go_on(self, told: Told) -> Course | None:
        """Begin a part, or drop KV of a context that was read, scored and fitted. Return the course
        in progress, if any: one context is read at a time."""
        requests: dict[str, Any] = self.requests  # type: ignore[attr-defined]
        manager: Any = self._offloads  # type: ignore[attr-defined]
        first: Course | None = None
        for name, course in list(self._courses.items()):
            request = requests.get(name)
            if request is None or request.num_computed_tokens < request.num_prompt_tokens:
                # The request ended, or its prompt has yet to be computed, perhaps again.
                if course.reader in requests:
                    self.finish_requests(course.reader, RequestStatus.FINISHED_ABORTED)  # type: ignore[attr-defined]
                course.start_over()
                if request is None:
                    del self._courses[name]
            elif first is None and not course.dropped:
                first = course
        if first is None or first.reader in requests:
            return first
        request = requests[first.request_id]
        if not first.all_read:
            part = first.next_part()
            told.again[part.name] = part.again
            self._read(request, part, manager.block_size)
        elif first.all_fitted and manager.may_drop(first.request_id, first.kept, first.blocks):
            kept = manager.drop(first.request_id, first.kept, first.blocks)
            told.drops[first.request_id] = Drop(first.blocks * manager.block_size, kept)
            first.dropped = True
            return None
        return first

    def _read(self, request: Any, part: Part, block_tokens: int) -> None:
        again = Request(
            part.name,
            part.tokens,
            SamplingParams(max_tokens=1, temperature=0.0),
            None,
            arrival_time=request.arrival_time,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
        again.block_hashes = request.block_hashes[: part.cached // block_tokens]
        keep_to_itself(again)
        super().add_request(again)  # type: ignore[misc]
        waiting: Any = self.waiting  # type: ignore[attr-defined]
        waiting.remove_request(again)
        waiting.prepend_request(again)


class BoundingTakingUp(_Bounds, OffloadingTakingUp):
    """Scheduler in which a step waits for the one before."""


class BoundingTakingUpAsync(_Bounds, OffloadingTakingUpAsync):
    """Scheduler that schedules steps ahead."""

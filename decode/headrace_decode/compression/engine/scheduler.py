"""Schedulers in which compressed requests drop the KV that their context needs least.

The scheduler adds internal requests that read a context again. vLLM schedules these like any
prompt. They go before waiting requests, since they lead to free memory. While no other request
waits, they run in small chunks (`reread_rate`), so that answers continue. Their output is not used.

In engines with a predictor, requests may stream instead (`incremental_scheduler`).
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

from vllm import SamplingParams

from headrace_decode.attention.lost_requests import LOST
from headrace_decode.attention.offload.decision import AttentionMode
from headrace_decode.attention.offload.scheduler import (
    AsyncOffloadingScheduler,
    OffloadingScheduler,
    exclude_from_connectors,
)
from headrace_decode.compression.engine.compression_job import CompressionJob, RereadRequest
from headrace_decode.compression.engine.incremental_scheduler import IncrementalScheduler
from headrace_decode.compression.engine.metadata import (
    COMPRESSION_METADATA,
    CompressionMetadata,
    FitWork,
    Retention,
)
from headrace_decode.compression.engine.reread_rate import RereadRateController
from headrace_decode.compression.engine.settings import settings_of
from headrace_decode.compression.scores import PART_TOKENS
from headrace_decode.techniques import COMPRESSION, keep_ratio_in
from headrace_engine.vllm.scheduling import Request, RequestStatus

PACED = "headrace_paced"
"""Attribute of a step that reads as many rows again as `RereadRateController` allows: the predicted
seconds of its answers alone, and when the step began."""


class _CompressionMixin:
    """Mixin that precedes a scheduler that offloads among the bases."""

    drops_blocks = True
    """Ability that `worker.why_scheduler_unable` looks for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._jobs: dict[str, CompressionJob] = {}
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        settings = settings_of(config.additional_config)
        self._has_predictor = settings is not None and settings.calibration is not None
        manager = self._offloads  # type: ignore[attr-defined]
        self._incremental: IncrementalScheduler | None = None
        if settings is not None and settings.calibration is not None and manager is not None:
            page_tokens = self._settings.page_tokens  # type: ignore[attr-defined]
            self._incremental = IncrementalScheduler(self, manager, settings, page_tokens)
        self._reread_rate = RereadRateController(1 + self.num_spec_tokens)  # type: ignore[attr-defined]
        # vLLM reads a step's maximum tokens of a prompt from here in each step. `schedule` changes
        # this copy.
        self.scheduler_config: Any = copy.copy(self.scheduler_config)  # type: ignore[has-type]
        self._chunk: int = self.scheduler_config.long_prefill_token_threshold

    def add_request(self, request: Any) -> None:
        """Add a request like vLLM; a compressed one is incremental, or is read again."""
        streams = self._incremental is not None and self._incremental.on_add(request)
        super().add_request(request)  # type: ignore[misc]
        if not streams:
            self._start_job(request)

    def _stays(self, request: Any) -> bool:
        """Implement `_OffloadingMixin._stays`: an incremental request is not offloaded."""
        return self._incremental is not None and request.request_id in self._incremental

    def _start_job(self, request: Any) -> None:
        share = keep_ratio_in(request.sampling_params, COMPRESSION)
        manager = self._offloads  # type: ignore[attr-defined]
        if share is None or manager is None or request.prompt_token_ids is None:
            return
        if manager.ledger.planned(request.request_id) is not None:
            return  # too long for the cache: it is offloaded
        groups = self.kv_cache_config.kv_cache_groups  # type: ignore[attr-defined]
        job = CompressionJob(
            *(request.request_id, list(request.prompt_token_ids), share, manager.block_size),
            self.max_model_len,  # type: ignore[attr-defined]
            len(groups[0].layer_names),
            self._has_predictor,
        )
        if job.is_worthwhile:
            self._jobs[request.request_id] = job

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step like vLLM, with the step's work on compressed requests."""
        metadata = CompressionMetadata()
        if self._incremental is not None:
            self._incremental.before_schedule(metadata)
        job = self._advance(metadata)
        is_reading = job is not None and job.reader in self.requests  # type: ignore[attr-defined]
        paced = is_reading and not self._others_wait()
        if paced:
            self.scheduler_config.long_prefill_token_threshold = self._reread_rate.rows
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.scheduler_config.long_prefill_token_threshold = self._chunk
        if self._incremental is not None:
            self._incremental.after_schedule(metadata, output)
        if job is not None and job.all_scored and not job.all_fitted:
            rows = PART_TOKENS if self._others_wait() else self._reread_rate.rows
            metadata.fits[job.request_id] = FitWork(job.kept, job.fit(rows))
        elif job is not None:
            rows = output.num_scheduled_tokens.get(job.reader, 0)
            metadata.layers = job.score(rows or self._reread_rate.rows, is_reading)
            if paced and rows == self._reread_rate.rows:
                setattr(output, PACED, (self._alone_s(output), self._clock()))  # type: ignore[attr-defined]
        setattr(output, COMPRESSION_METADATA, metadata)
        return output

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Process a step's output like vLLM, and adapt the number of rows that read again."""
        if self._incremental is not None:
            self._incremental.on_loads_finished(model_runner_output.kv_connector_output)
            if hasattr(model_runner_output, LOST):
                self._incremental.on_lost()
        paced: Any = getattr(scheduler_output, PACED, None)
        if paced is not None:
            alone_s, begun_s = paced
            begun_s = max(begun_s, self._returned_s)  # type: ignore[attr-defined]
            self._reread_rate.record_step(self._clock() - begun_s, alone_s)  # type: ignore[attr-defined]
        return super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output, *args, **kwargs
        )

    def _others_wait(self) -> bool:
        """Return whether another request waits, usually for memory, or has its prompt computed."""
        readers = {job.reader for job in self._jobs.values()}
        running: list[Any] = self.running  # type: ignore[attr-defined]
        waiting: Any = self.waiting  # type: ignore[attr-defined]
        prompts = (each for each in running if each.num_computed_tokens < each.num_prompt_tokens)
        return any(each.request_id not in readers for each in itertools.chain(waiting, prompts))

    def _alone_s(self, output: Any) -> float:
        """Predict the seconds that a step's answers would take alone."""
        rows, context = 0, [0.0] * len(AttentionMode)
        for name in output.num_scheduled_tokens:
            request = self.requests[name]  # type: ignore[attr-defined]
            if request.num_computed_tokens > request.num_prompt_tokens:
                rows += 1
                context[self._mode(self._offloads, request)] += self._attended(request)  # type: ignore[attr-defined]
        found: float = self.costs.seconds(rows, context)  # type: ignore[attr-defined]
        return found

    def _attended(self, request: Any) -> int:
        """Implement `_OffloadingMixin._attended`, without the tokens that the request dropped."""
        name, tokens = request.request_id, int(request.num_computed_tokens)
        if self._incremental is not None:
            tokens -= self._incremental.dropped_tokens(name)
        job = self._jobs.get(name)
        if job is None or not job.dropped:
            return tokens
        return tokens - (job.blocks - job.kept) * self._offloads.block_size  # type: ignore[attr-defined]

    def _advance(self, metadata: CompressionMetadata) -> CompressionJob | None:
        """Begin a part, or drop KV of a context that was read, scored and fitted. Return the job
        in progress, if any: one context is read at a time."""
        requests: dict[str, Any] = self.requests  # type: ignore[attr-defined]
        manager: Any = self._offloads  # type: ignore[attr-defined]
        first: CompressionJob | None = None
        for name, job in list(self._jobs.items()):
            request = requests.get(name)
            if request is None or request.num_computed_tokens < request.num_prompt_tokens:
                # The request ended, or its prompt has yet to be computed, perhaps again.
                if job.reader in requests:
                    self.finish_requests(job.reader, RequestStatus.FINISHED_ABORTED)  # type: ignore[attr-defined]
                job.restart()
                if request is None:
                    del self._jobs[name]
            elif first is None and not job.dropped:
                first = job
        if first is None or first.reader in requests:
            return first
        request = requests[first.request_id]
        if not first.all_read:
            part = first.next_part()
            metadata.rereads[part.name] = part.rows
            self._read(request, part, manager.block_size)
        elif first.all_fitted and manager.may_drop(first.request_id, first.kept, first.blocks):
            kept = manager.drop(first.request_id, first.kept, first.blocks)
            metadata.retentions[first.request_id] = Retention(
                first.blocks * manager.block_size, kept
            )
            first.dropped = True
            return None
        return first

    def _read(self, request: Any, part: RereadRequest, block_tokens: int) -> None:
        rereads = Request(
            part.name,
            part.tokens,
            SamplingParams(max_tokens=1, temperature=0.0),
            None,
            arrival_time=request.arrival_time,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
        rereads.block_hashes = request.block_hashes[: part.cached // block_tokens]
        exclude_from_connectors(rereads)
        super().add_request(rereads)  # type: ignore[misc]
        waiting: Any = self.waiting  # type: ignore[attr-defined]
        waiting.remove_request(rereads)
        waiting.prepend_request(rereads)


class CompressionScheduler(_CompressionMixin, OffloadingScheduler):
    """Scheduler in which a step waits for the one before."""


class AsyncCompressionScheduler(_CompressionMixin, AsyncOffloadingScheduler):
    """Scheduler that schedules steps ahead."""

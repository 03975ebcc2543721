"""Has compressed requests drop the KV that their context needs least, in the scheduler.

It adds internal requests that read a context again. vLLM schedules these like any
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
    OffloadSchedulerPart,
    exclude_from_connectors,
)
from headrace_decode.compression.engine.compression_job import CompressionJob, RereadRequest
from headrace_decode.compression.engine.incremental_scheduler import IncrementalScheduler
from headrace_decode.compression.engine.metadata import (
    COMPRESSION_KEY,
    CompressionMetadata,
    FitWork,
    Retention,
)
from headrace_decode.compression.engine.reread_rate import RereadRateController
from headrace_decode.compression.engine.settings import CompressionSettings
from headrace_decode.compression.scores import PART_TOKENS
from headrace_decode.techniques import COMPRESSION, keep_ratio_in
from headrace_engine.extensions.extension import SchedulerPart, metadata_of
from headrace_engine.vllm.scheduling import Request, RequestStatus, admissible

REREAD = "reread"
"""Key of the metadata of a step that reads as many rows again as `RereadRateController` allows: the
predicted seconds of its answers alone, and when it began. The scheduler itself reads it. It is a
tuple, so that workers need not import this module to unpickle it."""


class CompressionSchedulerPart(SchedulerPart):
    """Compressed requests of a scheduler.

    Args:
        scheduler: vLLM's. offload: its offloaded requests. settings: settings of the engine.
    """

    def __init__(
        self, scheduler: Any, offload: OffloadSchedulerPart, settings: CompressionSettings
    ) -> None:
        self._scheduler, self._offload, self._manager = scheduler, offload, offload.manager
        offload.compression = self
        self.jobs: dict[str, CompressionJob] = {}
        self.incremental: IncrementalScheduler | None = None
        if settings.calibration is not None:
            self.incremental = IncrementalScheduler(scheduler, offload, settings)
        self._reread_rate = RereadRateController(1 + scheduler.num_spec_tokens)
        # vLLM reads a step's maximum tokens of a prompt from here at the beginning of each step.
        # `_limit_prompts` changes this copy.
        scheduler.scheduler_config = copy.copy(scheduler.scheduler_config)
        self._chunk: int = scheduler.scheduler_config.long_prefill_token_threshold
        self._is_adaptive: bool = scheduler.adaptive_long_prefill_threshold
        self._metadata = CompressionMetadata()
        self._job: CompressionJob | None = None
        self._is_reading = self._is_paced = False

    def before_add(self, request: Any) -> None:
        """Have a compressed request stream if it can."""
        if self.incremental is not None:
            self.incremental.before_add(request)

    def after_add(self, request: Any) -> None:
        """Plan to read the context of a compressed request again, if it does not stream.

        A context with images, sound or video is not its tokens alone; its KV is kept whole.
        """
        keep_ratio = keep_ratio_in(request.sampling_params, COMPRESSION)
        if keep_ratio is None or self.stays(request) or not _is_tokens(request):
            return
        if self._manager.ledger.planned(request.request_id) is not None:
            return  # too long for the cache: it is offloaded
        job = CompressionJob(
            *(
                request.request_id,
                list(request.prompt_token_ids),
                keep_ratio,
                self._manager.block_size,
            ),
            self._scheduler.max_model_len,
            len(self._scheduler.kv_cache_config.kv_cache_groups[0].layer_names),
            self.incremental is not None,
        )
        if job.is_worthwhile:
            self.jobs[request.request_id] = job

    def stays(self, request: Any) -> bool:
        """Implement `CompressionView.stays`: an incremental request is not offloaded."""
        return self.incremental is not None and request.request_id in self.incremental

    def dropped(self, request: Any) -> int:
        """Implement `CompressionView.dropped`."""
        name, tokens = request.request_id, 0
        if self.incremental is not None:
            tokens = self.incremental.dropped_tokens(name)
        job = self.jobs.get(name)
        if job is not None and job.dropped:
            tokens += (job.blocks - job.kept) * self._manager.block_size
        return tokens

    def before_schedule(self) -> None:
        """Prepare the step's work on compressed requests."""
        self._metadata = metadata = CompressionMetadata()
        if self.incremental is not None:
            self.incremental.before_schedule(metadata)
        self._job = job = self._advance(metadata)
        self._is_reading = job is not None and job.reader in self._scheduler.requests
        self._is_paced = self._is_reading and not self._others_wait()
        if self._is_paced:
            self._limit_prompts(self._reread_rate.rows, is_adaptive=False)

    def after_schedule(self, step: Any, metadata: dict[str, Any]) -> None:
        """Tell the worker the step's work on compressed requests."""
        self._limit_prompts(self._chunk, self._is_adaptive)
        mine, job = self._metadata, self._job
        if self.incremental is not None:
            self.incremental.after_schedule(mine, step)
        if job is not None and job.all_scored and not job.all_fitted:
            rows = PART_TOKENS if self._others_wait() else self._reread_rate.rows
            mine.fits[job.request_id] = FitWork(job.kept, job.fit(rows))
        elif job is not None:
            rows = step.num_scheduled_tokens.get(job.reader, 0)
            mine.layers = job.score(rows or self._reread_rate.rows, self._is_reading)
            if self._is_paced and rows == self._reread_rate.rows:
                metadata[REREAD] = self._alone_s(step), self._offload.clock()
        metadata[COMPRESSION_KEY] = mine

    def before_update(self, step: Any, output: Any) -> None:
        """Follow loads and losses of KV, and adapt the number of rows that read again."""
        if self.incremental is not None:
            self.incremental.on_loads_finished(output.kv_connector_output)
            if hasattr(output, LOST):
                self.incremental.on_lost()
        timing: tuple[float, float] | None = metadata_of(step, REREAD)
        if timing is not None:
            alone_s, began_s = timing
            began_s = max(began_s, self._offload.returned_s)
            self._reread_rate.record_step(self._offload.clock() - began_s, alone_s)

    def _limit_prompts(self, tokens: int, is_adaptive: bool) -> None:
        """Set the maximum number of tokens of one prompt in a step.

        vLLM does not limit a request that is alone. A request that reads a context again is never
        alone: the request of the context runs too.

        Args:
            is_adaptive: whether vLLM raises the limit if the step has tokens for all requests.
        """
        self._scheduler.scheduler_config.long_prefill_token_threshold = tokens
        self._scheduler.adaptive_long_prefill_threshold = is_adaptive

    def _others_wait(self) -> bool:
        """Return whether another request waits, usually for memory, or has its prompt computed."""
        readers = {job.reader for job in self.jobs.values()}
        running, waiting = self._scheduler.running, admissible(self._scheduler)
        prompts = (each for each in running if each.num_computed_tokens < each.num_prompt_tokens)
        return any(each.request_id not in readers for each in itertools.chain(waiting, prompts))

    def _alone_s(self, output: Any) -> float:
        """Predict the seconds that a step's answers would take alone."""
        rows, context = 0, [0.0] * len(AttentionMode)
        for name in output.num_scheduled_tokens:
            request = self._scheduler.requests[name]
            if request.num_computed_tokens > request.num_prompt_tokens:
                rows += 1
                context[self._offload.mode(request)] += self._offload.attended(request)
        return self._offload.costs.seconds(rows, context)

    def _advance(self, metadata: CompressionMetadata) -> CompressionJob | None:
        """Begin a part, or drop KV of a context that was read, scored and fitted. Return the job
        in progress, if any: one context is read at a time."""
        requests, manager = self._scheduler.requests, self._manager
        first: CompressionJob | None = None
        for name, job in list(self.jobs.items()):
            request = requests.get(name)
            if request is None or request.num_computed_tokens < request.num_prompt_tokens:
                # The request ended, or its prompt has yet to be computed, perhaps again.
                if job.reader in requests:
                    self._scheduler.finish_requests(job.reader, RequestStatus.FINISHED_ABORTED)
                job.restart()
                if request is None:
                    del self.jobs[name]
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
        self._scheduler.add_request(rereads)
        waiting = self._scheduler.waiting
        waiting.remove_request(rereads)
        waiting.prepend_request(rereads)


def _is_tokens(request: Any) -> bool:
    return request.prompt_token_ids is not None and not request.mm_features

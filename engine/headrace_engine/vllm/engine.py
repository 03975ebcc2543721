"""The uses of vLLM beyond its documented API in this package. An upgrade of vLLM breaks this file
first.

`SchedulerStats.iteration_details` and `kv_connector_stats` are not stable interfaces (vLLM says so
in `StatLoggerBase`); `tests/unit/test_contracts.py` pins what is used here.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import vllm
from vllm.config import KVEventsConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.abstract import Executor
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from headrace_engine.kv_groups import BlockUse, block_use
from headrace_engine.meter import (
    ContextEstimate,
    EngineMeter,
    Finished,
    Progress,
    Step,
    StoreLoad,
    Transfer,
    Unproven,
)
from headrace_engine.prefill_admission import PrefillAdmission
from headrace_engine.pull_events import EPOCHS, PIECES, seconds_by_event, transfers_by_event
from headrace_engine.reporting.engine_events import (
    REPLAYED_STEPS,
    WAITING_BATCHES,
    EngineEvents,
)
from headrace_engine.reporting.reporter import EngineFacts
from headrace_engine.step_time import StepTime
from headrace_engine.vllm.executor import InProcessExecutor
from headrace_engine.vllm.usage_stats import ask_for_usage, pass_usage, vllm_counts

logger = logging.getLogger("headrace.engine")

SPARE_SHARE = 16
"""A prompt gets all tokens of a step at most, less one of so many (`prefill_admission`)."""


class MeterStatLogger(StatLoggerBase):
    """Feeds an `EngineMeter` from vLLM's per-step statistics.

    The step's time is the engine core's own where it runs one step at a time: from asking for the
    sampled tokens to having them, on a device too. Where steps overlap (asynchronous scheduling,
    pipeline stages) the core only measures the rest of the wait. There, and where the core reports
    nothing, it is the time from having one step's tokens to having the next one's.
    """

    def __init__(self, meter: EngineMeter, vllm_config: VllmConfig, engine_index: int = 0):
        self.meter = meter
        self._vllm_config = vllm_config
        self._overlaps = vllm_config.max_concurrent_batches > 1
        self._context = ContextEstimate()
        self._last_step_at: float | None = None

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        meter, stats = self.meter, scheduler_stats
        pass_usage(stats, meter.usage.add)
        meter.usage.count(**vllm_counts(stats, iteration_stats))
        waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        meter.load(stats.num_running_reqs, waiting, stats.kv_cache_usage)
        details, finished = stats.iteration_details, _finished(iteration_stats)
        told = connector_stats(stats.kv_connector_stats or {})
        # The seconds of other work in the step are not counted for its tokens.
        recompute_s = sum(data.get("recompute_s", 0.0) for data in told)
        cache = self._vllm_config.cache_config
        held = meter.held_tokens(cache.num_gpu_blocks or 0, cache.block_size)
        idle = not (stats.num_running_reqs + waiting)
        if details is not None:
            between_s = self._between_records(idle) if self._overlaps else None
            seconds = between_s if self._overlaps else details.elapsed_ms / 1e3
            if not details.is_dummy and seconds is not None:
                rows = details.num_generation_requests
                draft = details.num_generation_tokens - rows
                prompt, prompts = details.num_ctx_tokens, details.num_ctx_requests
                self._step(
                    *(prompt, prompts, rows, draft, held, finished, seconds - recompute_s),
                    learns=not details.num_encoder_inputs,
                )
        elif iteration_stats is not None:
            seconds = self._between_records(idle)
            prompt = finished.computed
            rows = max(0, iteration_stats.num_generation_tokens - finished.prompts)
            if seconds is not None and (prompt or rows):
                self._step(prompt, finished.prompts, rows, 0, held, finished, seconds - recompute_s)
        for data in told:
            if "recompute_s" in data:
                continue
            for epoch in data.get(EPOCHS, ()):
                meter.renewed(str(epoch))
            if "transfer_duration" in data:
                meter.transfers(*nixl_transfers(data))
                meter.proofs(transfers_by_event(data), seconds_by_event(data), unproven(data))
            else:
                loads = [StoreLoad(*load) for load in data.get("loads", ())]
                digest = bytes.fromhex(data.get("digest", ""))
                counts = {k: v for k, v in data.items() if isinstance(v, int)}
                meter.store(counts, loads, digest, data.get("states", ()))

    def _between_records(self, idle: bool) -> float | None:
        """Return the seconds since the last call; None if the engine was idle before.

        Args:
            idle: whether nothing is left to do now.
        """
        now = time.monotonic()
        began, self._last_step_at = self._last_step_at, None if idle else now
        return None if began is None else now - began

    def _step(
        self,
        prompt: int,
        prompts: int,
        rows: int,
        draft: int,
        held: float,
        finished: Finished,
        seconds: float,
        learns: bool = True,
    ) -> None:
        """Book a step; arguments as in `ContextEstimate.step` and `EngineMeter.step`.

        A prompt of which the step computes one token, since its KV was pulled or cached, is booked
        as a row: it reads its KV for one token.
        """
        if prompt == prompts == finished.computed:
            self.meter.prompt_tokens_total += prompt
            prompt, rows, finished = 0, rows + prompts, Finished()
        attended = self._context.step(prompt, prompts, rows, held, finished)
        self.meter.step(Step(prompt, rows, draft, *attended, seconds), learns)

    def log_engine_initialized(self) -> None:
        pass


def _finished(stats: IterationStats | None) -> Finished:
    """Return the prompts that got their first token, by vLLM's count."""
    if stats is None:
        return Finished()
    prompts = stats.prompt_token_stats
    return Finished(len(stats.time_to_first_tokens_iter), prompts.total, prompts.computed)


def connector_stats(stats: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one connector's statistics, or those of each connector within a MultiConnector."""
    # A MultiConnector's are mappings by the name of the connector; no connector's own has mappings.
    nested = [part for part in stats.values() if isinstance(part, dict)]
    return nested or ([stats] if stats else [])


def nixl_transfers(stats: dict[str, Any]) -> tuple[list[Transfer], int]:
    """Read finished transfers and the number of failed ones from NixlConnector's statistics."""
    sizes, seconds = stats.get("bytes_transferred", ()), stats.get("transfer_duration", ())
    cut = stats.get(PIECES) or [1] * len(sizes)
    rows = zip(sizes, seconds, cut, strict=False)
    done = [Transfer(int(size), float(took), int(pieces)) for size, took, pieces in rows]
    return done, int(sum(stats.get("num_failed_transfers", ())))


def unproven(stats: dict[str, Any]) -> list[Unproven]:
    """Read the pulls that failed from our NixlConnector's statistics."""
    return [
        Unproven(get_base_request_id(request_id), peer, kind, why)
        for request_id, peer, kind, why in stats.get("unproved", ())
    ]


def start_engine(
    make_llm: Callable[..., AsyncLLM],
    vllm_config: VllmConfig,
    meter: EngineMeter,
    *,
    in_process: bool,
    log_requests: bool,
) -> AsyncLLM:
    """Start an engine whose statistics go to Ray's metrics export and to `meter`.

    vLLM's own periodic log lines stay off: they would print one line a step.

    Args:
        make_llm: `AsyncLLM`, or a callable with the same arguments that makes one.
        in_process: run a CPU engine's only worker in the engine's process (`executor`).
    """
    vllm_config.observability_config.enable_logging_iteration_details = True
    leave_room(vllm_config)
    ask_for_usage()
    meter.step_time = StepTime(vllm_config.compilation_config.cudagraph_capture_sizes or ())
    return make_llm(
        vllm_config=vllm_config,
        executor_class=executor_class(vllm_config, in_process),
        log_stats=False,
        log_requests=log_requests,
        stat_loggers=[partial(MeterStatLogger, meter), RayPrometheusStatLogger],  # ours takes first
    )


def leave_room(vllm_config: VllmConfig) -> None:
    """Leave tokens of each step to other prompts than the first, unless the configuration sets how
    many one prompt gets.

    vLLM computes running requests first, so a prompt of several steps would take all their tokens.
    A request that is alone gets all of them in any case.
    """
    scheduler = vllm_config.scheduler_config
    step_tokens = scheduler.max_num_batched_tokens
    most = step_tokens - step_tokens // SPARE_SHARE
    given, longest = scheduler.long_prefill_token_threshold, vllm_config.model_config.max_model_len
    if scheduler.enable_chunked_prefill and not given and most < longest:
        scheduler.long_prefill_token_threshold = most


def engine_events(vllm_config: VllmConfig) -> EngineEvents | None:
    """Have an engine that is about to start publish its KV events to this process alone.

    Returns:
        The follower of the events, to be started after the engine. None if the events cannot be
        followed: they go elsewhere already, the engine keeps no finished blocks, or it is one rank
        of several (vLLM numbers ranks by ports, and the sockets have none).
    """
    why = None
    if vllm_config.kv_events_config is not None:
        why = "kv_events_config is set"
    elif not vllm_config.cache_config.enable_prefix_caching:
        why = "prefix caching is off"
    elif vllm_config.parallel_config.data_parallel_size > 1:
        why = "data_parallel_size is above 1"
    if why is not None:
        logger.info("gateways are not told which KV blocks this engine holds: %s", why)
        return None
    events = EngineEvents()
    vllm_config.kv_events_config = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=events.events,
        replay_endpoint=events.replay,
        buffer_steps=REPLAYED_STEPS,
        hwm=WAITING_BATCHES,
    )
    return events


def kv_token_bytes(vllm_config: VllmConfig) -> int:
    """Return the KV bytes of one token, in all layers and on all ranks."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    layers = model.get_num_layers(vllm_config.parallel_config)
    if fusion := getattr(model.hf_config, "kv_fusion", None):  # other layers read these layers' KV
        layers = fusion.get("storage_layers", layers)
    width = model.get_total_num_kv_heads() * model.get_head_size()
    each = model.dtype.itemsize if cache.cache_dtype == "auto" else 1
    return int(2 * layers * width * each)


async def cache_layout(llm: Any, vllm_config: Any) -> str:
    """Return the layout of a started engine's cache; empty if it is not known. The engine's own
    process chooses it by the same rules, from its workers and the configuration.

    Args:
        llm: `AsyncLLM`.
    """
    config = copy.copy(vllm_config)
    config.cache_config = copy.copy(vllm_config.cache_config)  # the call below changes it
    try:
        supported = await llm.collective_rpc("get_supported_kv_cache_layouts")
        return str(resolve_kv_cache_layout(config, supported).name)
    except Exception:
        logger.exception("the layout of this engine's KV cache is not known")
        return ""


async def cache_groups(llm: Any) -> list[dict[str, Any]]:
    """Return what vLLM tells of each KV cache group of a started engine: `group_idx`, `kind`,
    `block_size` and `sliding_window`. `headrace_engine.kv_groups` reads it.

    Args:
        llm: `AsyncLLM`.
    """
    found: list[dict[str, Any]] = await llm.engine_core.call_utility_async(
        "get_kv_cache_group_metadata"
    )
    return found


def cache_block_use(vllm_config: VllmConfig, groups: Sequence[Mapping[str, Any]]) -> BlockUse:
    """Return the blocks that a request of a started engine takes."""
    return block_use(groups, vllm_config.cache_config.block_size, vllm_config.max_in_flight_tokens)


def engine_facts(vllm_config: VllmConfig, meter: EngineMeter) -> EngineFacts:
    """Return a started engine's part of its replica's reports."""
    cache = vllm_config.cache_config
    return EngineFacts(
        meter,
        block_tokens=cache.block_size,
        token_bytes=kv_token_bytes(vllm_config),
        step_tokens=prompt_step_tokens(vllm_config),
        blocks=cache.num_gpu_blocks or 0,
    )


def prompt_step_tokens(vllm_config: VllmConfig) -> int:
    """Return the maximum number of tokens of one prompt that the engine computes in one step beside
    other requests."""
    scheduler = vllm_config.scheduler_config
    step_tokens: int = scheduler.max_num_batched_tokens
    return min(scheduler.long_prefill_token_threshold or step_tokens, step_tokens)


def step_time_facts(vllm_config: VllmConfig, in_process: bool) -> dict[str, Any]:
    """Return the options of an engine on which its step times depend, as JSON values."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    drafts, adapters = vllm_config.speculative_config, vllm_config.lora_config
    chosen = {
        "parallel": [
            getattr(parallel, f"{kind}_parallel_size", 1)
            for kind in ("tensor", "pipeline", "data", "prefill_context", "decode_context")
        ],
        "kernels": [vllm_config.attention_config.backend, model.enforce_eager],
        "graphs": vllm_config.compilation_config.cudagraph_capture_sizes,
        "scheduler": [scheduler.max_num_seqs, scheduler.max_num_batched_tokens],
        "steps": [scheduler.async_scheduling, vllm_config.use_v2_model_runner, in_process],
        "drafts": drafts and [drafts.method, drafts.num_speculative_tokens],
        "adapters": adapters and [adapters.max_loras, adapters.max_lora_rank],
        "techniques": vllm_config.additional_config,
    }
    return {
        "vllm": vllm.__version__,
        "device": current_platform.get_device_name(),
        "model": model.hf_config.to_json_string(use_diff=True),
        "dtypes": [model.dtype, model.quantization, cache.cache_dtype, cache.block_size],
        **chosen,
    }


def make_prefill_admission(vllm_config: VllmConfig, meter: EngineMeter) -> PrefillAdmission:
    """Return the prefill admission of a started engine."""
    most = prompt_step_tokens(vllm_config)
    spare = vllm_config.scheduler_config.max_num_batched_tokens - most
    return PrefillAdmission(meter, most, spare)


def engine_progress(vllm_config: VllmConfig, meter: EngineMeter, llm: AsyncLLM) -> Progress:
    """Return how far a started engine is."""
    # vLLM reports its load only with a step. No step follows when a client cancels its request, and
    # none is reported while the first step after an idle time hangs.
    unfinished = llm.output_processor.get_num_unfinished_requests()
    if not unfinished:
        meter.load(0, 0, meter.kv_usage)
    cache = vllm_config.cache_config
    progress = meter.progress(
        vllm_config.scheduler_config.max_num_batched_tokens,
        *(cache.num_gpu_blocks or 0, cache.block_size),
    )
    if unfinished and not progress.running:  # they may also wait for their KV
        return progress._replace(running=unfinished, longest_step_s=None)
    return progress


def executor_class(vllm_config: VllmConfig, in_process: bool) -> type[Executor]:
    """Return `InProcessExecutor` where it is wanted and possible, else vLLM's own choice."""
    one_worker = vllm_config.parallel_config.world_size == 1
    if in_process and one_worker and vllm_config.device_config.device_type == "cpu":
        return InProcessExecutor
    return Executor.get_class(vllm_config)

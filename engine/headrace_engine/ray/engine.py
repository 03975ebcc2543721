"""The uses of Ray beyond its public API in this package. An upgrade of Ray breaks this file first.

`VLLMEngine` is Ray's engine class. `LLMServer(engine_cls=...)` is the documented way to give a
server another one, but the class to extend is private; `tests/unit/test_contracts.py` pins what is
used here.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from typing import Any

import ray
from ray.llm._internal.serve.engines.vllm.vllm_engine import (
    VLLMEngine,
    _clear_current_platform_cache,
)
from vllm import RequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

from headrace_engine.extensions.extension import EXTENSIBLE_WORKER
from headrace_engine.kv_groups import STATE, hit_groups
from headrace_engine.kv_transfer.compatibility import KvKind
from headrace_engine.kv_transfer.kv_kind import kv_kind
from headrace_engine.kv_transfer.ports import ReservedPorts, reserve_ports
from headrace_engine.meter import EngineMeter
from headrace_engine.rehearsal import rehearsal_prompts, rehearse
from headrace_engine.rehearsal_cache import machine_facts, read_steps, steps_file, write_steps
from headrace_engine.reporting.engine_events import EngineEvents
from headrace_engine.reporting.start_errors import causes_told
from headrace_engine.serving.model_limits import PREFIX_CACHE, REMOTE_PREFILL, SPECULATION, STORE
from headrace_engine.serving.start_times import ENGINE, STEP_TIMES, WARM_UP, StartTimes
from headrace_engine.serving.techniques import unsupported
from headrace_engine.vllm.engine import (
    cache_block_use,
    cache_groups,
    cache_layout,
    engine_events,
    start_engine,
    step_time_facts,
)
from headrace_engine.vllm.parsers import set_parsers
from headrace_engine.vllm.platforms import cpu_arguments, why_no_prefix_cache
from headrace_engine.vllm.recurrent_models import leave_out_store, why_no_speculation
from headrace_kvstore.lookup.store_view import store_settings

logger = logging.getLogger("headrace.engine")

IN_PROCESS_KEY = "headrace_in_process"
"""`LLMConfig.experimental_configs`: whether a CPU engine's worker shares its process (default)."""

LEFT_OUT_KEY = "headrace_left_out"
"""`LLMConfig.experimental_configs`: parts that the app's arguments leave out of this engine."""

SIDE_CHANNEL_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
SIDE_CHANNEL_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"

_reserved: ReservedPorts | None = None
"""This process's ports for NIXL's handshakes. They are kept for an engine that starts again."""


class MeteredVLLMEngine(VLLMEngine):
    """Ray's vLLM engine with its steps and transfers metered, and an `AsyncLLM` of our making."""

    llm: AsyncLLM
    vllm_config: VllmConfig
    kv_kind: KvKind
    """The kind of its KV, once it has started."""

    def __init__(self, llm_config: Any):
        self._choose_side_channel(llm_config)
        super().__init__(llm_config)
        self.meter = EngineMeter()
        self.start_times = StartTimes()
        self.events: EngineEvents | None = None
        self.left_out: dict[str, str] = dict(llm_config.experimental_configs.get(LEFT_OUT_KEY, {}))
        """The parts that this engine runs without though the app has them, and why. Each part's own
        code gives the reason. Complete once the engine has started."""
        self.make_llm: Callable[..., AsyncLLM] = AsyncLLM

    @staticmethod
    def _choose_side_channel(llm_config: Any) -> None:
        """Give NIXL's handshake an address that other nodes reach, and ports that no other engine
        takes before this one listens there. A decode engine gets them with the KV. Ray chooses the
        address only for connectors that it knows by name."""
        os.environ.setdefault(SIDE_CHANNEL_HOST, ray.util.get_node_ip_address())
        if SIDE_CHANNEL_PORT not in os.environ:
            ranks = llm_config.engine_kwargs.get("data_parallel_size", 1)
            count = llm_config.get_engine_config().num_devices + ranks
            global _reserved
            _reserved = reserve_ports(count, os.environ[SIDE_CHANNEL_HOST])
            os.environ[SIDE_CHANNEL_PORT] = str(_reserved.first)

    async def start(self) -> None:
        """Start the engine and measure its first steps; a model that lies in a local folder needs
        no download task per node."""
        source = self.llm_config.model_loading_config.model_source
        if isinstance(source, str) and os.path.isdir(source):
            self.llm_config.get_or_create_callback().ctx.run_init_node = False
        self.start_times.begin(ENGINE)
        with causes_told():
            await super().start()
            await self._read_cache_groups()
            self.start_times.begin(STEP_TIMES)
            await self._rehearse()
        self.start_times.begin(WARM_UP)
        layout = await cache_layout(self.llm, self.vllm_config)
        self.kv_kind = await asyncio.to_thread(kv_kind, self.vllm_config, layout)
        self.left_out |= await self.find_left_out()
        for part, why in self.left_out.items():
            logger.warning("this engine runs without %s: %s", part, why)

    async def find_left_out(self) -> dict[str, str]:
        """Return the parts that the started engine runs without, by name, with the reasons."""
        found = {}
        if why := self.kv_kind.why_unidentified:
            found[REMOTE_PREFILL] = why
            transfer = self.vllm_config.kv_transfer_config
            if transfer is not None and store_settings(transfer) is not None:
                found[STORE] = why
        if self.vllm_config.parallel_config.worker_cls == EXTENSIBLE_WORKER:
            found |= await unsupported(self.llm)
        return found

    async def _read_cache_groups(self) -> None:
        """Learn the engine's KV cache groups, and follow its KV events."""
        found = await cache_groups(self.llm)
        has_states = any(group["kind"] == STATE for group in found)
        self.meter.set_cache_groups(cache_block_use(self.vllm_config, found), has_states)
        if self.events is None:
            return
        try:
            self.events.start(hit_groups(found, self.vllm_config.cache_config.block_size))
        except ValueError as error:
            logger.info("gateways are not told which KV blocks this engine holds: %s", error)
            events, self.events = self.events, None
            await asyncio.to_thread(events.close)

    async def _rehearse(self) -> None:
        model = self.vllm_config.model_config
        prompts = rehearsal_prompts(model.max_model_len, model.get_vocab_size())
        most_rows = self.vllm_config.scheduler_config.max_num_seqs
        in_process = self.llm_config.experimental_configs.get(IN_PROCESS_KEY, True)
        path = steps_file(step_time_facts(self.vllm_config, in_process) | machine_facts())
        known = await asyncio.to_thread(read_steps, path)
        steps = await rehearse(self._generate, self.meter, prompts, most_rows, known=known)
        if not known:
            await asyncio.to_thread(write_steps, path, steps)

    def _generate(
        self, ids: list[int], tokens: int, name: str, salt: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return a prompt's answer from the engine itself, without the plans of a subclass of
        `AsyncLLM`."""
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        prompt = TokensPrompt(prompt_token_ids=ids, cache_salt=salt)
        return AsyncLLM.generate(self.llm, prompt, params, name)

    def _prepare_engine_config(self, callback_ctx: Any) -> tuple[Any, Any, VllmConfig]:
        args, frontend, config = super()._prepare_engine_config(callback_ctx)
        own = self.llm_config.get_engine_config()
        changed = cpu_arguments(config)
        if (why := why_no_speculation(config)) is not None:
            self.left_out[SPECULATION] = why
            changed["speculative_config"] = None
        if changed:
            own.engine_kwargs.update(changed)
            args, frontend, config = super()._prepare_engine_config(callback_ctx)
        self.parsers = set_parsers(args, frontend, config, own.engine_kwargs | own.frontend_kwargs)
        if (why := leave_out_store(config)) is not None:
            self.left_out[STORE] = why
        if config.kv_transfer_config is None:
            self.left_out[REMOTE_PREFILL] = "the engine has no connector that moves KV"
        asked = self.llm_config.engine_kwargs.get("enable_prefix_caching")
        if asked is not False and (why := why_no_prefix_cache(config)) is not None:
            self.left_out[PREFIX_CACHE] = why
        return args, frontend, config

    async def shutdown(self) -> None:
        """End the engine's processes, so that they take their shared memory with them."""
        await super().shutdown()
        if (events := getattr(self, "events", None)) is not None:
            await asyncio.to_thread(events.close)
        if getattr(self, "llm", None) is not None:
            await asyncio.to_thread(self.llm.shutdown)

    def _start_async_llm_engine(
        self, vllm_engine_args: Any, vllm_engine_config: VllmConfig, placement_group: Any
    ) -> AsyncLLM:
        vllm_engine_config.parallel_config.placement_group = placement_group
        _clear_current_platform_cache()
        self.vllm_config = vllm_engine_config
        self.events = engine_events(vllm_engine_config)
        try:
            self.llm = start_engine(
                self.make_llm,
                vllm_engine_config,
                self.meter,
                in_process=self.llm_config.experimental_configs.get(IN_PROCESS_KEY, True),
                log_requests=vllm_engine_args.enable_log_requests,
            )
        except BaseException:
            if self.events is not None:
                self.events.close()
            raise
        return self.llm

"""The prefill replica, which computes KV for decode replicas and holds it until they pull it.

Decode replicas send prompts as token ids: they have rendered and tokenised them. The answer says
where the KV lies and what it cost, so the caller's models learn from every request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from ray import get_runtime_context, serve
from ray.serve.handle import DeploymentHandle
from ray.serve.llm.deployment import DPServer, LLMServer, PDPrefillServer
from ray.util import get_node_ip_address
from vllm import RequestOutput, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

from headrace_engine.adapters.settings import AdapterSettings
from headrace_engine.adapters.sources import AdapterError
from headrace_engine.kv_transfer.compatibility import refusal
from headrace_engine.kv_transfer.handoff import (
    BLENDED_KEY,
    PARAMS_KEY,
    PrefillAdapterError,
    PrefillError,
    PrefillRequest,
    PrefillResult,
    produce_params,
)
from headrace_engine.kv_transfer.media import prompt_with_media
from headrace_engine.meter import Step
from headrace_engine.ray.engine import MeteredVLLMEngine
from headrace_engine.ray.serve import read_cluster_value, write_cluster_value
from headrace_engine.reporting.prompt_backlog import PromptBacklog, ReceivedPlans
from headrace_engine.reporting.replica_reporting import ReplicaReporting
from headrace_engine.serving.added_adapters import AddedAdapters
from headrace_engine.serving.full_collections import limit_full_collections
from headrace_engine.serving.ready_file import start_ready_file
from headrace_engine.serving.replica_adapters import ReplicaAdapters
from headrace_engine.store_nodes.manager import join_store
from headrace_engine.supervise import supervise
from headrace_engine.usage.replica_usage import ReplicaUsage, UsageExports
from headrace_engine.usage.request_usage import tenant_of_salt
from headrace_engine.usage.usage_book import UsageRecord
from headrace_engine.vllm.engine import engine_facts, make_prefill_admission
from headrace_engine.vllm.llm import lora_request, with_retention

logger = logging.getLogger("headrace.prefill")

USAGE_WAIT_S = 0.1
"""Longest wait of an answer for the prompt's usage, which comes with the engine's last output."""


class PrefillFallback(Protocol):
    """A server that answers clients with a prefill replica's engine while no decode replica can."""

    async def start(self) -> None: ...
    def info(self) -> dict[str, Any]: ...
    async def stop(self) -> None: ...


@dataclass(frozen=True)
class FallbackServing:
    """Engine class and server of a prefill replica that can answer clients, importable by name."""

    engine_cls: type[MeteredVLLMEngine]
    make_server: Callable[[Callable[[], Awaitable[Any]], Any], PrefillFallback]
    """Called with (maker of vLLM's ASGI application, the engine); returns the server."""


class PrefillServer(PDPrefillServer):
    """Ray's prefill server that also takes prompts as token ids.

    Args:
        llm_config: the prefill `LLMConfig`.
        setup: called once in the replica before the engine starts (logging, tracing).
        store: the deployment that keeps the machines' StoreNodes; None without a store.
        fallback: how it answers clients while no decode replica can; None if it never does.
        adapters: the app's LoRA adapters; None if it has none.
        export_left_out: exports the parts that the engine runs without as a metric.
        usage: where the replica's usage goes; None for nowhere.
    """

    _adapters: ReplicaAdapters | None = None
    """The LoRA adapters; None without any, and until the engine has started."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        llm_config: Any,
        *,
        setup: Callable[[str], None] | None = None,
        store: DeploymentHandle | None = None,
        fallback: FallbackServing | None = None,
        adapters: AdapterSettings | None = None,
        export_left_out: Callable[[Mapping[str, str]], None] | None = None,
        usage: UsageExports | None = None,
    ):
        if setup is not None:
            setup("prefill")
        engine_cls = MeteredVLLMEngine if fallback is None else fallback.engine_cls
        await super().__init__(llm_config, engine_cls=engine_cls)
        self.engine: MeteredVLLMEngine
        if export_left_out is not None:
            export_left_out(self.engine.left_out)
        self._fallback: PrefillFallback | None = None
        self._polling: asyncio.Task[None] | None = None
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        if adapters is not None:
            await self._start_adapters(adapters)
        if fallback is not None:
            self._fallback = fallback.make_server(self._make_app, self.engine)
            if self._adapters is not None:
                # The fallback's engine class has a frontend that answers clients.
                self.engine.llm.adapters = self._adapters.registry  # type: ignore[attr-defined]
            await self._fallback.start()
        self._usage = ReplicaUsage(
            *(self.engine.meter.usage, self._llm_config.model_id, self._replica_id, usage)
        )
        self._admission = make_prefill_admission(self.engine.vllm_config, self.engine.meter)
        self._machine = get_runtime_context().get_node_id()
        self._kind = self.engine.kv_kind
        self._backlog, self._received_plans = PromptBacklog(), ReceivedPlans()
        self.engine.meter.on_step.append(self._on_step)
        self._reporting = ReplicaReporting(
            self._replica_id,
            "prefill",
            self._machine,
            token=secrets.token_urlsafe(32),
            host=get_node_ip_address(),
            events=self.engine.events,
            engine=engine_facts(self.engine.vllm_config, self.engine.meter),
            facts=self._facts,
            kv=lambda: self._kv,
        )
        self._joining = (
            supervise(partial(join_store, store), "join the KV store")
            if store is not None
            else None
        )
        if self._adapters is not None:
            self._adapters.registry.on_change.append(self._reporting.changed)
        limit_full_collections()
        self._ready = start_ready_file(self.check_health)
        self.engine.start_times.finish()

    async def _start_adapters(self, settings: AdapterSettings) -> None:
        app_name = serve.get_replica_context().app_name
        added = AddedAdapters(app_name, read_cluster_value, write_cluster_value, settings.group)
        llm = self.engine.llm
        self._adapters = ReplicaAdapters(settings, llm, added, self._replica_id)
        await self._adapters.start()
        self._polling = supervise(self._adapters.poll, "read the added LoRA adapters")

    async def _make_app(self) -> Any:
        """Make vLLM's application over the engine, for clients."""
        app = await LLMServer.__serve_build_asgi_app__(self)
        if self._adapters is not None:
            self._adapters.attach(app)
        return app

    @property
    def _kv(self) -> str:
        """Identity of the engine's KV, which decides the engines that it can exchange KV with."""
        return str(self._kind.of_epoch(self.engine.meter.kv_epoch))

    async def prefill(self, request: PrefillRequest, replica: str = "") -> PrefillResult:
        """Compute a prompt's KV and keep it for the caller's engine to pull.

        Args:
            request: the prompt.
            replica: for the caller's request router, which may have chosen another replica.

        Raises:
            PrefillError: the caller could not use the KV, the prompt's media cannot be read, or the
                engine left no KV to pull.
        """
        if why := refusal(self._kv, request.kv):
            raise PrefillError(f"{self._replica_id} has KV of another kind: {why}")
        token_ids = np.frombuffer(request.token_ids, dtype="<i4").tolist()
        arrived = time.perf_counter()
        compute_tokens = request.compute_tokens or len(token_ids)
        self._arrived(request, len(token_ids), compute_tokens)
        record = self._usage_record(request)
        try:
            async with (
                self._with_adapter(request) as lora,
                self._admission.turn(compute_tokens, resumes=request.resumes),
            ):
                waited_s = time.perf_counter() - arrived
                output = await self._compute(request, token_ids, lora, record)
        finally:
            self._backlog.ended(request.request_id)
            self._reporting.changed()
        kv_params = (output and output.kv_transfer_params) or {}
        if output is None or not kv_params.keys() - {BLENDED_KEY}:
            raise PrefillError(f"{request.request_id}: the prefill engine left no KV to pull")
        if record is not None:
            await record.completed(USAGE_WAIT_S)
        times, cached = output.metrics, output.num_cached_tokens or 0
        logger.debug("prefilled", extra={"request_id": request.request_id})
        return PrefillResult(
            kv_params=kv_params,
            queue_s=waited_s + (max(0.0, times.scheduled_ts - times.queued_ts) if times else 0.0),
            compute_s=max(0.0, times.first_token_ts - times.scheduled_ts) if times else 0.0,
            cached_tokens=cached,
            computed_tokens=len(token_ids) - cached,
            replica=self._replica_id,
            machine=self._machine,
            step_time=self.engine.meter.step_time.to_dict(),
            loads=tuple(self.engine.meter.take_loads()),
            has_media=bool(request.media),
            has_prefix_cache=bool(self.engine.vllm_config.cache_config.enable_prefix_caching),
            usage={} if record is None else record.usage.to_dict(),
        )

    def _usage_record(self, request: PrefillRequest) -> UsageRecord | None:
        """Return a record of what a prompt costs this engine; None for the caller's own."""
        if not request.client_id:
            return None
        tenant = tenant_of_salt(request.salt or "")
        return self.engine.meter.usage.record_of(tenant, request.client_id)

    async def _compute(
        self,
        request: PrefillRequest,
        token_ids: list[int],
        lora: Any,
        record: UsageRecord | None,
    ) -> RequestOutput | None:
        """Run the prompt through the engine, which keeps its KV.

        Args:
            lora: vLLM's `LoRARequest`; None without an adapter.
            record: where the engine's work is counted; None for nowhere.
        """
        prompt: Any = TokensPrompt(prompt_token_ids=token_ids)
        if request.media:
            try:
                prompt = await asyncio.to_thread(prompt_with_media, token_ids, request.media)
            except ValueError as error:
                raise PrefillError(f"{request.request_id}: {error}") from None
        if request.salt is not None:
            prompt["cache_salt"] = request.salt
        blending = self._blending_of(request)
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            extra_args={PARAMS_KEY: produce_params(request.check, blending)},
        )
        if record is not None:
            self.engine.meter.usage.follow(request.request_id, record)
        options = {
            "lora_request": lora,
            "priority": request.priority,
            "trace_headers": request.trace_headers,
        }
        # vLLM's own method: the fallback's engine class may override it for clients' requests.
        outputs = AsyncLLM.generate(
            self.engine.llm,
            prompt,
            params,
            request.request_id,
            **with_retention(options, request.retain_s, request.request_id),
        )
        output = None
        async for step_output in outputs:
            output = step_output
        return output

    @asynccontextmanager
    async def _with_adapter(self, request: PrefillRequest) -> AsyncIterator[Any]:
        """Hold a request's adapter in use, loaded into the engine; yield vLLM's form of it.

        Raises:
            PrefillAdapterError: this replica cannot use the adapter with the caller's content.
        """
        ref = request.adapter
        if ref is None:
            yield None
            return
        if self._adapters is None:
            raise PrefillAdapterError(f"{self._replica_id} has no LoRA adapters")
        registry = self._adapters.registry
        async with AsyncExitStack() as stack:
            try:
                version = await registry.find_ref(ref)
                await stack.enter_async_context(registry.using(version.number))
            except AdapterError as error:
                why = f"{self._replica_id}: {ref.name}: {error}"
                raise PrefillAdapterError(why) from None
            yield lora_request(version)

    def _blending_of(self, request: PrefillRequest) -> Mapping[str, Any] | None:
        """Return the stored runs of a request; None if this engine cannot make KV from them."""
        return None if "blending" in self.engine.left_out else request.blending

    def _arrived(self, request: PrefillRequest, prompt_tokens: int, compute_tokens: int) -> None:
        """Report a prompt to the gateways at once."""
        if request.plan_id:
            self._received_plans.add(request.plan_id, time.monotonic())
        self._backlog.arrived(request.request_id, prompt_tokens, compute_tokens)
        self._reporting.changed()

    def _on_step(self, step: Step) -> None:
        self._backlog.computed(step.prompt, step.pairs)

    def _facts(self) -> dict[str, Any]:
        return {
            "prompts": len(self._backlog),
            "queued_tokens": self._backlog.tokens,
            "queued_pairs": self._backlog.pairs,
            "heard": self._received_plans.recent(time.monotonic()),
            **({} if self._adapters is None else self._adapters.registry.report_fields()),
        }

    async def __del__(self) -> None:
        reporting = getattr(self, "_reporting", None)
        if reporting is not None:
            reporting.drains()
        fallback = getattr(self, "_fallback", None)
        if fallback is not None:
            await fallback.stop()
        if (usage := getattr(self, "_usage", None)) is not None:
            await usage.close()
        if reporting is not None:
            await reporting.close()
        tasks = (getattr(self, name, None) for name in ("_joining", "_polling", "_ready"))
        for task in tasks:
            if task is not None:
                task.cancel()
        if (adapters := getattr(self, "_adapters", None)) is not None:
            adapters.close()
        await super().__del__()

    async def alive(self, replica: str = "") -> str:
        """Return this replica's id to a caller that asks whether a replica works again.

        Args:
            replica: for the caller's request router, which may have chosen another replica.

        Raises:
            Exception: the engine is dead.
        """
        await self.check_health()
        return self._replica_id

    async def headrace_replica(self) -> dict[str, Any]:
        """Return the facts with which gateways follow this replica's reports and blocks, and those
        with which they send it clients' requests if it has a `FallbackServing`."""
        fallback = {} if self._fallback is None else self._fallback.info()
        own = {"replica_id": self._replica_id, "usage": self._usage.report()}
        return {**own, **fallback, **self._reporting.info()}

    async def headrace_usage(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]:
        """Return what this replica's engine did for a request; see `ReplicaUsage.of_request`."""
        return self._usage.of_request(request_id, tenant)

    async def headrace_adapters(
        self, sources: dict[str, str], name: str | None
    ) -> dict[str, Any] | None:
        """Set the adapters that administrators have added, and load one of them.

        Return the answer of `ReplicaAdapters.change`; None without adapters.
        """
        return None if self._adapters is None else await self._adapters.change(sources, name)

    async def headrace_status(self) -> dict[str, Any]:
        """Return the state of this replica, JSON-able."""
        context = serve.get_replica_context()
        return {
            "role": "prefill",
            "replica_id": self._replica_id,
            "deployment": context.deployment,
            "model": self._llm_config.model_id,
            "pid": os.getpid(),
            "start": self.engine.start_times.snapshot(),
            **self.engine.meter.snapshot(),
            "left_out": self.engine.left_out,
            "adapters": None if self._adapters is None else self._adapters.registry.snapshot(),
            "waiting_for_admission": self._admission.waiting,
        }


class DPPrefillServer(PrefillServer, DPServer):
    """`PrefillServer` whose engine is one rank of a data-parallel group."""

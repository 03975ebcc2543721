"""The decode replica, which answers clients over its own HTTP port and carries out their plans.

It runs vLLM's own OpenAI application around an engine that plans (`llm.planned_llm`), so
answers are byte for byte vLLM's. Requests arrive over the gateway's byte relay to this replica's
port.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ray import get_runtime_context, serve
from ray.serve.handle import DeploymentHandle
from ray.serve.llm.deployment import DPServer, LLMServer, PDDecodeServer
from ray.util import get_node_ip_address

from headrace_decode.apis.api_layer import add_api_layer
from headrace_decode.apis.engine_request_ids import engine_names
from headrace_decode.http.engine_health import EngineHealth
from headrace_decode.http.internal_port import InternalPort
from headrace_decode.http.public_routes import keep_public_routes, public_routes
from headrace_decode.http.vllm_environment import refuse_api_key, without_responses_store
from headrace_decode.llm.planned_llm import Planning
from headrace_decode.llm.vllm_engine import PlannedVLLMEngine
from headrace_decode.planning.blending_planner import BlendingPlanner
from headrace_decode.planning.prefill_executor import PrefillExecutor
from headrace_decode.rendering.keys import BlockKeysRoute
from headrace_decode.rendering.prompt_renderer import keys_route
from headrace_decode.resume.recorder import RecordingMiddleware
from headrace_decode.speculative.corpus_loader import CorpusLoader
from headrace_decode.speculative.report_poller import poll_reports
from headrace_decode.warmup.prefill_calibration import (
    answer_warmup_requests,
    measure_remote_prefill,
)
from headrace_decode.warmup.prompt_warmup import warm_prompts
from headrace_decode.wiring import DecodeWiring
from headrace_engine.kv_transfer.compatibility import KvKind
from headrace_engine.kv_transfer.handoff import PrefillRequest, PrefillResult
from headrace_engine.loop_stall import LoopStall
from headrace_engine.meter import EngineMeter
from headrace_engine.ray.serve import (
    max_ongoing_requests,
    ongoing_requests,
    read_cluster_value,
    shutdown_seconds,
    write_cluster_value,
)
from headrace_engine.reporting.replica_reporting import ReplicaReporting
from headrace_engine.serving.added_adapters import AddedAdapters
from headrace_engine.serving.drain_timeouts import grace_s
from headrace_engine.serving.full_collections import limit_full_collections
from headrace_engine.serving.inflight import InFlight
from headrace_engine.serving.members import MEMBERS
from headrace_engine.serving.ready_file import start_ready_file
from headrace_engine.serving.replica_adapters import ReplicaAdapters
from headrace_engine.serving.request_router import deployment_name
from headrace_engine.serving.settings_override import AppliedOverrides, OverrideStore
from headrace_engine.store_nodes.manager import join_store
from headrace_engine.supervise import supervise
from headrace_engine.usage.replica_usage import ReplicaUsage
from headrace_engine.vllm.engine import engine_facts, engine_progress, make_prefill_admission
from headrace_engine.vllm.kv_cache import block_hasher
from headrace_kvstore.protocol.address import base_url

logger = logging.getLogger("headrace.decode")

SPECULATION_WAIT_S = 2.0
PROBE_INTERVAL_S = 1.0
"""Interval in seconds at which failed prefill replicas are probed."""
OVERRIDES_INTERVAL_S = 5.0
"""Interval in seconds at which a replica reads the overrides that did not reach it."""


class DecodeServer(PDDecodeServer):
    """Ray's decode server with planned prefill, local fallback and its own HTTP port."""

    _adapters: ReplicaAdapters | None = None
    """The LoRA adapters; None without any, and until the engine has started."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        llm_config: Any,
        *,
        prefill_server: DeploymentHandle,
        wiring: DecodeWiring,
        store: DeploymentHandle | None = None,
    ):
        if wiring.setup is not None:
            wiring.setup("decode")
        self._wiring = wiring
        app_name = serve.get_replica_context().app_name
        self._overrides = OverrideStore(
            app_name, read_cluster_value, write_cluster_value, wiring.group
        )
        self._applied_overrides = AppliedOverrides()
        self._prefills = prefill_server
        self._token = secrets.token_urlsafe(32)
        self._kind: KvKind | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stall = LoopStall()
        without_responses_store()
        refuse_api_key(os.environ)
        await super().__init__(
            llm_config,
            prefill_server=prefill_server,
            engine_cls=partial(PlannedVLLMEngine, planning=self._make_planning),
        )
        self.engine: PlannedVLLMEngine
        self._kind = self.engine.kv_kind
        if wiring.export_left_out is not None:
            wiring.export_left_out(self.engine.left_out)
        if wiring.adapters is not None:
            self._adapters = adapters = ReplicaAdapters(
                wiring.adapters,
                self.engine.llm,
                AddedAdapters(app_name, read_cluster_value, write_cluster_value, wiring.group),
                serve.get_replica_context().replica_id.unique_id,
            )
            await adapters.start()
            self.engine.llm.adapters = adapters.registry
            self._start("read the added LoRA adapters", adapters.poll)
        if store is not None:
            self._start("join the KV store", partial(join_store, store))
        self._corpora = CorpusLoader(self.engine.llm.tokenize, self.engine.llm.corpus)
        self._app = app = await self.__serve_build_asgi_app__()
        self._routes = [asdict(route) for route in public_routes(app)]
        await measure_remote_prefill(self.engine.llm, self._planner)
        await answer_warmup_requests(app, self._llm_config.model_id)
        self.engine.llm.grammars.start()
        self._watch_members()
        self._start("probe prefill replicas", self._watch_prefill)
        if self.engine.llm.speculates and wiring.drafting_metrics is not None:
            fetch, metrics = partial(self.engine.llm.speculation, {}), wiring.drafting_metrics()
            polling = partial(poll_reports, fetch, metrics)
            self._start("poll the state of speculative decoding", polling)
        await self._apply_overrides()
        self._start("apply settings overrides", self._poll_overrides)
        limit_full_collections()
        self._usage = ReplicaUsage(
            self.engine.meter.usage,
            self._llm_config.model_id,
            serve.get_replica_context().replica_id.unique_id,
            wiring.usage,
        )
        engine = self.engine
        progress = partial(engine_progress, engine.vllm_config, engine.meter, engine.llm)
        app_with_health = EngineHealth(RecordingMiddleware(app), progress)
        self._port = InFlight(app_with_health, max_ongoing_requests)
        guarded = InternalPort(self._with_keys(self._port), self._token)
        watched = self._stall.wrap(guarded)
        self._listener = await wiring.listen(watched, get_node_ip_address(), 0)
        self._reporting = self._open_reporting()
        self._start("warm the system prompts", self._warm_system_prompts, restarts=False)
        if (ready := start_ready_file(self.check_health)) is not None:
            self._tasks.append(ready)
        engine.start_times.finish()

    def _start(
        self, name: str, work: Callable[[], Awaitable[None]], *, restarts: bool = True
    ) -> None:
        """Start a task that lives as long as this replica."""
        self._tasks.append(supervise(work, name, restarts=restarts))

    async def __serve_build_asgi_app__(self) -> Any:
        """Build vLLM's application with only the public routes and the `apis` layer."""
        app = await LLMServer.__serve_build_asgi_app__(self)
        keep_public_routes(app)
        if self._adapters is not None:
            self._adapters.attach(app)
        engine = self.engine
        add_api_layer(
            *(app, engine.parsers.why_no_tools, lambda: bool(engine.llm.errored)),
            book=engine.meter.usage,
        )
        return app

    def _make_planning(self, vllm_config: Any, meter: EngineMeter) -> Planning:
        self._planner = self._wiring.make_planner(vllm_config, meter)
        self._prefill_executor = PrefillExecutor(self._planner)
        meter.on_unproved.append(self._prefill_executor.unproved)
        return Planning(
            executor=self._prefill_executor,
            prefill_call=self._prefill,
            meter=meter,
            admission=make_prefill_admission(vllm_config, meter),
            tenants=self._wiring.tenants,
            itl_target_s=self._planner.itl_target_s,
            blending=self._blending_planner(vllm_config),
            adapters=lambda: None if self._adapters is None else self._adapters.registry,
        )

    def _blending_planner(self, vllm_config: Any) -> BlendingPlanner | None:
        if self._wiring.make_blending_planner is None:
            return None
        hasher = block_hasher(vllm_config)
        planner = self._wiring.make_blending_planner(hasher, vllm_config.cache_config.block_size)
        planner.holds_blocks = self._planner.holds
        return planner

    async def _prefill(self, request: PrefillRequest) -> PrefillResult:
        # The call runs without the context of a client's request: with it, Serve would give all
        # calls for one request the same id, by which its routers distinguish waiting calls.
        request = replace(request, kv=self._kv)
        call = partial(self._prefills.prefill.remote, request, replica=request.replica)
        response = contextvars.Context().run(call)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()  # otherwise the prefill engine would continue to compute
            # It may have finished before it hears of that. The caller then releases the KV.
            return await response

    def _with_keys(self, port: InFlight) -> BlockKeysRoute:
        """Return the port's application with a route that returns a prompt's block hashes."""
        planner, config = self._planner, self.engine.llm.vllm_config
        find = None if self._adapters is None else self._adapters.registry.find
        return keys_route(port, self._app, config, planner.available_runs, planner.machine, find)

    @property
    def _kv(self) -> str:
        """The kind of KV that the engine can exchange; empty until it is known."""
        kind = self._kind
        return "" if kind is None else str(kind.of_epoch(self.engine.meter.kv_epoch))

    def _open_reporting(self) -> ReplicaReporting:
        """Start to report this replica's state and its engine's blocks to gateways."""
        reporting = ReplicaReporting(
            serve.get_replica_context().replica_id.unique_id,
            "decode",
            get_runtime_context().get_node_id(),
            token=self._token,
            host=get_node_ip_address(),
            events=self.engine.events,
            engine=engine_facts(self.engine.vllm_config, self.engine.meter),
            facts=self._report_fields,
            kv=lambda: self._kv,
        )
        self._planner.on_change.append(reporting.changed)
        if self._adapters is not None:
            self._adapters.registry.on_change.append(reporting.changed)
        return reporting

    def _report_fields(self) -> dict[str, Any]:
        adapters = {} if self._adapters is None else self._adapters.registry.report_fields()
        return {**self._planner.report_fields(), **adapters}

    def _watch_members(self) -> None:
        """Keep the planner informed about which prefill replicas run."""
        loop = asyncio.get_running_loop()

        def update(replicas: frozenset[str]) -> None:
            loop.call_soon_threadsafe(self._prefill_executor.prefill_members, replicas)

        MEMBERS.watch(deployment_name("prefill", self._wiring.group), update)

    async def _watch_prefill(self) -> None:
        """Probe the failing prefill replicas, at an interval."""
        await self._probe("")  # with the first call the handle learns which replicas exist
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            for replica in self._planner.failing_prefill_replicas():
                why = await self._probe(replica)
                if why is None:
                    self._planner.prefill_up(replica)
                else:
                    self._planner.prefill_down(why, replica)

    async def _probe(self, replica: str) -> str | None:
        """Probe a prefill replica, or any one if the name is empty.

        Return why it does not work; None if it does.
        """
        probe = self._prefills.alive.remote(replica=replica)
        try:
            answered = await asyncio.wait_for(_answer(probe), timeout=2 * PROBE_INTERVAL_S)
        except Exception as error:
            with contextlib.suppress(Exception):
                probe.cancel()
            return f"a probe found it not running ({type(error).__name__})"
        return None if replica in ("", answered) else "a probe found it not running"

    async def _poll_overrides(self) -> None:
        while True:
            await asyncio.sleep(OVERRIDES_INTERVAL_S)
            await self._apply_overrides()

    async def _apply_overrides(self) -> None:
        """Apply the overrides that are in force and have not reached this replica."""
        try:
            stored = await asyncio.to_thread(self._overrides.all)
            for override in self._applied_overrides.pending(stored):
                if "policy" in override:
                    self._planner.policy = override["policy"]
                else:
                    await self.engine.llm.speculation(override)
        except Exception as error:
            logger.warning("cannot read the settings overrides: %r", error)

    async def __del__(self) -> None:
        """Finish the requests of this replica's port, then shut down; see `drain_timeouts`."""
        reporting = getattr(self, "_reporting", None)
        if reporting is not None:
            reporting.drains()
        listener = getattr(self, "_listener", None)
        if listener is not None:
            # Requests of a dead engine end on their own, and its replacement needs the resources.
            grace = 1.0 if self.engine.llm.errored else grace_s(*shutdown_seconds())
            with contextlib.suppress(Exception):
                await listener.stop(grace)
        for task in getattr(self, "_tasks", ()):
            task.cancel()
        if (usage := getattr(self, "_usage", None)) is not None:
            await usage.close()
        if reporting is not None:
            await reporting.close()
        if (adapters := getattr(self, "_adapters", None)) is not None:
            adapters.close()
        await super().__del__()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the replica's demand, for `headrace.autoscaling`, and its ongoing requests for
        Serve, which does not see its port."""
        return {**self._planner.demand(), **ongoing_requests(self._port.count)}

    async def headrace_replica(self) -> dict[str, Any]:
        """Return the facts by which gateways choose and call this replica.

        These are its load, its report stream, its routes, its techniques, its usage and its port's
        token.
        """
        own = {
            "routes": self._routes,
            "token": self._token,
            "techniques": self.engine.llm.offered_techniques,
            "usage": self._usage.report(),
        }
        return {**self._load(), **self._reporting.info(), **own}

    def _load(self) -> dict[str, Any]:
        """Return the URL at which this replica listens, and its load.

        A replica without a URL gets no requests. When its engine dies, it reports no URL at once;
        Serve notices the death only after several health checks.
        """
        meter = self.engine.meter
        url = base_url(get_node_ip_address(), self._listener.port)
        return {
            "replica_id": serve.get_replica_context().replica_id.unique_id,
            "url": None if self.engine.llm.errored else url,
            "in_flight": self._port.count,
            "running": meter.running,
            "waiting": meter.waiting,
            "kv_usage": round(meter.kv_usage, 4),
        }

    async def headrace_usage(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]:
        """Return what this replica's engine did for a request; see `ReplicaUsage.of_request`."""
        return self._usage.of_request(request_id, tenant)

    async def headrace_openapi(self) -> dict[str, Any]:
        """Return the application's OpenAPI document; the first call takes seconds of work."""
        return dict(await asyncio.to_thread(self._app.openapi))

    async def headrace_status(self) -> dict[str, Any]:
        """Return the JSON-able state of this replica, with its router's models."""
        executor = self._prefill_executor
        return {
            "role": "decode",
            "deployment": serve.get_replica_context().deployment,
            "model": self._llm_config.model_id,
            "pid": os.getpid(),
            "start": self.engine.start_times.snapshot(),
            **self._stall.snapshot(),
            **self._load(),
            **self.engine.meter.snapshot(),
            "left_out": self.engine.left_out,
            "adapters": None if self._adapters is None else self._adapters.registry.snapshot(),
            "router": self._planner.snapshot(),
            "speculation": await self._speculation(),
            "blending": self.engine.llm.blending_counts(),
            "planning": {
                "requests": executor.requests_total,
                "seconds": round(executor.own_seconds_total, 6),
            },
        }

    async def headrace_warm(
        self, bodies: Sequence[dict[str, Any]], salt: str, pin: bool
    ) -> list[dict[str, Any]]:
        """Compute and store prompts' KV (`prompt_warmup`); pin it in the store if `pin` is set."""
        planner = self._planner
        done = await warm_prompts(
            self._app,
            self._llm_config.model_id,
            bodies,
            salt,
            planner.stored_tokens,
            planner.block_tokens,
        )
        for outcome in done:
            token_ids = outcome.pop("token_ids", None)
            if token_ids is not None:
                outcome["prompt_tokens"] = len(token_ids)
                outcome["pinned_tokens"] = planner.pin(token_ids, salt) if pin else 0
        return done

    async def _speculation(self) -> dict[str, Any] | None:
        """Return the state of speculative decoding; None if a busy or dead engine gives none."""
        try:
            return await asyncio.wait_for(self.engine.llm.speculation({}), SPECULATION_WAIT_S)
        except Exception:
            return None

    async def _warm_system_prompts(self) -> None:
        bodies = [
            {"messages": [{"role": "system", "content": text}]}
            for text in self._wiring.system_prompts
        ]
        for outcome in await self.headrace_warm(bodies, "", pin=True) if bodies else ():
            logger.info("a system prompt was warmed: %s", outcome)

    async def headrace_speculation(self, command: dict[str, Any]) -> dict[str, Any] | None:
        """Change the engine's drafting and return its state; None if the engine does not draft."""
        return await self.engine.llm.speculation(command)

    async def headrace_corpus(self, command: dict[str, Any]) -> dict[str, Any] | None:
        """Run a command of `CorpusLoader` at this replica's retrieval memory.

        Return the answer; None without a memory.
        """
        replica_id = serve.get_replica_context().replica_id.unique_id
        answer = await self._corpora.command(command, replica_id)
        return None if answer is None else {"replica_id": replica_id, **answer}

    async def headrace_adapters(
        self, sources: dict[str, str], name: str | None
    ) -> dict[str, Any] | None:
        """Set the adapters that administrators have added, and load one of them.

        Return the answer of `ReplicaAdapters.change`; None without adapters.
        """
        return None if self._adapters is None else await self._adapters.change(sources, name)

    async def headrace_set_policy(self, policy: str) -> None:
        """Let plans follow the `cost`, or force them `local` or `remote`, until changed again."""
        self._planner.policy = policy

    async def headrace_plan(self, request_id: str) -> dict[str, Any] | None:
        """Return the plan made for a request, or None if this replica does not remember it."""
        plans = (self._planner.explain(name) for name in engine_names(request_id))
        return next((plan for plan in plans if plan is not None), None)


class DPDecodeServer(DecodeServer, DPServer):
    """A `DecodeServer` whose engine is one rank of a data-parallel group."""


async def _answer(response: Any) -> Any:
    return await response

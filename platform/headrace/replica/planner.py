"""The planner of a decode replica: the pure `router` with the engine's geometry and its meter."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from headrace.autoscaling.replica_metrics import AGE_S, REQUESTS, encode_metrics
from headrace.replica.plan_outcomes import PlanOutcomes
from headrace.router import (
    Geometry,
    Plan,
    PlanRequest,
    PrefillReport,
    Router,
    RouterSettings,
)
from headrace.router.plan_codec import decode as decode_plan
from headrace_engine.step_time import StepTime
from headrace_kvstore.lookup.availability import DRAM, AvailableRun
from headrace_kvstore.lookup.store_view import StoreView, store_settings

if TYPE_CHECKING:
    from headrace_engine.kv_transfer.handoff import PrefillResult
    from headrace_engine.meter import EngineMeter, Step, StoreLoad, Transfer


logger = logging.getLogger("headrace.router")

DEMAND_S = 10.0


@dataclass(frozen=True)
class RouterPlanner:
    """Makes a replica's planner: `make_planner(vllm_config, meter)`."""

    settings: RouterSettings

    def __call__(self, vllm_config: Any, meter: EngineMeter) -> ReplicaPlanner:
        from headrace_engine.vllm.engine import prompt_step_tokens

        step_tokens = prompt_step_tokens(vllm_config)
        settings = replace(self.settings, max_step_tokens=step_tokens)
        router = Router(
            settings,
            engine_geometry(vllm_config),
            decode_step=meter.step_time,
            replica=serve.get_replica_context().replica_id.unique_id,
        )
        machine = ray.get_runtime_context().get_node_id()
        return ReplicaPlanner(router, meter, store_view(vllm_config, meter), machine)


class ReplicaPlanner:
    """A `Router` as a decode replica uses it (`headrace_decode.wiring.PrefillAwarePlanner`).

    Attributes:
        machine: Ray's id of the node, whose store this is.
        on_change: called on the event loop when a request begins, advances or ends, so that
            `report_fields` changes.
    """

    def __init__(
        self,
        router: Router,
        meter: EngineMeter,
        store: StoreView | None = None,
        machine: str = "",
    ):
        from headrace.observability.metrics import RayPlanMetrics

        self.router = router
        self.metrics = RayPlanMetrics()
        self._meter = meter
        self._store = store
        self.machine = machine
        self._plans: dict[str, Plan] = {}
        geometry = router.geometry
        self._outcomes = PlanOutcomes(
            router.costs, router.settings.max_step_tokens, geometry.kv_bytes_per_token
        )
        self.on_change: list[Callable[[], None]] = []
        self._request_count, self._demand, self._demand_until_s = 0, dict[str, float](), 0.0
        self._born_s = time.monotonic()
        self._unreadable_logged = False
        meter.on_cache_groups.append(router.set_cache_groups)
        meter.on_step.append(self._on_step)
        meter.on_transfer.append(self._on_transfer)
        meter.on_load.append(self._on_load)

    @property
    def policy(self) -> str:
        """How the router chooses: `cost`, or forced to `local` or `remote`."""
        return self.router.settings.policy

    @policy.setter
    def policy(self, policy: str) -> None:
        self.router.settings = replace(self.router.settings, policy=policy)  # type: ignore[arg-type]

    async def plan(
        self,
        request_id: str,
        token_ids: Sequence[int],
        salt: str,
        local_only: str | None,
        given: bytes | None = None,
        computed: int | None = None,
    ) -> Plan:
        """Plan a prompt, or adopt the plan that came with it.

        Args:
            given: a gateway's plan (`router.plan_codec`), which is checked.
            computed: tokens to compute if the request names stored runs that its KV is made from.
                The store supplies the others, and a gateway does not know of it.
        """
        started = time.perf_counter()
        self._request_count += 1
        request = PlanRequest(request_id, token_ids, salt, local_only)
        came, stale = self._read(given) if given is not None else (None, None)
        if came is not None:
            stale = self.router.stale_reason(came, request)
        if computed is not None:
            stale = stale or "the prompt reuses KV at other places"
        if came is not None and stale is None:
            plan = self.router.adopt(came, request)
        else:
            stored: Sequence[AvailableRun] = ()
            if computed is not None:
                stored = (AvailableRun(DRAM, len(token_ids) - computed),)
            elif local_only is None:
                stored = await self.available_runs(token_ids, salt)
            plan = self.router.plan(replace(request, stored=stored), stale)
        if came is not None:
            self.router.record_received(came)
        if given is not None and stale is not None:
            self.metrics.plan_replaced()
        self._plans[request_id] = plan
        self.metrics.planned(plan.kind, time.perf_counter() - started)
        self._changed()
        return plan

    def _read(self, given: bytes) -> tuple[Plan | None, str | None]:
        """Return the plan that came, or why there is none."""
        try:
            return decode_plan(given), None
        except ValueError as error:
            if not self._unreadable_logged:
                self._unreadable_logged = True
                logger.warning("a gateway sends plans that cannot be read: %s", error)
            return None, str(error)

    async def available_runs(self, token_ids: Sequence[int], salt: str) -> Sequence[AvailableRun]:
        """Return how many leading tokens of a prompt this machine's store can supply, by medium."""
        if self._store is None:
            return ()
        found = await self._store.available_runs(token_ids, salt, self.router.block_compute_s)
        if self._store.lookup_failures:
            self.metrics.lookups_failed(self._store.lookup_failures)
        return found

    def remote_failed(self, request_id: str, why: str) -> Plan:
        self.metrics.failed()
        plan = self.router.remote_failed(request_id, why)
        self._plans[request_id] = plan
        self._changed()
        return plan

    def prefill_done(self, request_id: str, result: PrefillResult, call_s: float) -> None:
        if result.step_time:
            try:
                fit = StepTime.from_dict(result.step_time)
                self.router.prefill_step_times(fit, result.replica)
            except ValueError as error:
                logger.warning("a prefill replica's step times are left out: %s", error)
        for load in result.loads:
            self.router.observe_load(*load)
        self._outcomes.record_prefill(request_id, result.computed_tokens)
        self.router.prefill_done(
            request_id,
            PrefillReport(
                call_s=call_s,
                queue_s=result.queue_s,
                compute_s=result.compute_s,
                cached_tokens=result.cached_tokens,
                computed_tokens=result.computed_tokens,
                replica=result.replica,
                shares_store=result.machine == self.machine,
                has_media=result.has_media,
                has_prefix_cache=result.has_prefix_cache,
            ),
        )
        self._changed()

    def first_token(self, request_id: str, seconds_from_plan: float, cached_tokens: int) -> None:
        self.router.first_token(request_id, seconds_from_plan, cached_tokens)
        plan = self._plans.get(request_id)
        if plan is not None:
            self._outcomes.first_token(plan, seconds_from_plan, cached_tokens)
            self._log(plan)
            if plan.predicted_ttft_s > 0:
                self.metrics.outcome(plan.kind, seconds_from_plan / plan.predicted_ttft_s)
        self._changed()

    def finished(
        self, request_id: str, output_token_ids: Sequence[int] = (), shared: bool = True
    ) -> None:
        """Record the end of a request.

        Args:
            shared: whether other requests can use the KV of its answer.
        """
        plan = self._plans.pop(request_id, None)
        if plan is not None:
            self._outcomes.finished(plan, len(output_token_ids))
        self.router.finished(request_id, output_token_ids if shared else ())
        self._changed()

    def prefill_members(self, replicas: Collection[str]) -> None:
        self.router.prefill_members(replicas)

    def prefill_up(self, replica: str) -> None:
        self.router.prefill_up(replica)

    def prefill_down(self, why: str, replica: str) -> None:
        self.router.prefill_down(why, replica)

    def failing_prefill_replicas(self) -> list[str]:
        """Return `PrefillTargets.suspects`, and export the metrics that change slowly. Called about
        once a second, outside of any request."""
        found = self.router.targets.suspects(time.monotonic())
        self.metrics.update_totals(len(found), self._outcomes.sums)
        return found

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Return the plan of a request, if it is remembered, and its result: `measured` is an
        `PlanOutcome`, or None before the first token."""
        plan = self.router.explain(request_id)
        if plan is None:
            return None
        return {**plan.to_dict(), "measured": self._outcomes.of(request_id)}

    def attributes(self, request_id: str) -> dict[str, str | int | float]:
        """Return `explain`, flat, for a span: `headrace.plan.predicted.local.compute`, ..."""
        fields = self.explain(request_id)
        return {} if fields is None else dict(_flat("headrace.plan", fields))

    def _log(self, plan: Plan) -> None:
        """Log one line about a plan, after the first token."""
        came = self._outcomes.of(plan.request_id)
        if came is None or not logger.isEnabledFor(logging.INFO):
            return
        where = f"prefilled by {plan.replica or plan.prefill}" if plan.prefill else "prefilled here"
        logger.info(
            "plan: %s, because %s; first token predicted after %.3f s, measured %.3f s; %d of %d "
            "prompt tokens not computed, %d held somewhere",
            *(where, plan.reasons[0] if plan.reasons else "of no reason"),
            *(plan.predicted_ttft_s, came["ttft_s"], came["cached_tokens"], plan.prompt_tokens),
            plan.reachable_tokens,
            extra={"request_id": plan.request_id},
        )

    def snapshot(self) -> dict[str, Any]:
        return {**self.router.snapshot(), "outcomes": self._outcomes.snapshot()}

    def demand(self) -> dict[str, float]:
        """Return the numbers for the autoscaling policy (`autoscaling.replica_metrics`). Called
        about twice a second. All but the count of requests and the replica's age change only every
        10 s."""
        now_s = time.monotonic()
        if now_s >= self._demand_until_s:
            self._demand_until_s = now_s + DEMAND_S
            self._demand = encode_metrics(self.snapshot())
        return {**self._demand, REQUESTS: float(self._request_count), AGE_S: now_s - self._born_s}

    def report_fields(self) -> dict[str, Any]:
        """Return `Router.report_fields`. To be called on the event loop only."""
        return self.router.report_fields()

    @property
    def itl_target_s(self) -> float | None:
        """Target for the longest engine step that running streams see."""
        return self.router.settings.itl_target_s

    @property
    def block_tokens(self) -> int:
        """Tokens of a KV block."""
        return self.router.geometry.block_tokens

    def stored_tokens(self, token_ids: Sequence[int], salt: str) -> int:
        """Return how many leading tokens of a prompt this machine's DRAM holds."""
        return 0 if self._store is None else self._store.held_tokens(token_ids, salt)

    def holds(self, blocks: Sequence[bytes]) -> Sequence[bool]:
        """Return, for each block by its hash, whether this machine's DRAM holds it."""
        return [False] * len(blocks) if self._store is None else self._store.holds(blocks)

    def pin(self, token_ids: Sequence[int], salt: str) -> int:
        """Keep a prompt's KV in this machine's DRAM. Return how many of its tokens are there."""
        return 0 if self._store is None else self._store.pin(token_ids, salt)

    def _changed(self) -> None:
        for tell in self.on_change:
            tell()

    def _on_step(self, step: Step) -> None:
        self.router.local_step(step.prompt)

    def _on_load(self, load: StoreLoad) -> None:
        self.router.observe_load(*load)

    def _on_transfer(self, transfer: Transfer) -> None:
        self.router.observe_transfer(transfer.bytes * transfer.pieces, transfer.seconds)
        self.metrics.transferred(self._meter.transfer_bytes_total)


def _flat(name: str, fields: Any) -> Iterator[tuple[str, str | int | float]]:
    """Yield the names and values of all leaves: values that are neither a mapping nor a list."""
    if isinstance(fields, Mapping):
        for key, value in fields.items():
            yield from _flat(f"{name}.{key}", value)
    elif isinstance(fields, list):
        for number, value in enumerate(fields):
            yield from _flat(f"{name}.{number}", value)
    elif fields is not None:
        yield name, fields


def store_view(vllm_config: Any, meter: EngineMeter) -> StoreView | None:
    """Return this machine's KV store as the engine uses it; None for an engine without one."""
    from headrace_engine.vllm.kv_cache import BlockHasher

    settings, cache = store_settings(vllm_config.kv_transfer_config), vllm_config.cache_config
    if settings is None or not settings.load:
        return None
    hasher = BlockHasher(cache.prefix_caching_hash_algo, cache.block_size)
    return StoreView(
        settings,
        lambda: meter.store_digest,
        hasher,
        cache.block_size,
        states=lambda: meter.store_states,
    )


def engine_geometry(vllm_config: Any) -> Geometry:
    """Read a started engine's block size, KV bytes per token, block count and prefix cache. The
    blocks of a request are known later (`EngineMeter.on_cache_groups`).

    The prefill engine is taken to hold as many blocks as this one; its answers correct the index.
    """
    from headrace_engine.vllm.engine import kv_token_bytes

    cache = vllm_config.cache_config
    blocks = cache.num_gpu_blocks or 1
    return Geometry(
        block_tokens=cache.block_size,
        kv_bytes_per_token=kv_token_bytes(vllm_config),
        decode_blocks=blocks,
        prefill_blocks=blocks,
        has_prefix_cache=bool(cache.enable_prefix_caching),
    )

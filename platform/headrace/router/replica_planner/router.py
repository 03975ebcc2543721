"""Decides for each request whether its KV is made on the decode engine or on a prefill engine, and
on which of them.

The router keeps the data for the decision: each engine's cached blocks and outstanding work, and
the costs of steps, calls and transfers. It writes them into a view of its own engine and all
prefill replicas, and ``place`` makes the decision. Pure: no Ray, no vLLM, no I/O; the clock and the
random source are passed in.

Not thread-safe: all methods must be called from one thread, in practice one asyncio loop. No method
waits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec
import numpy as np

from headrace.router.placement.place import place
from headrace.router.placement.policies import make_policy
from headrace.router.placement.request import PlacementRequest
from headrace.router.plan import (
    Geometry,
    Plan,
    PlanRequest,
    PrefillReport,
    RouterSettings,
)
from headrace.router.replica_planner.active_request import (
    ActiveRequest,
    computed_pairs,
    computed_tokens,
)
from headrace.router.replica_planner.cost_models import CostModels
from headrace.router.replica_planner.engine_load import EngineLoad
from headrace.router.replica_planner.plan_log import PlanLog
from headrace.router.replica_planner.plan_staleness import stale_reason
from headrace.router.replica_planner.prefill_targets import ANY, PrefillTarget, PrefillTargets
from headrace.router.replica_planner.prefix_index import PrefixIndex, chain_seed, hash_blocks
from headrace.router.replica_planner.replica_view import ReplicaView
from headrace_engine.kv_groups import BlockUse
from headrace_engine.reporting.prompt_backlog import ReceivedPlans
from headrace_engine.step_time import StepTime, pairs_of


class Router:
    """Router of one decode engine: local prefill, or a replica of the deployment ``prefill``."""

    def __init__(
        self,
        settings: RouterSettings,
        geometry: Geometry,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        *,
        prefill: str | None = "prefill",
        decode_step: StepTime | None = None,
        replica: str = "this replica",
    ) -> None:
        """
        Args:
            rng: spreads measurements and short prompts. The default is seeded by the operating
                system, so that no two replicas draw the same numbers.
            decode_step: the decode engine's step times, which the caller fits.
            replica: the decode replica's id.
        """
        self.settings = settings
        self._policy = make_policy(settings.placement)
        self.geometry = geometry
        self.costs = CostModels() if decode_step is None else CostModels(decode_step)
        self.decode_load = EngineLoad()
        self.decode_index = PrefixIndex(geometry.decode_blocks * geometry.has_prefix_cache)
        now = clock()
        #: The prefill replicas that may be asked.
        self.targets = PrefillTargets(
            settings, geometry.prefill_blocks, now, allow_any=prefill is not None
        )
        self._no_target = self.targets.new(ANY, now)
        self._replica, self._prefill = replica, prefill
        self._own = ReplicaView(geometry, settings, replica, prefill)
        self._clock = clock
        self._rng = rng if rng is not None else random.Random()
        self._active: dict[str, ActiveRequest] = {}
        self._plans = PlanLog()
        self._counts = dict.fromkeys(
            ("local", "remote", "explored", "fell_back", "adopted", "stale"), 0
        )
        self._received = ReceivedPlans()
        # An engine that was never measured counts as just stale: it may cost twice the best price.
        self._measured_s = now - settings.remeasure_s
        self._explore_at_s = now
        # Compile now what the disk cache lacks, and not while a request waits.
        place(self._own.view, PlacementRequest("", 1))

    def set_cache_groups(self, use: BlockUse, has_states: bool) -> None:
        """Set what depends on the KV cache groups of the engines.

        Args:
            use: blocks that a request takes.
            has_states: whether hits end only at blocks of which an engine has a state.
        """
        self.geometry = geometry = replace(self.geometry, block_use=use)
        if geometry.has_prefix_cache:
            self.decode_index.resize(max(1, geometry.decode_blocks // use.cached))
        self.decode_index.ends_only = has_states
        self.targets.set_index(max(1, geometry.prefill_blocks // use.cached), has_states)

    # ---- deciding -------------------------------------------------------------------------

    def plan(self, request: PlanRequest, stale: str | None = None) -> Plan:
        """Make a plan, and reserve its work at once.

        Args:
            stale: why the plan that came with the request is not carried out, if one came.

        Raises:
            ValueError: a token id does not fit 32 bits.
        """
        now, hashes = self._clock(), self._hashes(request)
        if request.request_id in self._active:
            self.finished(request.request_id)
        self._own.refresh(
            *(self.settings, self.costs, self.decode_load, self.targets),
            *(self._pending_decodes(), self._measured_s, now),
        )
        plan = place(self._own.view, self._placement_request(request, hashes, now), self._policy)
        if stale is not None:
            self._counts["stale"] += 1
            plan = replace(plan, reasons=(f"the gateway's plan is stale: {stale}", *plan.reasons))
        return self._start(plan, request, hashes, now)

    def stale_reason(self, plan: Plan, request: PlanRequest) -> str | None:
        """Return why a gateway's plan for a request is not carried out, or None if it is."""
        now = self._clock()
        return stale_reason(plan, request, self._replica, self.settings.policy, self.targets, now)

    def adopt(self, plan: Plan, request: PlanRequest) -> Plan:
        """Adopt a gateway's plan that is not stale (`stale_reason`), as if it were made here.

        Raises:
            ValueError: a token id does not fit 32 bits.
        """
        now, hashes = self._clock(), self._hashes(request)
        if request.request_id in self._active:
            self.finished(request.request_id)
        self._counts["adopted"] += 1
        mine = replace(plan, request_id=request.request_id, plan_id=plan.request_id)
        if plan.prefill is not None:
            # Only this router knows whether it has called the prefill replica before.
            cold_s = self.settings.timeout_cold_s if self.targets[plan.replica].cold else 0.0
            timeout_s = max(plan.timeout_s, cold_s)
            mine = replace(mine, prefill=self._prefill, timeout_s=timeout_s)
        return self._start(mine, request, hashes, now)

    def record_received(self, plan: Plan) -> None:
        """Record that a gateway's plan was adopted or replaced.

        The next report includes its work, so the gateway can remove its booking.
        """
        self._received.add(plan.request_id, self._clock())

    def _hashes(self, request: PlanRequest) -> list[bytes]:
        block_tokens = self.geometry.block_tokens
        return hash_blocks(request.token_ids, block_tokens, chain_seed(request.salt))

    def _start(self, plan: Plan, request: PlanRequest, hashes: list[bytes], now: float) -> Plan:
        """Make the request active, and reserve the work of its plan."""
        if plan.explores:
            self._explored(plan, now)
        remote = plan.prefill is not None
        target = self.targets[plan.replica] if remote else self._no_target
        fit = target.steps or self.costs.prefill_step
        step_tokens = self.settings.max_step_tokens
        own_queue_s = target.load.queue_s(fit, step_tokens, now) if remote else 0.0
        tail = request.token_ids[len(hashes) * self.geometry.block_tokens :]
        local_tokens = computed_tokens(plan.fallback if remote else plan.runs)
        seed = chain_seed(request.salt)
        self._active[request.request_id] = ActiveRequest(
            *(plan, hashes, seed, tail, local_tokens, target, own_queue_s, target.cold)
        )
        self._reserve(plan, hashes, target, now)
        return plan

    def _placement_request(
        self, request: PlanRequest, hashes: list[bytes], now: float
    ) -> PlacementRequest:
        targets = sorted(self.targets.values(), key=lambda target: target.replica)
        held = [index.match(hashes) for index in (self.decode_index, *(s.index for s in targets))]
        prefix = hashes[0][:8] if hashes else self._rng.randbytes(8)
        return PlacementRequest(
            request.request_id,
            len(request.token_ids),
            now,
            np.array(held, np.int32),
            available_runs=(request.stored, ()),
            affinity=int.from_bytes(prefix, "little"),
            local_only=request.local_only,
            may_explore=now >= self._explore_at_s,
        )

    def _pending_decodes(self) -> tuple[int, int]:
        """Return the number of requests that will decode here and do not yet, and their tokens."""
        tokens = [
            active.plan.prompt_tokens for active in self._active.values() if not active.decoding
        ]
        return len(tokens), sum(tokens)

    def _explored(self, plan: Plan, now: float) -> None:
        """Record that a plan measures an engine again.

        The next exploration is 1 to 1.5 periods later, so that replicas do not explore together.
        """
        self._counts["explored"] += 1
        self._explore_at_s = now + self.settings.remeasure_s * (1.0 + 0.5 * self._rng.random())
        if plan.prefill is None:
            self._measured_s = now
        else:
            self.targets[plan.replica].measured_s = now

    @property
    def block_compute_s(self) -> float:
        """Predicted seconds that one more block of prompt adds to a step of the decode engine."""
        block = self.geometry.block_tokens
        return self.costs.decode_step.added_s(block, pairs_of(0, block))

    def _reserve(self, plan: Plan, hashes: list[bytes], target: PrefillTarget, now: float) -> None:
        tokens = computed_tokens(plan.runs)
        load, index = self.decode_load, self.decode_index
        if plan.prefill is not None:
            target.breaker.on_sent(plan.request_id, now)
            load, index = target.load, target.index
        load.reserve(plan.request_id, tokens, now, computed_pairs(plan, tokens))
        index.insert(hashes)
        self._counts[plan.kind] += 1
        self._plans.add(plan)

    # ---- outcomes -------------------------------------------------------------------------

    def remote_failed(self, request_id: str, why: str) -> Plan:
        """Record that a remote prefill failed, timed out or lost its KV; return the local plan.

        Opens the circuit breaker of the prefill replica, unless it has closed since the request was
        sent. A request that is no longer active gets its local plan too, without a reservation.

        Raises:
            KeyError: no such request among the last 1,000.
        """
        now = self._clock()
        active = self._active.get(request_id)
        old = active.plan if active is not None else self._plans[request_id]
        target = active.target if active is not None else self.targets.get(old.replica)
        if target is not None:
            target.breaker.on_failure(request_id, why, now)
            target.cold = True
        plan = old.prefilled_locally(why)
        self._plans.add(plan)
        if active is None:
            return plan
        if old.prefill is not None:
            self._counts["fell_back"] += 1
            active.remove_uncertain(
                active.target.index, old.cached_prefill_tokens, self.geometry.block_tokens
            )
        active.target.load.release(request_id, now)
        active.plan = plan
        if not active.decoding:
            tokens = active.uncached_decode_tokens
            self.decode_load.reserve(request_id, tokens, now, computed_pairs(plan, tokens))
            self.decode_index.insert(active.hashes)
        return plan

    def prefill_done(self, request_id: str, report: PrefillReport) -> None:
        """Record that the prefill call returned.

        The models of the call's overhead, and of the wait that other routers cause, learn from the
        report. A request that was sent while the prefill replica was cold teaches no overhead: one
        handshake of seconds would make remote prefill seem expensive for a long time. Neither does
        a prompt with media, whose tensors are on their way for a part of the call.
        """
        now = self._clock()
        active = self._active.get(request_id)
        target = self.targets.get(report.replica)
        if active is not None:
            active.target.load.release(request_id, now)
            target = self.targets.get(report.replica, active.target)
            if target is not active.target:
                active.move_to(target, now, self.geometry.block_tokens)
        if target is not None:
            target.shares_store, target.measured_s = report.shares_store, now
            if not report.has_prefix_cache:
                target.index.resize(0)
        if (active is None or not active.cold) and not report.has_media:
            self.costs.call.observe(report.call_s - report.queue_s - report.compute_s)
        if active is None or active.plan.prefill is None:
            return
        active.call_s = report.call_s
        if active.target.others.observe(report.queue_s - active.own_queue_s):
            active.target.others_at_s = now
        active.remove_lost(
            *(active.target.index, report.cached_tokens),
            *(active.plan.cached_prefill_tokens, self.geometry.block_tokens),
        )

    def first_token(self, request_id: str, seconds_from_plan: float, cached_tokens: int) -> None:
        """Record the first token of the decode engine, which found ``cached_tokens`` in its cache.

        ``cached_tokens`` may count tokens that were transferred. Unknown ids and repeated calls
        are ignored.
        """
        active = self._active.get(request_id)
        if active is None or active.decoding:
            return
        now = self._clock()
        active.decoding = True
        self.decode_load.release(request_id, now)
        active.target.load.release(request_id, now)
        plan = active.plan
        self.decode_load.start(request_id, plan.prompt_tokens)
        block = self.geometry.block_tokens
        active.remove_lost(self.decode_index, cached_tokens, plan.cached_decode_tokens, block)
        self.decode_index.insert(active.hashes)
        if plan.prefill is not None:
            active.target.breaker.on_success(request_id)
            active.target.cold = False
            if active.call_s is not None and not active.cold:
                p = plan.predicted
                known = p["remote.transfer"] + p["remote.decode_queue"] + p["remote.decode"]
                self.costs.handoff.observe(seconds_from_plan - active.call_s - known)

    def finished(self, request_id: str, output_token_ids: Sequence[int] = ()) -> None:
        """Record the end of a request, and release its reservations. Repeated calls are ignored.

        ``output_token_ids`` (all, in order) adds the answer's blocks to the index of cached blocks,
        for the next turn of the conversation. The last token is left out, since its KV is never
        computed.
        """
        active = self._active.pop(request_id, None)
        if active is None:
            return
        now = self._clock()
        self.decode_load.release(request_id, now)
        active.target.load.release(request_id, now)
        self.decode_load.stop(request_id)
        active.target.breaker.on_end(request_id)
        plan = active.plan
        if active.decoding:
            if len(output_token_ids) > 1:
                parent = active.hashes[-1] if active.hashes else active.seed
                rest = [*active.tail, *output_token_ids[:-1]]
                more = hash_blocks(rest, self.geometry.block_tokens, parent)
                self.decode_index.insert(active.hashes + more)
        elif plan.prefill is None:
            active.remove_uncertain(
                self.decode_index, plan.cached_decode_tokens, self.geometry.block_tokens
            )
        elif active.call_s is None:
            active.remove_uncertain(
                active.target.index, plan.cached_prefill_tokens, self.geometry.block_tokens
            )

    # ---- measurements ---------------------------------------------------------------------

    def prefill_step_times(self, fit: StepTime, replica: str = ANY) -> None:
        """Set a prefill engine's step times, which its own replica fitted.

        A replica without step times counts as fast as the replica that sent them last.
        """
        if fit.samples:
            self.costs.prefill_step = fit
            if replica in self.targets:
                self.targets[replica].steps = fit

    def local_step(self, prompt_tokens: int) -> None:
        """Record a step of the decode engine from which its step times have learned."""
        if prompt_tokens > 1:  # after a remote prefill, decode computes one token
            self._measured_s = self._clock()

    def observe_transfer(self, size_bytes: int, seconds: float) -> None:
        """Record a KV transfer over NIXL."""
        self.costs.observe_transfer(size_bytes, seconds)

    def observe_load(self, medium: str, size_bytes: int, seconds: float) -> None:
        """Record a load from a medium of the machine's KV store."""
        self.costs.load(medium).observe(size_bytes, seconds)

    def prefill_members(self, replicas: Collection[str]) -> None:
        """Set the prefill replicas that run."""
        self.targets.set_members(replicas, self._clock())

    def prefill_down(self, why: str, replica: str = ANY) -> None:
        """Record that a prefill replica does not answer: no plan uses it until ``prefill_up``."""
        if replica in self.targets:
            self.targets[replica].mark_down(why, self._clock())

    def prefill_up(self, replica: str = ANY) -> None:
        """Record that a prefill replica answers a probe (`PrefillBreaker.mark_up`)."""
        if replica in self.targets:
            self.targets[replica].breaker.mark_up()

    # ---- state ----------------------------------------------------------------------------

    def explain(self, request_id: str) -> Plan | None:
        """Return the final plan of one of the last 1,000 requests, or None."""
        return self._plans.get(request_id)

    def report_fields(self) -> dict[str, Any]:
        """Return the router's fields of this replica's report (`headrace_engine.reporting`).

        Times are in seconds.
        """
        now, c = self._clock(), self.costs
        step_tokens = self.settings.max_step_tokens
        tokens, pairs = self.decode_load.ahead(c.decode_step, step_tokens, now)
        coming, context = self._pending_decodes()
        return {
            "policy": self.settings.policy,
            "prompts": self.decode_load.waiting_requests,
            "coming": coming,
            "coming_context": context,
            "queued_tokens": tokens,
            "queued_pairs": pairs,
            **c.report_fields(),
            "heard": self._received.recent(now),
        }

    def snapshot(self) -> dict[str, Any]:
        """Return the state for JSON, for status pages and metrics."""
        now, c = self._clock(), self.costs
        return {
            "policy": self.settings.policy,
            "plans": dict(self._counts),
            "active": len(self._active),
            "breaker": self.targets.to_dict(now),
            "load": self.decode_load.to_dict(),
            "engines": {
                **asdict(self.geometry),
                "block_use": msgspec.structs.asdict(self.geometry.block_use),
                "step_tokens": self.settings.max_step_tokens,
            },
            "step_times": {
                "decode": c.decode_step.to_dict(),
                "prefill": c.prefill_step.to_dict(),
            },
            "index_blocks": len(self.decode_index),
            "prefill": {name: target.to_dict(now) for name, target in self.targets.items()},
            "fits": c.to_dict(),
            "transfers": dict(c.transfers),
            "measured_s_ago": now - self._measured_s,
        }

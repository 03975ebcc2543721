"""Decides for each request whether its KV is made on the decode engine or on the prefill engine.

The router keeps what the decision needs (what each engine holds and has ahead, what steps, calls
and transfers cost) and asks ``price`` and ``choose`` for the decision itself. Pure: no Ray, no
vLLM, no I/O; the clock and the random source are passed in.

Not thread-safe: all methods must be called from one thread, in practice one asyncio loop. None
of them waits.
"""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.router.cost import Costs
from headrace.router.index import PrefixIndex, chain_seed, hash_blocks
from headrace.router.load import Breaker, EngineLoad
from headrace.router.plan import (
    Geometry,
    Plan,
    PlanRequest,
    PrefillReport,
    RouterSettings,
)
from headrace.router.price import (
    Ages,
    Situation,
    choose,
    formula,
    longest_steps,
    price,
    remote_timeout_s,
)
from headrace.router.stored import Loaded, worth_loading
from headrace_engine.steptime import StepTime, pairs_of
from headrace_kvstore.supply import Supply

_PLANS_KEPT = 1_000


@dataclass(slots=True)
class _Active:
    """A request between its plan and its end."""

    plan: Plan
    hashes: list[bytes]
    seed: bytes
    tail: Sequence[int]
    uncached_decode_tokens: int
    #: Wait at the prefill engine that this router's own requests explain.
    own_queue_s: float
    #: Sent while the prefill side was cold: its overheads hold the handshake, not the rule.
    cold: bool
    #: The prefill call's measured seconds, once it returned.
    call_s: float | None = None
    decoding: bool = False


class Router:
    """One decode engine's view: local prefill, or the prefill deployment named ``prefill``."""

    def __init__(
        self,
        settings: RouterSettings,
        geometry: Geometry,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        *,
        prefill: str | None = "prefill",
        decode_step: StepTime | None = None,
    ) -> None:
        """``decode_step``: the decode engine's step times, fitted by whoever sees its steps."""
        self.settings = settings
        self.geometry = geometry
        self.costs = Costs() if decode_step is None else Costs(decode_step)
        self.breaker = Breaker(settings.retry_s, settings.retry_max_s)
        self.decode_load = EngineLoad()
        self.prefill_load = EngineLoad()
        self.decode_index = PrefixIndex(geometry.decode_blocks)
        self.prefill_index = PrefixIndex(geometry.prefill_blocks)
        self._prefill = prefill
        self._clock = clock
        self._rng = rng if rng is not None else random.Random(0)
        self._active: dict[str, _Active] = {}
        self._plans: OrderedDict[str, Plan] = OrderedDict()
        self._counts = {"local": 0, "remote": 0, "explored": 0, "fell_back": 0}
        self._moved = {"count": 0, "bytes": 0, "seconds": 0.0}
        self._prefill_steps_seen = False
        self._cold = True
        # Never measured counts as just stale: the dearer side is tried below twice the price.
        now = clock()
        self._local_measured_s = self._remote_measured_s = now - settings.remeasure_s
        self._others_measured_s = now

    # ---- deciding -------------------------------------------------------------------------

    def plan(self, request: PlanRequest) -> Plan:
        """Decide, and reserve at once what the decision uses.

        Raises:
            ValueError: a token id does not fit 32 bits.
        """
        now, g = self._clock(), self.geometry
        seed = chain_seed(request.salt)
        hashes = hash_blocks(request.token_ids, g.block_tokens, seed)
        if request.request_id in self._active:
            self.finished(request.request_id)
        n = len(request.token_ids)
        held_d, held_p = self._held(self.decode_index, hashes, n), 0
        if self._prefill is not None:
            held_p = self._held(self.prefill_index, hashes, n)
        cached_d, cached_p = held_d * g.block_tokens, held_p * g.block_tokens
        running, costs = self.decode_load.running, self.costs
        loaded_d = self._loaded(
            request.stored_decode, cached_d, n, costs.decode_step, self.decode_load
        )
        loaded_p = self._loaded(
            request.stored_prefill, cached_p, n, costs.prefill_step, self.prefill_load
        )
        own_queue_s = self.prefill_load.queue_s(
            self.costs.prefill_step, self.settings.max_step_tokens, now
        )
        s = Situation(
            uncached_decode_tokens=max(1, n - cached_d - loaded_d.tokens),
            uncached_prefill_tokens=max(1, n - cached_p - loaded_p.tokens),
            transfer_bytes=(math.ceil(n / g.block_tokens) - held_d) * g.block_bytes,
            running=running,
            decode_queue_s=self.decode_load.queue_s(
                self.costs.decode_step, self.settings.max_step_tokens, now
            ),
            prefill_queue_s=own_queue_s + self._others_wait_s(now),
            load_decode_bytes=loaded_d.bytes_read(g.kv_bytes_per_token),
            load_prefill_bytes=loaded_p.bytes_read(g.kv_bytes_per_token),
            pull_decode_s=loaded_d.wait_s,
            pull_prefill_s=loaded_p.wait_s,
            prompt_tokens=n,
            running_context=self.decode_load.running_context,
        )
        p = price(s, self.costs, self.settings)
        remote, reasons = self._decide(request, s, p, now)
        loaded = loaded_p if remote else loaded_d
        plan = Plan(
            request_id=request.request_id,
            prefill=self._prefill if remote else None,
            prompt_tokens=n,
            cached_decode_tokens=cached_d,
            cached_prefill_tokens=cached_p,
            loaded_tokens=loaded.tokens,
            loaded_from=loaded.by_medium,
            predicted=p,
            timeout_s=self._timeout_s(p) if remote else 0.0,
            reasons=(*reasons, formula(p)),
        )
        tail = request.token_ids[len(hashes) * g.block_tokens :]
        self._active[request.request_id] = _Active(
            plan, hashes, seed, tail, s.uncached_decode_tokens, own_queue_s, self._cold
        )
        self._reserve(plan, s, hashes, now)
        return plan

    def _decide(
        self, request: PlanRequest, s: Situation, p: dict[str, float], now: float
    ) -> tuple[bool, tuple[str, ...]]:
        """(remote?, why): what forbids remote first, then what forces it, then the price."""
        settings = self.settings
        if request.local_only is not None:
            return False, (f"local only: {request.local_only}",)
        if self._prefill is None:
            return False, ("there is no prefill deployment",)
        if settings.policy == "local":
            return False, ("policy is local",)
        refusal = self.breaker.refusal(now)
        if refusal is not None:
            return False, (refusal,)
        if settings.policy == "remote":
            return True, ("policy is remote",)
        ages = Ages(now - self._local_measured_s, now - self._remote_measured_s)
        choice = choose(p, longest_steps(s, self.costs, settings), ages, settings)
        if choice.explores:
            self._counts["explored"] += 1
            # Not all replicas at once: the next look comes 0 to half a period later.
            at = now + 0.5 * settings.remeasure_s * self._rng.random()
            if choice.kind == "remote":
                self._remote_measured_s = at
            else:
                self._local_measured_s = at
        return choice.kind == "remote", (choice.why,)

    def _timeout_s(self, p: dict[str, float]) -> float:
        return remote_timeout_s(p, self.costs, self.settings, cold=self._cold)

    def _held(self, index: PrefixIndex, hashes: list[bytes], prompt_tokens: int) -> int:
        """Blocks in an engine's own cache that spare computation."""
        block = self.geometry.block_tokens
        return self._useful(index.match(hashes) * block, prompt_tokens) // block

    def _loaded(
        self,
        supplies: Sequence[Supply],
        cached_tokens: int,
        prompt_tokens: int,
        step: StepTime,
        load: EngineLoad,
    ) -> Loaded:
        """What an engine loads of what the store could supply."""

        def seconds(loaded: Loaded) -> float:
            left = max(1, prompt_tokens - cached_tokens - loaded.tokens)
            compute_s = step.prefill_s(
                left,
                pairs_of(max(0, prompt_tokens - left), prompt_tokens),
                step_tokens=self.settings.max_step_tokens,
                rows=load.running,
                context=load.running_context,
            )
            read = loaded.bytes_read(self.geometry.kv_bytes_per_token)
            return loaded.wait_s + max(compute_s, self.costs.load_s(read))

        held = sum(supply.length for supply in supplies)
        useful = self._useful(held, prompt_tokens)
        return worth_loading(supplies, cached_tokens, useful, seconds)

    @property
    def block_compute_s(self) -> float:
        """Predicted seconds that one more block of prompt adds to a step of the decode engine."""
        block = self.geometry.block_tokens
        return self.costs.decode_step.added_s(block, pairs_of(0, block))

    def _useful(self, held_tokens: int, prompt_tokens: int) -> int:
        """Tokens of whole blocks that spare computation: vLLM always computes at least the last."""
        block = self.geometry.block_tokens
        return min(held_tokens, max(0, prompt_tokens - 1)) // block * block

    def _others_wait_s(self, now: float) -> float:
        """Queue that others make at the prefill engine; halves with each ``remeasure_s`` of age."""
        age = max(0.0, now - self._others_measured_s)
        return float(self.costs.others.seconds() * 0.5 ** (age / self.settings.remeasure_s))

    def _reserve(self, plan: Plan, s: Situation, hashes: list[bytes], now: float) -> None:
        if plan.prefill is None:
            tokens = s.uncached_decode_tokens
            self.decode_load.reserve(plan.request_id, tokens, now, s.pairs(tokens))
            self.decode_index.insert(hashes)
        else:
            self.breaker.sent(plan.request_id, now)
            tokens = s.uncached_prefill_tokens
            self.prefill_load.reserve(plan.request_id, tokens, now, s.pairs(tokens))
            self.prefill_index.insert(hashes)
        self._counts[plan.kind] += 1
        self._keep(plan)

    def _keep(self, plan: Plan) -> None:
        self._plans[plan.request_id] = plan
        self._plans.move_to_end(plan.request_id)
        while len(self._plans) > _PLANS_KEPT:
            self._plans.popitem(last=False)

    # ---- what became of it ----------------------------------------------------------------

    def remote_failed(self, request_id: str, why: str) -> Plan:
        """The remote prefill failed or timed out, or its KV did not come: the plan to do instead.

        Opens the breaker, unless it has closed since the request went out. A request that is not
        active any more gets its local plan too, without a reservation.

        Raises:
            KeyError: no such request among the last 1,000.
        """
        now = self._clock()
        active = self._active.get(request_id)
        old = active.plan if active is not None else self._plans[request_id]
        self.breaker.failed(request_id, why, now)
        self._cold = True
        plan = replace(
            old,
            prefill=None,
            timeout_s=0.0,
            reasons=(f"remote prefill failed, prefilling locally: {why}", *old.reasons),
        )
        self._keep(plan)
        if active is None:
            return plan
        if old.prefill is not None:
            self._counts["fell_back"] += 1
            self._unsure(self.prefill_index, active, old.cached_prefill_tokens)
        self.prefill_load.release(request_id, now)
        active.plan = plan
        if not active.decoding:
            tokens, end = active.uncached_decode_tokens, plan.prompt_tokens
            pairs = pairs_of(max(0, end - tokens), end)
            self.decode_load.reserve(request_id, tokens, now, pairs)
            self.decode_index.insert(active.hashes)
        return plan

    def prefill_done(self, request_id: str, report: PrefillReport) -> None:
        """The prefill call came back; teaches the call's overhead and the queue that others make.

        A request that was sent while the prefill side was cold teaches no overhead: one handshake
        of seconds would make remote prefill look dear for a long time.

        The prefill engine fits its step times itself and sends them (``prefill_step_times``); only
        if it never did, they are learned from the report.
        """
        now = self._clock()
        self.prefill_load.release(request_id, now)
        active = self._active.get(request_id)
        if active is None or not active.cold:
            self.costs.call.observe(report.call_s - report.queue_s - report.compute_s)
        self._remote_measured_s = max(now, self._remote_measured_s)
        if not self._prefill_steps_seen:
            first, last = report.cached_tokens, report.cached_tokens + report.computed_tokens
            pairs = pairs_of(first, last)
            self.costs.prefill_step.observe(
                report.computed_tokens, 0, 0, 0, pairs, report.compute_s
            )
        if active is None or active.plan.prefill is None:
            return
        active.call_s = report.call_s
        expected_s = active.own_queue_s + active.plan.predicted["remote.pull"]
        if self.costs.others.observe(report.queue_s - expected_s):
            self._others_measured_s = now
        self._correct(
            self.prefill_index, active, report.cached_tokens, active.plan.cached_prefill_tokens
        )

    def first_token(self, request_id: str, seconds_from_plan: float, cached_tokens: int) -> None:
        """The decode engine made the first token, having found ``cached_tokens`` in its cache.

        ``cached_tokens`` may count tokens that were transferred. Unknown ids and repeated calls
        are ignored.
        """
        active = self._active.get(request_id)
        if active is None or active.decoding:
            return
        now = self._clock()
        active.decoding = True
        self.decode_load.release(request_id, now)
        self.prefill_load.release(request_id, now)
        plan = active.plan
        self.decode_load.start(request_id, plan.prompt_tokens)
        self._correct(self.decode_index, active, cached_tokens, plan.cached_decode_tokens)
        self.decode_index.insert(active.hashes)
        if plan.prefill is not None:
            self.breaker.succeeded(request_id)
            self._cold = False
            if active.call_s is not None and not active.cold:
                p = plan.predicted
                known = p["remote.transfer"] + p["remote.decode_queue"] + p["remote.decode"]
                self.costs.handoff.observe(seconds_from_plan - active.call_s - known)

    def finished(self, request_id: str, output_token_ids: Sequence[int] = ()) -> None:
        """The request ended in any way: releases all that it still holds; may be called again.

        ``output_token_ids`` (all, in order) makes the answer's blocks known as cached, for the
        next turn of the conversation. The last token's KV is never computed, so it is left out.
        """
        active = self._active.pop(request_id, None)
        if active is None:
            return
        now = self._clock()
        self.decode_load.release(request_id, now)
        self.prefill_load.release(request_id, now)
        self.decode_load.stop(request_id)
        self.breaker.ended(request_id)
        plan = active.plan
        if active.decoding:
            if len(output_token_ids) > 1:
                parent = active.hashes[-1] if active.hashes else active.seed
                rest = [*active.tail, *output_token_ids[:-1]]
                more = hash_blocks(rest, self.geometry.block_tokens, parent)
                self.decode_index.insert(active.hashes + more)
        elif plan.prefill is None:
            self._unsure(self.decode_index, active, plan.cached_decode_tokens)
        elif active.call_s is None:
            self._unsure(self.prefill_index, active, plan.cached_prefill_tokens)

    def _correct(
        self, index: PrefixIndex, active: _Active, cached_tokens: int, predicted_tokens: int
    ) -> None:
        """The engine found fewer cached tokens than predicted: learn which blocks it lost.

        Blocks behind the predicted ones have been computed meanwhile, so they stay.
        """
        if cached_tokens < predicted_tokens:
            block = self.geometry.block_tokens
            lost = active.hashes[: predicted_tokens // block]
            index.truncate(lost, cached_tokens // block)
            if index is self.prefill_index:
                index.insert(active.hashes)

    def _unsure(self, index: PrefixIndex, active: _Active, cached_tokens: int) -> None:
        """The computation may not have happened: forget the blocks that it would have made."""
        index.truncate(active.hashes, cached_tokens // self.geometry.block_tokens)

    # ---- what is measured -----------------------------------------------------------------

    def prefill_step_times(self, fit: StepTime) -> None:
        """The prefill engine's step times, as that engine has fitted them."""
        if fit.samples:
            self.costs.prefill_step = fit
            self._prefill_steps_seen = True

    def step_alone_s(self, shape: Sequence[float], seconds: float) -> float:
        """What a step of the decode engine would have taken alone; its step times learn that.

        ``shape``: as ``StepTime.seconds``.
        """
        model, shared = self.costs.decode_step, self.costs.shared
        if not (model.samples and 0.0 < seconds < math.inf):
            return seconds
        overlap = self.prefill_load.busy_share(seconds, self._clock())
        shared.observe(overlap, model.seconds(*shape), seconds)
        return shared.alone_s(seconds, overlap)

    def local_step(self, prompt_tokens: int) -> None:
        """The decode engine made a step, from which its step times have learned."""
        if prompt_tokens > 1:  # one token is what a remote prefill leaves to decode
            self._local_measured_s = max(self._clock(), self._local_measured_s)

    def observe_transfer(self, size_bytes: int, seconds: float) -> None:
        """One KV transfer over NIXL."""
        if self.costs.transfer.observe(size_bytes, seconds):
            self._moved["count"] += 1
            self._moved["bytes"] += size_bytes
            self._moved["seconds"] += seconds

    def observe_load(self, medium: str, size_bytes: int, seconds: float) -> None:
        """One load from a medium of the machine's KV store."""
        self.costs.load(medium).observe(size_bytes, seconds)

    def prefill_down(self, why: str) -> None:
        """The prefill side is gone, and its cache with it: all goes local until it is up."""
        self.breaker.down(why, self._clock())
        self.prefill_index.clear()
        self._cold = True

    def prefill_up(self) -> None:
        """The prefill side answers: closes the breaker."""
        self.breaker.up()

    # ---- what can be seen -----------------------------------------------------------------

    def explain(self, request_id: str) -> Plan | None:
        """The plan of one of the last 1,000 requests, as it ended up."""
        return self._plans.get(request_id)

    def snapshot(self) -> dict[str, Any]:
        """JSON-able state for status pages and metrics."""
        now, c = self._clock(), self.costs
        return {
            "policy": self.settings.policy,
            "plans": dict(self._counts),
            "active": len(self._active),
            "breaker": self.breaker.to_dict(now),
            "loads": {
                "decode": self.decode_load.to_dict(),
                "prefill": self.prefill_load.to_dict(),
            },
            "index_blocks": {
                "decode": len(self.decode_index),
                "prefill": len(self.prefill_index),
            },
            "fits": {
                "decode_step": c.decode_step.summary(),
                "prefill_step": c.prefill_step.summary(),
                "transfer": c.transfer.to_dict(),
                **{f"load_{medium}": model.to_dict() for medium, model in c.loads.items()},
                "call": c.call.to_dict(),
                "handoff": c.handoff.to_dict(),
                "others": c.others.to_dict(),
                "shared_cores": c.shared.to_dict(),
            },
            "transfers": dict(self._moved),
            "measured_s_ago": {
                "local": now - self._local_measured_s,
                "remote": now - self._remote_measured_s,
            },
        }

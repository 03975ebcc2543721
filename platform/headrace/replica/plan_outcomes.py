"""Results of a replica's plans: the hits that were reached, and the traffic of the plans.

Hits: of a prompt's tokens, those that some engine's cache or some node's store held when the plan
was made are *reachable*; those that the engine which prefilled it did not compute are *reached*.

Pure: no Ray, no vLLM, no I/O. Call it from one thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from headrace.router.plan import Plan
from headrace.router.replica_planner.cost_models import CostModels
from headrace_engine.step_time import pairs_of

MAX_OUTCOMES = 1_000
"""Number of requests that are remembered, as the router remembers plans."""
TRAFFIC_REQUESTS = 256
"""Number of last requests that make up the traffic."""


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """Result of one plan.

    Attributes:
        ttft_s: seconds from the plan to the first token.
        cached_tokens: prompt tokens that the engine did not compute; for a remote prefill, the
            prefill engine.
    """

    ttft_s: float
    cached_tokens: int


class _TrafficSample(NamedTuple):
    """One request of the traffic."""

    at_s: float
    prompt_tokens: int
    computed_tokens: int
    answer_tokens: int
    local_s: float
    """Seconds to compute the computed part of its prompt on the decode engine alone."""
    remote_s: float
    """Seconds to compute it on a prefill engine, the call's overhead included."""
    move_s: float
    """Seconds to move the prompt's KV to the decode engine, and to hand it over."""


class PlanOutcomes:
    """Results of the plans of one decode replica.

    Args:
        costs: the replica's fits.
        step_tokens: the engines' token budget.
        token_bytes: KV bytes of a token.

    Attributes:
        sums: sums over all requests since the start, by name.
    """

    def __init__(
        self,
        costs: CostModels,
        step_tokens: int,
        token_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._costs, self._step_tokens, self._token_bytes = costs, step_tokens, token_bytes
        self._clock = clock
        self._outcomes: OrderedDict[str, PlanOutcome] = OrderedDict()
        self._computed: dict[str, int] = {}
        self._seen: deque[_TrafficSample] = deque(maxlen=TRAFFIC_REQUESTS)
        self.sums: dict[str, float] = {
            "requests": 0,
            "prompt_tokens": 0,
            "reachable_tokens": 0,
            "reached_tokens": 0,
        }

    def record_prefill(self, request_id: str, computed_tokens: int) -> None:
        """Record how many of a prompt's tokens a prefill engine computed."""
        self._computed[request_id] = computed_tokens

    def first_token(self, plan: Plan, ttft_s: float, cached_tokens: int) -> None:
        """Record a request's first token.

        Args:
            plan: the plan that was carried out.
            cached_tokens: prompt tokens that the decode engine did not compute.
        """
        computed = self._computed.get(plan.request_id)
        if plan.prefill is not None and computed is not None:
            cached_tokens = max(0, plan.prompt_tokens - computed)
        self._outcomes[plan.request_id] = PlanOutcome(ttft_s, cached_tokens)
        while len(self._outcomes) > MAX_OUTCOMES:
            self._outcomes.popitem(last=False)
        self.sums["requests"] += 1
        self.sums["prompt_tokens"] += plan.prompt_tokens
        self.sums["reachable_tokens"] += plan.reachable_tokens
        self.sums["reached_tokens"] += min(cached_tokens, plan.prompt_tokens)

    def finished(self, plan: Plan, answer_tokens: int) -> None:
        """Record a request's end. A request without a first token is no part of the traffic."""
        self._computed.pop(plan.request_id, None)
        found = self._outcomes.get(plan.request_id)
        if found is None:
            return
        end = plan.prompt_tokens
        tokens = max(1, end - found.cached_tokens)
        pairs, costs = pairs_of(max(0, end - tokens), end), self._costs
        local_s, remote_s = (
            fit.prefill_s(tokens, pairs, step_tokens=self._step_tokens)
            for fit in (costs.decode_step, costs.prefill_step)
        )
        remote_s += costs.call.seconds()
        move_s = costs.transfer.seconds(end * self._token_bytes) + costs.handoff.seconds()
        self._seen.append(
            _TrafficSample(self._clock(), end, tokens, answer_tokens, local_s, remote_s, move_s)
        )

    def of(self, request_id: str) -> dict[str, float] | None:
        """Return the JSON-able outcome of a request, if it is one of the last `MAX_OUTCOMES`."""
        found = self._outcomes.get(request_id)
        return None if found is None else asdict(found)

    def snapshot(self) -> dict[str, Any]:
        """Return, JSON-able, the sums since the start, and `traffic`.

        `traffic` has means over the last `TRAFFIC_REQUESTS` requests: requests a second, tokens,
        seconds, and squares of the seconds that prompts take.
        """
        traffic: dict[str, float] = {"requests": len(self._seen)}
        if self._seen:
            names = _TrafficSample._fields[1:]
            columns = np.array([seen[1:] for seen in self._seen], np.float64)
            traffic |= dict(zip(names, columns.mean(axis=0).tolist(), strict=True))
            for name in ("local_s", "remote_s"):
                squares = columns[:, names.index(name)] ** 2
                traffic[f"{name}_square"] = float(squares.mean())
            seconds = self._clock() - self._seen[0].at_s
            traffic["rate"] = (len(self._seen) - 1) / seconds if seconds > 0 else 0.0
        return {**self.sums, "traffic": traffic}

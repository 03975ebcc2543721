"""The gateway's admission in the simulator, before the gateway's own placement.

SLO classes, tickets, fair shares, costs and the capacity of the replicas are the gateway's code
(`headrace.gateway.admission`). The queue around them (`admission_queue`: turns, polls of the
replicas, reports of other gateways) is implemented again here for the simulation's clock. It leaves
out two terms of the capacity: requests that no report shows yet (`sent`), and
`prefill_safety_factor`.

A new request is sent, waits or is refused, as at a gateway. A waiting request is placed at its
turn. A gateway knows only the number of bytes of a prompt that arrives; here the bytes are the
tokens. It learns from the plans how many of them are cached; that it asks for the keys of prompts
that wait is left out. Several gateways get the requests in
turn, share the engines, and tell each other once a second how much each tenant has used.

The gateways' queues run on the simulation's clock. A request that is placed again after a failure
was admitted before, and does not pass admission again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.gateway.admission.admission_controller import AdmissionController, Refusal, Ticket
from headrace.gateway.admission.admission_queue import (
    PEER_POLL_INTERVAL_S,
    POLL_INTERVAL_S,
    REFRESH_INTERVAL_S,
)
from headrace.gateway.admission.capacity import Capacity, compute_capacity
from headrace.gateway.admission.slo_classes import DEFAULT, SloClass
from headrace_lab.simulate.best_case import best_case
from headrace_lab.simulate.cluster_state import EnginePair, PromptRequest
from headrace_lab.simulate.hardware import Engine, Hardware, prefill_s
from headrace_lab.simulate.headrace_policy import HeadracePolicy
from headrace_lab.simulate.outcome import first_token_seconds, measure_outcome
from headrace_lab.simulate.run import Simulation, SimulationRun, SimulationSettings, check
from headrace_lab.simulate.state import DONE, NEW
from headrace_lab.simulate.trace import Workload

_PROMPT_TOKENS, _GAIN = 2048.0, 0.05


@dataclass(frozen=True, slots=True)
class Tenancy:
    """Tenants and SLO classes of the requests, and the gateways that get them.

    Attributes:
        tenant: number of each request's tenant, int [requests].
        slo: SLO class of each tenant's requests; further tenants have the last one.
        gateways: number of gateways that share the engines.
        gateway: number of the gateway that gets each request, int [requests]; None for in turn.
        max_waiting: maximum number of requests in a gateway's queue.
    """

    tenant: NDArray[np.int64]
    slo: Sequence[SloClass] = (DEFAULT,)
    gateways: int = 1
    gateway: NDArray[np.int64] | None = None
    max_waiting: int = 1024

    def class_of(self, tenant: int) -> SloClass:
        return self.slo[min(tenant, len(self.slo) - 1)]


@dataclass(frozen=True, slots=True)
class Admitted:
    """Outcome of each request's admission; arrays [requests].

    Attributes:
        refused: whether the request was refused at once.
        expired: whether it was refused after it had waited.
        queued_s: its seconds in the queue; nan if it was not admitted.
        retry_s: `Retry-After` of a refused request, else nan.
        admissions: the gateways' `AdmissionController` objects at the end.
    """

    refused: NDArray[np.bool_]
    expired: NDArray[np.bool_]
    queued_s: NDArray[np.float64]
    retry_s: NDArray[np.float64]
    admissions: Sequence[AdmissionController]


@dataclass(slots=True)
class _Gateway:
    admission: AdmissionController
    charged_before: dict[str, float] = field(default_factory=dict)


class _AdmittedSimulation(Simulation):
    """A run with queues before the engines."""

    policy: HeadracePolicy

    def __init__(
        self,
        work: Workload,
        hardware: Hardware,
        prefills: int,
        decodes: int,
        policy: HeadracePolicy,
        settings: SimulationSettings,
        tenancy: Tenancy,
    ) -> None:
        super().__init__(work, hardware, prefills, decodes, policy, settings)
        one = int(tenancy.tenant.max(initial=0)) == 0
        self.tenancy = tenancy
        self.gateways = [
            _Gateway(AdmissionController(tenancy.max_waiting, one_tenant=one))
            for _ in range(tenancy.gateways)
        ]
        count = len(work)
        self.result = Admitted(
            np.zeros(count, np.bool_),
            np.zeros(count, np.bool_),
            np.full(count, np.nan),
            np.full(count, np.nan),
            [gateway.admission for gateway in self.gateways],
        )
        self._capacity, self._polled_s = Capacity(), -math.inf
        self._requests: dict[Ticket, int] = {}
        self._under_way: dict[int, tuple[_Gateway, Ticket]] = {}
        self._turn_s, self._peers_s = 0.0, PEER_POLL_INTERVAL_S
        self._now: tuple[_Gateway, Ticket] | None = None
        self._prompt_tokens = _PROMPT_TOKENS

    def _advance(self, until_s: float) -> None:
        while self._requests and self._turn_s < until_s:
            if self._turn_s > float(self.s.now_s[0]):
                super()._advance(self._turn_s)
            self._turn(max(self._turn_s, float(self.s.now_s[0])))
            self._turn_s += POLL_INTERVAL_S
        super()._advance(until_s)

    def _place(self, r: int, now_s: float) -> None:
        if self.s.req[r]["phase"] != NEW:
            super()._place(r, now_s)
            return
        chosen = self.tenancy.gateway
        gateway = self.gateways[r % len(self.gateways) if chosen is None else int(chosen[r])]
        tenant = int(self.tenancy.tenant[r])
        ticket = gateway.admission.arrive(
            *(str(tenant), self.tenancy.class_of(tenant), int(self.s.req["prompt"][r]), now_s),
            self._capacity_at(now_s, REFRESH_INTERVAL_S),
        )
        if isinstance(ticket, Refusal):
            self.result.refused[r], self.result.retry_s[r] = True, ticket.retry_after_s
            self.s.ev.count[4] += 1
        elif ticket.is_waiting:
            self._requests[ticket] = r
            self._turn_s = max(self._turn_s, now_s + POLL_INTERVAL_S)
        else:
            self._start(gateway, ticket, r, now_s)

    def _turn(self, now_s: float) -> None:
        for gateway in self.gateways:
            admission = gateway.admission
            while (ticket := admission.pop_expired(now_s)) is not None:
                self.result.expired[self._requests.pop(ticket)] = True
                self.s.ev.count[4] += 1
            capacity = self._capacity_at(now_s, POLL_INTERVAL_S)
            while (ticket := admission.next(now_s, capacity)) is not None:
                self._start(gateway, ticket, self._requests.pop(ticket), now_s)

    def _start(self, gateway: _Gateway, ticket: Ticket, r: int, now_s: float) -> None:
        self.result.queued_s[r] = now_s - ticket.arrived_s
        self._now = self._under_way[r] = gateway, ticket
        super()._place(r, now_s)
        self._now = None

    def _send(self, r: int, choice: EnginePair, request: PromptRequest, need: int) -> None:
        super()._send(r, choice, request, need)
        if self._now is None:
            return
        gateway, ticket = self._now
        e = choice.decode if choice.prefill is None else choice.prefill
        block = self.s.limits.block_tokens
        tokens = need - min(int(request.store[e]), (need - 1) // block) * block
        side = self.work_side(e)
        seconds = prefill_s(side.curve, tokens, need, side.step_tokens)
        gateway.admission.record_plan(ticket, seconds)
        self._prompt_tokens += _GAIN * (tokens - self._prompt_tokens)

    def work_side(self, e: int) -> Engine:
        hardware = self.cluster.hardware
        return hardware.prefill if e < self.cluster.prefills else hardware.decode

    def _capacity_at(self, now_s: float, every_s: float) -> Capacity:
        if now_s - self._polled_s < every_s:
            return self._capacity
        self._polled_s = now_s
        self._note_ended()
        if now_s >= self._peers_s:
            self._share_usage()
            self._peers_s = now_s + PEER_POLL_INTERVAL_S
        view = self.policy.current_view(self.cluster, self.reports, now_s)
        self._capacity = compute_capacity(
            view,
            now_s,
            prompt_tokens=self._prompt_tokens,
            itl_s=min(gateway.admission.itl_s for gateway in self.gateways),
        )
        for gateway in self.gateways:
            gateway.admission.set_engines(priced=True, engines=self._capacity.engines)
        return self._capacity

    def _note_ended(self) -> None:
        numbers = np.fromiter(self._under_way, np.int64, len(self._under_way))
        for r in numbers[self.s.req["phase"][numbers] == DONE].tolist():
            gateway, ticket = self._under_way.pop(r)
            answer_s = float(self.s.req["end_s"][r] - self.s.req["first_s"][r])
            if ticket.sent_s is not None:
                gateway.admission.record_first_token(
                    ticket, float(self.s.req["first_s"][r]) - ticket.sent_s
                )
            gateway.admission.record_end(ticket, answer_s, self._capacity.rows)

    def _share_usage(self) -> None:
        charges = [dict(gateway.admission.charged_s) for gateway in self.gateways]
        for at, gateway in enumerate(self.gateways):
            for other, had in enumerate(charges):
                if other != at:
                    for tenant, seconds in had.items():
                        more_s = seconds - self.gateways[other].charged_before.get(tenant, 0.0)
                        if more_s > 0.0:
                            gateway.admission.record_peer_usage(tenant, more_s)
        for gateway, had in zip(self.gateways, charges, strict=True):
            gateway.charged_before = had


def simulate_admitted(
    work: Workload,
    hardware: Hardware,
    prefills: int,
    decodes: int,
    policy: HeadracePolicy,
    tenancy: Tenancy,
    settings: SimulationSettings | None = None,
) -> tuple[SimulationRun, Admitted]:
    """Play a workload as `simulate` does, with admission before the placement.

    Raises:
        SimulationError: as in `simulate`.
    """
    settings = settings or SimulationSettings()
    check(work, hardware, prefills, decodes, settings)
    simulation = _AdmittedSimulation(work, hardware, prefills, decodes, policy, settings, tenancy)
    simulation.play(None)
    from_s = settings.warm_share * work.seconds
    reachable = best_case(work, hardware, from_s).hit_rate
    with np.errstate(invalid="ignore"):  # refused requests have no end
        until_s = float(simulation.s.now_s[0])
        outcome = measure_outcome(simulation.s, settings.targets, reachable, from_s, until_s)
    course = {name: np.array(values) for name, values in simulation.course.items()}
    ttft_s = first_token_seconds(simulation.s, from_s, until_s)
    return SimulationRun(outcome, course, ttft_s, simulation.s), simulation.result

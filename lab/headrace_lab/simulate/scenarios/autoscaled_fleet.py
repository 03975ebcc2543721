"""Replicas that a scaling policy starts and stops during a run.

An ordered replica serves after `start_s`, with an empty KV cache; the nodes' stores are running. To
scale down, replicas that are still starting are cancelled first, the latest first; then the latest
ready one is drained: it takes no new requests and finishes its own, after which its engine is free.
A replica's GPU is paid for from the order until the engine is free. A request that arrives while no
decode engine is open waits, and is placed again every `RETRY_S` until one is.

Engines keep their numbers: engines that do not exist at a time are closed. A run has as many
engines of each role as the maximum number of replicas.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_lab.simulate import event_loop
from headrace_lab.simulate.best_case import best_case
from headrace_lab.simulate.hardware import Hardware
from headrace_lab.simulate.headrace_policy import HeadracePolicy
from headrace_lab.simulate.outcome import first_token_seconds, measure_outcome
from headrace_lab.simulate.run import Simulation, SimulationRun, SimulationSettings, check
from headrace_lab.simulate.state import DONE, NEW
from headrace_lab.simulate.trace import Workload

RETRY_S = 0.2
"""Seconds after which a request that no decode engine could take is placed again."""


class RoleObservation(NamedTuple):
    """The replicas of one role, as a scaling policy sees them.

    Attributes:
        ready: number of replicas that take requests.
        starting: number of replicas that were ordered and do not serve yet.
        draining: number of replicas that finish their requests.
        ongoing: requests on their way to the role's engines or on them; for decode also those that
            are not placed yet.
        busy: share of the time since the last observation that a ready engine
            computed, on average.
    """

    ready: int
    starting: int
    draining: int
    ongoing: int
    busy: float


class FleetObservation(NamedTuple):
    """State of the replicas and requests that a scaling policy sees.

    Attributes:
        arrived: number of requests that arrived since the last observation.
        ended: numbers of the requests that ended since the last observation.
        requests: the simulation's table of all requests.
    """

    now_s: float
    prefill: RoleObservation
    decode: RoleObservation
    arrived: int
    ended: NDArray[np.int64]
    requests: NDArray[np.void]


Scaler = Callable[[FleetObservation], tuple[int, int]]
"""Returns the wanted numbers of replicas, prefill and decode."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Settings of how replicas start.

    Attributes:
        start_s: seconds from the order until a replica serves.
        every_s: seconds between two observations of the policy.
        first: number of replicas of each role at the start.
    """

    start_s: float = 120.0
    every_s: float = 15.0
    first: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Cost and number of the replicas in a run.

    Attributes:
        gpu_s: engine seconds paid for in the measured part.
        ordered: number of replicas that were ordered.
        course: one row for each observation: time, and the paid replicas of each role.
    """

    gpu_s: float
    ordered: int
    course: NDArray[np.float64]


@dataclass(slots=True)
class _Replicas:
    """Engines of one role, by state."""

    first: int
    count: int
    ready: list[int] = field(default_factory=list)
    starting: list[tuple[float, int]] = field(default_factory=list)
    draining: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    ordered: int = 0

    @property
    def paid(self) -> int:
        return len(self.ready) + len(self.starting) + len(self.draining)


class _AutoscaledSimulation(Simulation):
    def __init__(
        self,
        work: Workload,
        hardware: Hardware,
        most: tuple[int, int],
        policy: HeadracePolicy,
        settings: SimulationSettings,
        scaler: Scaler,
        fleet: FleetSettings,
    ) -> None:
        super().__init__(work, hardware, *most, policy, settings)
        self.scaler, self.fleet = scaler, fleet
        self.roles = _Replicas(0, most[0]), _Replicas(most[0], most[1])
        for role, first in zip(self.roles, fleet.first, strict=True):
            engines = range(role.first, role.first + role.count)
            role.ready, role.closed = list(engines[:first]), list(engines[first:])[::-1]
            for e in role.closed:
                event_loop.stop(self.s, e)
        self.cluster.report.alive = self.s.eng["alive"] & self.s.eng["open"]
        self.from_s = settings.warm_share * work.seconds
        self.gpu_s, self._paid_s, self._next_observation_s = 0.0, 0.0, 0.0
        self.rows: list[tuple[float, float, float]] = []
        self._homeless: list[tuple[float, int]] = []
        self._arrived = 0
        self._busy = np.zeros(self.engines)
        self._open: NDArray[np.int64] = np.zeros(0, np.int64)
        self._next = 0

    def _place(self, r: int, now_s: float) -> None:
        if self.s.req[r]["phase"] == NEW and r >= self._next:
            self._arrived += 1
            self._next = r + 1
        self.reports.deliver(self.cluster, now_s)
        if self.cluster.alive[self.cluster.prefills :].any():
            super()._place(r, now_s)
        else:
            heapq.heappush(self._homeless, (now_s + RETRY_S, r))

    def _tick(self, at_s: float) -> None:
        if self.from_s <= at_s <= self.work.seconds:
            paid = sum(role.paid for role in self.roles)
            self.gpu_s += paid * (at_s - max(self._paid_s, self.from_s))
        self._paid_s = at_s
        for role in self.roles:
            self._turn(role, at_s)
        while self._homeless and self._homeless[0][0] <= at_s:
            self._place(heapq.heappop(self._homeless)[1], at_s)
        if at_s >= self._next_observation_s and at_s <= self.work.seconds:
            self._next_observation_s = at_s + self.fleet.every_s
            for role, wanted in zip(self.roles, self.scaler(self._observe(at_s)), strict=True):
                self._order(role, wanted, at_s)
            self.rows.append((at_s, float(self.roles[0].paid), float(self.roles[1].paid)))

    def _turn(self, role: _Replicas, now_s: float) -> None:
        """Open the engines that have started, and close drained engines without requests."""
        while role.starting and role.starting[0][0] <= now_s:
            _, e = heapq.heappop(role.starting)
            event_loop.recover(self.s, e)
            role.ready.append(e)
        eng, of = self.s.eng, self.s.kv.of
        for e in list(role.draining):
            used = of[e]["held"] - of[e]["idle"] + of[e]["plain"]
            if eng[e]["sent_requests"] == 0 and used == 0 and eng[e]["waiting"] == 0:
                event_loop.stop(self.s, e)
                role.draining.remove(e)
                role.closed.append(e)

    def _order(self, role: _Replicas, wanted: int, now_s: float) -> None:
        wanted = min(max(wanted, 0), role.count)
        there = len(role.ready) + len(role.starting)
        while there < wanted and (role.closed or role.draining):
            if role.draining:  # a draining replica still has its cache, and serves at once
                e = role.draining.pop()
                self.s.eng[e]["open"] = 1
                role.ready.append(e)
            else:
                heapq.heappush(role.starting, (now_s + self.fleet.start_s, role.closed.pop()))
                role.ordered += 1
            there += 1
        while there > wanted:
            if role.starting:
                at = max(range(len(role.starting)), key=role.starting.__getitem__)
                role.closed.append(role.starting.pop(at)[1])
                heapq.heapify(role.starting)
            else:
                e = role.ready.pop()
                self.s.eng[e]["open"] = 0
                role.draining.append(e)
            there -= 1

    def _observe(self, now_s: float) -> FleetObservation:
        req, eng = self.s.req, self.s.eng
        came = np.arange(self._next - self._arrived, self._next)
        under_way = np.concatenate([self._open, came])
        done = req["phase"][under_way] == DONE
        self._open = under_way[~done]
        phases = req["phase"][self._open]
        computed = (eng["busy_s"] - self._busy) / max(self.fleet.every_s, 1e-9)
        self._busy = eng["busy_s"].copy()
        observations = []
        for role in self.roles:
            mine = eng["sent_requests"][role.first : role.first + role.count]
            busy = float(np.minimum(computed[role.ready], 1.0).mean()) if role.ready else 0.0
            observations.append(
                RoleObservation(
                    *(len(role.ready), len(role.starting), len(role.draining)),
                    *(int(mine.sum()), busy),
                )
            )
        waiting = int((phases == NEW).sum())
        prefill, decode = observations
        decode = decode._replace(ongoing=decode.ongoing + waiting)
        arrived, self._arrived = self._arrived, 0
        return FleetObservation(now_s, prefill, decode, arrived, under_way[done], req)


def simulate_autoscaled(
    work: Workload,
    hardware: Hardware,
    most: tuple[int, int],
    scaler: Scaler,
    settings: SimulationSettings | None = None,
    fleet: FleetSettings | None = None,
) -> tuple[SimulationRun, Fleet]:
    """Play a workload on replicas that start and stop.

    Args:
        most: maximum numbers of prefill and decode replicas.
        scaler: called every `fleet.every_s` seconds. It must not be used for another run.

    Raises:
        SimulationError: as in `simulate`.
    """
    settings, fleet = settings or SimulationSettings(), fleet or FleetSettings()
    check(work, hardware, *most, settings)
    simulation = _AutoscaledSimulation(
        work, hardware, most, HeadracePolicy(), settings, scaler, fleet
    )
    simulation.play(None)
    reachable = best_case(work, hardware, simulation.from_s).hit_rate
    until_s = float(simulation.s.now_s[0])
    with np.errstate(invalid="ignore"):  # a request that did not end has no end
        outcome = measure_outcome(
            simulation.s, settings.targets, reachable, simulation.from_s, until_s
        )
    course = {name: np.array(values) for name, values in simulation.course.items()}
    result = Fleet(
        simulation.gpu_s,
        sum(role.ordered for role in simulation.roles),
        np.array(simulation.rows).reshape(-1, 3),
    )
    ttft_s = first_token_seconds(simulation.s, simulation.from_s, until_s)
    return SimulationRun(outcome, course, ttft_s, simulation.s), result

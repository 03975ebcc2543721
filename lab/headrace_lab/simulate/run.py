"""Runs a workload on simulated engines with a policy. A run with the same seed is the same."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
from numpy.typing import NDArray

from headrace_lab.simulate import event_loop, known_blocks
from headrace_lab.simulate.best_case import best_case
from headrace_lab.simulate.cluster_state import (
    ClusterState,
    EnginePair,
    PromptRequest,
    ReportQueue,
    read_reports,
    record_sent,
)
from headrace_lab.simulate.hardware import Hardware
from headrace_lab.simulate.outcome import (
    GoodputTargets,
    SimulationOutcome,
    first_token_seconds,
    measure_outcome,
)
from headrace_lab.simulate.policies import Policy
from headrace_lab.simulate.request_kv import pairs_between
from headrace_lab.simulate.state import LOG_ROWS, LOST, NEW, State, new_state
from headrace_lab.simulate.trace import Workload

_AHEAD_BLOCKS = 1 << 16
COURSE = ("at_s", "prefill_busy", "decode_busy", "queue_tokens", "running", "kv_used")
"""Columns of a run's course."""


class SimulationError(ValueError):
    """A run with invalid parameters. The text says why."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of an engine, which is back with an empty cache after `down_s`."""

    at_s: float
    engine: int
    down_s: float


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """Age of the router's data, and the measured part of a run.

    Attributes:
        report_s: time between two reports of an engine.
        delay_s: time until a report or an event arrives.
        detect_s: time until the requests of a failed engine are placed again.
        warm_share: part at the beginning of the run that only fills caches and is not measured.
        drain_s: how long requests may continue after the last arrival.
    """

    seed: int = 0
    report_s: float = 0.2
    delay_s: float = 0.01
    detect_s: float = 1.0
    warm_share: float = 0.3
    drain_s: float = 600.0
    targets: GoodputTargets = field(default_factory=GoodputTargets)
    failures: Sequence[Failure] = ()

    def __post_init__(self) -> None:
        if not (self.report_s >= 0.001 and self.delay_s >= 0 and self.detect_s > 0):
            raise SimulationError("report_s must be at least 0.001, delay_s 0, detect_s above 0")
        if not (0 <= self.warm_share < 1 and self.drain_s >= 0):
            raise SimulationError("warm_share must be from 0 to below 1, drain_s at least 0")


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """A run's figures, its course (one row a second), the times to first token in seconds, and its
    final state."""

    outcome: SimulationOutcome
    course: dict[str, NDArray[np.float64]]
    ttft_s: NDArray[np.float64]
    state: State


def simulate(
    work: Workload,
    hardware: Hardware,
    prefills: int,
    decodes: int,
    policy: Policy,
    settings: SimulationSettings | None = None,
    progress: Callable[[float], None] | None = None,
) -> SimulationRun:
    """Run a workload.

    Args:
        prefills: engines for prefill; 0 lets every engine do both.
        decodes: engines for decode, at least 1.
        progress: called about once a simulated second, with the share of the time that has passed.

    Raises:
        SimulationError: no requests, no decode engine, or a prompt that no engine could ever hold.
    """
    settings = settings or SimulationSettings()
    check(work, hardware, prefills, decodes, settings)
    simulation = Simulation(work, hardware, prefills, decodes, policy, settings)
    simulation.play(progress)
    from_s = settings.warm_share * work.seconds
    reachable = best_case(work, hardware, from_s).hit_rate
    until_s = float(simulation.s.now_s[0])
    outcome = measure_outcome(simulation.s, settings.targets, reachable, from_s, until_s)
    ttft_s = first_token_seconds(simulation.s, from_s, until_s)
    course = {name: np.array(values) for name, values in simulation.course.items()}
    return SimulationRun(outcome, course, ttft_s, simulation.s)


def check(
    work: Workload, hardware: Hardware, prefills: int, decodes: int, settings: SimulationSettings
) -> None:
    if prefills < 0 or decodes < 1:
        raise SimulationError("there must be at least one decode engine")
    if len(work) == 0:
        raise SimulationError("no request comes in this time at this load")
    for failure in settings.failures:
        if not 0 <= failure.engine < prefills + decodes:
            raise SimulationError(f"there is no engine {failure.engine} to fail")
    rows = np.unique(work.row)
    most = int((work.trace.prompt[rows].astype(np.int64) + work.trace.output[rows]).max()) + 1
    kv_blocks = min(hardware.decode.kv_blocks, hardware.prefill.kv_blocks)
    size = hardware.block_tokens
    trace_size = work.trace.block_tokens
    if trace_size != size:
        raise SimulationError(
            f"blocks of the trace have {trace_size} tokens, of the engines {size}"
        )
    if -(-most // size) > kv_blocks:
        raise SimulationError(
            f"a request of {most:,} tokens needs {-(-most // size)} KV blocks of "
            f"{size} tokens; an engine has {kv_blocks}"
        )


class Simulation:
    """One run in progress."""

    def __init__(
        self,
        work: Workload,
        hardware: Hardware,
        prefills: int,
        decodes: int,
        policy: Policy,
        settings: SimulationSettings,
    ) -> None:
        self.s = new_state(work, hardware, prefills, decodes)
        self.work, self.policy, self.settings = work, policy, settings
        self.engines = prefills + decodes
        holders = np.diff(self.s.kv.of["first"]).tolist()
        self.known = known_blocks.new_known_blocks(holders, ahead=_AHEAD_BLOCKS)
        self.depth = np.zeros(len(holders), np.int32)
        self.rng = Random(settings.seed)
        self.reports = ReportQueue(settings.delay_s)
        eng = self.s.eng
        self.cluster = ClusterState(
            hardware=hardware,
            curves=(self.s.prefill_curve, self.s.decode_curve),
            prefills=prefills,
            node=eng["node"],
            now_s=0.0,
            report=read_reports(self.s),
            sent_requests=eng["sent_requests"],
            sent_tokens=eng["sent_tokens"],
            sent_blocks=eng["sent_blocks"],
            since_tokens=np.zeros(self.engines, np.int64),
            since_pairs=np.zeros(self.engines),
            since_requests=np.zeros(self.engines, np.int64),
        )
        self.placed = 0
        self.course: dict[str, list[float]] = {name: [] for name in COURSE}
        self._busy_before = np.zeros(self.engines)

    def play(self, progress: Callable[[float], None] | None) -> None:
        """Run until every request has ended, or the drain period is over."""
        settings, work = self.settings, self.work
        arrivals, count = work.arrival_s.tolist(), len(work)
        last_s = work.seconds + settings.drain_s
        # (time, kind, number): 0: failures, 1: recoveries, 2: requests that are placed again.
        others: list[tuple[float, int, int]] = []
        for failure in settings.failures:
            heapq.heappush(others, (failure.at_s, 0, failure.engine))
            heapq.heappush(others, (failure.at_s + failure.down_s, 1, failure.engine))
        next_request, tick, second = 0, 1, 1
        while True:
            arrival = arrivals[next_request] if next_request < count else math.inf
            other = others[0][0] if others else math.inf
            at_tick = tick * settings.report_s
            at = min(arrival, other, at_tick)
            if at > last_s or (next_request == count and self.s.ev.count[4] == count):
                break
            self._advance(at)
            if at == at_tick:
                self.reports.add(read_reports(self.s))
                self._tick(at)
                tick += 1
                if at >= second:
                    self._record_course(at)
                    second = int(at) + 1
                    if progress is not None:
                        progress(min(1.0, at / work.seconds))
            elif at == other:
                _, kind, number = heapq.heappop(others)
                if kind == 0:
                    event_loop.fail(self.s, number)
                elif kind == 1:
                    event_loop.recover(self.s, number)
                else:
                    self._place(number, at)
            else:
                self._place(next_request, at)
                next_request += 1
            lost = int(self.s.ev.count[3])
            for number in self.s.ev.lost[:lost].tolist():
                heapq.heappush(others, (at + settings.detect_s, 2, number))
            self.s.ev.count[3] = 0

    def _tick(self, at_s: float) -> None:
        """Hook for subclasses, called after each report."""

    def _advance(self, until_s: float) -> None:
        s = self.s
        while event_loop.advance(s, until_s):
            known_blocks.apply_changes(self.known, s.ev, float(s.now_s[0]) - self.settings.delay_s)
            if s.ev.count[2] > LOG_ROWS // 2:
                known_blocks.apply_changes(self.known, s.ev, math.inf)
        if s.ev.count[2] > LOG_ROWS:
            raise SimulationError("too many changes of caches in one step")

    def _place(self, r: int, now_s: float) -> None:
        s = self.s
        if s.req[r]["phase"] not in (NEW, LOST):
            return
        known_blocks.apply_changes(self.known, s.ev, now_s - self.settings.delay_s)
        self.reports.deliver(self.cluster, now_s)
        known_blocks.match_blocks(self.known, s, r, self.depth)
        engines, need = self.engines, int(s.req["prompt"][r] + s.req["emitted"][r])
        match = self.depth[:engines]
        store = np.maximum(match, self.depth[engines + self.cluster.node])
        request = PromptRequest(
            number=self.placed,
            prompt=need,
            output=int(s.req["output"][r]),
            blocks=int(s.req["blocks"][r]),
            affinity=self._affinity(r),
            match=match,
            store=store,
            stores=self.depth[engines:],
        )
        choice = self.policy(self.cluster, request, self.rng)
        self._send(r, choice, request, need)
        self.placed += 1

    def _affinity(self, r: int) -> int:
        """Return a number for the request's first block; a random one if it has no full block."""
        if not self.s.req["blocks"][r]:
            return self.rng.getrandbits(63)
        return int(self.s.keys[self.s.req["chain"][r]]) + int(self.s.req["offset"][r])

    def _send(self, r: int, choice: EnginePair, request: PromptRequest, need: int) -> None:
        p = -1 if choice.prefill is None else choice.prefill
        d, split = choice.decode, self.cluster.prefills
        if not (split <= d < self.engines and -1 <= p < split):
            raise SimulationError(f"the policy chose engines {p} and {d}, which do not exist")
        e = p if p >= 0 else d
        block = self.s.limits.block_tokens
        there = min(int(request.store[e]), (need - 1) // block)
        tokens = need - there * block
        pairs = pairs_between(need - tokens, need)
        event_loop.send(self.s, r, p, d, tokens)
        self.reports.record_sent(self.cluster.now_s, p, d, tokens, pairs)
        record_sent(self.cluster, p, d, tokens, pairs)
        known_blocks.expect_blocks(self.known, self.s, r, e)
        if p >= 0:
            known_blocks.expect_blocks(self.known, self.s, r, d)

    def _record_course(self, at_s: float) -> None:
        s, split, course = self.s, self.cluster.prefills, self.course
        before_s = course["at_s"][-1] if course["at_s"] else 0.0
        busy = (s.eng["busy_s"] - self._busy_before) / max(at_s - before_s, 1e-9)
        self._busy_before = s.eng["busy_s"].copy()
        capacity = np.diff(s.kv.of["first"])[: self.engines]
        used = (s.kv.of["held"] - s.kv.of["idle"] + s.kv.of["plain"])[: self.engines]
        course["at_s"].append(at_s)
        course["prefill_busy"].append(float(np.minimum(busy[:split], 1).mean()) if split else 0.0)
        course["decode_busy"].append(float(np.minimum(busy[split:], 1).mean()))
        course["queue_tokens"].append(float(s.eng["queue_tokens"].sum()))
        course["running"].append(float(s.eng["running"].sum()))
        course["kv_used"].append(float((used / capacity)[split:].mean()))

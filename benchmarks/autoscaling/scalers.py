"""Scaling policies that are compared, each a function of a `FleetObservation`."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import numpy as np

from benchmarks.autoscaling.day import Day
from benchmarks.autoscaling.traffic_means import TrafficMeans
from headrace.autoscaling.arrivals import METRICS_DELAY_S
from headrace.autoscaling.capacity import ReplicaBounds, Slo
from headrace.autoscaling.forecast import BIN_S, STEP_S, RateForecast, RateForecaster
from headrace.autoscaling.replica_counts import ReplicaCosts, ReplicaCounts, decide
from headrace.disaggregation import TrafficLoad
from headrace_lab.simulate.hardware import Hardware, prefill_s
from headrace_lab.simulate.scenarios.autoscaled_fleet import FleetObservation, RoleObservation

_NEVER_S = 1e6


class Static:
    """Always the same counts."""

    def __init__(self, prefill: int, decode: int) -> None:
        self.counts = prefill, decode

    def __call__(self, look: FleetObservation) -> tuple[int, int]:
        return self.counts


class Ours:
    """`headrace.autoscaling` with the inputs that a controller would get.

    Args:
        forecast: whether to forecast; if False, the last minute's rate is taken as the certain
            future rate.
        start_price: whether a start has a price and takes time; if False, it is free and at once.
        joint: whether roles are counted jointly; if False, each is counted separately, and only
            prefill replicas compute prompts.
    """

    def __init__(
        self,
        hardware: Hardware,
        slo: Slo,
        prices: ReplicaCosts,
        bounds: ReplicaBounds,
        day: Day,
        *,
        forecast: bool = True,
        start_price: bool = True,
        joint: bool = True,
    ) -> None:
        self.hardware, self.slo, self.joint = hardware, slo, joint
        self.bounds = bounds if joint else replace(bounds, prefill=(1, bounds.prefill[1]))
        self.prices = prices if start_price else ReplicaCosts(0.0)
        self.certain = not forecast
        self.forecast, self.traffic = RateForecaster(), TrafficMeans()
        self.end_s, self.last = 0.0, 0.0
        self.open: list[int] = []
        if forecast:
            parts = round(BIN_S / STEP_S)
            for count in np.repeat(day.before / parts, parts):
                self.forecast.observe(float(count))
        self.told: list[ReplicaCounts] = []

    def __call__(self, look: FleetObservation) -> tuple[int, int]:
        if not self._learn(look) and self.told:
            return self.told[-1].prefill, self.told[-1].decode
        now = tuple(role.ready + role.starting for role in (look.prefill, look.decode))
        load = self._load()
        if load is None:
            return now[0], now[1]
        if not self.joint:
            load = replace(load, local_s=_NEVER_S, local_square=_NEVER_S**2)
        counts = decide((now[0], now[1]), load, self._ahead, self.slo, self.prices, self.bounds)
        self.told.append(counts)
        return counts.prefill, counts.decode

    def load_of(self, look: FleetObservation) -> TrafficLoad | None:
        """Return the means of requests with those that ended; None while there are too few."""
        self._learn(look)
        return self._load()

    def _load(self) -> TrafficLoad | None:
        decode = self.hardware.decode
        kv_tokens = decode.kv_blocks * self.hardware.block_tokens
        return self.traffic.load(decode.steps, kv_tokens, self._move_s())

    def _ahead(self, ahead_s: float) -> RateForecast:
        if self.certain:
            return RateForecast(self.last, 0.0)
        return self.forecast.at_horizon(METRICS_DELAY_S + ahead_s)

    def _learn(self, look: FleetObservation) -> bool:
        """Return whether there is something new to decide by: a step's count."""
        step = max(0, math.ceil((look.now_s - self.end_s) / STEP_S) - 1)
        self.open.extend([0] * (step + 1 - len(self.open)))
        self.open[step] += look.arrived
        new = False
        while look.now_s >= self.end_s + STEP_S + METRICS_DELAY_S:
            count, new = self.open.pop(0), True
            self.end_s += STEP_S
            self.last = count / STEP_S
            if not self.certain:
                self.forecast.observe(float(count))
        if not len(look.ended):
            return new
        seen = look.requests[look.ended]
        rows = np.empty((len(seen), 4))
        rows[:, 0], rows[:, 1] = seen["prompt"], seen["output"]
        sides = self.hardware.decode, self.hardware.prefill
        for n, one in enumerate(seen):
            end = int(one["prompt"])
            tokens = max(1, end - int(one["cached"]) - int(one["loaded"]))
            for column, side in enumerate(sides, 2):
                rows[n, column] = prefill_s(side.curve, tokens, end, side.step_tokens)
        self.traffic.record_ended(rows)
        return new

    def _move_s(self) -> float:
        hardware = self.hardware
        tokens = 12_000.0
        moved_s = tokens * hardware.kv_bytes_per_token / hardware.link_bytes_s
        return hardware.transfer_fixed_s + hardware.handoff_s + moved_s


class QueueLength:
    """Ray Serve's `replica_queue_length_autoscaling_policy`, one a deployment.

    Wanted are ``running x (ongoing / running / target)`` replicas, rounded up, with the ongoing
    requests averaged over `look_back_s`. More are started when that was wanted for
    `upscale_delay_s` without a break, fewer kept when it was for `downscale_delay_s`
    (`ray/serve/autoscaling_policy.py`, 2.60). Serve's own delays are 30 s and 600 s.
    """

    def __init__(
        self,
        targets: tuple[float, float],
        bounds: ReplicaBounds,
        *,
        look_back_s: float = 30.0,
        upscale_delay_s: float = 30.0,
        downscale_delay_s: float = 600.0,
    ) -> None:
        delays = look_back_s, upscale_delay_s, downscale_delay_s
        self.prefill = _OneQueue(targets[0], bounds.prefill, *delays)
        self.decode = _OneQueue(targets[1], bounds.decode, *delays)

    def __call__(self, look: FleetObservation) -> tuple[int, int]:
        return self.prefill(look.now_s, look.prefill), self.decode(look.now_s, look.decode)


class _OneQueue:
    def __init__(
        self,
        target: float,
        bounds: tuple[int, int],
        look_back_s: float,
        upscale_delay_s: float,
        downscale_delay_s: float,
    ) -> None:
        self.target, self.bounds, self.look_back_s = target, bounds, look_back_s
        self.delay_s = {1: upscale_delay_s, -1: downscale_delay_s}
        self.seen: deque[tuple[float, int]] = deque()
        self.wanted: int | None = None
        self.direction, self.since_s = 0, math.inf

    def __call__(self, now_s: float, role: RoleObservation) -> int:
        self.seen.append((now_s, role.ongoing))
        while self.seen[0][0] <= now_s - self.look_back_s:
            self.seen.popleft()
        there = role.ready + role.starting
        self.wanted = there if self.wanted is None else self.wanted
        ongoing = sum(count for _, count in self.seen) / len(self.seen)
        desired = math.ceil(ongoing / self.target) if role.ready else self.wanted
        direction = (desired > self.wanted) - (desired < self.wanted)
        if direction != self.direction:
            self.direction, self.since_s = direction, now_s
        if direction and now_s - self.since_s >= self.delay_s[direction]:
            self.wanted, self.direction = desired, 0
        self.wanted = min(max(self.wanted, self.bounds[0]), self.bounds[1])
        return self.wanted

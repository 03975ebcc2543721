"""A wave of requests that replicas must follow: ``python -m benchmarks.autoscaling.burst``.

The case is that of ai-dynamo/dynamo#10528: 1 to 24 requests a second, as a sine with a period of
900 s; prompts of 8,000 tokens that share nothing, answers of 1,000. A request is in time if its
first token came within 3 s and a token of its answer took at most 35 ms on average. The engines are
those of `benchmarks.placement`. The first period is not measured. Of each policy's settings, the
one counts that took the fewest GPU-hours with at least `--share` of the requests in time, or else
the one with the most requests in time::

    ours           the production policy, as `benchmarks.autoscaling` has it, asked for shares
    clairvoyant    the same, which knows the rate of any time ahead
    queue          Ray Serve's policy, with several targets
    static         fixed counts

``burst.ARM.in_time``, ``burst.ARM.gpu_hours``, ``burst.ours.gpu_hours_vs_ARM``
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.autoscaling.day import Day
from benchmarks.autoscaling.scalers import Ours, QueueLength, Static
from benchmarks.figures import show
from headrace.autoscaling.capacity import ReplicaBounds, Slo
from headrace.autoscaling.forecast import RateForecast
from headrace.autoscaling.replica_counts import ReplicaCosts
from headrace_lab.simulate.hardware import Hardware
from headrace_lab.simulate.outcome import GoodputTargets
from headrace_lab.simulate.run import SimulationSettings
from headrace_lab.simulate.scenarios.autoscaled_fleet import (
    FleetObservation,
    FleetSettings,
    Scaler,
    simulate_autoscaled,
)
from headrace_lab.simulate.trace import Trace, Workload

PERIOD_S, LEAST, MOST = 900.0, 1.0, 24.0
PROMPT, ANSWER = 8000, 1000
TTFT_S, ITL_S = 3.0, 0.035
DRAIN_S = 20.0
ASKED = {"ours": (0.95, 0.9, 0.8), "clairvoyant": (0.95, 0.99, 0.999)}
"""Shares in time that are asked of the policy."""
TARGETS = (8.0, 16.0, 24.0)
"""Ongoing requests of a decode replica that are tried for Serve's policy; a quarter for prefill."""
TOTALS = (20, 22, 24)
"""Fixed numbers of replicas, a third of them for prefill."""


def rate(at_s: float) -> float:
    """Return the requests a second."""
    middle, swing = (MOST + LEAST) / 2, (MOST - LEAST) / 2
    return middle - swing * math.cos(2 * math.pi * at_s / PERIOD_S)


def wave(periods: int, seed: int) -> Workload:
    """Make the requests: independent arrivals at `rate`, prompts without a common block."""
    rng = np.random.default_rng(seed)
    seconds = periods * PERIOD_S
    at_s = np.sort(rng.uniform(0.0, seconds, rng.poisson(MOST * seconds)))
    at_s = at_s[rng.uniform(0.0, MOST, len(at_s)) < np.array([rate(one) for one in at_s])]
    count, blocks = len(at_s), PROMPT // Hardware().block_tokens
    trace = Trace(
        *(at_s, np.full(count, PROMPT, np.int32), np.full(count, ANSWER, np.int32)),
        starts=np.arange(count + 1, dtype=np.int64) * blocks,
        keys=np.arange(count * blocks, dtype=np.int32),
        distinct=count * blocks,
        tick_s=1e-3,
    )
    rows, none = np.arange(count, dtype=np.int32), np.zeros(count, np.int64)
    return Workload(trace, at_s, rows, none, seconds, count * blocks)


class Clairvoyant(Ours):
    """Our policy with the true rate in place of the forecast."""

    now_s = 0.0

    def __call__(self, look: FleetObservation) -> tuple[int, int]:
        self.now_s = look.now_s
        return super().__call__(look)

    def _ahead(self, ahead_s: float) -> RateForecast:
        return RateForecast(rate(self.now_s + ahead_s), 0.5)


class Played(NamedTuple):
    """One setting of a policy."""

    in_time: float
    gpu_hours: float


class Bench:
    """Plays policies on the wave.

    Args:
        start_s: seconds that a replica takes to start.
        most: maximum number of replicas of each role.
    """

    def __init__(self, periods: int, start_s: float, most: int, seed: int) -> None:
        self.work, self.start_s = wave(periods, seed), start_s
        self.bounds = ReplicaBounds((0, most), (1, most))
        self.hardware = Hardware()
        targets = GoodputTargets(TTFT_S, 0.0, ITL_S)
        self.settings = SimulationSettings(warm_share=1 / periods, targets=targets)

    def ours(self, kind: type[Ours], asked: float) -> Played:
        day = Day(self.work, np.zeros(0, np.int64))
        prices, slo = ReplicaCosts(self.start_s, DRAIN_S), Slo(TTFT_S, 0.0, ITL_S, asked)
        scaler = kind(self.hardware, slo, prices, self.bounds, day)
        return self._play(f"{kind.__name__} {asked:g}", scaler)

    def queue(self, target: float) -> Played:
        policy = QueueLength((max(1.0, target / 4), target), self.bounds)
        return self._play(f"queue length {target:g}", policy)

    def static(self, total: int) -> Played:
        counts = total // 3, total - total // 3
        return self._play(f"static {counts[0]} + {counts[1]}", Static(*counts), counts)

    def _play(self, name: str, scaler: Scaler, first: tuple[int, int] = (1, 2)) -> Played:
        most = self.bounds.prefill[1], self.bounds.decode[1]
        fleet = FleetSettings(start_s=self.start_s, every_s=5.0, first=first)
        run, told = simulate_autoscaled(
            self.work, self.hardware, most, scaler, self.settings, fleet
        )
        hours, found = told.gpu_s / 3600, run.outcome
        counts = told.course[:, 1:].max(axis=0)
        print(
            f"{name:20s} in time {found.goodput:.3f}, GPU-hours {hours:.2f}, started "
            f"{told.ordered}, at most {counts[0]:.0f} + {counts[1]:.0f}, TTFT p99 "
            f"{found.ttft_p99:.1f} s, a token p99 {1e3 * found.tpot_p99:.0f} ms",
            file=sys.stderr,
            flush=True,
        )
        return Played(found.goodput, hours)


def main() -> None:
    parser = argparse.ArgumentParser(description="Replicas that follow a wave of requests.")
    parser.add_argument("--periods", type=int, default=4, help="the first one is not measured")
    parser.add_argument("--start", type=float, default=60.0, help="seconds that a start takes")
    parser.add_argument("--most", type=int, default=24, help="replicas of each role")
    parser.add_argument("--share", type=float, default=0.9, help="of requests to be in time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", help="arms to play")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    bench = Bench(args.periods, args.start, args.most, args.seed)
    arms: dict[str, Callable[[], Iterator[Played]]] = {
        "ours": lambda: (bench.ours(Ours, one) for one in ASKED["ours"]),
        "clairvoyant": lambda: (bench.ours(Clairvoyant, one) for one in ASKED["clairvoyant"]),
        "queue": lambda: map(bench.queue, TARGETS),
        "static": lambda: map(bench.static, TOTALS),
    }
    figures: dict[str, float] = {}
    for name in args.only or arms:
        found = list(arms[name]())
        kept = [one for one in found if one.in_time >= args.share]
        best = min(kept, key=lambda one: one.gpu_hours) if kept else max(found)
        figures[f"burst.{name}.in_time"] = best.in_time
        figures[f"burst.{name}.gpu_hours"] = best.gpu_hours
        if name != "ours" and "burst.ours.gpu_hours" in figures:
            ratio = figures["burst.ours.gpu_hours"] / best.gpu_hours
            figures[f"burst.ours.gpu_hours_vs_{name}"] = ratio
    show(figures, args.json)


if __name__ == "__main__":
    main()

"""How many GPU-seconds a day takes: ``python -m benchmarks.autoscaling [--trace FILE] [--json
FILE]``.

A day (`day`) is played on the simulated engines of `benchmarks.placement`, whose replicas start and
go as a policy says (`headrace_lab.simulate.scenarios.autoscaled_fleet`); requests are placed by the
gateway's own code. Each policy must answer the same share of the day's requests in time: their
first token within 2 s plus 0.1 ms a token of the prompt, and at most 50 ms a token after it on
average. Of those settings of a policy that do, the one with the fewest GPU-seconds counts::

    ours           the asked share, less while that keeps it, or more until it does
    static         every split of the fewest replicas of which one keeps it
    queue length   Ray Serve's policy: targets of both roles, and its delay before it stops replicas
    without ...    ours with a part removed

``autoscaling.gpu_s_vs_best_static``, ``autoscaling.gpu_s_vs_queue_length_policy``: ours over
theirs, the mean of the days; with a shape in the name, that day's.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.autoscaling.day import SHAPES, WARM_S, Day, day_of
from benchmarks.autoscaling.scalers import Ours, QueueLength, Static
from headrace.autoscaling.capacity import ReplicaBounds, Slo
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
from headrace_lab.simulate.trace import Trace, read_trace

MOST = 8
BOUNDS = ReplicaBounds((0, MOST), (1, MOST))
SERVE_BOUNDS = ReplicaBounds((1, MOST), (1, MOST))
"""Serve's policy never starts the first prefill replica: decode replicas prefill without one."""
DRAIN_S = 20.0
MORE_MISSES, FEWER_MISSES = (2.0, 3.0, 3.8, 4.2), (0.8, 0.6, 0.4, 0.2)
"""Factors on the allowed misses; the product is the target that our autoscaler gets."""
TARGETS = {"decode": (10.0, 12.0, 14.0, 16.0), "prefill": (0.0, 1.0, 2.0, 4.0)}
"""Ongoing requests of a replica; 0 for prefill: no prefill replicas."""
DELAYS_S = (600.0, 120.0)
WITHOUT = {"forecast": "forecast", "start_price": "start-up price", "joint": "joint counts"}


class Result(NamedTuple):
    """One day under one setting of a policy."""

    setting: str
    in_time: float
    gpu_s: float
    ordered: int
    ttft_p99: float
    tpot_p99: float


class HopelessError(Exception):
    """So many requests were late that the share cannot be kept any more."""


class Watched:
    """A scaler whose run ends as soon as it cannot keep the share.

    Attributes:
        most: share of the requests that may still be in time.
    """

    def __init__(self, scaler: Scaler, slo: Slo, requests: int) -> None:
        self.scaler, self.slo, self.requests = scaler, slo, requests
        self.late, self.most = 0, 1.0

    def __call__(self, look: FleetObservation) -> tuple[int, int]:
        slo, seen = self.slo, look.requests[look.ended]
        seen = seen[seen["arrival_s"] >= WARM_S]
        ttft_s = seen["first_s"] - seen["arrival_s"]
        more = np.maximum(seen["output"] - 1, 1)
        late = ttft_s > slo.ttft_s + slo.ttft_token_s * seen["prompt"]
        late |= seen["end_s"] - seen["first_s"] > slo.itl_s * more
        self.late += int(late.sum())
        self.most = 1.0 - self.late / self.requests
        if self.most < slo.attainment:
            raise HopelessError(
                f"below {slo.attainment} after {(look.now_s - WARM_S) / 3600:.1f} hours"
            )
        return self.scaler(look)


class Bench:
    """Plays settings of policies on one day.

    Args:
        share: of the requests that must be in time.
    """

    def __init__(self, trace: Trace, day: Day, share: float, start_s: float) -> None:
        self.day, self.share, self.start_s = day, share, start_s
        self.hardware = Hardware()
        self.slo = Slo(2.0, 1e-4, 0.05, share)
        targets = GoodputTargets(self.slo.ttft_s, self.slo.ttft_token_s, self.slo.itl_s)
        self.settings = SimulationSettings(warm_share=WARM_S / day.work.seconds, targets=targets)

    def play(self, setting: str, scaler: Scaler, first: tuple[int, int] = (2, 2)) -> Result:
        begun = time.perf_counter()
        fleet = FleetSettings(start_s=self.start_s, first=first)
        watched = Watched(scaler, self.slo, len(self.day.work))
        try:
            run, told = simulate_autoscaled(
                self.day.work, self.hardware, (MOST, MOST), watched, self.settings, fleet
            )
        except HopelessError as error:
            print(f"{setting:40s} {error}", file=sys.stderr, flush=True)
            return Result(setting, watched.most, math.inf, 0, math.inf, math.inf)
        found = Result(
            *(setting, run.outcome.goodput, told.gpu_s, told.ordered),
            *(run.outcome.ttft_p99, run.outcome.tpot_p99),
        )
        print(
            f"{setting:40s} {time.perf_counter() - begun:5.0f} s: in time {found.in_time:.4f}, "
            f"GPU-hours {found.gpu_s / 3600:6.1f}, started {found.ordered}, "
            f"TTFT p99 {found.ttft_p99:.1f} s, a token p99 {1e3 * found.tpot_p99:.0f} ms",
            file=sys.stderr,
            flush=True,
        )
        return found

    def ours(self, **without: bool) -> Result | None:
        """The cheapest share to ask for that keeps the day's: from that on, down while the day's is
        kept, or up until it is."""
        name = "".join(f", without {WITHOUT[part]}" for part in without)

        def asked(miss: float) -> Result:
            slo = replace(self.slo, attainment=1.0 - miss)
            prices = ReplicaCosts(self.start_s, DRAIN_S)
            scaler = Ours(self.hardware, slo, prices, BOUNDS, self.day, **without)
            return self.play(f"ours{name}, {slo.attainment:.3f}", scaler)

        miss = 1.0 - self.share
        found = [asked(miss)]
        ways = MORE_MISSES if found[0].in_time >= self.share else FEWER_MISSES
        for factor in ways:
            found.append(asked(miss * factor))
            if (found[-1].in_time >= self.share) != (ways is MORE_MISSES):
                break
        good = [one for one in found if one.in_time >= self.share]
        return min(good, key=lambda one: one.gpu_s) if good else None

    def static(self, least: int) -> Result | None:
        """Return the cheapest counts: all splits of a total, from the fewest that are tried on."""
        for total in range(least, 2 * MOST + 1):
            kept = []
            for prefill, decode in BOUNDS.splits(total):
                counts = prefill, decode
                found = self.play(f"static {prefill} + {decode}", Static(*counts), counts)
                if found.in_time >= self.share:
                    kept.append(found)
                    break
            if kept:
                return kept[0]
        return None

    def queue_length(self) -> Result | None:
        """Coordinate by coordinate, from Serve's delay on: the decode target, the prefill target,
        the decode target again, and the delay."""

        def scaler(prefill: float, decode: float, delay_s: float) -> Result:
            bounds = SERVE_BOUNDS if prefill else replace(SERVE_BOUNDS, prefill=(0, 0))
            policy = QueueLength((prefill or 1.0, decode), bounds, downscale_delay_s=delay_s)
            return self.play(f"queue length {prefill:g} {decode:g} {delay_s:g} s", policy)

        found: dict[tuple[float, float, float], Result] = {}
        best = 2.0, TARGETS["decode"][1], DELAYS_S[0]
        for tried in (
            lambda at: [(at[0], one, at[2]) for one in TARGETS["decode"]],
            lambda at: [(one, at[1], at[2]) for one in TARGETS["prefill"]],
            lambda at: [(at[0], one, at[2]) for one in TARGETS["decode"]],
            lambda at: [(at[0], at[1], one) for one in DELAYS_S],
        ):
            for at in tried(best):
                if at not in found:
                    found[at] = scaler(*at)
            good = [at for at, one in found.items() if one.in_time >= self.share]
            if good:
                best = min(good, key=lambda at: found[at].gpu_s)
            else:
                best = max(found, key=lambda at: found[at].in_time)
        return found[best] if found[best].in_time >= self.share else None


def play_shape(
    trace: Trace,
    shape: str,
    peak: float,
    share: float,
    start_s: float,
    seed: int,
    least: int,
    parts: list[str],
) -> dict[str, Result]:
    """Return the best of each policy on one day."""
    bench = Bench(trace, day_of(trace, shape, peak, seed), share, start_s)
    found: dict[str, Result | None] = {}
    if "ours" in parts:
        found["ours"] = bench.ours()
    if "static" in parts:
        found["static"] = bench.static(least)
    if "queue" in parts:
        found["queue_length"] = bench.queue_length()
    if "ablations" in parts:
        for part in WITHOUT:
            found[f"without_{part}"] = bench.ours(**{part: False})
    return {name: one for name, one in found.items() if one is not None}


def figures_of(results: dict[str, dict[str, Result]]) -> dict[str, float]:
    """Ours over the others', for each day and on average."""
    figures: dict[str, float] = {}
    for shape, found in results.items():
        for name, one in found.items():
            figures[f"{shape}.{name}.gpu_hours"] = one.gpu_s / 3600.0
            figures[f"{shape}.{name}.in_time"] = one.in_time
            figures[f"{shape}.{name}.started"] = one.ordered
        if "ours" not in found:
            continue
        ours = found["ours"].gpu_s
        for name, label in (
            ("static", "gpu_s_vs_best_static"),
            ("queue_length", "gpu_s_vs_queue_length_policy"),
            *((f"without_{part}", f"gpu_s_vs_without_{part}") for part in WITHOUT),
        ):
            if name in found:
                figures[f"autoscaling.{shape}.{label}"] = ours / found[name].gpu_s
    for label in {name.split(".")[-1] for name in figures if name.startswith("autoscaling.")}:
        each = [figures.get(f"autoscaling.{shape}.{label}") for shape in results]
        if None not in each:
            figures[f"autoscaling.{label}"] = sum(one for one in each if one is not None) / len(
                each
            )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="GPU-seconds of a simulated day.")
    parser.add_argument(
        "--trace", type=Path, default=Path("../shared/traces/mooncake_conversation.jsonl")
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--peak", type=float, default=2.0, help="of the trace's rate, at most")
    parser.add_argument("--share", type=float, default=0.95, help="of requests in time")
    parser.add_argument("--start", type=float, default=120.0, help="seconds that a start takes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=int, default=4, help="fewest replicas of static counts")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="days played at once")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("ours", "static", "queue", "ablations"),
        default=["ours", "static", "queue", "ablations"],
    )
    args = parser.parse_args()
    trace = read_trace(args.trace)
    asked = args.peak, args.share, args.start, args.seed, args.least, args.parts
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork")) as pool:
        coming = {shape: pool.submit(play_shape, trace, shape, *asked) for shape in args.shapes}
        results = {shape: one.result() for shape, one in coming.items()}
    figures = figures_of(results)
    for name, value in figures.items():
        print(f"{name} {value:.4g}")
    if args.json:
        told = {
            shape: {name: one._asdict() for name, one in found.items()}
            for shape, found in results.items()
        }
        args.json.write_text(json.dumps({"figures": figures, "best": told}, indent=2) + "\n")


if __name__ == "__main__":
    main()

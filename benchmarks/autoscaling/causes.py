"""Where a day's GPU-seconds go: ``python -m benchmarks.autoscaling.causes --table FILE [--json
FILE]``.

The policy's own decisions (`headrace.autoscaling.replica_counts`) are played minute by minute on a
day's counts, but no requests are: how many are late follows from the minute's rate and the replicas
that serve, by the table that `benchmarks.autoscaling.bound --table` measures. So a day takes
seconds.
Then one cause after the other is taken away by an oracle::

    all            as it is
    rates known    the forecast is what comes, and certain
    model right    the share in time is the table's
    start free     a start takes no time and costs nothing, and nor does a drain

Each is asked for less and less until it keeps the day's share just so; `causes.SHAPE.ARM.gpu_hours`
are then interpolated at that share. `.starts` are replicas that were started, `.asked` the share
that it had to be asked for. The requests' means are constant: those of an hour of the trace.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from benchmarks.autoscaling.bound import EACH, rates_of
from benchmarks.autoscaling.day import DAY_S, SHAPES, WARM_S, day_of
from benchmarks.autoscaling.scalers import Ours
from headrace.autoscaling import capacity
from headrace.autoscaling.arrivals import METRICS_DELAY_S
from headrace.autoscaling.capacity import ReplicaBounds, Slo
from headrace.autoscaling.forecast import BIN_S, STEP_S, RateForecast, RateForecaster
from headrace.autoscaling.replica_counts import ReplicaCosts, decide
from headrace.disaggregation import TrafficLoad
from headrace_lab.simulate.hardware import Hardware
from headrace_lab.simulate.headrace_policy import HeadracePolicy
from headrace_lab.simulate.run import SimulationSettings, simulate
from headrace_lab.simulate.scenarios.autoscaled_fleet import FleetObservation, RoleObservation
from headrace_lab.simulate.state import DONE
from headrace_lab.simulate.trace import Trace, read_trace, scale_trace

Model = Callable[[float, int, int], float]
"""The share in time at a rate with so many replicas of each role."""
BOUNDS = ReplicaBounds((0, 4), (1, 8))
PRICES = ReplicaCosts(120.0, 20.0)
FREE = ReplicaCosts(0.0)
ASKED = (0.97, 0.95, 0.93, 0.91, 0.89, 0.87, 0.85, 0.82, 0.79, 0.76, 0.73, 0.7)
RATES = np.arange(0.0, 12.0, 0.1)
WARM = round(WARM_S / BIN_S)
SAID_S = (0.0, 15.0, 60.0, 120.0, 135.0, 275.0)
"""Seconds ahead that decisions ask for."""
ARMS = {
    "all": (False, False, False),
    "rates_known": (True, False, False),
    "model_right": (False, True, False),
    "start_free": (False, False, True),
    "model_right_rates_known": (True, True, False),
    "model_right_rates_known_start_free": (True, True, True),
}
"""Whether the rates are known, the model is right, a start is free."""


class Played(NamedTuple):
    """A day's share in time, GPU-hours, and replicas started."""

    in_time: float
    gpu_hours: float
    starts: float


def measured(table: dict[str, list[float]]) -> Model:
    """The table's share, never more at a higher load; of more replicas than it has as of its most,
    of more prefill replicas than it has as of the most that it has."""
    most = max(sum(map(int, name.split(" + "))) for name in table)

    def share(rate: float, prefill: int, decode: int) -> float:
        total = min(prefill + decode, most)
        rate *= total / (prefill + decode)
        prefill = min(prefill, total - 1)
        while f"{prefill} + {total - prefill}" not in table:
            prefill -= 1
        kept = np.minimum.accumulate(table[f"{prefill} + {total - prefill}"])
        x = np.array([0.0, *(one * total for one in EACH), 2.0 * EACH[-1] * total])
        return float(np.interp(rate, x, np.array([1.0, *kept, 0.0])))

    return share


def gridded(model: Model) -> Model:
    """Return the same, interpolated between `RATES`."""
    grids: dict[tuple[int, int], NDArray[np.float64]] = {}

    def share(rate: float, prefill: int, decode: int) -> float:
        if decode < 1:
            return 0.0
        grid = grids.get((prefill, decode))
        if grid is None:
            grid = np.array([model(float(one), prefill, decode) for one in RATES])
            grids[prefill, decode] = grid
        return float(np.interp(rate, RATES, grid))

    return share


def load_of(trace: Trace, hardware: Hardware, slo: Slo) -> TrafficLoad:
    """Return the means of the requests when five replicas serve an hour of them."""
    work = scale_trace(trace, 1.4, 3600.0, 0)
    settings = SimulationSettings(warm_share=0.0)
    req = simulate(work, hardware, 0, 5, HeadracePolicy(), settings).state.req
    day = day_of(trace, SHAPES[0], 2.0, 0, hours=0.1)
    ours = Ours(hardware, slo, PRICES, BOUNDS, day)
    ended = np.flatnonzero((req["phase"] == DONE) & (req["arrival_s"] > 1200.0))
    role = RoleObservation(0, 0, 0, 0, 0.0)
    load = ours.load_of(FleetObservation(0.0, role, role, 0, ended, req))
    assert load is not None
    return load


class Shape:
    """One day's counts, rates and forecasts."""

    def __init__(self, trace: Trace, shape: str, peak: float) -> None:
        day = day_of(trace, shape, peak, 0)
        rate = rates_of(trace, shape, peak)
        self.rate = np.concatenate([np.full(WARM, rate[0]), rate])
        minutes = round((DAY_S + WARM_S) / BIN_S)
        steps = round(BIN_S / STEP_S)
        step = (day.work.arrival_s // STEP_S).astype(int)
        counts = np.bincount(step, minlength=minutes * steps).reshape(-1, steps)
        forecast = RateForecaster()
        for count in np.repeat(day.before / steps, steps):
            forecast.observe(float(count))
        self.said: list[dict[float, RateForecast]] = []
        for n in range(minutes):
            for count in counts[n]:
                forecast.observe(float(count))
            said = {one: forecast.at_horizon(METRICS_DELAY_S + one) for one in SAID_S}
            self.said.append(said)

    def known(self, minute: int, ahead_s: float) -> RateForecast:
        """Return the true rate of arrivals at a time ahead."""
        at = min(len(self.rate) - 1, minute + 1 + int(ahead_s / BIN_S))
        return RateForecast(float(self.rate[at]), 0.0)


def played(
    shape: Shape,
    load: TrafficLoad,
    slo: Slo,
    truth: Model,
    model: Model,
    asked: float,
    *,
    known: bool,
    prices: ReplicaCosts,
) -> Played:
    """One day by the policy's decisions, which is asked for a share."""
    slo = replace(slo, attainment=asked)
    ready: list[int] = [2, 2]
    starting: list[list[int]] = [[], []]
    paid_s = late = came = 0.0
    starts = 0

    def in_time(load: TrafficLoad, slo: Slo, prefill: int, decode: int) -> float:
        return model(load.rate, prefill, decode)

    with mock.patch.object(capacity, "in_time", in_time):
        for minute, rate in enumerate(shape.rate.tolist()):
            for role in (0, 1):
                while starting[role] and starting[role][0] <= minute:
                    ready[role] += 1
                    starting[role].pop(0)
            there = [ready[role] + len(starting[role]) for role in (0, 1)]
            if minute >= WARM:
                paid_s += BIN_S * sum(there)
                came += rate
                late += rate * (1.0 - truth(rate, *ready))
            ahead = partial(shape.known, minute) if known else shape.said[minute].__getitem__
            found = decide((there[0], there[1]), load, ahead, slo, prices, BOUNDS)
            for role, wanted in enumerate((found.prefill, found.decode)):
                more = wanted - there[role]
                if more > 0 and prices.start_s == 0.0:
                    ready[role] += more
                elif more > 0:
                    begins = minute + 1 + round(prices.start_s / BIN_S)
                    starting[role].extend([begins] * more)
                while more < 0:
                    if starting[role]:
                        starting[role].pop()
                    else:
                        ready[role] -= 1
                        paid_s += prices.drain_s * (minute >= WARM)
                    more += 1
                starts += max(0, more) * (minute >= WARM)
    return Played(1.0 - late / came, paid_s / 3600.0, starts)


def least(asked: Callable[[float], Played], share: float) -> tuple[Played, float]:
    """Return the day at a share, and what had to be asked for it: between two of `ASKED`."""
    before: tuple[Played, float] | None = None
    for one in ASKED:
        found = asked(one), one
        if found[0].in_time < share or one == ASKED[-1]:
            break
        before = found
    if before is None or found[0].in_time >= share:
        return found
    part = (before[0].in_time - share) / (before[0].in_time - found[0].in_time)
    mixed = (a + part * (b - a) for a, b in zip(before[0], found[0], strict=True))
    return Played(*mixed), before[1] + part * (found[1] - before[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Where a day's GPU-seconds go.")
    parser.add_argument(
        "--trace", type=Path, default=Path("../shared/traces/mooncake_conversation.jsonl")
    )
    parser.add_argument("--table", type=Path, required=True, help="of benchmarks.autoscaling.bound")
    parser.add_argument("--peak", type=float, default=2.0, help="of the trace's rate, at most")
    parser.add_argument("--share", type=float, default=0.95, help="of requests in time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    trace, hardware = read_trace(args.trace), Hardware()
    slo = Slo(2.0, 1e-4, 0.05, args.share)
    load = load_of(trace, hardware, slo)
    truth = gridded(measured(json.loads(args.table.read_text())))
    fitted = capacity.in_time
    model = gridded(lambda rate, p, d: fitted(replace(load, rate=rate), slo, p, d))
    figures: dict[str, float] = {}
    for name in SHAPES:
        shape = Shape(trace, name, args.peak)
        for arm, (known, right, free) in ARMS.items():
            ask = partial(
                played,
                shape,
                load,
                slo,
                truth,
                truth if right else model,
                known=known,
                prices=FREE if free else PRICES,
            )
            found, share = least(ask, args.share)
            told = {"gpu_hours": found.gpu_hours, "starts": found.starts, "asked": share}
            for each, value in told.items():
                figures[f"causes.{name}.{arm}.{each}"] = value
                print(f"causes.{name}.{arm}.{each} {value:.4g}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()

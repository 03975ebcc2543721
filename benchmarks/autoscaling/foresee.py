"""Error of the forecast of arrivals, compared with naive forecasts.

    python -m benchmarks.autoscaling.foresee [--trace FILE] [--peak 2]

Series of counts a minute: a week of each of the two services of Azure's trace of 2024 (`day`), and
the hour of the conversation trace. The weeks are known to 7 minutes only; counts of steps are drawn
from them as independent arrivals, at `--peak` times the conversation trace's rate in the busiest
minute. The error is the mean of ``|forecast - count|`` over the mean count, from the third day on,
or from the tenth minute of the hour. `noise` is the error that remains if the rate is known.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.autoscaling.day import DAY_S, SHAPES, week
from headrace.autoscaling.forecast import BIN_S, STEP_S, RateForecaster
from headrace_lab.simulate.trace import read_trace

STEPS = round(BIN_S / STEP_S)
AHEAD_S = (120.0, 600.0, 1200.0, 3600.0)


def errors(
    steps: NDArray[np.float64], rate: NDArray[np.float64] | None, first: int
) -> dict[str, dict[float, float]]:
    """By forecast and seconds ahead.

    Args:
        steps: counts of the steps of each minute, [minutes, steps].
        rate: of each minute, if known.
        first: minute that is judged.
    """
    counts = steps.sum(axis=1)
    ours = RateForecaster()
    day = round(DAY_S / BIN_S)
    wrong: dict[str, dict[float, list[float]]] = {}
    for n, count in enumerate(counts):
        for part in steps[n]:
            ours.observe(float(part))
        if n < first:
            continue
        for ahead_s in AHEAD_S:
            at = n + round(ahead_s / BIN_S)
            if at >= len(counts):
                continue
            found = BIN_S * ours.at_horizon(ahead_s - BIN_S / 2).rate
            said = {"ours": found, "last minute": float(count)}
            said["mean of 5 minutes"] = float(counts[n - 4 : n + 1].mean())
            if at >= day:
                said["a day before"] = float(counts[at - day])
            if rate is not None:
                said["noise"] = float(rate[at])
            for name, value in said.items():
                wrong.setdefault(name, {}).setdefault(ahead_s, []).append(abs(value - counts[at]))
    mean = float(counts[first:].mean())
    return {
        name: {ahead_s: float(np.mean(values)) / mean for ahead_s, values in each.items()}
        for name, each in wrong.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors of forecasts of arrivals.")
    parser.add_argument(
        "--trace", type=Path, default=Path("../shared/traces/mooncake_conversation.jsonl")
    )
    parser.add_argument("--peak", type=float, default=2.0)
    args = parser.parse_args()
    trace = read_trace(args.trace)
    base = len(trace) / trace.seconds
    series: dict[str, tuple[NDArray[np.float64], NDArray[np.float64] | None, int]] = {}
    for shape in SHAPES:
        at_s, values = week(shape)
        middles = np.arange(0.0, 7 * DAY_S, STEP_S) + STEP_S / 2
        rate = np.interp(middles, at_s, values) / values.max() * args.peak * base * STEP_S
        counts = np.random.default_rng(0).poisson(rate).astype(float).reshape(-1, STEPS)
        minutes = rate.reshape(-1, STEPS).sum(axis=1)
        series[f"week of {shape}"] = counts, minutes, 2 * round(DAY_S / BIN_S)
    step, whole = (trace.arrival_s // STEP_S).astype(int), math.floor(trace.seconds / BIN_S)
    hour = np.bincount(step)[: whole * STEPS].astype(float).reshape(-1, STEPS)
    series["hour of conversation"] = hour, None, 10
    print(
        "| counts a minute | forecast | " + " | ".join(f"{s / 60:.0f} min" for s in AHEAD_S) + " |"
    )
    print("|---|---|" + "---|" * len(AHEAD_S))
    for name, asked in series.items():
        for forecast, found in errors(*asked).items():
            cells = (f"{100 * found[s]:.1f} %" if s in found else "" for s in AHEAD_S)
            print(f"| {name} | {forecast} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

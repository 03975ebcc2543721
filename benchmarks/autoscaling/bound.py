"""The fewest GPU-seconds that a policy could pay for a day: ``python -m
benchmarks.autoscaling.bound``.

First the share of requests in time is measured by load, for each split of each number of replicas:
requests of the day's kind come to fixed counts, slowly more of them (`measured`). Then a policy is
taken that knows each minute's rate in advance, has the best split of its replicas at once, and
drains them in no time. For any price of a late request, counts that keep the day's share cost at
least::

    min over n(t) of   sum n(t) 60 + start max(0, n(t) - n(t - 1)) + price (late(n(t)) - allowed)

(Lagrange). The minimum is found by dynamic programming over the minutes, and the bound is the
largest over the prices. The best fixed count is read off the same table. So `vs_static` is what is
left to any policy, as far as the share in time depends on the minute's rate only. It is as exact as
the table: each share is of some thousand requests that came in bursts.

    bound.SHAPE.gpu_hours     the bound
    bound.SHAPE.static        fewest replicas that keep the share all day, by the table
    bound.SHAPE.vs_static     one over the other
    bound.SHAPE.starts        replicas that such a policy starts
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.autoscaling.day import DAY_S, PLAYED, SHAPES, week
from benchmarks.figures import show
from headrace_lab.simulate.hardware import Hardware
from headrace_lab.simulate.headrace_policy import HeadracePolicy
from headrace_lab.simulate.outcome import GoodputTargets
from headrace_lab.simulate.run import SimulationSettings, simulate
from headrace_lab.simulate.state import DONE
from headrace_lab.simulate.trace import Trace, read_trace, scale_trace

Floats = NDArray[np.float64]
Shares = dict[int, list[float]]
MINUTE_S = 60.0
TARGETS = GoodputTargets(2.0, 1e-4, 0.05)
WARM_S, RISE_S = 2400.0, 5400.0
FIRST, LAST, STEP = 0.6, 1.45, 0.1
"""Requests a second and replica: while caches fill, at the end, and of a bin."""
EACH = (0.65, 0.75, 0.85, 0.95, 1.05, 1.15, 1.25, 1.35)
"""Middles of the bins."""
MAX_PREFILL = 1 / 3
"""Maximum share of prefill replicas; with more, fewer requests were in time at every load."""


def measured(trace: Trace, prefill: int, decode: int, seed: int) -> list[float]:
    """Return a split's share of requests in time, in each bin of the load, under rising load."""
    count = prefill + decode
    at_s = np.arange(0.0, WARM_S + RISE_S + 1.0, 30.0)
    rising = np.maximum(0.0, at_s - WARM_S) / RISE_S
    each = FIRST + (LAST - FIRST) * rising
    done = np.concatenate([[0.0], np.cumsum(count * each[:-1] * 30.0)])
    mean = done[-1] / at_s[-1]
    plain = scale_trace(trace, mean * trace.seconds / len(trace), float(at_s[-1]), seed)
    arrival_s = np.interp(plain.arrival_s * mean, done, at_s)
    work = replace(plain, arrival_s=arrival_s)
    settings = SimulationSettings(warm_share=0.0, targets=TARGETS, drain_s=60.0)
    req = simulate(work, Hardware(), prefill, decode, HeadracePolicy(), settings).state.req
    ended = req["phase"] == DONE
    answer_s = np.where(ended, req["end_s"], 0.0) - np.where(ended, req["first_s"], 0.0)
    good = ended & (req["first_s"] - arrival_s <= 2.0 + 1e-4 * req["prompt"])
    good &= answer_s <= TARGETS.itl_s * np.maximum(req["output"] - 1, 1)
    bins = ((np.interp(arrival_s, at_s, each) - FIRST) / STEP).astype(int)
    bins[arrival_s < WARM_S - MINUTE_S * 10] = -1
    return [float(good[bins == at].mean()) for at in range(len(EACH))]


def table(trace: Trace, most: int, seed: int, kept: Path | None) -> dict[str, list[float]]:
    """Return `measured` of each split, by its name (`prefill + decode`).

    Splits that the file `kept` has are not measured again."""
    found: dict[str, list[float]] = {}
    if kept is not None and kept.exists():
        found = json.loads(kept.read_text())
    for count in range(1, most + 1):
        for prefill in range(int(count * MAX_PREFILL) + 1):
            name = f"{prefill} + {count - prefill}"
            if name in found:
                continue
            found[name] = measured(trace, prefill, count - prefill, seed)
            told = " ".join(f"{one:.3f}" for one in found[name])
            print(f"{name}: {told}", file=sys.stderr, flush=True)
            if kept is not None:
                kept.write_text(json.dumps(found))
    return found


def best_of(splits: dict[str, list[float]]) -> Shares:
    """Share in time with the best split of each number of replicas: never more at a higher load,
    never less with more replicas."""
    found: Shares = {}
    for name, kept in splits.items():
        count = sum(map(int, name.split(" + ")))
        falling = np.minimum.accumulate(kept)
        found[count] = np.maximum(found.get(count, 0.0), falling).tolist()
    return dict(sorted(found.items()))


def late_of(shares: Shares, rates: Floats) -> Floats:
    """Return the late requests a second by rate and count of replicas, [rates, counts]."""
    late = np.empty((len(rates), len(shares)))
    for at, (count, best) in enumerate(shares.items()):
        x = np.concatenate([[0.0], np.array(EACH) * count, [2.0 * EACH[-1] * count]])
        y = np.concatenate([[1.0], best, [0.0]])
        late[:, at] = rates * (1.0 - np.interp(rates, x, y))
    return np.minimum.accumulate(late, axis=1)


def cheapest(late: Floats, price: float, start_s: float) -> tuple[NDArray[np.int64], float]:
    """Return the counts of each minute that cost least at a price, and what they cost."""
    minutes, states = late.shape
    counts = np.arange(1, states + 1)
    moves = start_s * np.maximum(0, counts[None, :] - counts[:, None])  # from row, to column
    each = MINUTE_S * (counts[None, :] + price * late)
    total, came = each[0].copy(), np.zeros((minutes, states), np.int64)
    for minute in range(1, minutes):
        ways = total[:, None] + moves
        came[minute] = ways.argmin(axis=0)
        total = ways.min(axis=0) + each[minute]
    path = np.empty(minutes, np.int64)
    path[-1] = total.argmin()
    for minute in range(minutes - 1, 0, -1):
        path[minute - 1] = came[minute, path[minute]]
    return counts[path], float(total.min())


def bound(
    late: Floats, rates: Floats, share: float, start_s: float
) -> tuple[float, NDArray[np.int64]]:
    """GPU-seconds that no counts which keep the share go below, and counts of the best price."""
    allowed = (1.0 - share) * float(rates.sum()) * MINUTE_S
    low, high, best = 1e-3, 1e4, -math.inf
    path = np.zeros(0, np.int64)
    for _ in range(40):
        price = math.sqrt(low * high)
        counts, cost = cheapest(late, price, start_s)
        best = max(best, cost - price * allowed)
        misses = MINUTE_S * float(late[np.arange(len(late)), counts - 1].sum())
        if misses > allowed:
            low = price
        else:
            high, path = price, counts
    return best, path


def rates_of(trace: Trace, shape: str, peak: float) -> Floats:
    """Return the requests a second of each minute of the day that is played (`day.day_of`)."""
    at_s, values = week(shape)
    begin_s = PLAYED[shape] * DAY_S
    inside = (at_s >= begin_s) & (at_s < begin_s + DAY_S)
    busiest = np.convolve(values[inside], [0.5, 0.5], "valid").max()
    minutes = begin_s + np.arange(0.0, DAY_S, MINUTE_S) + MINUTE_S / 2
    base = len(trace) / trace.seconds
    return np.asarray(np.interp(minutes, at_s, values) / busiest * peak * base, np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fewest GPU-seconds of a simulated day.")
    parser.add_argument(
        "--trace", type=Path, default=Path("../shared/traces/mooncake_conversation.jsonl")
    )
    parser.add_argument("--peak", type=float, default=2.0, help="of the trace's rate, at most")
    parser.add_argument("--share", type=float, default=0.95, help="of requests in time")
    parser.add_argument("--start", type=float, default=120.0, help="seconds that a start takes")
    parser.add_argument("--most", type=int, default=8, help="replicas that the table has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", type=Path, help="read what is there, add what is not")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    trace = read_trace(args.trace)
    splits = table(trace, args.most, args.seed, args.table)
    shares = {n: one for n, one in best_of(splits).items() if n <= args.most}
    figures: dict[str, float] = {}
    for shape in SHAPES:
        rates = rates_of(trace, shape, args.peak)
        late = late_of(shares, rates)
        least, path = bound(late, rates, args.share, args.start)
        kept = 1.0 - late.sum(axis=0) / rates.sum()
        static = int(np.argmax(kept >= args.share)) + 1
        figures[f"bound.{shape}.gpu_hours"] = least / 3600.0
        figures[f"bound.{shape}.static"] = static
        figures[f"bound.{shape}.vs_static"] = least / (static * DAY_S)
        figures[f"bound.{shape}.starts"] = float(np.maximum(0, np.diff(path)).sum())
        told = ", ".join(f"{n + 1}: {one:.3f}" for n, one in enumerate(kept))
        print(f"{shape}: fixed counts keep {told}", file=sys.stderr)
    show(figures, args.json)


if __name__ == "__main__":
    main()

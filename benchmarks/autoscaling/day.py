"""A day of requests, with the requests of one production trace and the arrival rate of another.

The requests, their prefixes and their small bursts are those of Mooncake's conversation trace (an
hour). The number of arrivals in each minute follows a week of Azure's LLM inference trace of 2024
(`azure2024.json`): time is warped so that requests arrive at that rate. This keeps the hour's order
and reuse of prefixes; between two turns of a session more time passes at night.

Of the days before the played one, only the counts for each minute exist, from which a forecast may
learn.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_lab.simulate.trace import Trace, Workload, scale_trace

DAY_S = 86_400.0
WARM_S = 3600.0
"""Before the day, to fill caches; not measured."""
PLAYED = {"code": 5, "conversation": 3}
"""Day of the week of each shape that is played: Wednesday, May 15th, 2024."""
SHAPES = tuple(PLAYED)


class Day(NamedTuple):
    """One day.

    Attributes:
        before: requests of each minute of the days before, from midnight on.
    """

    work: Workload
    before: NDArray[np.int64]


def week(shape: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the seconds since the week's first midnight, and requests a minute there."""
    told = json.loads((Path(__file__).parent / "azure2024.json").read_text())
    values = np.array(told[shape]["requests_a_minute"], np.float64)
    size_s = 7 * DAY_S / len(values)
    return np.asarray((np.arange(len(values)) + 0.5) * size_s, np.float64), values


def day_of(trace: Trace, shape: str, peak: float, seed: int, hours: float = 24.0) -> Day:
    """A day whose busiest quarter of an hour has `peak` times the trace's rate.

    Args:
        hours: of the day, from noon on if it is not whole.
    """
    at_s, values = week(shape)
    played = PLAYED[shape]
    inside = (at_s >= played * DAY_S) & (at_s < (played + 1) * DAY_S)
    busiest = np.convolve(values[inside], [0.5, 0.5], "valid").max()
    base = len(trace) / trace.seconds
    grid_s = np.arange(0.0, 7 * DAY_S, 30.0)
    rate = np.interp(grid_s, at_s, values) / busiest * peak  # times the trace's
    begin_s = played * DAY_S + (0.0 if hours >= 24.0 else 12 * 3600.0) - WARM_S
    end_s = begin_s + WARM_S + hours * 3600.0
    grid = np.arange(begin_s, end_s + 1.0, 30.0)
    done = np.concatenate([[0.0], np.cumsum(np.interp(grid, grid_s, rate)[:-1] * 30.0)])
    mean = done[-1] / (end_s - begin_s)
    plain = scale_trace(trace, mean, end_s - begin_s, seed)
    warped = np.interp(plain.arrival_s * mean, done, grid) - begin_s
    rng = np.random.default_rng(seed)
    minutes = np.arange(0.0, begin_s, 60.0)
    before = rng.poisson(np.interp(minutes, grid_s, rate) * base * 60.0)
    return Day(replace(plain, arrival_s=warped), before)

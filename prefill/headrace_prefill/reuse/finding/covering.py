"""Chooses, of runs that overlap, those that are taken: few and long ones, from left to right."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from headrace_prefill.reuse.finding.matching import END, NEW


def covering(runs: NDArray[np.int64], least: int) -> list[tuple[int, int, int]]:
    """At each position, the run that reaches furthest; of equals the one found first.

    Args:
        runs: int64 [n, 3], columns as in `matching`.
        least: tokens of a run that is worth taking, after what came before was cut off.

    Returns:
        (first position, end, row of `runs`), ascending and apart from each other. With one run a
        position each, this takes the fewest runs that cover all that can be covered.
    """
    order = np.argsort(runs[:, NEW], kind="stable")
    open_runs: list[tuple[int, int]] = []  # (-end, row), of those that have begun
    taken: list[tuple[int, int, int]] = []
    at, position = 0, 0
    while at < len(order) or open_runs:
        while at < len(order) and runs[order[at], NEW] <= position:
            heapq.heappush(open_runs, (-int(runs[order[at], END]), int(order[at])))
            at += 1
        end, row = open_runs[0] if open_runs else (0, -1)
        if row >= 0 and -end - position >= least:
            taken.append((position, -end, row))
            position = -end
        elif at < len(order):
            # What is open is too short from here on.
            open_runs.clear()
            position = int(runs[order[at], NEW])
        else:
            break
    return taken

"""The choice among overlapping runs: few and long ones, from left to right."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from headrace_prefill.blending.finding.matching import END, NEW


def covering(runs: NDArray[np.int64], least: int) -> list[tuple[int, int, int]]:
    """Choose at each position the run that reaches furthest; of equal ones, the first found.

    Args:
        runs: int64 [n, 3], columns as in `matching`.
        least: minimum length of a chosen run in tokens, without the part that an earlier one has.

    Returns:
        (first position, end, row of `runs`), ascending, without overlap. If `least` is 1, these are
        the fewest runs that cover all positions that can be covered.
    """
    order = np.argsort(runs[:, NEW], kind="stable")
    open_runs: list[tuple[int, int]] = []  # (-end, row) of runs that begin at or before `position`
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
            # The open runs are too short from here on.
            open_runs.clear()
            position = int(runs[order[at], NEW])
        else:
            break
    return taken

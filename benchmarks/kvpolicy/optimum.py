"""The clairvoyant optimum, between a schedule that nearly reaches it and a bound above it.

Who knows all prompts decides, for each prompt j, how many leading blocks m_j it shall find. Block d
of these must then lie in the cache from the last prompt before j that passed it, p(j, d), to j;
writing is free, and every prompt leaves all its blocks for the taking. With s counting the spans
between prompts, and v_d = compute_s - load_s of a block at depth d:

    maximise  sum over j, d < m_j of v_d
    subject to, in each span s:  #{(j, d): d < m_j, p(j, d) <= s < j}  <=  slots

This is exact for prefix caching with equal block sizes, except that the room that a prompt's own
blocks need while it is served is not counted, in the optimum's favour.

**Bound.** A price y_s >= 0 on each span gives, by Lagrangian duality, for any prices,

    optimum  <=  slots * sum_s y_s  +  sum_j max over m of sum over d < m of (v_d - price(j, d))

with price(j, d) the sum of y_s over p(j, d) <= s < j. Subgradient steps with Adam's scaling improve
the prices; the least bound met counts.

**Schedule.** The m that attain the bound, averaged over the steps, tend to an optimum of the
relaxed problem. Their whole parts are granted first, then more to prompts of which the average
wants a part, then to any, each time in falling order of v per price and as far as every span
has room. The schedule is feasible, so the optimum lies between the two figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from benchmarks.kvpolicy.workload import Workload

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Optimum:
    """The best schedule found: blocks found by each prompt, saved seconds, and their bound."""

    hits: _Ints
    saved_s: _Floats
    bound_s: float


class Clairvoyant:
    """Prepares a workload once; `solve` answers for a number of slots.

    `saving_s[m]` is what a hit of m leading blocks saves.
    """

    def __init__(self, work: Workload, saving_s: _Floats) -> None:
        self.known = work.endless_hits()
        self.saving_s = saving_s
        prompt = np.repeat(np.arange(len(work)), np.diff(work.starts))
        before = _previous(work.blocks, prompt, work.distinct)
        keep = work.depths < self.known[prompt]
        self.runs = _runs(before[keep], prompt[keep], work.depths[keep])

    def solve(self, slots: int, steps: int = 3000) -> Optimum:
        n = len(self.known)
        owner, since, start, stop = self.runs
        value = self.saving_s[stop] - self.saving_s[start]
        span = ((stop - start) * (owner - since)).sum()
        unit = float(value.sum()) / max(1.0, float(span))  # a price that is about right
        prices, first, second = np.full(n, 0.5 * unit), np.zeros(n), np.zeros(n)
        target, weight, bound = np.zeros(n), 0.0, np.inf
        for step in range(1, steps + 1):
            now, usage, wanted = _dual(*self.runs, self.saving_s, prices, slots, n)
            bound = min(bound, now)
            slope = slots - usage
            first = 0.9 * first + 0.1 * slope
            second = 0.999 * second + 0.001 * slope * slope
            mean, power = first / (1 - 0.9**step), second / (1 - 0.999**step)
            length = 0.1 * unit * (1.0 - step / (steps + 1))
            prices = np.maximum(0.0, prices - length * mean / np.sqrt(power + 1e-9))
            if 4 * step > steps:
                target += length * wanted
                weight += length
        hits = _schedule(*self.runs, self.saving_s, prices, target / max(weight, 1e-300), slots, n)
        return Optimum(hits, self.saving_s[hits], bound)


@njit(cache=True)
def _previous(blocks, prompt, distinct):  # type: ignore[no-untyped-def]
    last = np.full(distinct, -1, np.int64)
    before = np.empty(len(blocks), np.int64)
    for k in range(len(blocks)):
        before[k] = last[blocks[k]]
        last[blocks[k]] = prompt[k]
    return before


def _runs(before: _Ints, prompt: _Ints, depth: _Ints) -> tuple[_Ints, _Ints, _Ints, _Ints]:
    """Neighbouring blocks of one prompt with one predecessor: (prompt, since, start, stop)."""
    if not len(before):
        return before, before, before, before
    cut = np.flatnonzero((np.diff(before) != 0) | (np.diff(prompt) != 0)) + 1
    first = np.concatenate([[0], cut])
    last = np.concatenate([cut, [len(before)]]) - 1
    return prompt[first], before[first], depth[first], depth[last] + 1


@njit(cache=True)
def _dual(owner, since, start, stop, saving_s, prices, slots, n):  # type: ignore[no-untyped-def]
    """The bound at these prices, and the room used in each span by the choice that attains it.

    Within a run the price is one and v grows with depth, so the best m is at a run's end.
    """
    total = np.zeros(n + 1)
    total[1:] = np.cumsum(prices)
    change = np.zeros(n + 1)
    wanted = np.zeros(n)
    bound = slots * total[n]
    k = 0
    while k < len(owner):
        j = owner[k]
        end, gain, best, upto = k, 0.0, 0.0, k
        while end < len(owner) and owner[end] == j:
            held = (stop[end] - start[end]) * (total[j] - total[since[end]])
            gain += saving_s[stop[end]] - saving_s[start[end]] - held
            end += 1
            if gain > best:
                best, upto = gain, end
        bound += best
        for r in range(k, upto):
            change[since[r]] += stop[r] - start[r]
            change[j] -= stop[r] - start[r]
            wanted[j] += stop[r] - start[r]
        k = end
    return bound, np.cumsum(change)[:n], wanted


@njit(cache=True)
def _schedule(owner, since, start, stop, saving_s, prices, target, slots, n):  # type: ignore[no-untyped-def]
    total = np.zeros(n + 1)
    total[1:] = np.cumsum(prices)
    heads = np.empty(n + 1, np.int64)
    ratio = np.empty(n)
    count, k = 0, 0
    while k < len(owner):
        j, held, best = owner[k], 0.0, 0.0
        heads[count] = k
        while k < len(owner) and owner[k] == j:
            held += (stop[k] - start[k]) * (total[j] - total[since[k]] + 1e-12)
            best = max(best, saving_s[stop[k]] / held)
            k += 1
        ratio[count] = best
        count += 1
    heads[count] = len(owner)
    rank = np.argsort(-ratio[:count])
    hits = np.zeros(n, np.int64)
    room = np.full(n, slots, np.int64)
    for least, whole in ((1.0, True), (0.5, False), (0.0, False)):
        for c in rank:
            j = owner[heads[c]]
            wanted = target[j] + 1e-3
            if wanted < least:
                continue
            limit = np.int64(wanted) if whole else np.int64(1 << 60)
            for r in range(heads[c], heads[c + 1]):
                if stop[r] <= hits[j]:
                    continue
                wish = min(stop[r], limit) - hits[j]
                if wish <= 0:
                    break
                fits = min(wish, room[since[r] : j].min())
                room[since[r] : j] -= fits
                hits[j] += fits
                if hits[j] < stop[r]:
                    break
    return hits

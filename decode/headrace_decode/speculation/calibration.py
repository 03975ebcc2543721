"""With which probability a drafted token is accepted, learned online from what the engine refused.

A *cell* counts how often a token was tried and how often accepted, given that those before it were,
by

- source of the text that weighed most (`draft.Source`),
- match-length bucket: how much of the context that text shares,
- agreement: how many candidates there were, and what share of their weight had this token,
- what is known of this token here from earlier drafts (`failures`),
- position in the draft.

    rate(cell) = (accepted + S q) / (tried + S)          S = STRENGTH

so a cell that was rarely tried says what `q` does. That begins as a prior whose odds are a product
of one factor for each of match, agreement, known and position; then groups of cells, from wide to
narrow (`GROUPS`), move the odds of all their cells together by one Newton step of the logistic
regression of what came on what q said, shrunk by as much information as GROUP_STRENGTH tokens
at an even chance of four to one hold:

    odds(q) *= exp(sum(accepted - tried q) / (sum(tried q (1 - q)) + 0.2 GROUP_STRENGTH))

Rates are computed anew after 16, 32, 64, ... drafts, from then on every REFRESH; all counts fade by
FADE every REFRESH drafts, so that the memory follows a workload that changes.

A draft's survival is the running product of its cells' rates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculation.draft import Source
from headrace_decode.speculation.jit import jit
from headrace_decode.speculation.layout import CONTEXT

SOURCES = len(Source)
MATCH_FROM = (1, 2, 3, 4, 6, 9, 13, 20, 32)
"""Smallest match length, in tokens, of each bucket."""
POSITION_FROM = (0, 1, 2, 3, 5, 8, 12, 20)
SHARE_FROM = (0.745, 0.495, 0.345, 0.195, 0.0)
"""Below round shares: of two candidates that differ in age alone, each has half."""
AGREEMENTS = 3 + len(SHARE_FROM)
"""Alone; 2 or 3 agree; more agree; some agree, with at least such a share of the weight."""
KNOWN = 5
"""Nothing; more often accepted; both, not so; refused once; refused more often."""
STRENGTH, GROUP_STRENGTH = 12.0, 32.0
FADE = 0.98
FIRST_REFRESH, REFRESH = 16, 256

MATCHES, POSITIONS = len(MATCH_FROM), len(POSITION_FROM)
_VOTE_PRIOR = (0.30, 0.45, 0.55, 0.62, 0.70, 0.78, 0.84, 0.90, 0.95)
"""By match; of the weights in the vote."""
_BASE = 0.39
_BY_MATCH = (-1.02, -0.88, -0.44, -0.38, 0.25, 0.25, 0.35, 0.55, 1.32)
_BY_AGREEMENT = (0.51, 1.47, 2.52, 0.31, -0.49, -0.89, -1.57, -1.85)
_BY_KNOWN = (0.33, 1.41, 0.09, -0.36, -1.47)
_BY_POSITION = (-0.47, -0.36, -0.22, 0.08, 0.38, -0.11, 0.17, 0.54)
"""Log-odds of the rates' prior, as `python -m benchmarks.drafting --part prior` fits them."""
_RATE_PRIOR: NDArray[np.float64] = 1.0 / (
    1.0 + np.exp(-_BASE - sum(np.ix_(_BY_MATCH, _BY_AGREEMENT, _BY_KNOWN, _BY_POSITION)))
)
"""Rates before anything was counted, float64 [matches, agreements, known, positions]."""
GROUPS = ((2, 3, 4), (2, 3), (3, 4), (4,))
"""What lies along these dimensions of the cells moves together: all of a source and match; of a
position too; of an agreement; of what is known as well."""
_MOST = 2.0
"""What a group may move log-odds by."""


def _buckets(starts: tuple[int, ...], size: int) -> NDArray[np.int32]:
    return (np.searchsorted(starts, np.arange(size), side="right") - 1).clip(0).astype(np.int32)


MATCH_BUCKET = _buckets(MATCH_FROM, CONTEXT + 1)
POSITION_BUCKET = _buckets(POSITION_FROM, POSITION_FROM[-1] + 1)


class Calibration:
    """Counts and rates of all cells.

    Attributes:
        counts: float64 [cells, 2]: tried, accepted; a cell's number is that of `cell_of`.
        rates: float32 [cells]: what `trie` reads.
        weights: float32 [SOURCES, MATCHES]: odds that a candidate's next token is accepted, its
            weight in the vote on the next token.
    """

    def __init__(self, *, learn: bool = True) -> None:
        self.shape = (SOURCES, MATCHES, AGREEMENTS, KNOWN, POSITIONS)
        self.counts = np.zeros((int(np.prod(self.shape)), 2))
        self.learn = learn
        self.rates = np.zeros(len(self.counts), np.float32)
        self.weights = np.zeros((SOURCES, MATCHES), np.float32)
        self._drafts, self._due = 0, FIRST_REFRESH
        self._update()

    def learned(self, drafts: int) -> None:
        """So many drafts were counted into `counts`."""
        self._drafts += drafts
        if self._drafts < self._due:
            return
        fades = self._drafts >= REFRESH
        self._drafts -= REFRESH * fades
        self._due = min(2 * self._due, REFRESH)
        if self.learn:
            self._update()
            self.counts *= FADE if fades else 1.0

    def restore(self, counts: NDArray[np.float64]) -> None:
        """Take over another's counts of the same shape."""
        self.counts[:] = counts
        if self.learn:
            self._update()

    def _update(self) -> None:
        counts = self.counts.reshape(*self.shape, 2)
        rates = np.broadcast_to(_RATE_PRIOR, self.shape)
        for group in GROUPS:
            rates = _moved(counts, rates, group)
        self.rates[:] = _shrunk(counts, rates).ravel()
        prior = np.broadcast_to(_VOTE_PRIOR, (SOURCES, MATCHES))
        by_match = _shrunk(counts.sum(axis=(2, 3, 4)), prior)
        self.weights[:] = by_match / (1.0 - by_match + 1e-3)


def _moved(
    counts: NDArray[np.float64], rates: NDArray[np.float64], group: tuple[int, ...]
) -> NDArray[np.float64]:
    """Rates whose odds were moved towards what came, alike for all cells of a group."""
    tried, accepted = counts[..., 0], counts[..., 1]
    surprise = (accepted - tried * rates).sum(axis=group, keepdims=True)
    known = (tried * rates * (1.0 - rates)).sum(axis=group, keepdims=True)
    move = np.clip(surprise / (known + 0.2 * GROUP_STRENGTH), -_MOST, _MOST)
    return np.asarray(rates / (rates + (1.0 - rates) * np.exp(-move)))


def _shrunk(counts: NDArray[np.float64], parent: NDArray[np.float64]) -> NDArray[np.float64]:
    return (counts[..., 1] + STRENGTH * parent) / (counts[..., 0] + STRENGTH)


@jit
def cell_of(source: int, match: int, agreement: int, known: int, position: int) -> int:
    """Number of a cell; all but `source` and `known` are buckets."""
    cell = ((source * MATCHES + match) * AGREEMENTS + agreement) * KNOWN + known
    return cell * POSITIONS + position


@jit
def agreement_of(candidates: int, share: float) -> int:
    if share >= 0.999:
        return 0 if candidates == 1 else (1 if candidates <= 3 else 2)
    for bucket in range(len(SHARE_FROM) - 1):
        if share >= SHARE_FROM[bucket]:
            return 3 + bucket
    return AGREEMENTS - 1


@jit
def known_of(refused: int, accepted: int) -> int:
    if accepted > refused:
        return 1
    if accepted > 0:
        return 2
    return 0 if refused == 0 else (3 if refused == 1 else 4)


@jit
def count(counts: Any, cells: Any, offered: int, accepted: int) -> None:
    """Count one draft whose first `offered` tokens were tried, `accepted` of them with success."""
    for position in range(min(offered, accepted + 1)):
        counts[cells[position], 0] += 1.0
        if position < accepted:
            counts[cells[position], 1] += 1.0

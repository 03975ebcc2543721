"""A survival model, fitted from the stream of prompts, of when a prompt's blocks are wanted again.

The hazard of a prompt is the rate, per second, at which its next turn arrives, given that it has
not arrived yet. It falls with age, but not from the start (people read before they write), and
depends on how the conversation went so far. With four features in classes and age in bins

    hazard(x, age) = base(pace, age) * f_turn(turn) * f_fresh(fresh) * f_length(length)

where ``base`` is a table over age bin and the class of the conversation's usual gap. Agents return
within seconds and people within minutes, so bins and classes begin below a second. This is the
piecewise exponential model (Friedman, Piecewise exponential models for survival data with
covariates, Ann. Statist. 10, 1982): within a cell events are Poisson with mean hazard * exposure,
and its maximum likelihood comes from iterative proportional fitting over the cells' events and
exposures. Each factor is shrunk to 1 by `PRIOR_EVENTS` events that the rest of the model predicted
right. Prompts not asked for again count through their exposure, so nothing is biased towards those
that return.

The value of holding a block is not the hazard now but the best rate ahead:

    rate(x, age) = max over t of  P(asked within t) / E[seconds held until asked, or t]

This is the Gittins index of a job that ends when it is asked for. It accounts for a peak that is
still to come.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

PACES = 12  # no gap before, < 1 s, < 2 s, < 4 s, ..., < 512 s, more
TURNS = 6  # 0, 1, 2, 3-4, 5-8, 9 and more
FRESH = 6  # blocks new in this turn: 0, 1, 2-3, 4-7, 8-15, 16 and more
LENGTHS = 7  # blocks: < 4, < 8, < 16, ..., < 128, more
AGES = 32

SHAPE = (PACES, TURNS, FRESH, LENGTHS, AGES)
CELLS = PACES * TURNS * FRESH * LENGTHS

AGE_EDGES_S: Floats = np.concatenate([[0.0], 0.5 * 2.0 ** (0.5 * np.arange(AGES))])
"""Bin k holds ages from edge k to edge k + 1; the last bin is open above."""

PRIOR_EVENTS = 4.0
PRIOR_RETURN_S = 60.0  # prior hazard: PRIOR_SHARE / (age + PRIOR_RETURN_S), a heavy tail
PRIOR_SHARE = 0.3
SWEEPS = 4


def prior_base() -> Floats:
    """Return the hazard before any event was seen, (AGES,), per second."""
    middle = 0.5 * (AGE_EDGES_S[:-1] + AGE_EDGES_S[1:])
    return PRIOR_SHARE / (middle + PRIOR_RETURN_S)


def fit(events: Floats, exposure_s: Floats) -> Floats:
    """Return the hazard of every cell, shape (CELLS, AGES), per second.

    `events` and `exposure_s` (CELLS, AGES): number of next turns that arrived in the cell, and
    seconds that prompts waited in it.
    """
    y, time = events.reshape(SHAPE), exposure_s.reshape(SHAPE)
    base = _by_age(y.sum((0, 1, 2, 3)), time.sum((0, 1, 2, 3)))
    hazard = np.broadcast_to(base, SHAPE).copy()
    rests = [(1, 2, 3), (0, 2, 3, 4), (0, 1, 3, 4), (0, 1, 2, 4)]
    factors: list[Floats] = [np.ones(1)] * len(rests)
    for _ in range(SWEEPS):
        for which, rest in enumerate(rests):
            hazard /= factors[which]
            expected = (hazard * time).sum(rest, keepdims=True)
            factors[which] = _shrunk(y.sum(rest, keepdims=True), expected)
            hazard *= factors[which]
    return hazard.reshape(CELLS, AGES)


def _by_age(events: Floats, exposure_s: Floats) -> Floats:
    """Return the hazard by age alone; where little was seen, the prior's shape at the level
    before."""
    base, ratio = prior_base(), 1.0
    for k in range(AGES):
        seen, expected = events[k], exposure_s[k] * base[k]
        ratio = (seen + PRIOR_EVENTS * ratio) / (expected + PRIOR_EVENTS)
        base[k] *= ratio
    return base


def _shrunk(events: Floats, expected: Floats) -> Floats:
    return (events + PRIOR_EVENTS) / (expected + PRIOR_EVENTS)


def best_rate(hazard: Floats) -> Floats:
    """Return the Gittins index at the start of each age bin, shape as `hazard` (CELLS, AGES), per
    second.

    For bins a <= t: ``P = 1 - exp(-H)`` with ``H`` the hazard summed over the bins' seconds, and
    ``E`` the integral of the survival ``exp(-H)``.
    """
    width = np.diff(AGE_EDGES_S)
    passed = np.exp(-hazard * width)
    held = -np.expm1(-hazard * width) / hazard
    best = np.zeros_like(hazard)
    for a in range(AGES):
        survival = np.ones(len(hazard))
        seconds = np.zeros(len(hazard))
        for t in range(a, AGES):
            seconds += survival * held[:, t]
            survival = survival * passed[:, t]
            np.maximum(best[:, a], (1.0 - survival) / seconds, out=best[:, a])
    return best

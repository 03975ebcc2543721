"""What the calibration begins with: a logistic regression of which drafted tokens were accepted.

One effect for each match-length bucket, agreement, state of knowledge and position, fitted to the
cells of all corpora together, each of which weighs the same, by Newton's method with a weak ridge.
The figures are the constants of `headrace_decode.speculation.calibration`.
"""

from __future__ import annotations

from collections.abc import Mapping
from unittest import mock

import numpy as np

from benchmarks.drafting.arms import Ours
from benchmarks.drafting.corpora import Exchange
from benchmarks.drafting.replay import replay
from headrace_decode.speculation import calibration

FLOOR = 0.05
RIDGE = 20.0
TOKENS = 100_000.0
"""That each corpus counts as."""
_NAMES = ("match", "agreement", "known", "position")


def fit(corpora: Mapping[str, list[Exchange]]) -> dict[str, float]:
    """``prior.base`` and ``prior.EFFECT.BUCKET``, log-odds."""
    counted = []
    for exchanges in corpora.values():
        with mock.patch.object(calibration, "FADE", 1.0):
            arm = Ours(FLOOR)
            replay(arm, exchanges)
        cells = arm.memory.calibration
        table = cells.counts.reshape(*cells.shape, 2).sum(axis=0)
        counted.append(table * TOKENS / table[..., 0].sum())
    tried, accepted = np.moveaxis(sum(counted), -1, 0)
    columns = [np.eye(size)[at] for size, at in zip(
        tried.shape, np.indices(tried.shape).reshape(4, -1), strict=True
    )]  # fmt: skip
    design = np.concatenate([*columns, np.ones((tried.size, 1))], axis=1)
    ridge = np.append(np.full(design.shape[1] - 1, RIDGE), 1e-6)
    effects = np.zeros(design.shape[1])
    for _ in range(50):
        rates = 1.0 / (1.0 + np.exp(-design @ effects))
        slope = design.T @ (accepted.ravel() - tried.ravel() * rates) - ridge * effects
        weights = tried.ravel() * rates * (1.0 - rates)
        effects += np.linalg.solve(design.T @ (weights[:, None] * design) + np.diag(ridge), slope)
    named = [f"{name}.{at}" for name, size in zip(_NAMES, tried.shape, strict=True)
             for at in range(size)]  # fmt: skip
    return {f"prior.{n}": float(e) for n, e in zip([*named, "base"], effects, strict=True)}

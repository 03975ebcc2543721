"""Computes how many draft tokens of each row one engine step should verify. Pure arithmetic.

Each row of the batch emits one certain token, and one more for each accepted draft token. The
budget is the number of draft tokens that maximises the step's expected tokens per second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.jit import jit


@dataclass(frozen=True)
class DraftBudget:
    """The draft tokens that one step verifies.

    Attributes:
        take: int32 [n], number of draft tokens of each row, from its first on.
        expected_tokens: expected tokens of the whole batch, with the certain ones.
        seconds: predicted seconds of the step.
        price: survival that one more token would have needed to be worth its time.
    """

    take: NDArray[np.int32]
    expected_tokens: float
    seconds: float
    price: float


def best_draft_budget(
    survival: NDArray[np.float32],
    lengths: NDArray[np.int32],
    seconds: NDArray[np.float64],
    sure_tokens: float | None = None,
) -> DraftBudget:
    """Return the global maximum over m of ``(sure + s_1 + ... + s_m) / T(m)``.

    ``s`` are all survivals of the batch, merged in descending order. A row's survivals do not
    increase, so the m greatest are a prefix of each row's draft, and no other choice of m tokens
    has a greater expectation: the maximum over m is the maximum over all choices of lengths. Since
    T may have steps, the quotient may have several local maxima, so all m are compared. Among equal
    maxima the one with the fewest tokens wins.

    Args:
        survival: float32 [n, K], not increasing along a row.
        lengths: int32 [n], number of draft tokens in each row, at most K.
        seconds: float64 [M + 1], predicted seconds of the step with 0 to M draft tokens in it; M is
            also the maximum number of draft tokens.
        sure_tokens: number of tokens that the step emits without drafts; None: one a row.
    """
    rows = len(lengths)
    sure = float(rows if sure_tokens is None else sure_tokens)
    values, owner = _merged(survival, lengths)
    limit = min(len(values), len(seconds) - 1)
    expected = sure + np.concatenate([[0.0], np.cumsum(values[:limit], dtype=np.float64)])
    rate = expected / seconds[: limit + 1]
    best = int(rate.argmax())
    ahead = min(best + 1, len(seconds) - 1)
    return DraftBudget(
        np.bincount(owner[:best], minlength=rows).astype(np.int32),
        float(expected[best]),
        float(seconds[best]),
        float(rate[best] * (seconds[ahead] - seconds[best])),
    )


@jit
def _merged(
    survival: NDArray[np.float32], lengths: NDArray[np.int32]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return all survivals in descending order, and the row of each; a row's keep their order.

    A survival that is not above 0 is left out, with those after it in its row. A survival above its
    predecessor in the row counts as equal to it.
    """
    total = 0
    for row in range(len(lengths)):
        total += lengths[row]
    values = np.empty(total, np.float64)
    owner = np.empty(total, np.int64)
    count = 0
    for row in range(len(lengths)):
        least = 1.0
        for place in range(lengths[row]):
            if not survival[row, place] > 0.0:
                break
            least = min(least, survival[row, place])
            values[count] = least
            owner[count] = row
            count += 1
    order = np.argsort(-values[:count], kind="mergesort")
    return values[:count][order], owner[:count][order]

"""How many draft tokens of which rows one engine step should verify. Pure arithmetic.

Each row of the batch emits one token for certain, and each draft token that survives is one more. A
step is worth its expected tokens per second; the budget is where that is greatest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculation.jit import jit


@dataclass(frozen=True)
class Budget:
    """What one step verifies.

    Attributes:
        take: int32 [n], draft tokens of each row, from its first on.
        expected_tokens: of the whole batch, those that are certain included.
        seconds: predicted, of the step.
        price: survival that one token more would have had to offer to be worth its time.
    """

    take: NDArray[np.int32]
    expected_tokens: float
    seconds: float
    price: float


def best_budget(
    survival: NDArray[np.float32],
    lengths: NDArray[np.int32],
    seconds: NDArray[np.float64],
    sure_tokens: float | None = None,
) -> Budget:
    """The global maximum over m of ``(sure + s_1 + ... + s_m) / T(m)``.

    ``s`` are all survivals of the batch, merged in descending order. A row's survivals do not
    increase, so the m greatest are a prefix of each row's draft, and no other choice of m tokens
    expects more: the maximum over m is the maximum over all choices of lengths. Since T may be
    stepped, the quotient may have several local maxima; all m are looked at. Of equals the fewest
    tokens win.

    Args:
        survival: float32 [n, K], not increasing along a row.
        lengths: int32 [n], tokens on offer in each row, at most K.
        seconds: float64 [M + 1], predicted seconds of the step with 0 to M draft tokens in it; M is
            at the same time the most that may be taken.
        sure_tokens: what the step emits without drafts; one a row if not told.
    """
    rows = len(lengths)
    sure = float(rows if sure_tokens is None else sure_tokens)
    values, owner = _merged(survival, lengths)
    limit = min(len(values), len(seconds) - 1)
    expected = sure + np.concatenate([[0.0], np.cumsum(values[:limit], dtype=np.float64)])
    rate = expected / seconds[: limit + 1]
    best = int(rate.argmax())
    ahead = min(best + 1, len(seconds) - 1)
    return Budget(
        np.bincount(owner[:best], minlength=rows).astype(np.int32),
        float(expected[best]),
        float(seconds[best]),
        float(rate[best] * (seconds[ahead] - seconds[best])),
    )


@jit
def _merged(
    survival: NDArray[np.float32], lengths: NDArray[np.int32]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """All survivals in descending order, and the row of each. Stable: a row's stay in their order.

    What is not above 0 is left out, with what follows it in its row; what rises along a row counts
    as its predecessor.
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

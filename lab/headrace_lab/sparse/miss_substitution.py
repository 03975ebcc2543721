"""When a miss is left out, and what stands in for it. Engines leave none out:
`benchmarks.sparse.prefetch` measures what that would cost.

A chosen unit that has no slot is fetched, and the step waits for it. Or the best unit that has a
slot and was not chosen stands in for it: that costs no time, and the attention

    loss = score(missing) - score(stand-in)

Losses of one KV head may add up to `slack` times the attention that the choice itself leaves out.
Within that the least losses are taken first. With `slack` 0 nothing is left out, and a step
attends to what it would have attended to without offload.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_decode.sparse.layout import jit


def stand_ins(
    scores: NDArray[np.float32],
    chosen: NDArray[np.int64],
    slots: NDArray[np.int32],
    sinks: int,
    recent: int,
    slack: float,
) -> NDArray[np.int64]:
    """The choice with units that are there in place of some that are not.

    Args:
        scores: float32 [kv_heads, n].
        chosen: int64 [kv_heads, c] ascending, as of `choosing.choose`.
        slots: int [kv_heads, n]; below 0 for units that are not there.
        sinks, recent: first and last units, which are never replaced.
        slack: losses allowed, over the attention to units that are not chosen.

    Returns:
        int64 [kv_heads, c] ascending.
    """
    if slack <= 0:
        return chosen
    found = chosen.copy()
    order = np.argsort(np.take_along_axis(scores, chosen, 1), axis=1, kind="stable")
    _stand_in(scores, slots, order, sinks, recent, np.float32(slack), found)
    found.sort(axis=1)
    return found


@jit
def _stand_in(
    scores: Any,
    slots: Any,
    order: Any,
    sinks: int,
    recent: int,
    slack: np.float32,
    chosen: Any,
) -> None:
    kv_heads, n = scores.shape
    for head in range(kv_heads):
        taken = np.zeros(n, np.bool_)
        total = np.float32(0)
        for unit in range(n):
            total += scores[head, unit]
        for unit in chosen[head]:
            taken[unit] = True
            total -= scores[head, unit]
        left = slack * total
        # Lowest first: the pairs of least loss are the lowest miss with the best stand-in.
        for place in order[head]:
            unit = chosen[head, place]
            if slots[head, unit] >= 0 or unit < sinks or unit >= n - recent:
                continue
            best = -1
            for other in range(n):
                free = slots[head, other] >= 0 and not taken[other]
                if free and (best < 0 or scores[head, other] > scores[head, best]):
                    best = other
            if best < 0:
                break
            left -= scores[head, unit] - scores[head, best]
            if left < 0:
                break
            chosen[head, place] = best
            taken[best] = True

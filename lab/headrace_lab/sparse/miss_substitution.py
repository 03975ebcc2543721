"""Substitution of chosen pages that have no slot. Engines do not substitute any:
`benchmarks.sparse.prefetch` measures what that would cost.

A chosen page that has no slot is fetched, and the step waits for it. Alternatively, it is replaced
by the best page that has a slot and was not chosen. That costs no time, and this much attention:

    loss = score(missing) - score(substitute)

Losses of one KV head may add up to `slack` times the attention that the choice itself leaves out.
Within this limit the smallest losses are taken first. With `slack` 0 no page is replaced, and a
step attends to the same pages as without offload.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_decode.sparse.summary_layout import jit


def substitute_misses(
    scores: NDArray[np.float32],
    chosen: NDArray[np.int64],
    slots: NDArray[np.int32],
    sinks: int,
    recent: int,
    slack: float,
) -> NDArray[np.int64]:
    """Return the choice after replacing some pages without a slot by pages that have one.

    Args:
        scores: float32 [kv_heads, n].
        chosen: int64 [kv_heads, c] ascending, as from `page_selection.select_pages`.
        slots: int [kv_heads, n]; below 0 for pages without a slot.
        sinks, recent: numbers of first and last pages, which are never replaced.
        slack: allowed losses, over the attention to pages that are not chosen.

    Returns:
        int64 [kv_heads, c] ascending.
    """
    if slack <= 0:
        return chosen
    found = chosen.copy()
    order = np.argsort(np.take_along_axis(scores, chosen, 1), axis=1, kind="stable")
    _substitute(scores, slots, order, sinks, recent, np.float32(slack), found)
    found.sort(axis=1)
    return found


@jit
def _substitute(
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
        for page in range(n):
            total += scores[head, page]
        for page in chosen[head]:
            taken[page] = True
            total -= scores[head, page]
        left = slack * total
        # Lowest first: the smallest losses pair the lowest miss with the best substitute.
        for place in order[head]:
            page = chosen[head, place]
            if slots[head, page] >= 0 or page < sinks or page >= n - recent:
                continue
            best = -1
            for other in range(n):
                free = slots[head, other] >= 0 and not taken[other]
                if free and (best < 0 or scores[head, other] > scores[head, best]):
                    best = other
            if best < 0:
                break
            left -= scores[head, page] - scores[head, best]
            if left < 0:
                break
            chosen[head, place] = best
            taken[best] = True

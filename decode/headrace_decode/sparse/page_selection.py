"""Chooses the pages that a step attends to: the first, the newest, and the highest scores between.

The first page holds the text's attention sink (StreamingLLM, arXiv 2309.17453), and the newest
tokens draw attention whatever they are. Neither is left to an estimate.

The k-th highest score is built bit by bit, like in `kernels.page_selection`. Floats are ordered
like their bits, if for floats below 0 all bits but the sign are inverted. This orders any bits, so
exactly the given number of pages is chosen, whatever the scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_decode.sparse.summary_layout import jit


def select_pages(
    scores: NDArray[np.float32], count: int, sinks: int, recent: int
) -> NDArray[np.int64]:
    """Choose `count` pages for each KV head.

    Args:
        scores: float32 [kv_heads, n], higher is better.
        count: number of pages, including `sinks` and `recent`; at least their sum, at most n.
        sinks: number of first pages that are always chosen.
        recent: number of last pages that are always chosen.

    Returns:
        int64 [kv_heads, count] ascending; of equal scores, the earlier page.
    """
    kv_heads, n = scores.shape
    sinks = min(sinks, n)
    recent = min(recent, n - sinks)
    count = min(max(count, sinks + recent), n)
    free = count - sinks - recent
    chosen = np.empty((kv_heads, count), np.int64)
    bits = np.ascontiguousarray(scores, np.float32).view(np.int32)
    _choose(bits, free, sinks, recent, chosen)
    return chosen


@jit
def _choose(bits: Any, free: int, sinks: int, recent: int, chosen: Any) -> None:
    n, count = bits.shape[1], chosen.shape[1]
    for head in range(len(bits)):
        row, into = bits[head], chosen[head]
        middle = row[sinks : n - recent].copy()
        for i in range(middle.size):
            middle[i] ^= (middle[i] >> np.int32(31)) & np.int32(0x7FFFFFFF)
        for i in range(sinks):
            into[i] = i
        for i in range(recent):
            into[count - recent + i] = n - recent + i
        if free == 0:
            continue
        lowest, above = np.int32(-(2**31)), 0
        for shift in range(32):
            tried = np.int32(lowest | np.int32(1 << (31 - shift))) if shift else np.int32(0)
            found = _reaching(middle, tried)
            if found >= free:
                lowest = tried
            else:
                above = max(above, found)
        equals, at = free - above, sinks
        for i in range(middle.size):
            if middle[i] < lowest or at == sinks + free:
                continue
            if middle[i] == lowest:
                if equals == 0:
                    continue
                equals -= 1
            into[at] = sinks + i
            at += 1


@jit
def _reaching(bits: Any, least: Any) -> Any:
    found = np.int32(0)
    for i in range(bits.size):
        found += np.int32(bits[i] >= least)
    return found

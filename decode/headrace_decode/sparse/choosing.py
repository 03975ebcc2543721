"""Which units a step attends to: the first, the newest, and the highest scores between them.

The first unit holds the text's attention sink (StreamingLLM, arXiv 2309.17453), and the newest
tokens draw attention whatever they are; neither is left to an estimate.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def choose(scores: NDArray[np.float32], count: int, sinks: int, recent: int) -> NDArray[np.int64]:
    """Choose `count` units for each KV head.

    Args:
        scores: float32 [kv_heads, n], higher is better; not NaN.
        count: of units, those of `sinks` and `recent` included; raised to these, at most n.
        sinks: first units that are always chosen.
        recent: last units that are always chosen.

    Returns:
        int64 [kv_heads, count] ascending; the earlier one of equals.
    """
    kv_heads, n = scores.shape
    sinks = min(sinks, n)
    recent = min(recent, n - sinks)
    count = min(max(count, sinks + recent), n)
    free = count - sinks - recent
    middle = scores[:, sinks : n - recent]
    chosen = np.empty((kv_heads, count), np.int64)
    chosen[:, :sinks] = np.arange(sinks)
    chosen[:, count - recent :] = np.arange(n - recent, n)
    if free:
        best = np.argsort(-middle, axis=1, kind="stable")[:, :free]
        chosen[:, sinks : sinks + free] = np.sort(best, axis=1) + sinks
    return chosen

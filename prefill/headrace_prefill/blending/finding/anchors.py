"""Anchors of a text, chosen by its content alone, so that equal runs have equal anchors.

Each window of `WINDOW` tokens has a keyed hash. Of any `SPAN` consecutive windows, the one with the
smallest hash is an anchor. (Robust winnowing: the previous choice stays while it is the smallest;
of several equal ones, the last is chosen.) A run of `LEAST` tokens or more that two texts share
contains an anchor of both texts, unless the run repeats itself. About 2 / (SPAN + 1) of all windows
are anchors.
Source: Schleimer, Wilkerson, Aiken, "Winnowing" (SIGMOD 2003), sections 3 and 4.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.numba_jit import jit

WINDOW, SPAN = 32, 32
LEAST = WINDOW + SPAN - 1
"""Length of the shortest run that is certain to be found, in tokens."""


def anchors(tokens: NDArray[np.int32], key: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the anchors of a text.

    Args:
        tokens: int32 [n].
        key: 64 bits, secret: a client that knows it could make texts with equal hashes.

    Returns:
        int64 [m], the index of the last token of each anchor's window, ascending; uint64 [m],
        hashes.
    """
    ends = np.empty(max(0, len(tokens) - WINDOW + 1), np.int64)
    hashes = np.empty(len(ends), np.uint64)
    count = _anchors(tokens, np.uint64(key), ends, hashes)
    return ends[:count], hashes[:count]


@jit(nogil=True)
def _anchors(tokens, key, ends, hashes):  # type: ignore[no-untyped-def]
    base = key | np.uint64(1)
    top = np.uint64(1)
    for _ in range(WINDOW):
        top *= base
    recent = np.empty(SPAN, np.uint64)
    rolling, best, count = np.uint64(0), -1, 0
    windows = len(tokens) - WINDOW + 1
    for i in range(len(tokens)):
        # r_i = sum over the window of (token + 1) * base^(distance from its end), modulo 2^64
        rolling = rolling * base + np.uint64(tokens[i]) + np.uint64(1)
        if i >= WINDOW:
            rolling -= top * (np.uint64(tokens[i - WINDOW]) + np.uint64(1))
        at = i - WINDOW + 1
        if at < 0:
            continue
        recent[at % SPAN] = _mixed(rolling ^ key)
        if at < min(SPAN, windows) - 1:
            continue
        if best <= at - SPAN:  # the previous choice is out of range, or there was none
            first = max(0, at - SPAN + 1)
            best = first
            for other in range(first, at + 1):
                if recent[other % SPAN] <= recent[best % SPAN]:
                    best = other
        elif recent[at % SPAN] < recent[best % SPAN]:
            best = at
        else:
            continue
        ends[count], hashes[count] = best + WINDOW - 1, recent[best % SPAN]
        count += 1
    return count


@jit(nogil=True, inline="always")
def _mixed(x):  # type: ignore[no-untyped-def]
    """Return the finaliser of splitmix64: each bit of x flips about half of the bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

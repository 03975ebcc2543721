"""Maximal runs that a prompt shares with stored texts.

Each anchor of the prompt is looked up. The tokens around each place of the prompt's tenant are
compared one by one in both directions, so a run's tokens are equal even where hashes collide. A
place on the diagonal of a run that was found already is not compared again. Texts that repeat
themselves could cause quadratic work, so there are at most about `WORK` comparisons for each token
of the prompt. After that, the search returns the runs found so far.
"""

from __future__ import annotations

import numpy as np

from headrace_kvstore.numba_jit import jit
from headrace_prefill.blending.finding.table import CANDIDATES, get
from headrace_prefill.blending.finding.texts import back, forth

WORK = 32
ACTIVE = 16
"""Number of latest runs whose diagonals are kept."""
NEW, END, PLACE = 0, 1, 2
"""Columns of a run: its first position in the prompt, the position after its last, and the place of
its last token."""


@jit(nogil=True)
def matches(texts, table, tokens, tenant, ends, hashes, first, end, runs):  # type: ignore[no-untyped-def]
    """Write runs to int64 [anchors * CANDIDATES, 3] and return their number.

    Args:
        tokens: int32 [n], the prompt's tokens.
        ends, hashes: its anchors.
        first, end: the first block that the ring holds, and the one after its last.
    """
    size, blocks = texts.tokens.shape[1], len(texts.tokens)
    diagonals = np.zeros(ACTIVE, np.int64)
    until = np.full(ACTIVE, -1, np.int64)
    places = np.empty(CANDIDATES, np.int64)
    count, work = 0, WORK * len(tokens)
    for n in range(len(ends)):
        at = ends[n]
        for candidate in range(get(table, hashes[n], first * size, places)):
            place = places[candidate]
            block = (place // size) % blocks
            if texts.tenant[block] != tenant:
                continue
            diagonal = at - (texts.number[block] * size + place % size)
            known = False
            for other in range(ACTIVE):
                known |= until[other] > at and diagonals[other] == diagonal
            if known or work <= 0:
                continue
            behind = back(texts, tokens, at, place, first)
            if behind == 0:
                continue
            ahead, last = forth(texts, tokens, at + 1, place, end)
            work -= behind + ahead
            runs[count, NEW] = at + 1 - behind
            runs[count, END] = at + 1 + ahead
            runs[count, PLACE] = last
            diagonals[count % ACTIVE] = diagonal
            until[count % ACTIVE] = at + 1 + ahead
            count += 1
    return count

"""Longest hits of engines whose layers do not all keep a whole prefix.

Layers with a sliding window or a state need only the last blocks of a prefix. Such a hit may end at
a block and not at the one before it, so it is searched from the end of the blocks that the other
layers have, as vLLM does:

    hit = longest n so that the holder has n leading blocks, and
          in each of its windows the blocks n - needed to n - 1 (all n if there are fewer)

The search visits each block of the prompt at most once, and each holder once for each run of blocks
with the same holders.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.router.blocks.hash_table import find
from headrace.router.blocks.holder_sets import Int, Tables, has
from headrace_kvstore.numba_jit import jit


@jit(_nrt=False)
def shorten(
    t: Tables,
    keys: NDArray[np.uint64],
    ends: NDArray[np.int64],
    starts: NDArray[np.int64],
    slots: NDArray[np.int64],
    needed: NDArray[np.int64],
) -> None:
    """Shorten hits to blocks at which the windows of their holders allow them to end.

    Args:
        keys: keys of the prompt's blocks, [blocks].
        ends: leading blocks that each holder has; they are replaced by its hit, [holders].
        starts: first window of each holder, and the number of windows, [holders + 1].
        slots, needed: slot of each window, and the blocks that it needs, [windows].
    """
    i = np.int64(0)
    for h in range(ends.size):
        i = max(i, ends[h])
    i -= 1
    node = find(t, keys[i]) if i >= 0 else np.int64(0)
    while i >= 0:
        usable, orphan = sets_of(t, node)
        low = i
        while low > 0:
            node = find(t, keys[low - 1])
            before, alone = sets_of(t, node)
            if before != usable or alone != orphan:
                break
            low -= 1
        searching = False
        for h in range(ends.size):
            if ends[h] > low:
                last = min(i, ends[h] - 1)
                whole = True
                for w in range(starts[h], starts[h + 1]):
                    if ends[h] - last > needed[w]:
                        continue
                    if not (has(t, usable, slots[w]) or has(t, orphan, slots[w])):
                        ends[h] = low
                        whole = False
                        break
                if whole:
                    for w in range(starts[h], starts[h + 1]):
                        if ends[h] - low < needed[w]:
                            searching = True
                    continue
            searching |= ends[h] > 0
        if not searching:
            return
        i = low - 1


@jit(_nrt=False)
def sets_of(t: Tables, node: Int) -> Any:
    """Return the sets of holders of a node, empty for none."""
    if node == 0:
        return np.int64(0), np.int64(0)
    return np.int64(t.nodes[node].usable), np.int64(t.nodes[node].orphan)

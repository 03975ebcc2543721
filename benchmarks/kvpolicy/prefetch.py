"""Choice of the prompts whose blocks are fetched from disk before their next turn needs them.

A block that was evicted from DRAM may be worth its space again: because space has become cheaper,
or because its conversation's next turn is nearer than before. With the policy's forecast,

    worth(b) = rate(b) * (compute_s - load_s) / bytes        as when a victim is chosen

a block on disk is fetched if its worth exceeds the price of space by the factor `MARGIN`, which
prevents blocks from moving back and forth. Nothing is fetched if space is free. The most valuable
prompt comes first, each from its root on. Pure.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MARGIN = 1.25
"""How much more than what is given up for it a fetched block must be worth."""


def worth_fetching(
    worth: NDArray[np.float64], in_dram: NDArray[np.bool_], price: float, most: int
) -> NDArray[np.int64]:
    """Return the positions of the blocks of one prompt to fetch, root first, at most `most`.

    A block is useful only with all blocks before it, so a leading run is fetched: the longest one
    whose blocks outside of DRAM have a mean worth above `MARGIN` times the price.

    Args:
        worth: worth per byte of each block on disk, from the root on, (n,).
        in_dram: whether DRAM has the block already, (n,).
    """
    missing = np.flatnonzero(~in_dram)[:most]
    if not len(missing):
        return missing
    mean = np.cumsum(worth[missing]) / np.arange(1, len(missing) + 1)
    enough = np.flatnonzero(mean > MARGIN * price)
    return missing[: int(enough[-1]) + 1] if len(enough) else missing[:0]

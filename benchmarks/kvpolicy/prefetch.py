"""Which prompts' blocks to bring from disk before their next turn asks for them.

A block in DRAM that was given up may be worth its room again: because room has become cheaper, or
because its conversation's next turn is nearer than it was. With the policy's forecast,

    worth(b) = rate(b) * (compute_s - load_s) / bytes        as when a victim is chosen

a block on disk is fetched when that exceeds what room costs by `MARGIN` (so that nothing goes back
and forth), nothing where room is free, the most valuable prompt first, each from its root on. Pure.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MARGIN = 1.25
"""How much more than what is given up for it a fetched block must be worth."""


def worth_fetching(
    worth: NDArray[np.float64], in_dram: NDArray[np.bool_], price: float, most: int
) -> NDArray[np.int64]:
    """Positions of the blocks of one prompt to fetch, root first, at most `most`.

    A block is of use only with all before it, so a leading run counts: of those that lead to the
    best mean worth of what is not in DRAM, none if that is no more than `MARGIN` prices.

    Args:
        worth: per byte, of each block on disk, from the root on, (n,).
        in_dram: which of them DRAM has already, (n,).
    """
    missing = np.flatnonzero(~in_dram)[:most]
    if not len(missing):
        return missing
    mean = np.cumsum(worth[missing]) / np.arange(1, len(missing) + 1)
    enough = np.flatnonzero(mean > MARGIN * price)
    return missing[: int(enough[-1]) + 1] if len(enough) else missing[:0]

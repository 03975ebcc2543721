"""How long a peer that spoils blocks stays unnoticed: formula and simulation. Pure."""

from __future__ import annotations

import numpy as np


def transfers_until_seen(spoiled: float, blocks: int, rate: float) -> float:
    """Return the expected transfers up to the first that is checked and holds a spoiled block.

    Args:
        spoiled: share of blocks. blocks: a transfer. rate: share of transfers that are checked.
    """
    return 1.0 / (rate * (1.0 - (1.0 - spoiled) ** blocks))


def simulated(
    spoiled: float, blocks: int, rate: float, runs: int, seed: int
) -> tuple[float, float]:
    """Mean, and the 95th percentile, of the same over `runs` drawn block by block."""
    draw = np.random.default_rng(seed)
    seen = np.empty(runs)
    for run in range(runs):
        transfers = 0
        while True:
            transfers += 1
            bad = (draw.random(blocks) < spoiled).any()
            if draw.random() < rate and bad:
                break
        seen[run] = transfers
    return float(seen.mean()), float(np.percentile(seen, 95))

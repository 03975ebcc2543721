"""Which blocks a disk keeps, and which are worth writing to it. Pure.

For a block b of a tier that loads it in load_s,

    worth(b) = rate(b) * max(compute_s - load_s, 0)          saved seconds per second of residence

with rate(b) the hits per second that the policy expects (`Policy.rates`). When room is short, the
segment whose blocks have the least sum is removed.

A disk that keeps up writes everything: often a block is asked for again only after DRAM evicted it,
and after a restart only the disk has it. A disk that does not keep up can write only a share of
the blocks, so it should be the better share. With a backlog beyond `CALM`,

    write b  if  worth(b) / bytes(b)  >  quantile of the same among the blocks in DRAM, at pressure

where pressure rises from 0 at `CALM` to 1 at a full backlog.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.policy.base import Table

Floats = NDArray[np.float64]

DISK_BYTES_S = 1.5e9
"""What a disk reads and writes in a second while nobody measured."""
UNKNOWN_RATIO = 16.0
"""compute_s of a block of which nobody told, in units of its load_s."""
CALM = 0.5
"""Share of the backlog's limit up to which the disk counts as keeping up."""


def saved_s(rows: Table) -> Floats:
    """Seconds that loading each block saves against computing it, (n,), at least 0."""
    load_s = rows["bytes"].astype(np.float64) / DISK_BYTES_S
    compute_s = np.where(rows["compute_s"] > 0.0, rows["compute_s"], UNKNOWN_RATIO * load_s)
    return np.maximum(compute_s - load_s, 0.0)


def worth_keeping(rows: Table, rate: Floats) -> Floats:
    """Predicted seconds saved per second of residence, (n,). rate: hits per second, (n,)."""
    return rate * saved_s(rows)


def pressure(backlog: float) -> float:
    """How much of what comes the disk has to do without, 0 to 1, for a backlog's share."""
    return min(1.0, max(0.0, backlog - CALM) / (1.0 - CALM))


def worth_writing(rows: Table, worth: Floats, others: Floats, backlog: float) -> NDArray[np.bool_]:
    """Which blocks to write, (n,); pinned and preferred ones in any case.

    Args:
        worth: `worth_keeping` of each, (n,).
        others: `worth_keeping` per byte of blocks in DRAM, a sample, (m,).
        backlog: what waits for the disk, as a share of its limit.
    """
    share = pressure(backlog)
    if share == 0.0 or not len(others):
        return np.ones(len(rows), np.bool_)
    wanted = worth / np.maximum(rows["bytes"], 1.0) > np.quantile(others, share)
    return wanted | (rows["pinned"] > 0) | (rows["priority"] > 0)

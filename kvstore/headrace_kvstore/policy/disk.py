"""Which blocks a disk keeps. Pure.

For a block b of a tier that loads it in load_s,

    worth(b) = rate(b) * max(compute_s - load_s, 0)          saved seconds per second of residence

with rate(b) the hits per second that the policy expects (`Policy.rates`). When room is short, the
segment whose blocks have the least sum is removed.
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


def saved_s(rows: Table) -> Floats:
    """Seconds that loading each block saves against computing it, (n,), at least 0."""
    load_s = rows["bytes"].astype(np.float64) / DISK_BYTES_S
    compute_s = np.where(rows["compute_s"] > 0.0, rows["compute_s"], UNKNOWN_RATIO * load_s)
    return np.maximum(compute_s - load_s, 0.0)


def worth_keeping(rows: Table, rate: Floats) -> Floats:
    """Predicted seconds saved per second of residence, (n,). rate: hits per second, (n,)."""
    return rate * saved_s(rows)

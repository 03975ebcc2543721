"""A second check of blocks that a reader reported as bad.

The reader's memory, its bus or an outdated place may have been at fault. So the owner reads the
blocks itself, and the tier drops those that are damaged on the disk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace_kvstore.blocks.checksum import payload_sums
from headrace_kvstore.nvme.nvme_tier import NvmeTier
from headrace_kvstore.nvme.record import PAGE_BYTES
from headrace_kvstore.nvme.segment import Location, Read, page_memory

READ_BYTES = 16 * 2**20
"""Memory for one read."""
READ_S = 10.0
"""Time after which a disk that has not ended a read counts as hanging. Its blocks stay."""


def recheck(tier: NvmeTier, places: Sequence[Location]) -> int:
    """Read blocks of one namespace again; return how many the tier dropped."""
    if not places:
        return 0
    shape = places[0].shape
    stride = -(-shape.payload_bytes // PAGE_BYTES) * PAGE_BYTES
    at_once = max(1, min(len(places), READ_BYTES // stride))
    memory, address = page_memory(at_once * stride)
    layers = np.arange(shape.layers) * shape.layer_bytes
    dropped = 0
    for first in range(0, len(places), at_once):
        some = places[first : first + at_once]
        rows = address + np.arange(len(some)) * stride
        read = tier.read(some, rows[:, None] + layers, verify=payload_sums)
        try:
            read.wait(READ_S)
        except TimeoutError:
            read.abort()
            _keep_until_done(read, memory)
            break
        dropped += sum(reason != "unopened" for reason in read.bad.values())
    return dropped


def _keep_until_done(read: Read, memory: np.ndarray) -> None:
    """Keep memory alive while a disk that hangs may still write to it."""
    held = [memory]
    read.batch.add_done_callback(lambda _: held.clear())

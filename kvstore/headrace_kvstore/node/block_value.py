"""The value of a block to a node: on NVMe, or brought back into DRAM.

Its unit is seconds of computing saved per second: hits per second, by the arena policy's forecast,
times the seconds that each hit saves. Without an arena it follows from past use alone.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from headrace_kvstore.node.dram_service import DramService
from headrace_kvstore.nvme.catalog import use_per_second
from headrace_kvstore.nvme.nvme_tier import NvmeTier
from headrace_kvstore.nvme.record import padded
from headrace_kvstore.objects.object_tier import ObjectTier
from headrace_kvstore.policy.base import saved_s

REMEMBERED_USES = 1 << 16
"""Maximum number of blocks remembered as read from NVMe by one request."""


class BlockValue:
    """Value of the blocks of one node. Rows are SLOT (n,).

    Args:
        dram: the work on the arena, None while there is none.
    """

    def __init__(self, dram: Callable[[], DramService | None]) -> None:
        self._dram = dram

    def value_on_nvme(self, digest: bytes, rows: np.ndarray, now_s: float) -> np.ndarray:
        """Return the value of keeping blocks on NVMe: a `catalog.Value`."""
        dram = self._dram()
        if dram is None:
            return use_per_second(digest, rows, now_s)
        return dram.arena.rates(digest, rows) * saved_s(
            rows, dram.arena.load_cost_s_per_byte("nvme")
        )

    def best(
        self, contents: Sequence[tuple[bytes, np.ndarray]], room_bytes: int
    ) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield the most valuable blocks that fit, as namespace digest and hashes, roots first.

        Args:
            contents: namespace digest and rows; a digest may come more than once.
        """
        if not contents:
            return
        rows = np.concatenate([rows for _, rows in contents])
        owner = np.repeat(np.arange(len(contents)), [len(rows) for _, rows in contents])
        values = [self.value_on_nvme(digest, found, time.monotonic()) for digest, found in contents]
        best = np.argsort(-np.concatenate(values), kind="stable")
        best = best[np.cumsum(rows["bytes"][best]) <= room_bytes]
        best = best[np.argsort(rows["depth"][best], kind="stable")]
        for i in np.unique(owner[best]).tolist():
            yield contents[i][0], [rows["hash"][j].tobytes() for j in best[owner[best] == i]]


class UseHistory:
    """Record of uses; finds blocks that a second request reads from NVMe, which are worth bringing
    into DRAM."""

    def __init__(self) -> None:
        self._by: OrderedDict[bytes, str] = OrderedDict()

    def again(self, digest: bytes, hashes: Sequence[bytes], request_key: str) -> list[bytes]:
        """Record that a request reads these blocks; return those that another one read before."""
        again = []
        for block_hash in hashes:
            key = digest + padded(block_hash)
            before = self._by.get(key)
            if before is None:
                self._by[key] = request_key
            elif before != request_key:
                del self._by[key]
                again.append(block_hash)
        while len(self._by) > REMEMBERED_USES:
            self._by.popitem(last=False)
        return again


def below_dram(
    nvme: NvmeTier | None, objects: ObjectTier | None
) -> Iterator[tuple[bytes, np.ndarray]]:
    """Yield namespace digest and rows, SLOT (n,), of the blocks of slower tiers, each block
    once."""
    if nvme is not None:
        yield from nvme.contents()
    if objects is not None:
        for digest, rows in objects.contents():
            if nvme is not None:
                hashes = [row["hash"].tobytes() for row in rows]
                rows = rows[~nvme.contains(digest, hashes)]
            if len(rows):
                yield digest, rows

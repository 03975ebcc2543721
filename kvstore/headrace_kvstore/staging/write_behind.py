"""Write-behind: writes of blocks from the arena to NVMe, in the background.

The queue holds names only. The bytes stay in the arena and are written from there, with the
checksums beside them. Just before writing, blocks are held by a lease that does not count as a
use. Afterwards each slot is checked again: if another block took it during the write, the record is
discarded.

Nothing waits for a disk. Blocks that do not fit the backlog are dropped and counted. `missed` is
then True: a sweep through the arena may find them, once the backlog is empty.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.arena.arena_map import NamespaceInfo
from headrace_kvstore.blocks.slot_record import READY
from headrace_kvstore.nvme.nvme_tier import NvmeTier
from headrace_kvstore.nvme.record import BlockShape, WriteRequest
from headrace_kvstore.staging.transfer_pool import TransferPool

logger = logging.getLogger("headrace.kvstore")

HOLD_S = 60.0
BATCH_BLOCKS = 32
THREADS = 2
"""Number of threads: while one checks its written blocks, the other keeps the disk busy."""


class WriteBehind(TransferPool[tuple[int, list[bytes]]]):
    """Writer of an arena's blocks to the current tier, `tier()`.

    Args:
        tier: the NVMe tier, or None while there is none.
        backlog_bytes: maximum size of the blocks that wait.
        writing_bytes: maximum size of the blocks on their way to the disk at once.
    """

    def __init__(
        self,
        arena: Arena,
        tier: Callable[[], NvmeTier | None],
        backlog_bytes: int,
        writing_bytes: int,
    ) -> None:
        super().__init__("kv-write-behind", THREADS)
        self.missed = False
        """Whether the arena may hold blocks that should have been written and were not."""
        self._arena, self._tier = arena, tier
        self._backlog_limit, self._writing_limit = backlog_bytes, writing_bytes
        self._backlog: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._backlog_bytes = 0
        self._start_threads()

    @property
    def idle(self) -> bool:
        """Whether no block waits or is being written."""
        with self._condition:
            return not self._backlog and not self._busy

    @property
    def has_disk(self) -> bool:
        """Whether there is a disk to write to."""
        tier = self._tier()
        return tier is not None and tier.state == "on"

    def offer(self, row: int, hashes: Sequence[bytes]) -> None:
        """Queue blocks of one namespace that were stored, if the disk lacks them."""
        tier = self._tier()
        if tier is None or tier.state != "on" or not hashes:
            self.missed |= bool(hashes)
            return
        namespace = self._namespace(row)
        slots = self._arena.lookup(row, hashes)
        slots[tier.contains(namespace.digest, hashes)] = -1
        there = np.flatnonzero(slots >= 0)
        if not len(there):
            return
        with self._condition:
            for i in there.tolist():
                self._enqueue((row, hashes[i]), namespace.block_bytes)
            self._condition.notify_all()

    def _enqueue(self, key: tuple[int, bytes], block_bytes: int) -> None:
        """Queue a block. If there is no room it is dropped, since older ones begin their
        prefixes."""
        if key in self._backlog:
            return
        if self._backlog_bytes + block_bytes > self._backlog_limit:
            self._counts["dropped_busy"] += 1
            self.missed = True
            return
        self._backlog[key] = None
        self._backlog_bytes += block_bytes

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is left to write; return False if that took too long."""
        deadline = time.monotonic() + timeout_s
        while not self.idle and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.idle

    def stats(self) -> dict[str, Any]:
        """Return JSON-able sizes and counts."""
        with self._condition:
            return {
                "backlog_blocks": len(self._backlog),
                "backlog_bytes": self._backlog_bytes,
                "backlog_limit_bytes": self._backlog_limit,
                "writing_bytes": self._bytes_in_flight,
                **self._totals(),
            }

    def _next_task(self) -> tuple[int, list[bytes]] | None:
        """Take the oldest blocks of one namespace, as many as may be written now."""
        if not self._backlog:
            return None
        row, _ = next(iter(self._backlog))
        size = self._namespace(row).block_bytes
        room = min(BATCH_BLOCKS, (self._writing_limit - self._bytes_in_flight) // size)
        if room < 1 and self._bytes_in_flight:
            return None
        hashes: list[bytes] = []
        for key in self._backlog:
            if key[0] != row or len(hashes) >= max(1, room):
                break
            hashes.append(key[1])
        for block_hash in hashes:
            del self._backlog[row, block_hash]
        self._backlog_bytes -= size * len(hashes)
        self._bytes_in_flight += size * len(hashes)
        return row, hashes

    def _run_task(self, task: tuple[int, list[bytes]]) -> None:
        row, hashes = task
        namespace, tier = self._namespace(row), self._tier()
        left = len(hashes)
        try:
            if tier is None or tier.state != "on":
                return self._count("dropped_off", left)
            if namespace.block_bytes % namespace.layers:
                return self._count("dropped_shape", left)
            slots = self._arena.hold(row, hashes, HOLD_S)
            there = slots >= 0
            self._count("dropped_evicted", int((~there).sum()))
            left, slots = int(there.sum()), slots[there]
            names = [name for name, here in zip(hashes, there, strict=True) if here]
            try:
                self._write(tier, namespace, names, slots)
            finally:
                self._arena.release(slots)
        except Exception:
            self._count("dropped_failed", left)
            raise
        finally:
            with self._condition:
                self._bytes_in_flight -= namespace.block_bytes * len(hashes)

    def _cancel_all(self) -> None:
        self._counts["dropped_end"] += len(self._backlog)
        self._backlog.clear()
        self._backlog_bytes = 0

    def _write(
        self, tier: NvmeTier, namespace: NamespaceInfo, names: list[bytes], slots: np.ndarray
    ) -> None:
        """Write the blocks in these slots; discard records of slots that were overwritten during
        the write."""
        rows = self._arena.table[slots]
        shape = BlockShape(
            namespace.digest, namespace.layers, namespace.block_bytes // namespace.layers
        )
        futures = tier.write(shape, arena_saves(self._arena, slots, rows))
        written = np.array([future.result() for future in futures], np.bool_)
        now = self._arena.table[slots]
        same = (now["state"] == READY) & (now["generation"] == rows["generation"])
        for i in np.flatnonzero(written & ~same).tolist():
            tier.discard(namespace.digest, names[i], "overwritten")
        self._count("written", int((written & same).sum()))
        self._count("dropped_failed", int((~written).sum()))
        self._count("dropped_overwritten", int((written & ~same).sum()))

    def _count(self, name: str, blocks: int) -> None:
        super()._count(name, blocks)
        if blocks:
            self.missed |= name in ("dropped_failed", "dropped_off", "dropped_overwritten")

    def _namespace(self, row: int) -> NamespaceInfo:
        return self._arena.namespace_info(row)


def arena_saves(arena: Arena, slots: np.ndarray, rows: np.ndarray) -> list[WriteRequest]:
    """Return the saves that write these slots of an arena; rows: theirs, SLOT (n,)."""
    return [
        WriteRequest(
            *(row["hash"].tobytes(), int(address), sums),
            int(row["parent"]).to_bytes(8, "little"),
            *(int(row["depth"]), int(row["tenant"]), float(row["compute_s"])),
        )
        for row, address, sums in zip(rows, arena.addresses(slots), arena.sums(slots), strict=True)
    ]

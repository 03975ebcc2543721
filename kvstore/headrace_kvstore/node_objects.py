"""A node's work with an object store: blocks worth sharing go there, wanted ones come from there.

What is worth it shows only with use, so no list of blocks waits here: every `sweep_s` the arena is
looked through for blocks that have proved themselves and are in no object yet. What could not be
written is found by the next look; nothing is held meanwhile but one object being made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from headrace_kvstore.chains import chains
from headrace_kvstore.node_sources import Fill, Found, Offer, Unavailable
from headrace_kvstore.node_tiers import NodeArena, Space
from headrace_kvstore.tiers.nvme import Save
from headrace_kvstore.tiers.object_catalog import Place
from headrace_kvstore.tiers.object_format import most_blocks
from headrace_kvstore.tiers.object_pack import Packed
from headrace_kvstore.tiers.objects import ObjectTier
from headrace_kvstore.tiers.record import Shape, padded

logger = logging.getLogger("headrace.kvstore")

SharedAdmit = Callable[[np.ndarray], np.ndarray]
"""Rows of SLOT (n,) -> which blocks to share, bool (n,)."""


def worth_sharing(rows: np.ndarray) -> np.ndarray:
    """Blocks that were used again since they were stored, or that somebody asked to keep.

    An object costs a request and a place for as long as it stays, and most blocks are never wanted
    twice; one that was wanted by a second request here will be wanted elsewhere too.
    """
    wanted: np.ndarray = (rows["hits"] > 0) | (rows["pinned"] > 0) | (rows["priority"] > 0)
    return wanted


class ObjectSource:
    """The object tier as a `node_sources.Source`."""

    batch_blocks = 64
    fill_bytes = 32 * 2**20

    def __init__(self, tier: ObjectTier) -> None:
        self._tier = tier

    def open(self, digest: bytes, hashes: Sequence[bytes]) -> Future[Offer]:
        """As `Source`."""
        answer: Future[Offer] = Future()
        if self._tier.may_read:
            answer.set_result(ObjectOffer(self._tier, digest, hashes))
        else:
            answer.set_exception(Unavailable("breaker"))
        return answer


class ObjectOffer:
    """Blocks in objects; one that is removed meanwhile is a miss."""

    def __init__(self, tier: ObjectTier, digest: bytes, hashes: Sequence[bytes]) -> None:
        self._tier = tier
        found = [tier.find(digest, block_hash) for block_hash in hashes]
        self._places: list[Place] = [place for place in found if place is not None]
        self.found = [_found(place) for place in self._places]

    def read(self, which: Sequence[int], addresses: np.ndarray) -> Fill:
        """As `Offer`."""
        return self._tier.read([self._places[i] for i in which], addresses)

    def close(self, bad: Sequence[int]) -> None:
        """The tier itself has dropped what was bad."""


def _found(place: Place) -> Found:
    block = place.block
    return Found(
        *(block.hash, place.bundle.name.shape, block.sums),
        *(int.from_bytes(block.parent[:8], "little"), block.depth, block.tenant),
        *(block.priority, block.compute_s),
    )


class ObjectWriter:
    """Puts an arena's blocks into objects, from a thread of its own.

    Args:
        object_bytes: size of an object, about.
        bytes_per_s: what the writes take of the line, in the mean.
        sweep_s: between looks through the arena.
        admit: which blocks are worth it.
    """

    def __init__(
        self,
        arena: NodeArena,
        tier: ObjectTier,
        object_bytes: int,
        bytes_per_s: int,
        sweep_s: float,
        admit: SharedAdmit = worth_sharing,
    ) -> None:
        self._arena, self._tier, self._admit = arena, tier, admit
        self._object_bytes, self._bytes_per_s, self._sweep_s = object_bytes, bytes_per_s, sweep_s
        self.sweeps = self.written = self.failed = 0
        self._stop = threading.Event()
        self._touching = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kv-share", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Write no more; False if the arena's memory may still be read after that time.

        An object under way is left to its own end: it was copied before.
        """
        deadline = time.monotonic() + timeout_s
        self._stop.set()
        free = self._touching.acquire(timeout=max(0.0, timeout_s))
        if free:
            self._touching.release()
        self._thread.join(max(0.0, min(deadline - time.monotonic(), timeout_s / 4)))
        return free

    def stats(self) -> dict[str, Any]:
        """JSON-able counts of sweeps, and of blocks."""
        return {"sweeps": self.sweeps, "written": self.written, "failed": self.failed}

    def _run(self) -> None:
        while not self._stop.wait(self._sweep_s):
            try:
                if self._tier.refreshed.is_set():
                    self._sweep()
                    self.sweeps += 1
            except Exception:
                logger.exception("sharing blocks failed; it goes on")

    def _sweep(self) -> None:
        for space, rows in self._candidates():
            if space.block_bytes % space.layers:
                continue
            shape = Shape(space.digest, space.layers, space.block_bytes // space.layers)
            size = most_blocks(shape, self._object_bytes)
            for first in range(0, len(rows), size):
                if self._stop.is_set() or not self._tier.may_write:
                    return
                self._write(shape, rows[first : first + size])

    def _candidates(self) -> Iterator[tuple[Space, list[np.void]]]:
        """Blocks worth it that are in no object, by namespace, those of one prefix together."""
        with self._touching:
            if self._stop.is_set():
                return
            rows, _ = self._arena.blocks()
            spaces = self._arena.spaces()
        rows = rows[self._admit(rows)]
        for number in np.unique(rows["namespace"]).tolist():
            mine = rows[rows["namespace"] == number]
            here = self._tier.contains(spaces[number].digest, [r["hash"].tobytes() for r in mine])
            if not here.all():
                yield spaces[number], chains(mine[~here])

    def _write(self, shape: Shape, rows: Sequence[np.void]) -> None:
        began_s = time.monotonic()
        with self._touching:
            packed = None if self._stop.is_set() else self._pack(shape, rows)
        if packed is None:
            return
        if self._tier.put(packed):
            self.written += len(packed.blocks)
        else:
            self.failed += len(packed.blocks)
        due_s = began_s + len(packed.data) / self._bytes_per_s
        self._stop.wait(max(0.0, due_s - time.monotonic()))

    def _pack(self, shape: Shape, rows: Sequence[np.void]) -> Packed | None:
        number = int(rows[0]["namespace"])
        slots = self._arena.lookup(number, [row["hash"].tobytes() for row in rows])
        there = slots >= 0
        rows = [row for row, here in zip(rows, there, strict=True) if here]
        slots = slots[there]
        if not rows:
            return None
        addresses, sums = self._arena.addresses(slots), self._arena.sums(slots)
        saves = [
            Save(
                *(row["hash"].tobytes(), int(address), layer_sums),
                padded(int(row["parent"]).to_bytes(8, "little")),
                *(int(row["depth"]), int(row["tenant"]), float(row["compute_s"])),
                int(row["priority"]),
            )
            for row, address, layer_sums in zip(rows, addresses, sums, strict=True)
        ]
        return self._tier.pack(shape, saves)

"""The owner's side of a pull: it leases blocks of its arena to peers, and tells where they lie.

A lease is an arena lease: blocks are not evicted until it is released or expires. Blocks that only
NVMe has are brought into DRAM first, and the answer waits for that. Peers may lease at most
LENT_SHARE of the arena at once; further requests are refused, and the peer computes.

The reader verifies the blocks of a lease by their tags (`tags`). The owner makes tags when they are
first asked for, of bytes that match their sums, and keeps them while the slot holds that block. The
sums lie where peers cannot write.

When a block does not verify at the reader, the owner checks its own copy. If that is wrong too,
the block is dropped. Otherwise the transfer was at fault.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.arena.arena_map import Space
from headrace_kvstore.checksum import payload_sums
from headrace_kvstore.peers.messages import Failed, Lease, Leased, Row, Tags
from headrace_kvstore.peers.tags import NO_TAG, TAG_BYTES, BlockTags
from headrace_kvstore.staging.prefetch import Prefetcher

LENT_SHARE = 0.5
LEND_PRIORITY = 64
"""Priority of prefetches that a peer waits for."""


@dataclass
class _Lent:
    space: Space
    row: int
    hashes: list[bytes]
    slots: np.ndarray
    until_s: float

    @property
    def bytes(self) -> int:
        return len(self.hashes) * self.space.block_bytes


class Lender:
    """Lender of one arena's blocks. Thread-safe.

    Args:
        arena: holds the blocks.
        generation: changes whenever addresses may have changed.
        tags: of this generation.
        on_nvme: digest, hashes -> whether the NVMe tier has each block, bool (n,).
        prefetcher: brings these into the arena.
    """

    def __init__(
        self,
        arena: Arena,
        generation: str,
        tags: BlockTags,
        on_nvme: Callable[[bytes, Sequence[bytes]], np.ndarray],
        prefetcher: Prefetcher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arena, self.generation = arena, generation
        self._on_nvme, self._prefetcher, self._clock = on_nvme, prefetcher, clock
        self._lock = threading.Lock()
        self._lent: dict[int, _Lent] = {}
        self._ids = count(1)
        self._limit_bytes = LENT_SHARE * arena.geometry.size_bytes
        self._counts: Counter[str] = Counter()
        self._tags = tags
        slots = len(arena.table)
        self._tagged = np.zeros(slots, "u4"), np.zeros((slots, TAG_BYTES), "u1")
        """For each slot: the generation (from 1 on) that has a tag, and the tag."""
        self._tagging = ThreadPoolExecutor(1, "kv-tags")

    def serving(self) -> bool:
        """Whether a peer may be reading."""
        with self._lock:
            self._run_out()
            return bool(self._lent)

    def lease(self, request: Lease) -> Leased | Failed | Future[Leased]:
        """Lease blocks to a reader; return the answer."""
        if request.generation != self.generation:
            self._count("refused_generation", len(request.hashes))
            return Failed("generation")
        wrong = self._wrong_shape(request)
        if wrong:
            self._count("refused_shape", len(request.hashes))
            return Failed(wrong)
        row = self._arena.row_of(request.digest)
        absent = list(request.hashes)
        if row is not None:
            slots = self._arena.lookup(row, request.hashes)
            absent = [h for h, slot in zip(request.hashes, slots, strict=True) if slot < 0]
        below = self._on_nvme(request.digest, absent) if absent else np.zeros(0, np.bool_)
        if not below.any():
            return self._lend(request)
        answer: Future[Leased] = Future()
        wanted = [h for h, there in zip(absent, below, strict=True) if there]
        self._count("raised_from_nvme", len(wanted))
        raised = self._prefetcher.fetch(request.digest, wanted, LEND_PRIORITY)
        raised.add_done_callback(lambda _: _settle(answer, lambda: self._lend(request)))
        return answer

    def tags(self, lease: int) -> Future[Tags] | Failed:
        """Return the tags of a lease's blocks; a block that does not match its sums gets a wrong
        tag."""
        with self._lock:
            lent = self._lent.get(lease)
        return Failed("lease") if lent is None else self._tagging.submit(self._tags_of, lent)

    def release(self, lease: int, bad: Sequence[int]) -> None:
        """End a lease; `bad` are the positions of blocks that did not verify at the reader."""
        with self._lock:
            self._run_out()
            lent = self._lent.pop(lease, None)
            if lent is None:
                return
            self._arena.release(lent.slots)
            self._counts["released"] += len(lent.hashes)
        suspects = [i for i in bad if 0 <= i < len(lent.hashes)]
        if suspects:
            self._look_at(lent, suspects)

    def stats(self) -> dict[str, Any]:
        """Return JSON-able counts of blocks."""
        with self._lock:
            self._run_out()
            return {
                "leases": len(self._lent),
                "leased_bytes": sum(lent.bytes for lent in self._lent.values()),
                **self._counts,
            }

    def close(self) -> None:
        """End all leases."""
        self._tagging.shutdown(cancel_futures=True)
        with self._lock:
            for lent in self._lent.values():
                if self._clock() < lent.until_s:
                    self._arena.release(lent.slots)
            self._lent.clear()

    def _wrong_shape(self, request: Lease) -> str:
        space = next((s for s in self._arena.spaces() if s.digest == request.digest), None)
        if space is None:
            return ""
        size = request.layers * request.layer_bytes
        if (space.layers, space.block_bytes) == (request.layers, size):
            return ""
        return f"blocks have {space.layers} layers and {space.block_bytes} bytes here"

    def _lend(self, request: Lease) -> Leased:
        row = self._arena.row_of(request.digest)
        if row is None:
            self._count("absent", len(request.hashes))
            return Leased()
        space = self._arena.spaces()[row]
        with self._lock:
            self._run_out()
            lent_bytes = sum(lent.bytes for lent in self._lent.values())
            room = max(0, int(self._limit_bytes - lent_bytes) // space.block_bytes)
            hashes = request.hashes[:room]
            self._counts["refused_full"] += len(request.hashes) - len(hashes)
            if not hashes:
                return Leased()
            until_s = self._clock() + request.lease_s
            slots = self._arena.lease(row, hashes, request.lease_s)
            there = np.flatnonzero(slots >= 0)
            self._counts["absent"] += len(hashes) - len(there)
            if not len(there):
                return Leased()
            slots = slots[there]
            names = [hashes[i] for i in there]
            lease = next(self._ids)
            self._lent[lease] = _Lent(space, row, names, slots, until_s)
            self._counts["leased"] += len(slots)
        rows = [
            Row(
                *(int(index), int(address), int(record["parent"]), int(record["depth"])),
                *(int(record["tenant"]), float(record["compute_s"])),
            )
            for index, address, record in zip(
                there, self._arena.addresses(slots), self._arena.table[slots], strict=True
            )
        ]
        return Leased(lease, rows, self._arena.sums(slots).astype("<u8").tobytes())

    def _tags_of(self, lent: _Lent) -> Tags:
        generations, tags = self._tagged
        for name, slot in zip(lent.hashes, lent.slots.tolist(), strict=True):
            generation = self._arena.table["generation"][slot]
            if generations[slot] == generation:
                continue
            right = self._is_right(lent.space, name, slot)
            at = self._arena.address(slot), lent.space.block_bytes
            tag = self._tags.make(*at) if right else NO_TAG
            tags[slot] = np.frombuffer(tag, "u1")
            generations[slot] = generation if right else 0
        return Tags(tags[lent.slots].tobytes())

    def _run_out(self) -> None:
        now_s = self._clock()
        for lease in [n for n, lent in self._lent.items() if lent.until_s <= now_s]:
            self._counts["ran_out"] += len(self._lent.pop(lease).hashes)

    def _look_at(self, lent: _Lent, suspects: Sequence[int]) -> None:
        """Drop blocks that were bad at a reader and are bad here too."""
        generations, tags = self._tagged
        names = [lent.hashes[i] for i in suspects]
        slots = self._arena.lookup(lent.row, names)
        wrong = []
        for name, slot in zip(names, slots.tolist(), strict=True):
            if slot < 0:
                continue
            at = self._arena.address(slot), lent.space.block_bytes
            tagged = generations[slot] == self._arena.table["generation"][slot]
            if not self._is_right(lent.space, name, slot) or (
                tagged and not self._tags.right(tags[slot].tobytes(), *at)
            ):
                wrong.append(name)
        self._count("corrupt_here", len(wrong))
        self._count("corrupt_at_reader", len(names) - len(wrong))
        if wrong:
            self._arena.discard(lent.row, wrong)

    def _is_right(self, space: Space, name: bytes, slot: int) -> bool:
        """Whether a block matches its sums."""
        layer_bytes = space.block_bytes // space.layers
        at = self._arena.address(slot) + np.arange(space.layers) * layer_bytes
        sums = payload_sums(space.digest, name, 0, at, layer_bytes)
        return np.array_equal(sums, self._arena.sums(np.array([slot]))[0])

    def _count(self, name: str, blocks: int) -> None:
        if blocks:
            with self._lock:
                self._counts[name] += blocks


def _settle(answer: Future[Any], make: Callable[[], Any]) -> None:
    try:
        answer.set_result(make())
    except Exception as error:
        answer.set_exception(error)

"""The owner's side of a pull: it leases blocks of its arena to peers, and tells where they lie.

A lease is an arena lease: blocks are not evicted until it is released or expires. Blocks that only
NVMe has are brought into DRAM first, and the answer waits for that. Peers may lease at most
MAX_LEASED_SHARE of the arena at once; further requests are refused, and the peer computes.

The reader verifies the blocks of a lease by their tags (`block_tags`). The owner makes tags when
they are first asked for, of bytes that match their sums, and keeps them while the slot holds that
block. The sums lie where peers cannot write.

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
from headrace_kvstore.arena.arena_map import NamespaceInfo
from headrace_kvstore.blocks.checksum import payload_sums
from headrace_kvstore.peers.block_tags import NO_TAG, TAG_BYTES, BlockTags
from headrace_kvstore.peers.messages import Failed, Lease, Leased, LeasedBlock, Tags
from headrace_kvstore.staging.prefetch import Prefetcher

MAX_LEASED_SHARE = 0.5
LEASE_PRIORITY = 64
"""Priority of prefetches that a peer waits for."""


@dataclass
class _Lease:
    namespace: NamespaceInfo
    namespace_id: int
    hashes: list[bytes]
    slots: np.ndarray
    until_s: float

    @property
    def bytes(self) -> int:
        return len(self.hashes) * self.namespace.block_bytes


class LeaseServer:
    """Server of leases of one arena's blocks. Thread-safe.

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
        self._leases: dict[int, _Lease] = {}
        self._ids = count(1)
        self._limit_bytes = MAX_LEASED_SHARE * arena.geometry.size_bytes
        self._counts: Counter[str] = Counter()
        self._tags = tags
        slots = len(arena.table)
        self._tagged = np.zeros(slots, "u4"), np.zeros((slots, TAG_BYTES), "u1")
        """For each slot: the generation (from 1 on) that has a tag, and the tag."""
        self._tagging = ThreadPoolExecutor(1, "kv-tags")

    def serving(self) -> bool:
        """Whether a peer may be reading."""
        with self._lock:
            self._expire()
            return bool(self._leases)

    def lease(self, request: Lease) -> Leased | Failed | Future[Leased]:
        """Lease blocks to a reader; return the answer."""
        if request.generation != self.generation:
            self._count("refused_generation", len(request.hashes))
            return Failed("generation")
        wrong = self._wrong_shape(request)
        if wrong:
            self._count("refused_shape", len(request.hashes))
            return Failed(wrong)
        namespace_id = self._arena.find_namespace(request.digest)
        absent = list(request.hashes)
        if namespace_id is not None:
            slots = self._arena.lookup(namespace_id, request.hashes)
            absent = [h for h, slot in zip(request.hashes, slots, strict=True) if slot < 0]
        below = self._on_nvme(request.digest, absent) if absent else np.zeros(0, np.bool_)
        if not below.any():
            return self._grant(request)
        answer: Future[Leased] = Future()
        wanted = [h for h, there in zip(absent, below, strict=True) if there]
        self._count("raised_from_nvme", len(wanted))
        raised = self._prefetcher.fetch(request.digest, wanted, LEASE_PRIORITY)
        raised.add_done_callback(lambda _: _settle(answer, lambda: self._grant(request)))
        return answer

    def tags(self, lease_id: int) -> Future[Tags] | Failed:
        """Return the tags of a lease's blocks; a block that does not match its sums gets a wrong
        tag."""
        with self._lock:
            lease = self._leases.get(lease_id)
        return Failed("lease") if lease is None else self._tagging.submit(self._tags_of, lease)

    def release(self, lease_id: int, bad: Sequence[int]) -> None:
        """End a lease; `bad` are the positions of blocks that did not verify at the reader."""
        with self._lock:
            self._expire()
            lease = self._leases.pop(lease_id, None)
            if lease is None:
                return
            self._arena.release(lease.slots)
            self._counts["released"] += len(lease.hashes)
        suspects = [i for i in bad if 0 <= i < len(lease.hashes)]
        if suspects:
            self._recheck(lease, suspects)

    def stats(self) -> dict[str, Any]:
        """Return JSON-able counts of blocks."""
        with self._lock:
            self._expire()
            return {
                "leases": len(self._leases),
                "leased_bytes": sum(lease.bytes for lease in self._leases.values()),
                **self._counts,
            }

    def close(self) -> None:
        """End all leases."""
        self._tagging.shutdown(cancel_futures=True)
        with self._lock:
            for lease in self._leases.values():
                if self._clock() < lease.until_s:
                    self._arena.release(lease.slots)
            self._leases.clear()

    def _wrong_shape(self, request: Lease) -> str:
        namespace = next((s for s in self._arena.namespaces() if s.digest == request.digest), None)
        if namespace is None:
            return ""
        size = request.layers * request.layer_bytes
        if (namespace.layers, namespace.block_bytes) == (request.layers, size):
            return ""
        return f"blocks have {namespace.layers} layers and {namespace.block_bytes} bytes here"

    def _grant(self, request: Lease) -> Leased:
        namespace_id = self._arena.find_namespace(request.digest)
        if namespace_id is None:
            self._count("absent", len(request.hashes))
            return Leased()
        namespace = self._arena.namespaces()[namespace_id]
        with self._lock:
            self._expire()
            lent_bytes = sum(lease.bytes for lease in self._leases.values())
            room = max(0, int(self._limit_bytes - lent_bytes) // namespace.block_bytes)
            hashes = request.hashes[:room]
            self._counts["refused_full"] += len(request.hashes) - len(hashes)
            if not hashes:
                return Leased()
            until_s = self._clock() + request.lease_s
            slots = self._arena.lease(namespace_id, hashes, request.lease_s)
            there = np.flatnonzero(slots >= 0)
            self._counts["absent"] += len(hashes) - len(there)
            if not len(there):
                return Leased()
            slots = slots[there]
            names = [hashes[i] for i in there]
            lease_id = next(self._ids)
            self._leases[lease_id] = _Lease(namespace, namespace_id, names, slots, until_s)
            self._counts["leased"] += len(slots)
        rows = [
            LeasedBlock(
                *(int(index), int(address), int(record["parent"]), int(record["depth"])),
                *(int(record["tenant"]), float(record["compute_s"])),
            )
            for index, address, record in zip(
                there, self._arena.addresses(slots), self._arena.table[slots], strict=True
            )
        ]
        return Leased(lease_id, rows, self._arena.sums(slots).astype("<u8").tobytes())

    def _tags_of(self, lease: _Lease) -> Tags:
        generations, tags = self._tagged
        for name, slot in zip(lease.hashes, lease.slots.tolist(), strict=True):
            generation = self._arena.table["generation"][slot]
            if generations[slot] == generation:
                continue
            right = self._matches_sums(lease.namespace, name, slot)
            at = self._arena.address(slot), lease.namespace.block_bytes
            tag = self._tags.make(*at) if right else NO_TAG
            tags[slot] = np.frombuffer(tag, "u1")
            generations[slot] = generation if right else 0
        return Tags(tags[lease.slots].tobytes())

    def _expire(self) -> None:
        now_s = self._clock()
        for lease_id in [n for n, lease in self._leases.items() if lease.until_s <= now_s]:
            self._counts["ran_out"] += len(self._leases.pop(lease_id).hashes)

    def _recheck(self, lease: _Lease, suspects: Sequence[int]) -> None:
        """Drop blocks that were bad at a reader and are bad here too."""
        generations, tags = self._tagged
        names = [lease.hashes[i] for i in suspects]
        slots = self._arena.lookup(lease.namespace_id, names)
        wrong = []
        for name, slot in zip(names, slots.tolist(), strict=True):
            if slot < 0:
                continue
            at = self._arena.address(slot), lease.namespace.block_bytes
            tagged = generations[slot] == self._arena.table["generation"][slot]
            if not self._matches_sums(lease.namespace, name, slot) or (
                tagged and not self._tags.verify(tags[slot].tobytes(), *at)
            ):
                wrong.append(name)
        self._count("corrupt_here", len(wrong))
        self._count("corrupt_at_reader", len(names) - len(wrong))
        if wrong:
            self._arena.discard(lease.namespace_id, wrong)

    def _matches_sums(self, namespace: NamespaceInfo, name: bytes, slot: int) -> bool:
        """Whether a block matches its sums."""
        layer_bytes = namespace.block_bytes // namespace.layers
        at = self._arena.address(slot) + np.arange(namespace.layers) * layer_bytes
        sums = payload_sums(namespace.digest, name, 0, at, layer_bytes)
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

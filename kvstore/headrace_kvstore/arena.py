"""The DRAM tier's memory: one shared-memory file a node, mapped by every engine process.

A block is found by (namespace row, block hash) and stands in a slot. Who stores it reserves a
slot, copies the block in, and publishes it with its checksums; who loads it takes a lease, copies
it out and compares checksums. Nothing is copied under the lock, whose sections take microseconds.

Correctness does not rest on lock or lease: checksums are seeded with the key, so a slot that was
reused while somebody read it is a miss. A lease only avoids that waste, and runs out by itself, so
that a dead reader costs nothing. A process that dies inside a section leaves the header's section
word odd; the next one to take the lock rebuilds index and free chains (see arena_kernels). One that
dies while it copies a block in leaves a slot WRITING, which is taken back once room is short or its
key is stored again.

Times are time.monotonic() seconds, which all processes of a machine share, so the folder must be
one that does not survive a restart of the machine (a tmpfs).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from headrace_kvstore import arena_kernels as kernels
from headrace_kvstore.arena_check import broken_invariants, describe
from headrace_kvstore.arena_layout import (
    EVENT_FLOOR,
    EVENT_HEAD,
    NAMESPACE_COUNT,
    NAMESPACES,
    NONE,
    SECTION,
    WORDS,
    WORDS_OFFSET,
    ArenaFormatError,
    Geometry,
    Tables,
    slot_bytes,
    sums_offset,
)
from headrace_kvstore.arena_room import Chooser, least_recently_used, own_victims, victims
from headrace_kvstore.locking import PATIENCE_S, FileLock, LockBusyError
from headrace_kvstore.shm import SharedFile, huge_page_mode
from headrace_kvstore.table import EVENT, READY, SLOT, pack_hashes
from headrace_kvstore.writers import WRITER_TIMEOUT_S, dead_writers, left_behind

logger = logging.getLogger("headrace.kvstore")

Hashes = Sequence[bytes] | np.ndarray
"""Block hashes: bytes of at most 32 each, or an array of n rows of 32 bytes."""

LOOKUP_PATIENCE_S = 0.05
LOOKUP_TRIES = 4


class Arena:
    """One process's handle on a node's arena. Threads may share it; a forked child may go on with
    it.

    choose: which blocks are given up for new ones; called under `policy_lock`, not under the
    arena's own. quotas: bytes that each tenant may hold (by its SLOT number; a tenant that is not
    in it has no limit): who stores beyond that gives up blocks of its own first.

    `table` is the slot table itself, of which only `rate` is for others to write; `state`
    (u8 [state_bytes]) is shared memory for the policy, all zeros at first; `policy_lock` is for
    all who use it. Code that holds it may call the arena, but not `reserve`.

    Calls that find the lock held for PATIENCE_S miss (`lease`, `reserve`, `publish`) or raise
    LockBusyError (all others but `lookup`, which never waits for long).
    """

    def __init__(
        self,
        file: SharedFile,
        choose: Chooser = least_recently_used,
        quotas: Mapping[int, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.choose = choose
        self.quotas: dict[int, float] = dict(quotas or {})
        self._clock = clock
        self._file = file
        self._bytes = np.frombuffer(file.memory, np.uint8)
        self._u64 = self._bytes[: file.size_bytes // 8 * 8].view(np.uint64)
        self.geometry = Geometry.parse(bytes(self._bytes[:WORDS_OFFSET]), file.size_bytes)
        self._t: Tables = self.geometry.tables(self._bytes)
        self._per_segment = self.geometry.slots_per_segment
        self.table = self._t.table.view(SLOT)
        self.state = self._t.state
        self.base_address = int(self._bytes.ctypes.data)
        self._words = memoryview(file.memory)[WORDS_OFFSET : WORDS_OFFSET + 8 * WORDS].cast("Q")
        self._section = _Section(self, PATIENCE_S)
        self._short_section = _Section(self, LOOKUP_PATIENCE_S)

    @classmethod
    def create_or_attach(
        cls,
        name: str,
        size_bytes: int,
        *,
        folder: str | Path = "/dev/shm",
        block_bytes: int = 1 << 20,
        layers: int = 32,
        smallest_block_bytes: int | None = None,
        state_bytes: int = 0,
        **options: Any,
    ) -> Arena:
        """Open the arena of that name, creating it if nobody has.

        `size_bytes` bounds all of it: tables, the policy's state and data. `block_bytes` and
        `layers` are those of most blocks, for which no room is lost; blocks smaller than
        `smallest_block_bytes` (a quarter of that unless given) lose the more room the smaller they
        are. An arena that is there already keeps the size and cut that it has. `options` are the
        constructor's.

        Raises ValueError if the size holds no block, OSError (ENOSPC) if the folder has not that
        much room, ArenaFormatError if the file is no arena of this version.
        """
        if not name or "/" in name or name in (".", ".."):
            raise ValueError(f"{name!r} is no file name")
        kernels.warm()
        geometry = Geometry.plan(
            size_bytes,
            block_bytes,
            layers,
            smallest_block_bytes or max(1, block_bytes // 4),
            state_bytes,
        )

        def initialise(memory: Any) -> None:
            geometry.format(geometry.tables(np.frombuffer(memory, np.uint8)))
            header = geometry.header()
            memory[8 : len(header)] = header[8:]
            memory[:8] = header[:8]

        file = SharedFile.open(Path(folder) / name, geometry.size_bytes, initialise)
        try:
            arena = cls(file, **options)
        except BaseException:
            file.close()
            raise
        if file.size_bytes != geometry.size_bytes:
            logger.warning(
                "arena %s has %d bytes; the %d asked for are not used",
                *(file.path, file.size_bytes, geometry.size_bytes),
            )
        return arena

    @property
    def policy_lock(self) -> FileLock:
        """A second lock between all processes, for the policy and its state."""
        return self._file.second_lock

    # What is stored

    def namespace(self, digest: bytes, block_bytes: int, layers: int) -> int:
        """The row of a namespace, registered if it is new.

        digest: 16 bytes. Raises ValueError if it is registered with another block size or number
        of layers, if a segment is too small for its blocks, or if the table is full.
        """
        if len(digest) != 16 or block_bytes < 1 or layers < 1:
            raise ValueError(
                "a namespace has a digest of 16 bytes, and blocks with bytes and layers"
            )
        spaces = self._t.spaces
        with self._section:
            count = int(self._words[NAMESPACE_COUNT])
            for row in range(count):
                if spaces["digest"][row].tobytes() == digest:
                    known = int(spaces["block_bytes"][row]), int(spaces["layers"][row])
                    if known != (block_bytes, layers):
                        raise _Refused(
                            f"namespace {digest.hex()} has blocks of {known[0]} bytes and "
                            f"{known[1]} layers, not {block_bytes} and {layers}"
                        )
                    return row
            needed = slot_bytes(block_bytes, layers)
            if needed > int(self._t.segments["bytes"].max()):
                raise _Refused(
                    f"a block of {block_bytes} bytes is larger than a segment of this arena: "
                    f"{self.geometry.segment_bytes} bytes"
                )
            if count == NAMESPACES:
                raise _Refused(f"the arena has {NAMESPACES} namespaces already")
            spaces[count] = (np.frombuffer(digest, np.uint64), block_bytes, needed, layers)
            self._words[NAMESPACE_COUNT] = count + 1
            return count

    def lookup(self, row: int, hashes: Hashes) -> np.ndarray:
        """Slots (int64 [n]) of the blocks that are there, -1 for others. No side effects at all."""
        self._check_row(row)
        keys = pack_hashes(hashes)
        slots = np.empty(len(keys), np.int64)
        for _ in range(LOOKUP_TRIES):
            before = self._words[SECTION]
            kernels.lookup(self._t, row, keys, slots)
            if before % 2 == 0 and self._words[SECTION] == before:
                return slots
        try:
            with self._short_section:
                kernels.lookup(self._t, row, keys, slots)
        except LockBusyError:
            pass  # each hit was found in its slot's record; a block in motion may be missed
        return slots

    def lease(self, row: int, hashes: Hashes, lease_s: float) -> np.ndarray:
        """As lookup; what is there stays for `lease_s` seconds, and counts as used once more."""
        self._check_row(row)
        keys = pack_hashes(hashes)
        slots = np.full(len(keys), -1, np.int64)
        now_s = self._clock()
        try:
            with self._section:
                kernels.lease(self._t, row, keys, now_s, now_s + lease_s, slots)
        except LockBusyError as error:
            logger.warning("no lease: %s", error)
        return slots

    def release(self, slots: np.ndarray) -> None:
        """End a lease early, once for each `lease`. Slots of -1 are skipped."""
        wanted = self._slots(slots)
        with self._section:
            kernels.release(self._t, wanted[wanted >= 0], self._clock())

    def reserve(
        self,
        row: int,
        hashes: Hashes,
        parents: Sequence[int] | np.ndarray,
        depths: Sequence[int] | np.ndarray,
        *,
        tenant: int = 0,
        priority: int = 0,
        compute_s: float | np.ndarray = 0.0,
        load_s: float | np.ndarray = 0.0,
    ) -> np.ndarray:
        """Slots (int64 [n]) to copy these blocks into, this process being their writer.

        -1 where the block is there, is being written, or has no room even after eviction. parents,
        depths, compute_s and load_s as in SLOT, one a block (the last two may be one for all).
        Each slot must be given to `publish` or `abandon`.
        """
        self._check_row(row)
        keys = pack_hashes(hashes)
        count = len(keys)
        slots = np.full(count, kernels.NO_ROOM, np.int64)
        now_s = self._clock()
        each = (
            *(_column(parents, count, np.uint64), _column(depths, count, np.uint32)),
            *(int(tenant), int(priority)),
            *(_column(compute_s, count, np.float32), _column(load_s, count, np.float32)),
        )

        def place() -> int:
            stuck_before_s = now_s - WRITER_TIMEOUT_S
            left = kernels.place(
                *(self._t, row, keys, *each, os.getpid(), now_s, stuck_before_s),
                *(self._per_segment, slots),
            )
            kernels.commit(self._t, slots)
            return int(left)

        try:
            own = self._over_quota(row, tenant, keys, now_s)
            with self._section:
                self._evict(own, now_s)
                left = place()
            if left:
                gone = self._left_behind(now_s)
                given_up = self._victims(row, left, now_s)
                with self._section:
                    kernels.reclaim(self._t, *gone, self._per_segment)
                    self._evict(given_up, now_s)
                    place()
        except LockBusyError as error:
            logger.warning("not all blocks are stored: %s", error)
        return np.maximum(slots, -1)

    def publish(self, slots: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """Make reserved blocks readable; sums: u64 [n, layers]. Slots must be of one namespace.

        Returns bool [n]: False where the slot is no longer this process's to write, or where the
        lock could not be had.
        """
        wanted = self._slots(slots)
        done = np.zeros(len(wanted), np.bool_)
        if not len(wanted):
            return done
        given = np.array(sums, np.uint64, order="C")
        if given.shape != (len(wanted), self._layers(wanted)):
            raise ValueError(f"checksums {given.shape} for {len(wanted)} blocks")
        owner = os.getpid()
        kernels.write_sums(self._t, self._u64, self._sums_at(wanted), wanted, owner, given)
        try:
            with self._section:
                kernels.publish(self._t, wanted, owner, self._clock(), done)
        except LockBusyError as error:
            logger.warning("not published: %s", error)
        return done

    def abandon(self, slots: np.ndarray) -> None:
        """Give reserved slots back unwritten. Slots of -1 are skipped."""
        wanted = self._slots(slots)
        with self._section:
            kernels.abandon(self._t, wanted, os.getpid(), self._per_segment)

    def discard(self, row: int, hashes: Hashes) -> int:
        """Drop blocks that were found corrupt, leased or not; returns how many were there."""
        self._check_row(row)
        keys = pack_hashes(hashes)
        with self._section:
            return int(kernels.discard(self._t, row, keys, self._per_segment))

    def pin(self, row: int, hashes: Hashes, pinned: bool = True) -> np.ndarray:
        """Keep blocks from eviction, or let them go again; bool [n]: whether they are there."""
        self._check_row(row)
        keys = pack_hashes(hashes)
        done = np.zeros(len(keys), np.bool_)
        with self._section:
            kernels.pin(self._t, row, keys, int(pinned), done)
        return done

    def clear(self, row: int | None = None) -> int:
        """Drop all blocks, or one namespace's, also pinned and leased ones; returns how many.

        Blocks being written are not touched.
        """
        if row is not None:
            self._check_row(row)
        with self._section:
            return int(kernels.clear(self._t, NONE if row is None else row, self._per_segment))

    def reclaim(self) -> None:
        """Take back what dead writers left. `reserve` does it too where room is short."""
        gone = self._left_behind(self._clock())
        if len(gone[0]):
            with self._section:
                kernels.reclaim(self._t, *gone, self._per_segment)

    # Where it stands

    def offsets(self, slots: np.ndarray) -> np.ndarray:
        """Bytes (int64 [n]) from the start of the arena to each slot's block."""
        wanted = self._slots(slots, least=0)
        segment, place = np.divmod(wanted, self._per_segment)
        stride = self._t.spaces["slot_bytes"][self.table["namespace"][wanted]].astype(np.int64)
        start = self.geometry.data_offset + segment * self.geometry.segment_bytes
        offsets: np.ndarray = start + place * stride
        return offsets

    def addresses(self, slots: np.ndarray) -> np.ndarray:
        """Address in this process (int64 [n]) of each slot's block, for copy kernels."""
        return self.base_address + self.offsets(slots)

    def address(self, slot: int) -> int:
        """Address in this process of the slot's block."""
        return int(self.addresses(np.array([slot]))[0])

    def view(self, slot: int) -> np.ndarray:
        """The slot's block: u8 [block_bytes], shared memory itself."""
        start = int(self.offsets(np.array([slot]))[0])
        row = int(self.table["namespace"][slot])
        return self._bytes[start : start + int(self._t.spaces["block_bytes"][row])]

    def sums(self, slots: np.ndarray) -> np.ndarray:
        """Checksums of published blocks of one namespace: u64 [n, layers], a copy."""
        wanted = self._slots(slots, least=0)
        if not len(wanted):
            return np.zeros((0, 0), np.uint64)
        return self._u64[self._sums_at(wanted)[:, None] + np.arange(self._layers(wanted))]

    def prefault(self) -> bool:
        """Fill this process's page tables (about 0.1 s a GiB), so that copies do not fault."""
        return self._file.prefault(self.base_address)

    # What happened

    def events(self, since_seq: int, limit: int = 4096) -> tuple[np.ndarray, int, bool]:
        """What was stored and removed from `since_seq` on: EVENT [at most limit], next_seq, lost.

        If lost, there is no such history any more (the reader is too far behind, or a process
        died): take all from `blocks`, and go on from the number that it gives. A new reader
        starts that way or with 0.
        """
        with self._section:
            head, floor = int(self._words[EVENT_HEAD]), int(self._words[EVENT_FLOOR])
            ring = self._t.events
            if not max(floor, head - len(ring)) <= since_seq <= head:
                return np.zeros(0, EVENT), head, True
            upto = min(head, since_seq + limit)
            found = ring[np.arange(since_seq, upto) % len(ring)]
        return found.view(EVENT), upto, False

    def blocks(self, row: int | None = None) -> tuple[np.ndarray, int]:
        """All readable blocks (SLOT [n], a copy), and the sequence number from which events add."""
        with self._section:
            wanted = self.table["state"] == READY
            if row is not None:
                wanted &= self.table["namespace"] == row
            return self.table[wanted], int(self._words[EVENT_HEAD])

    def stats(self) -> dict[str, Any]:
        """JSON-able sizes, counts and totals. Takes no lock: figures may be a moment apart."""
        return {
            "size_bytes": self.geometry.size_bytes,
            "huge_pages": huge_page_mode(),
            **describe(self._t, self._clock()),
        }

    def check(self) -> list[str]:
        """Invariants that do not hold, in words; empty if all is well."""
        with self._section:
            return broken_invariants(self._t, self._per_segment)

    # The handle

    def unlink(self) -> None:
        """Remove the arena's name. Who has it mapped goes on; the next to come creates another."""
        self._file.unlink()

    def close(self) -> None:
        """Let go of the memory. Views that were given out keep it mapped until they are gone."""
        if hasattr(self, "_t"):
            self._words.release()
            del self._t, self.table, self.state, self._bytes, self._u64, self._words
            self._file.close()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self._words[NAMESPACE_COUNT]:
            raise ValueError(f"{row} is no namespace of this arena")

    def _slots(self, slots: np.ndarray, least: int = -1) -> np.ndarray:
        wanted = np.array(slots, np.int64, order="C").reshape(-1)
        if len(wanted) and not least <= wanted.min() <= wanted.max() < len(self.table):
            raise IndexError("no such slot")
        return wanted

    def _layers(self, slots: np.ndarray) -> int:
        rows = self.table["namespace"][slots]
        if np.any(rows != rows[0]):
            raise ValueError("slots of more than one namespace")
        return int(self._t.spaces["layers"][rows[0]])

    def _sums_at(self, slots: np.ndarray) -> np.ndarray:
        """Words from the start of the arena to each slot's checksums."""
        row = int(self.table["namespace"][slots[0]])
        return (self.offsets(slots) + sums_offset(int(self._t.spaces["block_bytes"][row]))) // 8

    def _evict(self, chosen: tuple[np.ndarray, np.ndarray], now_s: float) -> None:
        if len(chosen[0]):
            kernels.evict(self._t, *chosen, now_s, self._per_segment)

    def _victims(self, row: int, need: int, now_s: float) -> tuple[np.ndarray, np.ndarray]:
        """Slots to evict and the generations in which they were chosen. Without the lock: the
        choice may be outdated when it is carried out, so `evict` looks at each slot again."""
        generations = self.table["generation"].copy()
        size = int(self._t.spaces["slot_bytes"][row])
        with self.policy_lock:
            chosen = victims(self.table, self._t.segments, row, size, need, now_s, self.choose)
        return chosen, generations[chosen]

    def _over_quota(
        self, row: int, tenant: int, keys: np.ndarray, now_s: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Blocks of the tenant's own that must go before it stores these, with generations."""
        if tenant not in self.quotas:
            return np.zeros(0, np.int64), np.zeros(0, np.uint32)
        generations = self.table["generation"].copy()
        absent = int((self.lookup(row, keys) < 0).sum())
        asked_bytes = absent * float(self._t.spaces["slot_bytes"][row])
        held_bytes = float(self.table["bytes"][self.table["tenant"] == tenant].sum())
        excess_bytes = min(asked_bytes, held_bytes + asked_bytes - self.quotas[tenant])
        with self.policy_lock:
            chosen = own_victims(self.table, tenant, excess_bytes, now_s, self.choose)
        return chosen, generations[chosen]

    def _left_behind(self, now_s: float) -> tuple[np.ndarray, np.ndarray]:
        """Slots whose writers will not finish them, with generations."""
        generations = self.table["generation"].copy()
        slots = left_behind(self.table, now_s)
        return slots, generations[slots]


class _Refused(ValueError):
    """Raised in a section that has changed nothing."""


class _Section:
    """The critical section. Entering repairs what a holder left that died, or raised, inside."""

    def __init__(self, arena: Arena, patience_s: float) -> None:
        self._arena = arena
        self._patience_s = patience_s

    def __enter__(self) -> None:
        arena = self._arena
        arena._file.lock.acquire(self._patience_s)
        words = arena._words
        try:
            if words[SECTION] % 2:
                kernels.repair(arena._t, dead_writers(arena.table), arena._per_segment)
                logger.warning("arena repaired: a process died inside a critical section")
            else:
                words[SECTION] += 1
        except BaseException:
            arena._file.lock.release()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        arena = self._arena
        if kind is None or kind is _Refused:
            arena._words[SECTION] += 1
        arena._file.lock.release()


def _column(values: Any, count: int, dtype: Any) -> np.ndarray:
    column = np.empty(count, dtype)
    column[:] = values
    return column


__all__ = ["Arena", "ArenaFormatError", "LockBusyError"]

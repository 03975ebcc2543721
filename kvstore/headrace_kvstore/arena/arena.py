"""The DRAM tier: one shared-memory file per machine, mapped by every engine process.

A block is found by (namespace id, block hash) and occupies a slot. A writer reserves a slot,
copies the block in, and publishes it with its checksums. A reader takes a lease, copies the block
out and compares checksums. No bytes are copied under the lock, which is held for microseconds.

Correctness rests on neither lock nor lease. Checksums are seeded with the key, so a slot that was
reused during a read is a miss. A lease only avoids that wasted read. It expires after its time, so
a dead reader costs nothing. A process that dies inside a critical section leaves the header's
section word odd; the next process to take the lock rebuilds index and free chains (see `kernels`).
A process that dies while it copies a block in leaves a slot WRITING. That slot is reclaimed when
room is short or its key is stored again.

The workers of one engine fill a slot together (`Writer`): each reserves the same slot and publishes
its parts. The block is READY when all workers have published. Until then the slot is WRITING like
any other, so no reader, tier or policy sees half a block.

Times are time.monotonic() seconds, which all processes of a machine share. Therefore the file must
not survive a restart of the machine: its folder is a tmpfs.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_kvstore.arena import kernels
from headrace_kvstore.arena.arena_map import RejectedError, Section
from headrace_kvstore.arena.evicting_arena import Chosen, Hashes
from headrace_kvstore.arena.geometry import (
    DISCARDED_TOTAL,
    DROPPED,
    EVICTED_TOTAL,
    KERNEL_SLOT,
    MISSES_TOTAL,
    NAMESPACE_COUNT,
    NAMESPACES,
    PAGE_BYTES,
    RECLAIMED_TOTAL,
    SECTION,
    ArenaFormatError,
    Geometry,
)
from headrace_kvstore.arena.locking import LockBusyError
from headrace_kvstore.arena.pinning_arena import PinningArena
from headrace_kvstore.arena.shared_file import SharedFile
from headrace_kvstore.arena.writer_group import Writer, WriterToken
from headrace_kvstore.blocks.slot_record import FREE, READY, WRITING, pack_hashes
from headrace_kvstore.policy import registry as policies

logger = logging.getLogger("headrace.kvstore")

LOOKUP_TRIES = 4
WRITER_TIMEOUT_S = 120.0
"""Age at which a reservation that was not renewed may be given to another writer: its own writer
died or hangs. If that writer still writes, checksums detect it."""
INF = float("inf")
EXISTS, NO_ROOM = kernels.ABSENT, kernels.NO_ROOM
"""Answers of `reserve` in place of a slot. EXISTS: the block is stored, or being written.
NO_ROOM: no slot can be evicted, since every block is leased or kept, or the lock is held."""


class Arena(PinningArena):
    """One process's handle on a node's arena. Threads may share it, and a forked child may use it.

    `policy` chooses the blocks that are evicted for new ones (see `policy.registry`). It belongs to
    the arena, not to the handle. quotas: bytes that each tenant (by its SLOT number) may hold;
    default_quota: the same for tenants not listed. If a tenant stores more, its own blocks are
    evicted first.

    A call waits up to PATIENCE_S for the lock (`lease`: BRIEF_S). After that `lease`, `reserve` and
    `publish` miss, `lookup` works without the lock, and all others raise LockBusyError.
    """

    _uncounted_misses = 0

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
        policy: str = policies.DEFAULT,
        **options: Any,
    ) -> Arena:
        """Open the arena of that name, and create it if there is none.

        `size_bytes` bounds all of it: tables, the policy's state and data. `block_bytes` and
        `layers` are those of most blocks, for which no room is lost. Blocks smaller than
        `smallest_block_bytes` (default: a quarter of `block_bytes`) waste room, more the smaller
        they are. `policy` evicts, unless its state would take too much of so small an arena. An
        arena that exists keeps its size, geometry and policy. `options` are the constructor's.

        Raises ValueError if the size holds no block or the policy is unknown, OSError (ENOSPC) if
        the folder lacks the room, ArenaFormatError if the file is no arena of this version.
        """
        if not name or "/" in name or name in (".", ".."):
            raise ValueError(f"{name!r} is no file name")
        kernels.warm()
        size_bytes -= size_bytes % PAGE_BYTES
        cut = size_bytes, block_bytes, layers, smallest_block_bytes or max(1, block_bytes // 4)
        policy = policies.affordable(policy, size_bytes)
        geometry = Geometry.plan(*cut, policies.state_bytes(policy, size_bytes))

        def initialise(memory: Any) -> None:
            tables = geometry.tables(np.frombuffer(memory, np.uint8))
            geometry.format(tables, policies.KINDS[policy].code)
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
        if arena.policy.name != policy:
            logger.warning("arena %s is kept by %s, not %s", name, arena.policy.name, policy)
        return arena

    @classmethod
    def attach(cls, name: str, folder: str | Path = "/dev/shm") -> Arena:
        """Open the arena of that name. Raises FileNotFoundError if there is none, and at once if it
        is still being made."""
        kernels.warm()
        return cls(SharedFile.attach(Path(folder) / name))

    # What is stored

    def register_namespace(
        self, digest: bytes, block_bytes: int, layers: int, keep: bool = True
    ) -> int:
        """Return the id of a namespace; register the namespace if it is new.

        digest: 16 bytes. With `keep` the id stays this namespace's as long as this handle lives.
        If the table is full, the new namespace gets an id that no process keeps, preferably one
        without blocks. Raises ValueError if the namespace is registered with another block size or
        number of layers, if a segment is too small for its blocks, or if all ids are kept.
        """
        if len(digest) != 16 or block_bytes < 1 or layers < 1:
            raise ValueError(
                "a namespace has a digest of 16 bytes, and blocks with bytes and layers"
            )
        namespaces = self.tables.namespaces
        with self.section:
            count = int(self.words[NAMESPACE_COUNT])
            for namespace_id in range(count):
                if namespaces["digest"][namespace_id].tobytes() == digest:
                    known = self.namespace_info(namespace_id)
                    if (known.block_bytes, known.layers) != (block_bytes, layers):
                        raise RejectedError(
                            f"namespace {digest.hex()} has blocks of {known.block_bytes} bytes and "
                            f"{known.layers} layers, not {block_bytes} and {layers}"
                        )
                    if keep:
                        self._file.use(namespace_id)
                    return namespace_id
            needed = self.geometry.slot_bytes(block_bytes, layers)
            if needed > int(self.tables.segments["bytes"].max()):
                raise RejectedError(
                    f"a block of {block_bytes} bytes, {layers} layers, exceeds a segment of this "
                    f"arena: {self.geometry.segment_bytes} bytes"
                )
            namespace_id = count if count < NAMESPACES else self._reclaim_namespace()
            key = np.frombuffer(digest, np.uint64)
            namespaces[namespace_id] = key, block_bytes, needed, layers
            self.words[NAMESPACE_COUNT] = max(count, namespace_id + 1)
            if keep:
                self._file.use(namespace_id)
            return namespace_id

    def _reclaim_namespace(self) -> int:
        """Drop the blocks of the least recently used namespace that no process keeps; return its
        id. In a section."""
        used_s = np.full(NAMESPACES, -INF)
        held = self.table["state"] != FREE
        np.maximum.at(used_s, self.table["namespace"][held], self.table["used_s"][held])
        for namespace_id in np.argsort(used_s, kind="stable").tolist():
            if not self._file.unused(namespace_id):
                continue
            slots = np.flatnonzero(held & (self.table["namespace"] == namespace_id))
            generations = self.table["generation"][slots]
            for state in (READY, WRITING):
                self._drop(slots, generations, state, EVICTED_TOTAL)
            return int(namespace_id)
        raise RejectedError(f"the arena has {NAMESPACES} namespaces in use already")

    def lookup(self, namespace_id: int, hashes: Hashes) -> np.ndarray:
        """Return the slots (int64 [n]) of the blocks that are stored, -1 for others. No side
        effects.

        Each hit was checked against its slot's record. If other processes change the index all the
        time and keep the lock, the lookup may miss a block whose index entry is being moved.
        """
        self._check_namespace(namespace_id)
        keys = pack_hashes(hashes)
        slots = np.empty(len(keys), np.int64)
        for _ in range(LOOKUP_TRIES):
            before = self.words[SECTION]
            kernels.lookup(self.tables, namespace_id, keys, slots)
            if before % 2 == 0 and self.words[SECTION] == before:
                return slots
        try:
            with self.brief_section:  # repairs the tables if a process died inside
                kernels.lookup(self.tables, namespace_id, keys, slots)
        except LockBusyError:
            pass
        return slots

    def lease(
        self, namespace_id: int, hashes: Hashes, lease_s: float, readers: int = 1
    ) -> np.ndarray:
        """Look blocks up, and lease those that are stored: they stay for `lease_s` seconds, or
        until `readers` readers have each called `release`. Each also counts as used once more.
        Returns slots as `lookup`; -1 for all if the lock is not free at once, since an engine's
        step waits for this."""
        try:
            return self._leased(self.brief_section, namespace_id, hashes, lease_s, True, readers)
        except LockBusyError as error:
            logger.warning("no lease: %s", error)
            return np.full(len(hashes), -1, np.int64)

    def record_misses(self, blocks: int) -> None:
        """Count blocks that a request needs and that are not stored; they are not leased. An
        engine's step waits for this: if the lock is not free at once, they are counted with the
        next ones."""
        self._uncounted_misses += blocks
        with contextlib.suppress(LockBusyError), self.brief_section:
            self.words[MISSES_TOTAL] += self._uncounted_misses
            self._uncounted_misses = 0

    def hold(self, namespace_id: int, hashes: Hashes, hold_s: float) -> np.ndarray:
        """Lease blocks without counting them as used: policies see readers only. Returns slots as
        `lookup`."""
        return self._leased(self.section, namespace_id, hashes, hold_s, used=False)

    def _leased(
        self,
        section: Section,
        namespace_id: int,
        hashes: Hashes,
        lease_s: float,
        used: bool,
        readers: int = 1,
    ) -> np.ndarray:
        self._check_namespace(namespace_id)
        keys, now_s = pack_hashes(hashes), self._clock()
        slots = np.empty(len(keys), np.int64)
        with section:
            kernels.lease(
                self.tables, namespace_id, keys, now_s, now_s + lease_s, used, readers, slots
            )
        return slots

    def release(self, slots: np.ndarray) -> None:
        """End a lease early, once for each reader. Numbers below 0 are no slots and are skipped."""
        wanted = self._slots(slots)
        with self.section:
            kernels.release(self.tables, wanted[wanted >= 0], self._clock())

    def reserve(
        self,
        namespace_id: int,
        hashes: Hashes,
        parents: Sequence[int] | np.ndarray,
        depths: Sequence[int] | np.ndarray,
        *,
        tenant: int = 0,
        compute_s: float | np.ndarray = 0.0,
        writer: Writer | None = None,
    ) -> np.ndarray:
        """Return slots (int64 [n]) to copy these blocks into, with this process as their writer.

        A block that gets no slot has EXISTS or NO_ROOM instead, both below 0. parents, depths and
        compute_s as in SLOT, one a block (compute_s may be one for all). Each slot must be given to
        `publish` or `abandon`, with its generation (`generations`) if another thread of this
        process may get the slot later. A slot is this writer's for WRITER_TIMEOUT_S; `renew`
        extends that.

        With `writer` this process is one of several, and gets the slot that another one has begun
        to fill. When all have ended, `give_up` frees the slots that they did not finish.
        """
        owner, bit, pending_writers = WriterToken.of(writer)
        self._check_namespace(namespace_id)
        keys, now_s = pack_hashes(hashes), self._clock()
        slots = np.full(len(keys), NO_ROOM, np.int64)
        blocks = np.zeros(len(keys), KERNEL_SLOT)
        blocks["hash"], blocks["parent"], blocks["depth"] = keys, parents, depths
        blocks["namespace"], blocks["tenant"] = namespace_id, tenant
        blocks["compute_s"] = compute_s
        blocks["owner"], blocks["pending_writers"] = owner, pending_writers
        blocks["stored_s"], blocks["used_s"] = now_s, now_s

        def place() -> int:
            left = kernels.place(self.tables, blocks, now_s - WRITER_TIMEOUT_S, bit, slots)
            kernels.commit(self.tables, slots)
            return int(left)

        try:
            absent = np.flatnonzero(self.lookup(namespace_id, keys) < 0)
            asked_bytes = len(absent) * float(self.tables.namespaces["slot_bytes"][namespace_id])
            own = self._over_quota(tenant, asked_bytes, now_s)
            with self.section:
                self._drop(*own, READY, EVICTED_TOTAL, now_s)
                left = place()
            if left:
                slots_left, generations = self._stale_reservations(now_s)
                if len(slots_left):  # they may be room enough, so nothing is evicted before
                    with self.section:
                        self._drop(slots_left, generations, WRITING, RECLAIMED_TOTAL)
                        left = place()
            if left:
                given_up = self._victims(namespace_id, left, now_s)
                with self.section:
                    self._drop(*given_up, READY, EVICTED_TOTAL, now_s)
                    place()
        except LockBusyError as error:
            logger.warning("not all blocks are stored: %s", error)
        return np.where(slots == kernels.STALE, EXISTS, slots)

    def publish(
        self,
        slots: np.ndarray,
        sums: np.ndarray,
        writer: Writer | None = None,
        layers: np.ndarray | None = None,
        generations: np.ndarray | None = None,
    ) -> np.ndarray:
        """Publish reserved blocks. A block becomes readable when all of its writers have published
        it. All slots must be of one namespace.

        sums: u64 [n, layers]; layers: int64, the layers that this writer has filled, None for all;
        generations: as reserved, None if no other thread of this process can have got the slots.
        Returns bool [n]: False if the slot is no longer this writer's, or if the lock was not free
        in time.
        """
        wanted = self._slots(slots)
        done = np.zeros(len(wanted), np.bool_)
        if not len(wanted):
            return done
        given, every = np.array(sums, np.uint64, order="C"), self._layers(wanted)
        filled = np.array(range(every) if layers is None else layers, np.int64)
        places = 0 <= filled.min() <= filled.max() < every
        if given.shape != (len(wanted), len(filled)) or not places:
            raise ValueError(f"checksums {given.shape} for {len(wanted)} blocks")
        owner, bit, _ = WriterToken.of(writer)
        tickets = wanted, self._tickets(wanted, generations)
        kernels.write_sums(self.tables, self._sums_at(wanted), *tickets, owner, filled, given)
        try:
            with self.section:
                kernels.publish(self.tables, *tickets, owner, bit, self._clock(), done)
        except LockBusyError as error:
            logger.warning("not published: %s", error)
        return done

    def abandon(self, slots: np.ndarray, generations: np.ndarray | None = None) -> None:
        """Give reserved slots back unwritten. Numbers below 0 are no slots and are skipped.
        generations: as in `publish`."""
        wanted = self._slots(slots)
        tickets = self._tickets(wanted, generations)[wanted >= 0]
        wanted = wanted[wanted >= 0]
        if not len(wanted):
            return
        with self.section:
            mine = self.table["owner"][wanted] == os.getpid()
            self._drop(wanted[mine], tickets[mine], WRITING, DROPPED)

    def generations(self, slots: np.ndarray) -> np.ndarray:
        """Return the generations of slots that were just reserved, u4 [n]."""
        return self._tickets(self._slots(slots), None)

    def renew(self, slots: np.ndarray, generations: np.ndarray) -> None:
        """Keep slots that this process is still filling for another WRITER_TIMEOUT_S."""
        wanted = self._slots(slots, least=0)
        with self.section:
            rows = self.table[wanted]
            mine = (rows["state"] == WRITING) & (rows["owner"] == os.getpid())
            mine &= rows["generation"] == generations
            self.table["stored_s"][wanted[mine]] = self._clock()

    def _tickets(self, wanted: np.ndarray, generations: np.ndarray | None) -> np.ndarray:
        if generations is None:
            return self.table["generation"][wanted]
        return np.array(generations, np.uint32, order="C").reshape(len(wanted))

    def give_up(self, namespace_id: int, hashes: Hashes, group: int) -> int:
        """Free the slots that a group of writers has begun to fill with these blocks and will not
        finish; return their number. No writer may still be copying."""
        self._check_namespace(namespace_id)
        keys = pack_hashes(hashes)
        slots = np.empty(len(keys), np.int64)
        with self.brief_section:
            kernels.unfinished(self.tables, namespace_id, keys, group, slots)
            begun = slots[slots >= 0]
            return self._drop(begun, self.table["generation"][begun], WRITING, DROPPED)

    def discard(self, namespace_id: int, hashes: Hashes) -> int:
        """Drop blocks that were found corrupt, leased or not; return how many were stored."""
        self._check_namespace(namespace_id)
        keys = pack_hashes(hashes)
        slots = np.empty(len(keys), np.int64)
        with self.section:
            kernels.lookup(self.tables, namespace_id, keys, slots)
            there = slots[slots >= 0]
            return self._drop(there, self.table["generation"][there], READY, DISCARDED_TOTAL)

    def clear(self, namespace_id: int | None = None) -> int:
        """Drop all blocks, or one namespace's, also kept and leased ones; return their number.

        Blocks being written are not touched.
        """
        if namespace_id is not None:
            self._check_namespace(namespace_id)
        with self.section:
            its = True if namespace_id is None else self.table["namespace"] == namespace_id
            slots = np.flatnonzero((self.table["state"] == READY) & its)
            return self._drop(slots, self.table["generation"][slots], READY, DROPPED)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside

    def _drop(
        self, slots: np.ndarray, generations: np.ndarray, state: int, total: int, now_s: float = INF
    ) -> int:
        if not len(slots):
            return 0
        return int(kernels.drop(self.tables, slots, generations, state, now_s, total))

    def _stale_reservations(self, now_s: float) -> Chosen:
        """Return the slots whose writers are past WRITER_TIMEOUT_S, with their generations."""
        generations = self.table["generation"].copy()
        reserved = self.table["state"] == WRITING
        slots = np.flatnonzero(reserved & (self.table["stored_s"] < now_s - WRITER_TIMEOUT_S))
        return slots, generations[slots]


__all__ = ["Arena", "ArenaFormatError", "LockBusyError"]

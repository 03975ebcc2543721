"""The arena's file as this process maps it: where blocks are, and read-only facts about them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from headrace_kvstore.arena import kernels
from headrace_kvstore.arena.geometry import (
    EVENT_FLOOR,
    EVENT_HEAD,
    NAMESPACE_COUNT,
    NONE,
    SECTION,
    TOTALS,
    WORDS,
    WORDS_OFFSET,
    ArenaFormatError,
    Geometry,
    Tables,
)
from headrace_kvstore.arena.locking import PATIENCE_S, FileLock
from headrace_kvstore.arena.shared_file import SharedFile, huge_page_mode
from headrace_kvstore.blocks.slot_record import EVENT, PINNED, READY, SLOT, WRITING

logger = logging.getLogger("headrace.kvstore")

BRIEF_S = 0.2e-3
"""Maximum wait for the lock on an engine's thread, which makes a few such calls for each worker.
Sections take microseconds."""


class NamespaceInfo(NamedTuple):
    """A namespace of the arena."""

    digest: bytes
    block_bytes: int
    layers: int


class RejectedError(ValueError):
    """Error raised in a section that has changed nothing."""


class Section:
    """The arena's critical section, between all threads and processes that map it.

    A context manager; entering raises LockBusyError after `patience_s` seconds.

    The header's section word is odd inside a section. If it is odd on entry, a holder died or
    raised inside; entering then repairs the arena.

    Args:
        words: the header's words, u64, as a memoryview.
    """

    def __init__(
        self, lock: FileLock, words: memoryview, tables: Tables, patience_s: float
    ) -> None:
        self._lock, self._words, self._t = lock, words, tables
        self._patience_s = patience_s

    def __enter__(self) -> None:
        self._lock.acquire(self._patience_s)
        try:
            if self._words[SECTION] % 2:
                kernels.repair(self._t)
                logger.warning("arena repaired: a process died inside a critical section")
            else:
                self._words[SECTION] += 1
        except BaseException:
            self._lock.release()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None or kind is RejectedError:
            self._words[SECTION] += 1
        self._lock.release()


class ArenaMap:
    """A mapped arena.

    Attributes:
        table: the slot table itself, SLOT [slots].
        tables, words: all tables, and the header's words. They are changed inside `section` only.
        memory: all bytes of the file, u8.
    """

    def __init__(self, file: SharedFile, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._file = file
        self.memory = np.frombuffer(file.memory, np.uint8)
        try:
            self.geometry = Geometry.parse(bytes(self.memory[:WORDS_OFFSET]), file.size_bytes)
        except ArenaFormatError as error:
            raise ArenaFormatError(
                f"{file.path} cannot be used: {error}. End the processes that use it and remove "
                "the file, or give another name"
            ) from None
        self.tables: Tables = self.geometry.tables(self.memory)
        self._per_segment = self.geometry.slots_per_segment
        self.table = self.tables.table.view(SLOT)
        self.base_address = int(self.memory.ctypes.data)
        self.words = memoryview(file.memory)[WORDS_OFFSET : WORDS_OFFSET + 8 * WORDS].cast("Q")

        def section(patience_s: float) -> Section:
            return Section(file.lock, self.words, self.tables, patience_s)

        self.section, self.brief_section = section(PATIENCE_S), section(BRIEF_S)

    # Namespaces and blocks

    def namespaces(self) -> list[NamespaceInfo]:
        """Return the namespaces, by their ids."""
        return [
            self.namespace_info(namespace_id)
            for namespace_id in range(int(self.words[NAMESPACE_COUNT]))
        ]

    def namespace_info(self, namespace_id: int) -> NamespaceInfo:
        """Return the namespace of this id."""
        found = self.tables.namespaces[namespace_id]
        return NamespaceInfo(
            found["digest"].tobytes(), int(found["block_bytes"]), int(found["layers"])
        )

    def find_namespace(self, digest: bytes) -> int | None:
        """Return a namespace's id, if it is registered."""
        return next((i for i, s in enumerate(self.namespaces()) if s.digest == digest), None)

    def offsets(self, slots: np.ndarray) -> np.ndarray:
        """Return the bytes (int64 [n]) from the start of the arena to each slot's block."""
        wanted = self._slots(slots, least=0)
        segment, place = np.divmod(wanted, self._per_segment)
        stride = self.tables.namespaces["slot_bytes"][self.table["namespace"][wanted]].astype(
            np.int64
        )
        start = self.geometry.data_offset + segment * self.geometry.segment_bytes
        offsets: np.ndarray = start + place * stride
        return offsets

    @property
    def data_address(self) -> int:
        """Address in this process where blocks begin, after all tables."""
        return self.base_address + self.geometry.data_offset

    @property
    def data_bytes(self) -> int:
        """Bytes from `data_address` to the end of the arena."""
        return self.geometry.size_bytes - self.geometry.data_offset

    def addresses(self, slots: np.ndarray) -> np.ndarray:
        """Return the address in this process (int64 [n]) of each slot's block, for copy kernels."""
        return self.base_address + self.offsets(slots)

    def address(self, slot: int) -> int:
        """Return the address in this process of the slot's block."""
        return int(self.addresses(np.array([slot]))[0])

    def view(self, slot: int) -> np.ndarray:
        """Return the slot's block: u8 [block_bytes], shared memory itself."""
        start = int(self.offsets(np.array([slot]))[0])
        namespace_id = int(self.table["namespace"][slot])
        return self.memory[start : start + int(self.tables.namespaces["block_bytes"][namespace_id])]

    def sums(self, slots: np.ndarray) -> np.ndarray:
        """Return the checksums of published blocks of one namespace: u64 [n, layers], a copy."""
        wanted = self._slots(slots, least=0)
        if not len(wanted):
            return np.zeros((0, 0), np.uint64)
        return self.tables.sums[self._sums_at(wanted)[:, None] + np.arange(self._layers(wanted))]

    # What happened

    @property
    def next_seq(self) -> int:
        """Sequence number of the next event, read without the lock."""
        return int(self.words[EVENT_HEAD])

    def events(self, since_seq: int, limit: int = 4096) -> tuple[np.ndarray, int, bool]:
        """Return the events from `since_seq` on: EVENT [at most limit], next_seq, lost.

        `lost` means that this part of the history is no longer there (the reader is too late, or a
        process died). The reader then takes all blocks from `blocks`, and continues from the number
        that it returns. A new reader starts in the same way, or with 0.
        """
        with self.section:
            head, floor = int(self.words[EVENT_HEAD]), int(self.words[EVENT_FLOOR])
            ring = self.tables.events
            if not max(floor, head - len(ring)) <= since_seq <= head:
                return np.zeros(0, EVENT), head, True
            upto = min(head, since_seq + limit)
            found = ring[np.arange(since_seq, upto) % len(ring)]
        return found.view(EVENT), upto, False

    def blocks(self, namespace_id: int | None = None) -> tuple[np.ndarray, int]:
        """Return all readable blocks (SLOT [n], a copy), and the sequence number from which events
        add.

        Takes no lock: the events from that number on cover changes during the copy, and a slot that
        was given to another block while it was copied is left out.
        """
        head, generations = int(self.words[EVENT_HEAD]), self.table["generation"].copy()
        wanted = self.table["state"] == READY
        if namespace_id is not None:
            wanted &= self.table["namespace"] == namespace_id
        slots = np.flatnonzero(wanted)
        rows = self.table[slots]
        same = (self.table["generation"][slots] == generations[slots]) & (rows["state"] == READY)
        return rows[same], head

    def stats(self) -> dict[str, Any]:
        """Return JSON-able sizes, counts and totals. Takes no lock, so they may be inconsistent."""
        t, ready = self.tables, self.table["state"] == READY
        now_s = self._clock()
        leased, retained = self.table["lease_until_s"] > now_s, self._retained(now_s)
        return {
            "size_bytes": self.geometry.size_bytes,
            "huge_pages": huge_page_mode(),
            "data_bytes": int(t.segments["bytes"].sum()),
            "held_bytes": int(self.table["bytes"].sum()),
            "blocks": int(ready.sum()),
            "writing": int((self.table["state"] == WRITING).sum()),
            "leased": int((ready & leased).sum()),
            "pinned": int((ready & (self.table["kept_until_s"] == PINNED)).sum()),
            "retained": int(retained.sum()),
            "retained_bytes": int(self.table["bytes"][retained].sum()),
            "segments": len(t.segments),
            "segments_free": int((t.segments["namespace"] == NONE).sum()),
            "namespaces": [
                {
                    "digest": namespace.digest.hex(),
                    "block_bytes": namespace.block_bytes,
                    "layers": namespace.layers,
                    "blocks": int((ready & (self.table["namespace"] == namespace_id)).sum()),
                }
                for namespace_id, namespace in enumerate(self.namespaces())
            ],
            **{name: int(self.words[word]) for name, word in TOTALS.items()},
        }

    def _retained(self, now_s: float) -> np.ndarray:
        """Return which slots hold blocks that are kept until a time after `now_s`, bool [slots]."""
        until_s = self.table["kept_until_s"]
        kept: np.ndarray = (until_s > now_s) & (until_s != PINNED)
        return kept & (self.table["state"] == READY)

    def free_bytes(self) -> int:
        """Return the number of data bytes that hold no block."""
        return int(self.tables.segments["bytes"].sum()) - int(self.table["bytes"].sum())

    # The handle

    def replaced(self) -> bool:
        """Whether another file has taken this one's name."""
        try:
            return os.stat(self._file.path).st_ino != os.fstat(self._file.lock.fd).st_ino
        except FileNotFoundError:
            return False

    def unlink(self) -> None:
        """Remove the arena's name. Processes that map it continue; the next to open it makes a new
        one."""
        self._file.unlink()

    def unlink_unused(self) -> bool:
        """Remove the arena's name unless another handle uses it; return False if one does. Raises
        LockBusyError."""
        return self._file.unlink_unused()

    def close(self) -> None:
        """Release the memory. It stays mapped until all views that were handed out are deleted."""
        if hasattr(self, "tables"):
            self.words.release()
            del self.tables, self.table, self.memory, self.words
            del self.section, self.brief_section
            self._file.close()

    # Inside

    def _check_namespace(self, namespace_id: int) -> None:
        if not 0 <= namespace_id < self.words[NAMESPACE_COUNT]:
            raise ValueError(f"{namespace_id} is no namespace of this arena")

    def _slots(self, slots: np.ndarray, least: int = kernels.STALE) -> np.ndarray:
        wanted = np.array(slots, np.int64, order="C").reshape(-1)
        if len(wanted) and not least <= wanted.min() <= wanted.max() < len(self.table):
            raise IndexError("no such slot")
        return wanted

    def _layers(self, slots: np.ndarray) -> int:
        rows = self.table["namespace"][slots]
        if np.any(rows != rows[0]):
            raise ValueError("slots of more than one namespace")
        return int(self.tables.namespaces["layers"][rows[0]])

    def _sums_at(self, slots: np.ndarray) -> np.ndarray:
        """Return where each slot's checksums begin in `sums`."""
        segment, place = np.divmod(slots, self._per_segment)
        start: np.ndarray = segment * (self._per_segment * self.geometry.layers)
        return start + place * self._layers(slots)

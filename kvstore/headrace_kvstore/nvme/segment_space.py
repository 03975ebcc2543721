"""The segments of a file tier: how many fit its size, and which one is removed.

A full tier removes the segment whose blocks are worth least. If other files have filled the disk,
the tier gives up one segment's room, not all segments (`_frees_segment_for_full_disk`).
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from headrace_kvstore.nvme.catalog import Catalog, Segment, Value, use_per_second
from headrace_kvstore.nvme.record import PAGE_BYTES, BlockShape, TierEvent
from headrace_kvstore.nvme.record_writer import make_segment, remove_segment
from headrace_kvstore.nvme.scan import new_segment_path
from headrace_kvstore.nvme.segment import NO_RESOURCES, SegmentFiles

logger = logging.getLogger("headrace.kvstore")

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

State = Literal["on", "read-only", "off"]


class SegmentSpace:
    """Segments of a folder. Subclasses read and write blocks in them, under `_lock`.

    Attributes:
        state, reason: whether the disk is used, and why not.
        events: called with each `TierEvent`.
        value: value of keeping a block; decides which segment is removed.
    """

    def __init__(self, folder: Path, size_bytes: int, segment_bytes: int, sync: bool) -> None:
        self.folder, self.size_bytes = folder, size_bytes
        self.segment_bytes = min(segment_bytes, size_bytes) // PAGE_BYTES * PAGE_BYTES
        self.state: State = "on"
        self.reason = ""
        self.events: list[Callable[[TierEvent], None]] = []
        self.value: Value = use_per_second
        self._lock = threading.RLock()
        self._growing = threading.Lock()
        self._catalog = Catalog()
        self._files = SegmentFiles(writable=True, sync=sync)
        self._open: dict[BlockShape, Segment] = {}
        self._next_segment = 1
        self._disk_full = False
        """Whether a segment was given up for a full disk, and none could be made since."""
        self._undeleted: dict[str, int] = {}
        """Size of each removed segment whose file is still there, by path."""
        self._counts: Counter[str] = Counter()

    def _open_segment(self, shape: BlockShape) -> Segment | None:
        """Return this namespace's segment with a free slot, if there is one."""
        segment = self._open.get(shape)
        return segment if segment is not None and segment.next_slot < segment.slots else None

    def _make_segment(self, shape: BlockShape) -> bool:
        """Make a segment with a free slot for the namespace unless it has one; return False if that
        is impossible.

        The disk allocates and removes files without the tier's lock, so only writers wait for it.
        """
        slots = shape.slots(self.segment_bytes)
        with self._growing:
            while True:
                with self._lock:
                    if self._open_segment(shape) is not None:
                        return True
                    if not slots or self.state != "on":
                        return False
                if not self._make_room():
                    return False
                number = self._next_segment
                self._next_segment += 1
                path = new_segment_path(self.folder, number)
                try:
                    make_segment(path, self.segment_bytes, shape)
                except OSError as error:
                    if self._frees_segment_for_full_disk(error):
                        continue
                    return False
                self._disk_full = False
                segment = Segment(number, path, self.segment_bytes, shape, slots)
                with self._lock:
                    self._catalog.segments[number] = segment
                    self._open[shape] = segment
                    return True

    def _frees_segment_for_full_disk(self, error: OSError) -> bool:
        """Handle a segment that could not be made; return True if it is to be tried again.

        If other files have filled the disk, the tier gives up one segment. If that makes no room,
        other files have taken it, and giving up more would only empty the tier. Then the tier gives
        up no more until a segment could be made again.
        """
        if error.errno in NO_RESOURCES:
            self._counts["segments_unopened"] += 1
            return False
        if error.errno in DISK_FULL and not self._disk_full:
            self._disk_full = True
            freed = 0
            while freed < self.segment_bytes and (more := self._reclaim()):
                freed += more
            if freed:
                return True
        self._set_state("read-only", f"cannot make a segment: {error}")
        return False

    def _make_room(self) -> bool:
        """Give segments up until one more fits; return False if that is impossible."""
        for path in list(self._undeleted):
            self._delete(path, self._undeleted[path])
        while self._file_bytes + self.segment_bytes > self.size_bytes:
            if not self._reclaim():
                return False
        return True

    @property
    def _file_bytes(self) -> int:
        """Bytes of all files, including removed segments that the disk still keeps."""
        with self._lock:
            return self._catalog.file_bytes + sum(self._undeleted.values())

    def _reclaim(self) -> int:
        """Remove the segment that is worth least; return its bytes, 0 if none can be removed.

        Called by one thread at a time. The tier's lock is held for one segment after the other, so
        other threads wait neither for the choice nor for the disk.
        """
        now_s = time.monotonic()
        with self._lock:
            segments = [self._catalog.segments[n] for n in sorted(self._catalog.segments)]
        values = []
        for segment in segments:
            with self._lock:
                rows = self._catalog.rows(segment)
            values.append(self.value(segment.shape.digest, rows, now_s).sum())
        for i in np.argsort(values, kind="stable").tolist():
            segment = segments[i]
            with self._lock:
                gone = self._catalog.drop(segment, now_s)
                if gone is None:
                    continue
                self._close_open(segment)
                self._counts["segments_reclaimed"] += 1
                self._counts["blocks_evicted"] += len(gone)
            break
        else:
            return 0
        return segment.file_bytes if self._remove(segment, gone, "evicted") else 0

    def _remove(self, segment: Segment, gone: Sequence[bytes], reason: str) -> bool:
        """Remove the file of a segment that the catalog has dropped; return False if the disk keeps
        it."""
        self._files.close([segment.path])
        for block_hash in gone:
            self._notify(TierEvent(False, segment.shape.digest, block_hash, reason))
        return self._delete(segment.path, segment.file_bytes)

    def _close_open(self, segment: Segment) -> None:
        """Stop writing to this segment."""
        if self._open.get(segment.shape) is segment:
            del self._open[segment.shape]

    def _delete(self, path: str, size_bytes: int) -> bool:
        """Remove a segment's file. Return False if the disk keeps it; its size then still
        counts."""
        try:
            remove_segment(path)
        except OSError as error:
            self._undeleted[path] = size_bytes
            self._set_state("read-only", f"cannot remove {path}: {error}")
            return False
        self._undeleted.pop(path, None)
        return True

    def _set_state(self, state: State, reason: str) -> None:
        if self.state == "off" or self.state == state:
            return
        self.state, self.reason = state, reason
        logger.error("NVMe tier %s is %s: %s", self.folder, state, reason)

    def _notify(self, event: TierEvent) -> None:
        for listener in self.events:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener of %s failed", self.folder)

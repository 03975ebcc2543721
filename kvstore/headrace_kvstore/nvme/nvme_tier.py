"""The NVMe tier: KV blocks in a folder of preallocated segment files, owned by one process.

Writing is append-only. A block gets the next slot of its namespace's open segment. Its payload is
written first, then its header, and only then can it be found. When the folder is full, the segment
whose blocks are worth least is removed and a new one is created. A new
segment is a new file: it holds no old headers, and readers of the removed file still read the
right bytes. After a restart the headers tell which blocks are here.

The owner holds an flock on the folder's file `LOCK`; the kernel releases it when the owner dies.
Other processes ask the owner for a Location and read with `segment.BlockReader`.

No error reaches a request. A write is dropped and counted if too much is in flight or every
segment is in use. A disk that is read-only or failing turns writing off; so does a disk that
others have filled, after one segment was given up in vain. Eight failed reads in a row turn the
tier off. Both are logged once and shown by `stats`. A lack of open files or memory, and a file
that was removed, are not disk faults: they cost their blocks only.

A process that dies loses no published block. A power cut may tear blocks, and checksums find them,
so syncing (`sync`) only saves a few hits.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from headrace_kvstore.daemon_thread_pool import DaemonThreadPool
from headrace_kvstore.lock_file import acquire_lock_file
from headrace_kvstore.nvme.block_lookup import BlockLookup
from headrace_kvstore.nvme.catalog import Segment, Value, use_per_second
from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.nvme.record import (
    PAGE_BYTES,
    BlockShape,
    RecordHeader,
    TierEvent,
    WriteRequest,
    pack_header,
    padded,
)
from headrace_kvstore.nvme.record_writer import PendingWrite, write_record
from headrace_kvstore.nvme.scan import Scan, scan_folder
from headrace_kvstore.nvme.segment import (
    NO_FILE,
    NO_RESOURCES,
    BlockReader,
    Location,
    Read,
    Verify,
)

logger = logging.getLogger("headrace.kvstore")

WRITING_BYTES = 256 * 2**20
"""Maximum size of the records in flight to the disk."""
LOCK = "lock"
"""File in a folder that its owner holds, with the owner's name in it."""
NOT_THE_DISK = (errno.ECANCELED, errno.EFAULT, *NO_FILE, *NO_RESOURCES)
"""Errors of a write that are not disk faults: cancelled, the source memory was unmapped, the file
was removed, no descriptor or memory to open it."""
FAILED_READS = 8
"""Failed reads in a row that turn the tier off."""


class FolderBusy(RuntimeError):
    """Another process owns the folder."""


class NvmeTier(BlockLookup):
    """Blocks on a local disk. Thread-safe; made by `NvmeTier.open`."""

    def __init__(
        self, folder: Path, size_bytes: int, segment_bytes: int, file_io: FileIo, sync: bool = False
    ) -> None:
        super().__init__(folder, size_bytes, segment_bytes, sync)
        self.file_io = file_io
        self.writing_limit_bytes = WRITING_BYTES
        self.scanned = Scan()
        self._lock_fd = -1
        self._wiper = DaemonThreadPool(1, "kv-nvme-wipe")
        self._reader = BlockReader(self.file_io, self._files)
        self._writing: dict[bytes, Future[bool]] = {}
        self._writing_bytes = 0
        self._next_sequence = 1
        self._failed_reads = 0

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        size_bytes: int,
        segment_bytes: int,
        file_io: FileIo,
        *,
        sync: bool = False,
        owner: str = "",
        value: Value = use_per_second,
        writing_limit_bytes: int = WRITING_BYTES,
        events: Sequence[Callable[[TierEvent], None]] = (),
    ) -> NvmeTier:
        """Own a folder, make it if need be, and find the blocks in it.

        Args:
            size_bytes: maximum size of all segment files together; if they exceed it, segments are
                removed at once.
            segment_bytes: size of a new segment, a multiple of 4,096.
            file_io: reads and writes the files; shared with others.
            sync: whether a write is done only once the disk has it for good (O_DSYNC).
            owner: name that other processes read in the lock.
            value: value of keeping a block; decides which segment is removed.
            events: called with each `TierEvent`, with "scanned" blocks before this returns.

        Raises:
            FolderBusy: another process owns it. A bad disk does not raise: see `state`.
        """
        tier = cls(Path(folder), size_bytes, segment_bytes, file_io, sync)
        tier.value, tier.writing_limit_bytes = value, writing_limit_bytes
        tier.events.extend(events)
        try:
            tier.folder.mkdir(parents=True, exist_ok=True)
            tier._lock_fd = acquire_lock_file(tier.folder / LOCK)
            with suppress(OSError):  # a full disk: others wait for this owner's end
                os.ftruncate(tier._lock_fd, 0)
                os.pwrite(tier._lock_fd, owner.encode(), 0)
            tier._load()
        except BlockingIOError as error:
            tier.close()
            raise FolderBusy(f"another process owns {folder}") from error
        except OSError as error:
            tier._set_state("off", f"cannot open {folder}: {error}")
        return tier

    # Reading

    def read(
        self,
        locations: Sequence[Location],
        addresses: np.ndarray,
        first_layer: int = 0,
        verify: Verify | None = None,
    ) -> Read:
        """Start reading some layers of many blocks, as `BlockReader.read`; this counts as a use of
        each.

        Blocks that turn out bad in `wait` are discarded. The blocks' segments stay until the read
        is done.
        """
        now_s = time.monotonic()
        used: list[Segment] = []
        with self._lock:
            for place in locations:
                segment = self._catalog.segments.get(place.segment)
                if segment is None:
                    continue
                segment.users += 1
                used.append(segment)
                row = int(segment.rows[place.slot])
                if row >= 0:
                    self._catalog.table[row]["hits"] += 1
                    self._catalog.table[row]["used_s"] = now_s
            self._counts["reads"] += len(locations)

        def done(clean: bool) -> None:
            with self._lock:
                if clean:
                    self._failed_reads = 0
                for segment in used:
                    segment.users -= 1

        try:
            return self._reader.read(
                locations, addresses, first_layer, verify, self._on_bad_block, done
            )
        except BaseException:
            done(False)
            raise

    def _on_bad_block(self, place: Location, reason: str) -> None:
        with self._lock:
            self._counts[f"reads_{reason}"] += 1
            if reason == "unreadable" and place.segment in self._catalog.segments:
                self._failed_reads += 1
                if self._failed_reads >= FAILED_READS:
                    self._set_state("off", f"{self._failed_reads} reads failed in a row")
        if reason != "unopened":
            self._discard(place.shape.digest, place.hash, reason, place)

    # Writing

    def write(self, shape: BlockShape, saves: Sequence[WriteRequest]) -> list[Future[bool]]:
        """Start writing blocks. Each future tells whether the block is here in the end; the memory
        must not change before that.

        Raises ValueError or struct.error for a block that no header can describe; the futures
        raise nothing.
        """
        futures: list[Future[bool]] = []
        pending_writes: list[PendingWrite] = []
        try:
            for save in saves:
                taken = self._reserve_slot(shape, save)
                while taken is None:
                    taken = self._reserve_slot(shape, save, full=not self._make_segment(shape))
                if isinstance(taken, PendingWrite):
                    pending_writes.append(taken)
                    futures.append(taken.future)
                else:
                    futures.append(taken)
        finally:
            for pending in pending_writes:
                write_record(self.file_io, self._files, pending, self._on_written)
        return futures

    def _reserve_slot(
        self, shape: BlockShape, save: WriteRequest, full: bool = False
    ) -> PendingWrite | Future[bool] | None:
        """Return a pending write with a slot for the block, or a future of the outcome if it needs
        or gets none. None if a segment must be made first; full: no segment can be made.
        """
        with self._lock:
            key = padded(save.hash)
            under_way = self._writing.get(shape.digest + key)
            if under_way is not None:
                return under_way
            future: Future[bool] = Future()
            if self._catalog.row(shape.digest, key) is not None:
                future.set_result(True)
                return future
            block = RecordHeader(
                key,
                padded(save.parent),
                save.depth,
                save.tenant,
                save.compute_s,
                time.time(),
                self._next_sequence,
                save.sums,
            )
            header = pack_header(shape, block)
            segment = self._open_segment(shape)
            refused = ""
            if self.state != "on":
                refused = "writing_off"
            elif self._writing_bytes + shape.record_bytes > self.writing_limit_bytes:
                refused = "writes_dropped_busy"
            elif segment is None and full:
                refused = "writes_dropped_full"
            if refused:
                self._counts[refused] += 1
                future.set_result(False)
                return future
            if segment is None:
                return None
            slot = segment.next_slot
            segment.next_slot += 1
            segment.users += 1
            self._writing[shape.digest + key] = future
            self._writing_bytes += shape.record_bytes
            self._next_sequence += 1
            return PendingWrite(shape, block, header, save.address, segment, slot, future)

    def _on_written(self, pending: PendingWrite, error: OSError | None) -> None:
        """Handle a record that was written, or could not be written."""
        with self._lock:
            if error is None:
                self._catalog.add(pending.segment, pending.slot, pending.block, pending.taken_s)
            elif error.errno not in NOT_THE_DISK:
                self._set_state("read-only", f"write failed: {error}")
            elif error.errno in NO_FILE and self._open.get(pending.shape) is pending.segment:
                del self._open[pending.shape]
            self._counts["writes" if error is None else "writes_failed"] += 1
            pending.segment.users -= 1
            self._writing_bytes -= pending.shape.record_bytes
            del self._writing[pending.shape.digest + pending.block.hash]
        if error is None:
            self._notify(TierEvent(True, pending.shape.digest, pending.block.hash, "written"))
        pending.future.set_result(error is None)

    def discard(self, digest: bytes, block_hash: bytes, reason: str = "discarded") -> bool:
        """Discard a block, on disk too, in the background; return False if it was not here."""
        return self._discard(digest, block_hash, reason)

    def _discard(
        self, digest: bytes, block_hash: bytes, reason: str, place: Location | None = None
    ) -> bool:
        """Discard a block; with a place only if the block is still there."""
        with self._lock:
            row = self._catalog.row(digest, block_hash)
            if row is None:
                return False
            segment, slot = self._catalog.place(row)
            if place is not None and (segment.path, slot) != (place.path, place.slot):
                return False
            self._catalog.remove(row)
            wipes = reason != "gone"
            segment.users += wipes
        if wipes:
            self._wiper.submit(lambda: self._wipe(segment, slot))
        self._notify(TierEvent(False, digest, padded(block_hash), reason))
        return True

    def clear(self, digest: bytes | None = None) -> int:
        """Discard all blocks, or one namespace's, on disk too; return how many. Files that are
        being read or written stay, without their blocks."""
        count, now_s = 0, time.monotonic()
        with self._growing:
            with self._lock:
                segments = list(self._catalog.segments.values())
            for segment in segments:
                if digest is not None and segment.shape.digest != digest:
                    continue
                with self._lock:
                    self._close_open(segment)
                    gone = self._catalog.drop(segment, now_s)
                    kept = (
                        [name for _, name in self._catalog.hashes(segment)] if gone is None else []
                    )
                if gone is not None:
                    count += len(gone)
                    self._remove(segment, gone, "cleared")
                count += sum(self.discard(segment.shape.digest, name, "cleared") for name in kept)
        return count

    def _wipe(self, segment: Segment, slot: int) -> None:
        try:
            file = self._files.acquire(segment.path)
            try:
                os.pwrite(file.fd, bytes(PAGE_BYTES), segment.shape.header_offset(slot))
            finally:
                self._files.release(file)
        except FileNotFoundError:
            pass  # its file was removed, so nothing is left of it
        except OSError as error:
            logger.warning("a discarded block stays in %s: %s", segment.path, error)
        finally:
            with self._lock:
                segment.users -= 1

    # Beginning and end

    def _load(self) -> None:
        self.scanned = scan_folder(self.folder, self.file_io, self._files, self._catalog)
        for segment in self._catalog.segments.values():
            if segment.next_slot < segment.slots and segment.file_bytes == self.segment_bytes:
                self._open[segment.shape] = segment
        self._next_segment = self.scanned.last_segment + 1
        self._next_sequence = self.scanned.last_sequence + 1
        while self._catalog.file_bytes > self.size_bytes and self._reclaim():
            pass
        logger.info("%s: %d blocks found, %s", self.folder, len(self._catalog), self.scanned)
        for segment in self._catalog.segments.values():
            for _, block_hash in self._catalog.hashes(segment):
                self._notify(TierEvent(True, segment.shape.digest, block_hash, "scanned"))

    def heal(self) -> None:
        """Use the disk again after it failed, until it fails once more."""
        with self._lock:
            self.state, self.reason, self._failed_reads = "on", "", 0

    def stats(self) -> dict[str, Any]:
        """Return a JSON-able view: state, sizes, counters since the start, the start-up scan."""
        with self._lock:
            return {
                "state": self.state,
                "reason": self.reason,
                "blocks": len(self._catalog),
                "segments": len(self._catalog.segments),
                "bytes": self._file_bytes,
                "size_bytes": self.size_bytes,
                "writing_bytes": self._writing_bytes,
                "scan": self.scanned.as_dict(),
                **self._counts,
            }

    def close(self, timeout_s: float = 30.0) -> None:
        """Let reads and writes in flight finish, and release files and folder. The files stay."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self.state, self.reason = "off", self.reason or "closed"
            segments = list(self._catalog.segments.values())
        self._wiper.close(timeout_s)
        while any(segment.users for segment in segments) and time.monotonic() < deadline:
            time.sleep(0.001)
        self._files.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

"""Reads of blocks from segment files, by their owner or by any process that has a Location.

A read takes some layers of many blocks, each layer to its own address. Layers that are adjacent in
memory and in the file become one piece.

Each file is opened twice. A piece goes through the O_DIRECT descriptor if its address, offset and
length are whole pages, which every file system takes, otherwise through the page cache. O_DIRECT
copies nothing and keeps the page cache free of bytes that the DRAM arena holds already. So callers
should pass page-aligned memory, as arena slots are.

A published record never changes and a segment's name is never reused. So a Location stays right
until the file is removed, and then the block is missing, not wrong.

A block that cannot be read has a reason: its file is "gone", this process could not open the file
("unopened": no free descriptors or memory), the disk failed or the file ends early ("unreadable"),
or the bytes do not match their checksums ("corrupt"). The first two say nothing about the disk.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace_kvstore.nvme.file_io import IoBatchError
from headrace_kvstore.nvme.record import PAGE_BYTES, BlockShape

OPEN_FILES = 128
"""Maximum number of unused segments kept open, with two descriptors each."""

NO_FILE = (errno.ENOENT, errno.ESTALE)
NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of `open` that say nothing about the disk: the file was removed, or this process or this
machine has no room for another open file."""

Verify = Callable[[bytes, bytes, int, np.ndarray, int], np.ndarray]
"""(namespace digest, block hash, first layer, addresses (n,) u64, layer_bytes) -> sums (n,) u64 of
the bytes now at those addresses."""


@dataclass(frozen=True)
class Location:
    """Place of a block; plain values, to be sent to other processes."""

    path: str
    segment: int
    slot: int
    shape: BlockShape
    hash: bytes
    sums: np.ndarray
    """One u64 a layer, (layers,)."""

    @property
    def payload_offset(self) -> int:
        """Offset in the file at which layer 0 begins."""
        return self.shape.payload_offset(self.slot)


@dataclass
class File:
    """An open segment; `direct_fd` is -1 if the file system has no O_DIRECT."""

    path: str
    fd: int
    direct_fd: int
    users: int = 0
    cached: bool = True
    """Whether `SegmentFiles` holds it; if not, the last user closes it."""

    def is_removed(self) -> bool:
        """Whether the file has no name any more. The kernel frees none of its room before every
        descriptor is closed."""
        return os.fstat(self.fd).st_nlink == 0

    def choose_fds(
        self, addresses: np.ndarray, offsets: np.ndarray, lengths: np.ndarray
    ) -> np.ndarray:
        """Return the descriptor through which each piece goes, (n,) int64."""
        if self.direct_fd < 0:
            return np.full(len(addresses), self.fd)
        aligned = (addresses | offsets | lengths) % PAGE_BYTES == 0
        return np.where(aligned, self.direct_fd, self.fd)

    def close(self) -> None:
        """Close the descriptors."""
        for fd in {self.fd, self.direct_fd} - {-1}:
            os.close(fd)


class SegmentFiles:
    """Open files by path, the least recently used closed first.

    Args:
        writable, sync: how they are opened.
        before_close: called with each descriptor that is about to be closed.
    """

    def __init__(
        self,
        writable: bool = False,
        sync: bool = False,
        before_close: Callable[[int], None] | None = None,
    ) -> None:
        self._flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_DSYNC if sync else 0)
        self._before_close = before_close
        self._lock = threading.Lock()
        self._files: OrderedDict[str, File] = OrderedDict()

    def acquire(self, path: str) -> File:
        """Return an open file, which stays open until `release`; open it if need be. Raises
        OSError.

        A removed file counts as missing, even if it is open here. Opening a file closes all
        removed files that are not in use. A disk that hangs delays only the threads that open its
        files, because no lock is held during that time.
        """
        opened: File | None = None
        while True:
            file = self._use(path, opened)
            if file is None:
                opened = self._open(path)
                self._close_removed()
            elif file is opened:
                return file
            elif not file.is_removed():
                if opened is not None:
                    opened.close()
                return file
            else:
                self._uncache([file])
                self.release(file)

    def release(self, file: File) -> None:
        """Undo one `acquire`."""
        with self._lock:
            file.users -= 1
            last = not file.users and not file.cached
        if last:
            self._close(file)

    def _close_removed(self) -> None:
        """Close removed files that are not in use."""
        with self._lock:
            idle = [file for file in self._files.values() if not file.users]
            for file in idle:
                file.users += 1
        self._uncache([file for file in idle if file.is_removed()])
        for file in idle:
            self.release(file)

    def _uncache(self, files: Iterable[File]) -> None:
        with self._lock:
            for file in files:
                file.cached = False
                if self._files.get(file.path) is file:
                    del self._files[file.path]

    def close(self, paths: Iterable[str] | None = None) -> None:
        """Close these files, or all, except those in use."""
        with self._lock:
            chosen = list(self._files) if paths is None else paths
            found = [self._files[path] for path in chosen if path in self._files]
            unused = self._uncached([file for file in found if not file.users])
        for file in unused:
            self._close(file)

    def _close(self, file: File) -> None:
        if self._before_close is not None:
            for fd in {file.fd, file.direct_fd} - {-1}:
                self._before_close(fd)
        file.close()

    def _open(self, path: str) -> File:
        fd = os.open(path, self._flags | os.O_CLOEXEC)
        direct_fd = -1
        with suppress(OSError):
            direct_fd = os.open(path, self._flags | os.O_CLOEXEC | os.O_DIRECT)
        return File(path, fd, direct_fd)

    def _use(self, path: str, opened: File | None) -> File | None:
        """Return the open file, else the one given, with one more user."""
        with self._lock:
            file = self._files.get(path, opened)
            if file is None:
                return None
            self._files[path] = file
            self._files.move_to_end(path)
            file.users += 1
            unused = self._uncached([f for f in self._files.values() if not f.users][:-OPEN_FILES])
        for each in unused:
            self._close(each)
        return file

    def _uncached(self, files: list[File]) -> list[File]:
        for file in files:
            file.cached = False
            del self._files[file.path]
        return files


class PendingIo(Protocol):
    """A scatter list on its way; as `file_io.IoBatch`."""

    def done(self) -> bool: ...

    def abort(self) -> None: ...

    def result(self, timeout: float | None = None) -> None: ...

    def exception(self, timeout: float | None = None) -> BaseException | None: ...

    def add_done_callback(self, call: Callable[[Any], None], /) -> None: ...


class FileReads(Protocol):
    """Part of `file_io.FileIo` that starts to fill memory from files."""

    def read(self, addresses: Any, fds: Any, offsets: Any, lengths: Any) -> PendingIo: ...


class Read:
    """Blocks on their way into memory."""

    def __init__(
        self,
        batch: PendingIo,
        locations: Sequence[Location],
        addresses: np.ndarray,
        first_layer: int,
        block_of_piece: np.ndarray,
        missing: dict[int, str],
        verify: Verify | None,
        on_bad: Callable[[Location, str], None] | None,
    ) -> None:
        self.batch = batch
        self._locations, self._addresses, self._first = locations, addresses, first_layer
        self._block_of_piece = block_of_piece
        self.bad: dict[int, str] = missing
        """Position and reason of each block that could not be read; complete after `wait`."""
        self._verify, self._on_bad = verify, on_bad
        self._ok: np.ndarray | None = None

    def done(self) -> bool:
        """Whether no more bytes will arrive, so that the caller may reuse the memory."""
        return self.batch.done()

    def abort(self) -> None:
        """Begin no further reads; `wait` then counts all blocks as missing."""
        self.batch.abort()

    def wait(self, timeout_s: float | None = None) -> np.ndarray:
        """Wait, and return whether each block is whole in memory and, with `verify`, proven right:
        bool (blocks,).

        Raises TimeoutError while bytes may still arrive; nothing else.
        """
        if self._ok is None:
            self._ok = self._verify_blocks(timeout_s)
        return self._ok

    def _verify_blocks(self, timeout_s: float | None) -> np.ndarray:
        ok = np.ones(len(self._locations), np.bool_)
        try:
            self.batch.result(timeout_s)
        except IoBatchError as error:
            for i in np.unique(self._block_of_piece[list(error.pieces)]).tolist():
                self.bad[i] = "unreadable" if os.path.exists(self._locations[i].path) else "gone"
        except CancelledError:
            return np.zeros_like(ok)
        ok[list(self.bad)] = False
        if self._verify is not None:
            for i in np.flatnonzero(ok).tolist():
                place, rows = self._locations[i], self._addresses[i]
                shape = place.shape
                sums = self._verify(shape.digest, place.hash, self._first, rows, shape.layer_bytes)
                wanted = place.sums[self._first : self._first + len(rows)]
                if not np.array_equal(sums, wanted):
                    ok[i], self.bad[i] = False, "corrupt"
        if self._on_bad is not None:
            for i, reason in self.bad.items():
                self._on_bad(self._locations[i], reason)
        return ok


class BlockReader:
    """Reader of blocks at their Locations, in any process."""

    def __init__(self, file_io: FileReads, files: SegmentFiles | None = None) -> None:
        self._file_io = file_io
        self._files = SegmentFiles() if files is None else files

    def read(
        self,
        locations: Sequence[Location],
        addresses: np.ndarray,
        first_layer: int = 0,
        verify: Verify | None = None,
        on_bad: Callable[[Location, str], None] | None = None,
        on_done: Callable[[bool], None] | None = None,
    ) -> Read:
        """Start reading layers `first_layer ... first_layer + n - 1` of some blocks of one shape.

        Args:
            addresses: u64 (blocks, n), where each layer goes, `layer_bytes` each.
            verify: computes the sums to compare with the location's; None compares nothing.
            on_bad: called with each block that failed and its reason.
            on_done: called, on another thread, when no more bytes will arrive; its argument is
                whether all pieces that were asked for arrived.
        """
        addresses = np.ascontiguousarray(addresses, dtype=np.int64)
        shapes = {(place.shape.layers, place.shape.layer_bytes) for place in locations}
        if len(shapes) > 1 or addresses.ndim != 2 or len(addresses) != len(locations):
            raise ValueError(f"{len(locations)} blocks of shapes {shapes} to {addresses.shape}")
        if shapes and not 0 <= first_layer <= min(shapes)[0] - addresses.shape[1]:
            raise ValueError(f"layers {first_layer} + {addresses.shape[1]} of {min(shapes)[0]}")
        files: dict[str, File] = {}
        refused: dict[str, str] = {}
        for place in locations:
            if place.path not in files and place.path not in refused:
                try:
                    files[place.path] = self._files.acquire(place.path)
                except OSError as error:
                    refused[place.path] = open_failure(error)
        missing = {i: refused[p.path] for i, p in enumerate(locations) if p.path in refused}
        blocks, targets, offsets, lengths = plan_pieces(
            np.array([place.payload_offset for place in locations], dtype=np.int64),
            addresses,
            first_layer,
            min(shapes)[1] if shapes else 0,
        )
        there = ~np.isin(blocks, list(missing))
        blocks, targets = blocks[there], targets[there]
        offsets, lengths = offsets[there], lengths[there]
        fds = np.zeros(len(blocks), np.int64)
        for path, file in files.items():
            mine = np.array([place.path == path for place in locations])[blocks]
            fds[mine] = file.choose_fds(targets[mine], offsets[mine], lengths[mine])
        batch = self._file_io.read(targets, fds, offsets, lengths)

        def landed(done: PendingIo) -> None:
            for file in files.values():
                self._files.release(file)
            if on_done is not None:
                on_done(done.exception() is None)

        batch.add_done_callback(landed)
        return Read(batch, locations, addresses, first_layer, blocks, missing, verify, on_bad)

    def close(self) -> None:
        """Close the files, except those being read."""
        self._files.close()


def open_failure(error: OSError) -> str:
    """Return the reason why a block whose file cannot be opened cannot be read."""
    if error.errno in NO_FILE:
        return "gone"
    return "unopened" if error.errno in NO_RESOURCES else "unreadable"


def plan_pieces(
    payload_offsets: np.ndarray, addresses: np.ndarray, first_layer: int, layer_bytes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Plan the minimum number of pieces that bring layers to their addresses.

    Args:
        payload_offsets: (blocks,), where each block's layer 0 begins in its file.
        addresses: (blocks, n), where layers `first_layer ...` go.

    Returns:
        block number, address, file offset and length of each piece, int64 (pieces,).
    """
    count, n = addresses.shape
    blocks = np.repeat(np.arange(count), n)
    layers = first_layer + np.tile(np.arange(n), count)
    flat = addresses.reshape(-1)
    starts = np.ones(len(flat), bool)
    starts[1:] = (blocks[1:] != blocks[:-1]) | (flat[1:] != flat[:-1] + layer_bytes)
    first = np.flatnonzero(starts)
    lengths = np.diff(first, append=len(flat)) * layer_bytes
    blocks = blocks[first]
    return blocks, flat[first], payload_offsets[blocks] + layers[first] * layer_bytes, lengths


def page_memory(length: int) -> tuple[np.ndarray, int]:
    """Allocate zeroed, page-aligned memory: u8 (at least length,) and its address."""
    memory = np.frombuffer(mmap.mmap(-1, max(1, length)), np.uint8)
    return memory, memory.ctypes.data

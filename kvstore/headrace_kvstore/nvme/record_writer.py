"""Writes of records: the payload first, then the header, so that only a whole record counts."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace_kvstore.nvme.catalog import Segment
from headrace_kvstore.nvme.file_io import FileIo, IoBatchError
from headrace_kvstore.nvme.record import BlockShape, RecordHeader, pack_segment
from headrace_kvstore.nvme.segment import SegmentFiles, page_memory


@dataclass(eq=False)
class PendingWrite:
    """One block being written to a slot of its own."""

    shape: BlockShape
    block: RecordHeader
    header: bytes
    address: int
    segment: Segment
    slot: int
    future: Future[bool] = field(default_factory=Future)
    taken_s: float = field(default_factory=time.monotonic)
    """Time of its first use: blocks that were saved in order stay in order of their age."""


def write_record(
    file_io: FileIo,
    files: SegmentFiles,
    pending: PendingWrite,
    on_complete: Callable[[PendingWrite, OSError | None], None],
) -> None:
    """Start writing; `on_complete` is called once, on any thread, with the error if there was one.

    Both pieces go through O_DIRECT if `segment.File.choose_fds` allows it. It always does for the
    header, which lies in page-aligned memory of its own.
    """
    memory, header_address = page_memory(len(pending.header))
    memory[: len(pending.header)] = np.frombuffer(pending.header, np.uint8)
    addresses = np.array([pending.address, header_address])
    shape, slot = pending.shape, pending.slot
    offsets = np.array([shape.payload_offset(slot), shape.header_offset(slot)])
    lengths = np.array([shape.payload_bytes, len(pending.header)])
    try:
        file = files.acquire(pending.segment.path)
    except OSError as error:
        on_complete(pending, error)
        return

    def done(batch: Any) -> None:
        assert memory is not None  # kept until no write uses it
        files.release(file)
        error = batch.exception()
        if error is not None and not isinstance(error, IoBatchError):
            error = OSError(errno.ECANCELED, str(error))
        on_complete(pending, error)

    fds = file.choose_fds(addresses, offsets, lengths)
    file_io.write(addresses, fds, offsets, lengths, in_order=True).add_done_callback(done)


def make_segment(path: str, size_bytes: int, shape: BlockShape) -> None:
    """Make a segment's file with all of its room. Raises OSError, and then leaves no file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        os.pwrite(fd, pack_segment(shape), 0)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def remove_segment(path: str) -> None:
    """Remove a segment's file and free its room, also while other processes have it open.

    A removed file keeps its room until the last descriptor is closed, and engines keep files open.
    So the file is cut to nothing first. A read under way then ends early, which is a miss.
    Raises OSError if the name stays.
    """
    with suppress(OSError):  # unlinking matters more, and reports the error
        os.truncate(path, 0)
    with suppress(FileNotFoundError):
        os.unlink(path)

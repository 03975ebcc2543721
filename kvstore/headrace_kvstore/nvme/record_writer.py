"""Writing records so that only whole ones count: all payloads first, then the headers.

A payload that fails takes only its own record with it. Both steps go through O_DIRECT where
`segment.File.choose_fds` allows; headers always do, since they lie in memory of their own.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace_kvstore.nvme.catalog import Segment
from headrace_kvstore.nvme.mover import MoveError, Mover
from headrace_kvstore.nvme.record import Block, Shape, pack_segment
from headrace_kvstore.nvme.scan import page_memory
from headrace_kvstore.nvme.segment import File, SegmentFiles


@dataclass(eq=False)
class Flight:
    """One block being written to a slot of its own."""

    shape: Shape
    block: Block
    header: bytes
    address: int
    segment: Segment
    slot: int
    future: Future[bool] = field(default_factory=Future)


@dataclass(frozen=True)
class RecordWriter:
    """Writes flights; `published` and `failed` hear of each exactly once, on the mover's thread."""

    mover: Mover
    files: SegmentFiles
    published: Callable[[list[Flight]], None]
    failed: Callable[[list[Flight], OSError], None]

    def write(self, flights: list[Flight], sync: bool) -> None:
        """Start writing; with `sync`, payloads are on stable storage before headers are written."""

        def landed(good: list[Flight]) -> None:
            if good and (not sync or self._synced(good)):
                self._write_headers(good)

        pieces = [
            (f.address, f.shape.payload_offset(f.slot), f.shape.payload_bytes) for f in flights
        ]
        self._write_pieces(flights, pieces, landed)

    def _write_headers(self, flights: list[Flight]) -> None:
        memory, address = page_memory(sum(len(flight.header) for flight in flights))
        pieces, begin = [], 0
        for flight in flights:
            end = begin + len(flight.header)
            memory[begin:end] = np.frombuffer(flight.header, np.uint8)
            pieces.append((address + begin, flight.shape.header_offset(flight.slot), end - begin))
            begin = end
        self.mover.register(address, len(memory))

        def landed(good: list[Flight]) -> None:
            self.mover.deregister(address, len(memory))
            if good:
                self.published(good)

        self._write_pieces(flights, pieces, landed)

    def _write_pieces(
        self,
        flights: list[Flight],
        pieces: list[tuple[int, int, int]],
        landed: Callable[[list[Flight]], None],
    ) -> None:
        """Write one (address, offset, length) a flight, then hand on those that got through."""
        files: dict[str, File] = {}
        try:
            for flight in flights:
                if flight.segment.path not in files:
                    files[flight.segment.path] = self.files.acquire(flight.segment.path)
        except OSError as error:
            for file in files.values():
                self.files.release(file)
            self.failed(flights, error)
            landed([])
            return
        addresses, offsets, lengths = np.array(pieces, dtype=np.int64).T
        fds = np.zeros(len(flights), np.int64)
        for path, file in files.items():
            mine = np.array([flight.segment.path == path for flight in flights])
            fds[mine] = file.choose_fds(addresses[mine], offsets[mine], lengths[mine])

        def done(move: Any) -> None:
            for file in files.values():
                self.files.release(file)
            landed(self._sort_out(flights, move.exception()))

        self.mover.write(addresses, fds, offsets, lengths).add_done_callback(done)

    def _sort_out(self, flights: list[Flight], error: BaseException | None) -> list[Flight]:
        """Fail the flights whose piece did not get through; return the others."""
        if error is None:
            return flights
        if not isinstance(error, MoveError):
            self.failed(flights, OSError(errno.ECANCELED, str(error)))
            return []
        bad = [flight for i, flight in enumerate(flights) if i in error.pieces]
        self.failed(bad, next(iter(error.pieces.values())))
        return [flight for i, flight in enumerate(flights) if i not in error.pieces]

    def _synced(self, flights: list[Flight]) -> bool:
        try:
            for path in {flight.segment.path for flight in flights}:
                file = self.files.acquire(path)
                try:
                    os.fdatasync(file.fd)
                finally:
                    self.files.release(file)
        except OSError as error:
            self.failed(flights, error)
            return False
        return True


def make_segment(path: str, size_bytes: int, shape: Shape) -> None:
    """Make a segment's file with all of its room. Raises OSError, and leaves nothing then."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        os.pwrite(fd, pack_segment(shape), 0)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)

"""Transfers between local memory and files: many pieces at once, by threads.

A *batch* is a scatter list: piece i is `lengths[i]` bytes at memory address `addresses[i]` and at
`offsets[i]` of file `fds[i]`. The caller keeps memory and files alive until the batch is done.

`pread` and `pwrite` release Python's lock, so that a few threads keep a disk's queue full. Reads
and writes have threads of their own: reads do not queue behind saves, and a disk that hangs in one
direction does not stop the other. Why not NIXL's POSIX backend: docs/design-decisions.md.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, Literal

import numpy as np

from headrace_kvstore.daemon_thread_pool import DaemonThreadPool

Operation = Literal["READ", "WRITE"]

THREADS = 8
"""Threads in each direction. Four reach a disk's bandwidth with pieces of 2 MiB, eight with 128
KiB."""

_libc = ctypes.CDLL(None, use_errno=True)
_CALLS = {"READ": _libc.pread, "WRITE": _libc.pwrite}
for _call in _CALLS.values():
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
    _call.restype = ctypes.c_ssize_t


class IoBatchError(OSError):
    """Error: some pieces did not move. `pieces` maps their positions in the scatter list to
    reasons."""

    def __init__(self, operation: str, pieces: Mapping[int, OSError]) -> None:
        first = next(iter(pieces.values()))
        super().__init__(
            first.errno, f"{operation} failed for {len(pieces)} pieces, first: {first}"
        )
        self.pieces = dict(pieces)


class IoBatch(Future[None]):
    """A scatter list on its way. A future: raises `IoBatchError`, or CancelledError if aborted.

    Callbacks run on an I/O thread and must not block.
    """

    def __init__(self, operation: Operation, *columns: Any, in_order: bool = False) -> None:
        super().__init__()
        arrays = [np.ascontiguousarray(column, dtype=np.int64).reshape(-1) for column in columns]
        if len({len(array) for array in arrays}) != 1:
            raise ValueError(f"columns of unequal length: {[len(array) for array in arrays]}")
        self.operation: Operation = operation
        self.in_order = in_order
        self.addresses, self.fds, self.offsets, self.lengths = arrays
        self.bytes = int(self.lengths.sum())
        self._aborted = False
        self._errors: dict[int, OSError] = {}
        self._next: Iterator[int] = iter(range(len(self.lengths)))
        self._lock = threading.Lock()
        self._threads = 0
        self.set_running_or_notify_cancel()

    def abort(self) -> None:
        """Begin no more pieces. The batch is done, and its memory free, once the pieces under way
        end."""
        self._aborted = True

    def tasks(self) -> list[Callable[[], None]]:
        """Return the tasks that move all pieces; each task is for one thread."""
        self._threads = 1 if self.in_order else min(THREADS, len(self.lengths))
        return [self._work] * self._threads

    def _work(self) -> None:
        """Move pieces until none is left; the thread that ends last finishes the batch."""
        try:
            for i in self._next:  # one iterator for all threads: each piece is taken once
                if self._aborted or (self.in_order and self._errors):
                    break
                try:
                    self._transfer(i)
                except OSError as error:
                    self._errors[i] = error
        finally:
            with self._lock:
                self._threads -= 1
                last = not self._threads
            if last:
                self._finish()

    def _transfer(self, i: int) -> None:
        fd, address = int(self.fds[i]), int(self.addresses[i])
        length, offset = int(self.lengths[i]), int(self.offsets[i])
        call, done = _CALLS[self.operation], 0
        while done < length:
            count = call(fd, address + done, length - done, offset + done)
            if count < 0 and (number := ctypes.get_errno()) != errno.EINTR:
                raise OSError(number, os.strerror(number))
            if count == 0:
                what = f"short {self.operation.lower()}: the file ends inside piece {i}"
                raise OSError(errno.EIO, what)
            done += max(0, count)

    def _finish(self) -> None:
        if self._errors:
            self.set_exception(IoBatchError(self.operation, dict(sorted(self._errors.items()))))
        elif self._aborted:
            self.set_exception(CancelledError("the batch was aborted"))
        else:
            self.set_result(None)


class FileIo:
    """Transfers of bytes between files and local memory. Thread-safe."""

    def __init__(self) -> None:
        self._workers = {each: DaemonThreadPool(THREADS, f"kv-{each.lower()}") for each in _CALLS}
        self._lock = threading.Lock()
        self._batches: set[IoBatch] = set()
        self._closed = False

    def read(self, addresses: Any, fds: Any, offsets: Any, lengths: Any) -> IoBatch:
        """Start filling memory from files; each argument is one number a piece."""
        return self._start(IoBatch("READ", addresses, fds, offsets, lengths))

    def write(
        self, addresses: Any, fds: Any, offsets: Any, lengths: Any, in_order: bool = False
    ) -> IoBatch:
        """Start writing memory to files; each argument is one number a piece.

        in_order: write piece after piece, and none after one that failed.
        """
        return self._start(IoBatch("WRITE", addresses, fds, offsets, lengths, in_order=in_order))

    def _start(self, batch: IoBatch) -> IoBatch:
        tasks = batch.tasks()
        with self._lock:  # when it is being closed it accepts all of a batch's tasks or none
            taken = not self._closed
            if taken and tasks:
                self._batches.add(batch)
                batch.add_done_callback(self._on_done)
                for task in tasks:
                    self._workers[batch.operation].submit(task)
        if not taken:
            batch.set_exception(CancelledError("the file I/O is closed"))
        elif not tasks:
            batch.set_result(None)
        return batch

    def _on_done(self, batch: Any) -> None:
        with self._lock:
            self._batches.discard(batch)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Abort all batches, and wait for the pieces under way.

        Returns False if the disk has not ended some within `timeout_s`; their threads are then
        abandoned.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            batches = list(self._batches)
        for batch in batches:
            batch.abort()
        ended = [w.close(max(0.0, deadline - time.monotonic())) for w in self._workers.values()]
        return all(ended)

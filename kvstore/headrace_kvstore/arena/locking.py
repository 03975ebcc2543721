"""A lock between processes that the kernel takes back from the dead.

A lock of Linux's F_OFD kind covers a byte of a file and belongs to an open file description: it
goes when the description's last descriptor is closed, so also when its holder is killed. Three
things follow, and are kept here:

- the descriptor is the lock's own (nothing else opened or duplicated it), so that closing another
  file, or a mapping that outlives this object, neither drops nor keeps the lock;
- a forked child would share the description with its parent, and keep the lock alive after the
  parent's death: the child opens its own at once;
- threads of one process share the description, so a `threading.Lock` stands in front.

Waiting is bounded: a holder that is stopped, not dead, makes others miss, never hang.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
import weakref

SPINS = 20
"""Tries without sleeping; a section of the arena takes about as long as ten of them."""
FIRST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 1e-3


class LockBusyError(TimeoutError):
    """Error: another thread or process held the lock for longer than the caller would wait."""


PATIENCE_S = 2.0
"""Maximum wait for a lock. Sections take microseconds, a policy's choice milliseconds. A holder
that takes longer is stopped, and the caller should continue without the lock."""


def byte_lock(kind: int, first: int, length: int = 1) -> bytes:
    """Return the kernel's `struct flock` for some bytes of a file; length 0: all from there on."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, first, length, 0)


class FileLock:
    """Exclusive lock on one byte of the open file `fd`, which it owns and closes. Not reentrant.

    As a context manager it waits for PATIENCE_S.
    """

    def __init__(self, fd: int, byte: int = 0) -> None:
        self.fd = fd
        self._take = byte_lock(fcntl.F_WRLCK, byte)
        self._drop = byte_lock(fcntl.F_UNLCK, byte)
        self._threads = threading.Lock()
        _locks.add(self)

    def acquire(self, patience_s: float) -> None:
        """Take the lock within `patience_s` seconds, or raise LockBusyError."""
        if not self._threads.acquire(timeout=patience_s):
            raise LockBusyError(f"another thread held the lock for {patience_s} s")
        try:
            self._acquire(patience_s)
        except BaseException:
            self._threads.release()
            raise

    def _acquire(self, patience_s: float) -> None:
        deadline_s = time.monotonic() + patience_s
        tries, sleep_s = 0, FIRST_SLEEP_S
        while True:
            try:
                fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, self._take)
                return
            except BlockingIOError:
                tries += 1
            if tries <= SPINS:
                os.sched_yield()
                continue
            left_s = deadline_s - time.monotonic()
            if left_s <= 0.0:
                raise LockBusyError(f"another process held the lock for {patience_s} s")
            time.sleep(min(sleep_s, left_s))
            sleep_s = min(1.5 * sleep_s, LONGEST_SLEEP_S)

    def release(self) -> None:
        """Give the lock back."""
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, self._drop)
        self._threads.release()

    def __enter__(self) -> None:
        self.acquire(PATIENCE_S)

    def __exit__(self, *_: object) -> None:
        self.release()

    def close(self) -> None:
        """Close the descriptor; the lock must not be used any more."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def _after_fork(self) -> None:
        self._threads = threading.Lock()
        if self.fd >= 0:
            inherited = self.fd
            # A new description of the same file, even if its name was removed.
            self.fd = os.open(f"/proc/self/fd/{inherited}", os.O_RDWR | os.O_CLOEXEC)
            os.close(inherited)


_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _reopen_in_child() -> None:
    for lock in list(_locks):
        lock._after_fork()


os.register_at_fork(after_in_child=_reopen_in_child)

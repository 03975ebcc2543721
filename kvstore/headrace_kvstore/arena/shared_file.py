"""One shared-memory file, created by the first process that opens it and mapped by all.

All bytes are allocated before the first use, so a full /dev/shm is an error at start and never a
SIGBUS later. A file is complete once its first 8 bytes (the magic) are there. If its creator dies
before that, the next process makes it again. Creation and attachment happen under the file's lock.

Huge pages: the mapping asks for them (MADV_HUGEPAGE); the kernel's `shmem_enabled` decides. If it
is "advise", pages are allocated through the mapping, because an allocation through the file would
ignore the advice. NUMA: the kernel places pages by the policy with which the folder is mounted
(`mpol=`) or the creator runs (`numactl`), else on the creator's node first.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from headrace_kvstore.arena.locking import FileLock, LockBusyError, byte_lock

logger = logging.getLogger("headrace.kvstore")

CREATE_PATIENCE_S = 30.0
"""Time in which the file must grow at least once, or other processes stop waiting for its creator.
Allocating takes about a quarter of a second per GiB."""

SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
IN_MEMORY = (0x01021994, 0x858458F6, 0x958458F6)
"""File systems tmpfs, ramfs and hugetlbfs, by the numbers of `statfs`."""
MADV_POPULATE_WRITE = 23
MAGIC_BYTES = 8
USES = 16
"""First of the file's bytes whose locks tell which parts are in use; locks do not change bytes."""


class SharedFile:
    """A mapped shared-memory file and its lock.

    `memory` is the mapping, `lock` and `second_lock` are two locks between all its users, `created`
    is whether this process made it.
    """

    def __init__(self, path: Path, memory: mmap.mmap, lock: FileLock, created: bool) -> None:
        self.path = path
        self.memory = memory
        self.lock = lock
        self.second_lock = FileLock(_reopen(lock.fd), byte=1)
        self._uses_fd = _reopen(lock.fd)
        self.use(-1)  # the file as a whole is in use
        self.created = created
        self.size_bytes = len(memory)
        self._inode = os.fstat(lock.fd).st_ino

    @classmethod
    def open(
        cls,
        path: Path,
        size_bytes: int,
        initialise: Callable[[mmap.mmap], None],
    ) -> SharedFile:
        """Attach to `path`, or create it with `size_bytes`.

        `initialise` fills a new file, which is all zeros, the magic (first 8 bytes) last. An
        existing file keeps its size. Raises OSError (ENOSPC) if there is no room for a new file.
        """
        while True:
            lock = FileLock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            try:
                _wait_for_creator(lock)
                try:
                    if _names(path, os.fstat(lock.fd).st_ino):
                        return cls._open_locked(path, lock, size_bytes, initialise)
                finally:
                    lock.release()
            except BaseException:
                lock.close()
                raise
            lock.close()  # unlinked while this process waited: try again

    @classmethod
    def attach(cls, path: Path) -> SharedFile:
        """Attach to a complete file. Raises FileNotFoundError if there is none; does not wait."""
        lock = FileLock(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        try:
            if not any(os.pread(lock.fd, MAGIC_BYTES, 0)):
                raise FileNotFoundError(errno.ENOENT, "is still being made", str(path))
            return cls(path, _map(lock.fd), lock, created=False)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def _open_locked(
        cls, path: Path, lock: FileLock, size_bytes: int, initialise: Callable[[mmap.mmap], None]
    ) -> SharedFile:
        if any(os.pread(lock.fd, MAGIC_BYTES, 0)):
            return cls(path, _map(lock.fd), lock, created=False)
        memory = _create(path, lock.fd, size_bytes)
        initialise(memory)
        return cls(path, memory, lock, created=True)

    def use(self, number: int) -> None:
        """Mark part `number` of the file as used by this process, until it closes the file or ends.
        Call this and `unused` with `lock` held."""
        fcntl.fcntl(self._uses_fd, fcntl.F_OFD_SETLK, byte_lock(fcntl.F_RDLCK, USES + number))

    def unused(self, number: int) -> bool:
        """Whether no living process uses part `number`, this handle included."""
        try:
            fcntl.fcntl(self.lock.fd, fcntl.F_OFD_SETLK, byte_lock(fcntl.F_WRLCK, USES + number))
        except BlockingIOError:
            return False
        fcntl.fcntl(self.lock.fd, fcntl.F_OFD_SETLK, byte_lock(fcntl.F_UNLCK, USES + number))
        return True

    def unlink_unused(self) -> bool:
        """Remove the name as `unlink` does, unless another handle has the file open, here or in
        another process. Returns whether it may be removed. Raises LockBusyError.

        A process that opens the file at that moment waits for the lock, and then makes a new file.
        """
        with self.lock:
            try:
                self._lock_use(fcntl.F_WRLCK)  # turns this handle's own lock into a write lock
            except BlockingIOError:
                return False
            self.unlink()
            self._lock_use(fcntl.F_RDLCK)
            return True

    def _lock_use(self, kind: int) -> None:
        fcntl.fcntl(self._uses_fd, fcntl.F_OFD_SETLK, byte_lock(kind, USES - 1))

    def unlink(self) -> None:
        """Remove the name if it is still this file's; the last user's end frees the memory."""
        if _names(self.path, self._inode):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap the file. While views of the memory exist, it stays mapped until the last is
        deleted."""
        if self._uses_fd >= 0:
            os.close(self._uses_fd)
            self._uses_fd = -1
        self.lock.close()
        self.second_lock.close()
        with suppress(BufferError):
            self.memory.close()


def remove_unused_files(folder: Path, pattern: str) -> list[str]:
    """Remove the shared files of that pattern that no living process has open; return their
    names."""
    removed = []
    for path in folder.glob(pattern):
        with suppress(OSError):  # in use, or removed by another process
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, byte_lock(fcntl.F_WRLCK, 0, 0))
                path.unlink()
                removed.append(path.name)
            finally:
                os.close(fd)
    return removed


def is_in_memory(folder: Path) -> bool:
    """Whether files of this folder lie in memory, and are lost when the machine restarts."""
    buffer = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None).statfs(os.fsencode(folder), buffer):
        return False
    return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) in IN_MEMORY


def huge_page_mode() -> str:
    """Return the kernel's mode of huge pages in shared memory: always, within_size, advise, ..."""
    try:
        words = SHMEM_HUGE_PAGES.read_text().split()
    except OSError:
        return "unsupported"
    return next((word.strip("[]") for word in words if word.startswith("[")), "unsupported")


def _wait_for_creator(lock: FileLock) -> None:
    """Take the lock. Raises LockBusyError if its holder allocates nothing."""
    while True:
        size = os.fstat(lock.fd).st_blocks
        try:
            return lock.acquire(CREATE_PATIENCE_S)
        except LockBusyError:
            if os.fstat(lock.fd).st_blocks == size:
                raise


def _names(path: Path, inode: int) -> bool:
    try:
        return path.stat().st_ino == inode
    except FileNotFoundError:
        return False


def _create(path: Path, fd: int, size_bytes: int) -> mmap.mmap:
    if not is_in_memory(path.parent):
        logger.warning(
            "%s is no tmpfs: the arena there is slow, and leases outlive a restart of the machine",
            path.parent,
        )
    try:
        os.ftruncate(fd, 0)
        os.ftruncate(fd, size_bytes)
        memory = _map(fd)
        if huge_page_mode() == "advise":
            _populate(memory)
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EFBIG):
            raise
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            errno.ENOSPC,
            f"{path.parent} has {free} bytes free, {size_bytes} are asked for {path.name}",
        ) from error
    return memory


def _map(fd: int) -> mmap.mmap:
    # mmap keeps a duplicate of its descriptor, which must not be of the lock's description.
    own = _reopen(fd)
    try:
        memory = mmap.mmap(own, 0)
    finally:
        os.close(own)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP):
        with suppress(OSError):  # a kernel without it
            memory.madvise(advice)
    return memory


def _reopen(fd: int) -> int:
    """Open another file description of the same file."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def _populate(memory: mmap.mmap) -> None:
    with suppress(OSError):  # too old a kernel, or no room: the allocation that follows says which
        memory.madvise(MADV_POPULATE_WRITE)

"""Ownership of a folder or a socket, by the process that holds the lock on a file beside it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def acquire_lock_file(lock: Path) -> int:
    """Lock a file, which is made if need be, and return its descriptor. The descriptor keeps the
    lock, and the kernel releases it when the process dies.

    Raises:
        BlockingIOError: another process holds it.
    """
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(lock).st_ino:
                return fd
        except BlockingIOError:
            os.close(fd)
            raise
        except FileNotFoundError:
            pass  # its owner removed it while ending: make another
        os.close(fd)

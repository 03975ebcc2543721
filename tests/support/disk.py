"""A small disk of a test's own."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_disk(where: Path, size_bytes: int) -> Iterator[bool]:
    """A file system of this size in memory at this folder, which is made; whether that may be
    done. If not, it is a folder as any other."""
    where.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(where)]
    if subprocess.run(mount, check=False).returncode:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)

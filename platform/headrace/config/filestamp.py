"""Whether a file that is read again has changed."""

from __future__ import annotations

from pathlib import Path


def stamp_of(file: Path) -> tuple[int, ...] | None:
    """What changes when the file does; None if it is gone."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

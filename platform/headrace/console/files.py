"""The console's files, by the path at which a gateway serves them.

All files of `static/` whose type is known are read once, at the first request, and only these
exist: no path is ever made from a URL. The page itself holds nothing about the app; it asks for its
data with the reader's key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

CONSOLE = "/console"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

Header = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class File:
    """One file.

    Attributes:
        etag: of its bytes; a browser that has them is answered 304.
    """

    body: bytes
    etag: bytes
    headers: tuple[Header, ...]


def is_console(path: str) -> bool:
    """Whether a path is the console's, existing or not."""
    return path == CONSOLE or path.startswith(CONSOLE + "/")


def find(path: str) -> File | None:
    """Return the file at a path; None if there is none."""
    return _all().get(path)


@lru_cache(maxsize=1)
def _all() -> dict[str, File]:
    folder = files("headrace.console") / "static"
    found = {f"{CONSOLE}/{name}": _read(file) for name, file in _walk(folder, "")}
    return {**found, CONSOLE: found[f"{CONSOLE}/index.html"]}


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    """Yield the path below the first folder and the file, for each file of a known type."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif PurePosixPath(entry.name).suffix in _TYPES:
            yield prefix + entry.name, entry


def _read(file: Traversable) -> File:
    body = file.read_bytes()
    kind = _TYPES[PurePosixPath(file.name).suffix]
    etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'.encode()
    headers = (
        (b"content-type", kind.encode()),
        (b"etag", etag),
        (b"cache-control", b"no-cache"),  # asked again each time, answered 304
        (b"content-security-policy", _POLICY.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
    )
    return File(body, etag, headers)

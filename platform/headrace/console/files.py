"""The console's files, by the path at which a gateway serves them.

They are read once, and only those listed here exist: no path is ever made from a URL. The page
itself holds nothing about the app; it asks for its data with the reader's key.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

CONSOLE = "/console"
_NAMES = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "views.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "vendor/htm-preact.js": "text/javascript; charset=utf-8",
    "vendor/uplot.js": "text/javascript; charset=utf-8",
    "vendor/uplot.css": "text/css; charset=utf-8",
    "vendor/LICENSES.txt": "text/plain; charset=utf-8",
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
    found = {f"{CONSOLE}/{name}": _read(folder / name, kind) for name, kind in _NAMES.items()}
    return {**found, CONSOLE: found[f"{CONSOLE}/index.html"]}


def _read(file: object, kind: str) -> File:
    body: bytes = file.read_bytes()  # type: ignore[attr-defined]
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

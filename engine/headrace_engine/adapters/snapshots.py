"""Copies of adapters in the cache folder, each in a folder that is named by its content.

vLLM's block hash covers an adapter's name and path, and an engine reads an adapter's files whenever
it loads the adapter again. The path of a snapshot names the content, and a snapshot never changes.
So blocks, pulls and loads of different content never meet, although the adapter under a name may be
replaced at any time.

A replica holds a shared lock on each snapshot that it uses, until it ends. `remove_unused` removes
those that no replica of the machine has locked. All functions block.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from headrace_engine.adapters.sources import (
    MAX_BYTES,
    PIECE_BYTES,
    AdapterError,
    file_facts,
    read_pieces,
)
from headrace_engine.cache_root import cache_root

DIGEST_BYTES = 16
UNFINISHED_S = 3600.0
"""Age at which a copy that was not finished is removed."""
_NEW = ".new-"
_PERSON = b"headrace-lora"
_DIGEST = re.compile(r"[0-9a-f]{32}")


def snapshot_root() -> Path:
    """Return the folder of all snapshots; the same in all processes of an engine."""
    return cache_root() / "adapters"


def snapshot_digest(path: str) -> str | None:
    """Return the digest of the content at a path; None if it is not the path of a snapshot."""
    folder = Path(path)
    if folder.parent == snapshot_root() and _DIGEST.fullmatch(folder.name):
        return folder.name
    return None


class Snapshots:
    """The snapshots of one replica.

    Args:
        root: folder of all snapshots of the machine.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or snapshot_root()
        self._locks: dict[str, int] = {}
        self._mutex = threading.Lock()
        self._whole: set[str] = set()
        """Digests whose content this replica has checked; it has locked them."""

    def take(self, source: str) -> str:
        """Copy an adapter into its snapshot; return the digest of its content.

        Raises:
            AdapterError: the source is no adapter, or changes while it is read.
        """
        for _ in range(2):
            before = file_facts(source)
            self.root.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=_NEW, dir=self.root))
            try:
                digest = _copy(source, folder)
                if file_facts(source) == before:
                    self._publish(folder, digest)
                    return digest
            except OSError as error:
                raise AdapterError(f"{self.root}: {error.strerror or error}") from None
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        raise AdapterError(f"{source} is being changed")

    def open(self, digest: str) -> Path | None:
        """Return the folder of a snapshot, with its content checked once; None without it."""
        folder = self.root / digest
        if digest in self._whole:
            return folder
        self._lock(digest)
        if _is_whole(folder, digest):
            self._whole.add(digest)
            return folder
        self._unlock(digest)
        return None

    def remove_unused(self) -> int:
        """Remove the snapshots that no replica has locked, and old unfinished copies; return the
        number of snapshots."""
        removed = 0
        for folder in list(self.root.iterdir()) if self.root.is_dir() else []:
            if folder.name.startswith(_NEW):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - folder.stat().st_mtime > UNFINISHED_S:
                        shutil.rmtree(folder, ignore_errors=True)
            elif _DIGEST.fullmatch(folder.name) and folder.name not in self._locks:
                with (
                    contextlib.suppress(BlockingIOError),
                    _locked(self._lock_file(folder.name), fcntl.LOCK_EX | fcntl.LOCK_NB),
                ):
                    shutil.rmtree(folder, ignore_errors=True)
                    removed += 1
        return removed

    def release(self, digest: str) -> None:
        """Let a snapshot be removed that this replica no longer uses."""
        self._whole.discard(digest)
        self._unlock(digest)

    def close(self) -> None:
        """Release all locks."""
        for digest in list(self._locks):
            self.release(digest)

    def _publish(self, folder: Path, digest: str) -> None:
        """Give a new copy its name, and lock it. An equal snapshot that is whole stays."""
        if digest in self._whole:
            return
        self._lock(digest)
        final = self.root / digest
        try:
            with _locked(self.root / ".publish.lock", fcntl.LOCK_EX):
                if not _is_whole(final, digest):
                    shutil.rmtree(final, ignore_errors=True)
                    os.chmod(folder, 0o755)
                    os.rename(folder, final)
        except OSError:
            self._unlock(digest)
            raise
        self._whole.add(digest)

    def _lock_file(self, digest: str) -> Path:
        return self.root / f"{digest}.lock"

    def _lock(self, digest: str) -> None:
        with self._mutex:
            if digest in self._locks:
                return
            self.root.mkdir(parents=True, exist_ok=True)
            file = os.open(self._lock_file(digest), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            fcntl.flock(file, fcntl.LOCK_SH)
            self._locks[digest] = file

    def _unlock(self, digest: str) -> None:
        with self._mutex:
            file = self._locks.pop(digest, None)
        if file is not None:
            os.close(file)


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    """Hold a lock file.

    Raises:
        BlockingIOError: `how` has LOCK_NB, and the file is locked.
    """
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, how)
        yield
    finally:
        os.close(file)


def _copy(source: str, folder: Path) -> str:
    """Copy an adapter's files into a folder; return the digest of their content."""
    hashed = _hasher()
    for name in MAX_BYTES:
        each = _hasher()
        with open(folder / name, "xb") as file:
            for piece in read_pieces(source, name):
                each.update(piece)
                file.write(piece)
        hashed.update(name.encode() + each.digest())
    return hashed.hexdigest()


def _is_whole(folder: Path, digest: str) -> bool:
    """Whether a snapshot has the content that its name says."""
    hashed = _hasher()
    try:
        for name in MAX_BYTES:
            each = _hasher()
            with open(folder / name, "rb") as file:
                while piece := file.read(PIECE_BYTES):
                    each.update(piece)
            hashed.update(name.encode() + each.digest())
    except OSError:
        return False
    return hashed.hexdigest() == digest


def _hasher() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=DIGEST_BYTES, person=_PERSON)

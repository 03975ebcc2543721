"""Finds the processes that use files in /dev/shm, and removes the files that killed ones left."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

SHM = Path("/dev/shm")
SHARED_BY_PYTHON = ("sem.mp-", "psm_")  # semaphores and segments of Python's multiprocessing
POLL_INTERVAL_S = 1.0  # between two listings of it
TOKEN_VARIABLE = "HEADRACE_INSTANCE"
"""Variable of all processes of an instance that `headrace up` started."""


@dataclass(frozen=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    created: float  # seconds since the epoch, as psutil.Process.create_time() gives

    @classmethod
    def of(cls, process: psutil.Process) -> ProcessId:
        """Return the identity of a process. Raises psutil.NoSuchProcess if it has ended."""
        return cls(process.pid, process.create_time())

    def process(self) -> psutil.Process | None:
        """Return the process, if it still runs; None for a later process with the same pid."""
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.created) < 0.05 and is_alive(process):
                return process
        except psutil.Error:
            pass
        return None


class ShmFile(NamedTuple):
    """A file in /dev/shm that cannot be mistaken for a later one of the same name."""

    name: str
    device: int
    inode: int


def shm_names() -> frozenset[str]:
    """Return the names of the files in /dev/shm."""
    try:
        return frozenset(os.listdir(SHM))
    except OSError:
        return frozenset()


def shm_files(names: Iterable[str]) -> set[ShmFile]:
    """Return the files that have these names in /dev/shm now."""
    found = set()
    for name in names:
        with contextlib.suppress(OSError):
            status = os.stat(SHM / name, follow_symlinks=False)
            found.add(ShmFile(name, status.st_dev, status.st_ino))
    return found


def shm_users(
    files: Iterable[ShmFile], processes: Iterable[psutil.Process]
) -> dict[ShmFile, set[ProcessId]]:
    """Return, for each file that has users, those of `processes` that have it open or mapped.

    Files are compared by device and inode. Names mislead: the C library makes a semaphore under a
    temporary name and renames it, so the map of the process that made it shows the old name.
    """
    named = {(file.device, file.inode): file for file in files}
    users: dict[ShmFile, set[ProcessId]] = {}
    for process in processes if named else ():
        for inode in _open_shm(process.pid) & named.keys():
            with contextlib.suppress(psutil.Error):
                users.setdefault(named[inode], set()).add(ProcessId.of(process))
    return users


def remove_shm(files: Iterable[ShmFile], before: frozenset[str]) -> list[str]:
    """Remove those of our files that still exist and that no process uses. Return their names.

    A file that has been replaced by another of the same name stays.
    """
    names = {file.name for file in files} - before
    left = shm_files(names) & set(files)
    left -= shm_users(left, psutil.process_iter()).keys()
    removed = []
    for file in sorted(left):
        with contextlib.suppress(OSError):
            (SHM / file.name).unlink()
            removed.append(file.name)
    return removed


class ShmWatch:
    """Watch over the files in /dev/shm that processes use; removes those that killed ones left.

    Only semaphores and segments of Python's multiprocessing are removed: their names are random,
    and only processes that use them know them. A file is removed once all its known users are dead
    and a search of all processes finds no other user.

    Attributes:
        used: files that the watched processes use.

    Args:
        before: names of files that do not belong to the watched processes.
    """

    def __init__(self, before: frozenset[str] = frozenset()) -> None:
        self.used: set[ShmFile] = set()
        self._before = before
        self._looked_at: dict[ShmFile, int] = {}
        self._users: dict[ShmFile, set[ProcessId]] = {}

    def poll(self, processes: Callable[[], Iterable[psutil.Process]]) -> None:
        """Find the users of new files among these processes, each file three times. Then remove the
        files that no process uses any more."""
        files = shm_files(shm_names() - self._before) - self.used
        new = {file for file in files if self._looked_at.get(file, 0) < 3}
        if new:
            self._looked_at = {file: self._looked_at.get(file, 0) + 1 for file in files}
            users = shm_users(new, processes())
            shared = {f: who for f, who in users.items() if f.name.startswith(SHARED_BY_PYTHON)}
            self._users |= shared
            self.used |= users.keys()
        dead = {i for i in set().union(*self._users.values()) if i.process() is None}
        unused = {file for file, who in self._users.items() if who <= dead}
        if unused:
            self._users |= shm_users(unused, psutil.process_iter())
            unused = {file for file in unused if self._users[file] <= dead}
            remove_shm(unused, self._before)
            self.used -= unused
            for file in unused:
                del self._users[file]


def watch_siblings() -> None:
    """Watch the files of all descendants of this process's parent, on a thread. Without effect
    below `headrace up`, whose supervisor watches them."""
    parent = psutil.Process().parent()
    if parent is None or TOKEN_VARIABLE in os.environ:
        return
    watch = ShmWatch()

    def run() -> None:
        while parent.is_running():
            with contextlib.suppress(psutil.Error):
                watch.poll(lambda: parent.children(recursive=True))
            time.sleep(POLL_INTERVAL_S)

    threading.Thread(target=run, name="shm-watch", daemon=True).start()


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs, and is no zombie."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _open_shm(pid: int) -> set[tuple[int, int]]:
    """Return (device, inode) of each file in /dev/shm that a process has mapped or open."""
    prefix = f"{SHM}/"
    found: set[tuple[int, int]] = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as maps:
        for line in maps:
            if prefix in line:
                _, _, _, device, inode, _ = line.split(maxsplit=5)
                major, minor = (int(part, 16) for part in device.split(":"))
                found.add((os.makedev(major, minor), int(inode)))
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith(prefix):
                    file = os.stat(entry.path)
                    found.add((file.st_dev, file.st_ino))
    return found

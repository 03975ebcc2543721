"""Decides which processes and files in /dev/shm belong to an instance, and ends or removes them.

A process belongs to an instance if it descends from a process that the instance recorded (by pid
and start time), or if the instance's private folder or token is in its command line or environment.
Names are never used. Both ways are needed, because init adopts some of Ray's and vLLM's processes
when their parent dies.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

SHM = Path("/dev/shm")
TOKEN_VARIABLE = "HEADRACE_INSTANCE"
QUIET_LOOKS = 4
"""Searches in a row, 0.1 s apart, that must find no process."""


@dataclass(frozen=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    created: float  # seconds since the epoch, as psutil.Process.create_time() gives

    @classmethod
    def of(cls, process: psutil.Process) -> ProcessId:
        """The identity of a process. Raises psutil.NoSuchProcess if it is gone."""
        return cls(process.pid, process.create_time())

    def process(self) -> psutil.Process | None:
        """The process, if it still runs; None for a later process with the same pid."""
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.created) < 0.05 and _alive(process):
                return process
        except psutil.Error:
            pass
        return None


class ShmFile(NamedTuple):
    """A file in /dev/shm that cannot be mistaken for a later one of the same name."""

    name: str
    device: int
    inode: int


@dataclass
class Belongings:
    """The facts by which an instance's processes and files are recognised."""

    token: str
    temp_dir: Path
    pids: list[ProcessId] = field(default_factory=list)
    shm_before: frozenset[str] = frozenset()  # names in /dev/shm when the instance started

    def processes(self) -> dict[ProcessId, psutil.Process]:
        """All its running processes, except this process and its ancestors."""
        mark_command = str(self.temp_dir).encode() + b"/"
        mark_environment = f"{TOKEN_VARIABLE}={self.token}".encode()
        recorded = set(self.pids)
        parents: dict[int, int] = {}
        found: dict[int, psutil.Process] = {}
        everyone: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                everyone[process.pid] = process
                parents[process.pid] = process.ppid()
                if ProcessId.of(process) in recorded or _carries(
                    process.pid, mark_command, mark_environment
                ):
                    found[process.pid] = process
        for pid, process in everyone.items():
            ancestor, seen = pid, set[int]()
            while ancestor in parents and ancestor not in seen:
                if ancestor in found:
                    found[pid] = process
                    break
                seen.add(ancestor)
                ancestor = parents[ancestor]
        spared = _self_and_ancestors()
        out: dict[ProcessId, psutil.Process] = {}
        for pid, process in found.items():
            with contextlib.suppress(psutil.Error):
                if pid not in spared and _alive(process):
                    out[ProcessId.of(process)] = process
        return out

    def shm_files(self, processes: Iterable[psutil.Process]) -> set[ShmFile]:
        """Files in /dev/shm, made since the start, that any of `processes` has open or mapped."""
        return set(shm_users(shm_files(shm_names() - self.shm_before), processes))


def shm_names() -> frozenset[str]:
    """Names of the files in /dev/shm."""
    try:
        return frozenset(os.listdir(SHM))
    except OSError:
        return frozenset()


def end(belongings: Belongings, grace_s: float = 10.0, kill_s: float = 10.0) -> set[ShmFile]:
    """End all of an instance's processes: SIGTERM, `grace_s` seconds, SIGKILL. Idempotent.

    Returns:
        The files in /dev/shm that they used; some may be gone by now.
    """
    processes = belongings.processes()
    shm = belongings.shm_files(processes.values())
    everyone = dict(processes)
    for process in processes.values():
        _signal(process, kill=False)
    deadline = time.monotonic() + grace_s
    while processes and time.monotonic() < deadline:
        time.sleep(0.1)
        processes = {i: p for i, p in processes.items() if i.process() is not None}
    # Children that were started in the meantime are found only now, and are killed too. One search
    # is not enough: a dying parent may just have started one, and a process that is being executed
    # shows neither command line nor environment.
    deadline = time.monotonic() + kill_s
    quiet_looks = 0
    while quiet_looks < QUIET_LOOKS and time.monotonic() < deadline:
        belongings.pids = list(everyone)
        processes = belongings.processes()
        quiet_looks = 0 if processes else quiet_looks + 1
        everyone |= processes
        shm |= belongings.shm_files(processes.values())
        for process in processes.values():
            _signal(process, kill=True)
        time.sleep(0.1)
    return shm


def shm_files(names: Iterable[str]) -> set[ShmFile]:
    """The files that have these names in /dev/shm now."""
    found = set()
    for name in names:
        with contextlib.suppress(OSError):
            status = os.stat(SHM / name, follow_symlinks=False)
            found.add(ShmFile(name, status.st_dev, status.st_ino))
    return found


def shm_users(
    files: Iterable[ShmFile], processes: Iterable[psutil.Process]
) -> dict[ShmFile, set[ProcessId]]:
    """Which of `processes` have each of these files open or mapped; files without users are left
    out.

    Files are compared by device and inode. Names mislead: the C library makes a semaphore under a
    temporary name and renames it, so the map of the process that made it shows a name that is gone.
    """
    named = {(file.device, file.inode): file for file in files}
    users: dict[ShmFile, set[ProcessId]] = {}
    for process in processes if named else ():
        for inode in _open_shm(process.pid) & named.keys():
            with contextlib.suppress(psutil.Error):
                users.setdefault(named[inode], set()).add(ProcessId.of(process))
    return users


def remove_shm(files: Iterable[ShmFile], before: frozenset[str]) -> list[str]:
    """Remove those of our files that are still there and that no process uses; returns their names.

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


def _open_shm(pid: int) -> set[tuple[int, int]]:
    """(device, inode) of each file in /dev/shm that a process has mapped or open."""
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


def _carries(pid: int, in_command: bytes, in_environment: bytes) -> bool:
    for file, mark in (("cmdline", in_command), ("environ", in_environment)):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/{file}").read_bytes()
            if mark in text:
                return True
    return False


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _self_and_ancestors() -> set[int]:
    me = psutil.Process()
    pids = {me.pid}
    with contextlib.suppress(psutil.Error):
        pids |= {p.pid for p in me.parents()}
    return pids


def _signal(process: psutil.Process, *, kill: bool) -> None:
    """psutil checks the start time before it signals, so a reused pid is never hit."""
    with contextlib.suppress(psutil.Error):
        process.kill() if kill else process.terminate()

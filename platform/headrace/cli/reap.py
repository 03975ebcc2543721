"""Which processes and /dev/shm files belong to one instance, and how they end.

Belonging is decided by facts that a stranger cannot share: descent from a process that we started
(known by pid and start time), or our private folder or token in its command line or environment.
Never by a name. Ray's workers and vLLM's engine processes are found both ways, as some of them are
adopted by init when their parent dies.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

SHM = Path("/dev/shm")
TOKEN_VARIABLE = "HEADRACE_INSTANCE"
QUIET_LOOKS = 4
"""Looks in a row, a tenth of a second apart, that must find nobody."""


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


@dataclass
class Belongings:
    """What tells an instance's processes from all others."""

    token: str
    temp_dir: Path
    pids: list[ProcessId] = field(default_factory=list)
    shm_before: frozenset[str] = frozenset()  # names in /dev/shm when the instance started

    def processes(self) -> dict[ProcessId, psutil.Process]:
        """All its processes that run now, this process and its ancestors left out."""
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

    def shm_files(self, processes: Iterable[psutil.Process]) -> set[str]:
        """Names in /dev/shm, made since the start, that any of `processes` has open or mapped."""
        new = shm_names() - self.shm_before
        if not new:
            return set()
        ours: set[str] = set()
        for process in processes:
            ours |= _open_shm(process.pid) & new
        return ours


def shm_names() -> frozenset[str]:
    """Names of the files in /dev/shm."""
    try:
        return frozenset(os.listdir(SHM))
    except OSError:
        return frozenset()


def end(belongings: Belongings, grace_s: float = 10.0, kill_s: float = 10.0) -> set[str]:
    """End all of an instance's processes: SIGTERM, `grace_s` seconds, SIGKILL. Idempotent.

    Returns:
        The /dev/shm files that they had open at the start (some are gone by now).
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
    # Children that were started meanwhile are found only now, and killed with the stragglers. One
    # look is not enough: a dying parent may have started one behind it, and a process that is just
    # being executed shows neither command line nor environment.
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


def remove_shm(names: Iterable[str], before: frozenset[str]) -> list[str]:
    """Remove those of our files that are still there and that no process uses; returns them."""
    left = (set(names) - before) & shm_names()
    if left:
        for process in psutil.process_iter():
            left -= _open_shm(process.pid)
    removed = []
    for name in sorted(left):
        with contextlib.suppress(OSError):
            (SHM / name).unlink()
            removed.append(name)
    return removed


def _open_shm(pid: int) -> set[str]:
    """Names of files directly in /dev/shm that a process has mapped or open."""
    prefix = f"{SHM}/"
    names: set[str] = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as maps:
        for line in maps:
            at = line.find(prefix)
            if at >= 0:
                names.add(line[at + len(prefix) :].rstrip("\n").removesuffix(" (deleted)"))
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith(prefix):
                    names.add(target[len(prefix) :].removesuffix(" (deleted)"))
    return {name.split("/")[0] for name in names}


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

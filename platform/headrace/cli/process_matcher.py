"""Decides which processes belong to an instance, and ends them.

A process belongs to an instance if it descends from a process that the instance recorded (by pid
and start time), or if the instance's private folder or token is in its command line or environment.
Names are never used. Both ways are needed, because init adopts some of Ray's and vLLM's processes
when their parent dies.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from headrace.observability.shared_memory import (
    TOKEN_VARIABLE,
    ProcessId,
    ShmFile,
    is_alive,
    shm_files,
    shm_names,
    shm_users,
)

QUIET_POLLS = 4
"""Searches in a row, 0.1 s apart, that must find no process."""


@dataclass
class ProcessMatcher:
    """The facts by which an instance's processes and files are recognised."""

    token: str
    temp_dir: Path
    pids: list[ProcessId] = field(default_factory=list)
    shm_before: frozenset[str] = frozenset()  # names in /dev/shm when the instance started

    def processes(self) -> dict[ProcessId, psutil.Process]:
        """Return all its running processes, except this process and its ancestors."""
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
                if pid not in spared and is_alive(process):
                    out[ProcessId.of(process)] = process
        return out

    def shm_files(self, processes: Iterable[psutil.Process]) -> set[ShmFile]:
        """Return files in /dev/shm, made since the start, that `processes` have open or mapped."""
        return set(shm_users(shm_files(shm_names() - self.shm_before), processes))


def terminate(matcher: ProcessMatcher, grace_s: float = 10.0, kill_s: float = 10.0) -> set[ShmFile]:
    """End all of an instance's processes: SIGTERM, `grace_s` seconds, SIGKILL. Idempotent.

    Returns:
        The files in /dev/shm that they used; some may no longer exist.
    """
    processes = matcher.processes()
    shm = matcher.shm_files(processes.values())
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
    quiet_polls = 0
    while quiet_polls < QUIET_POLLS and time.monotonic() < deadline:
        matcher.pids = list(everyone)
        processes = matcher.processes()
        quiet_polls = 0 if processes else quiet_polls + 1
        everyone |= processes
        shm |= matcher.shm_files(processes.values())
        for process in processes.values():
            _signal(process, kill=True)
        time.sleep(0.1)
    return shm


def _carries(pid: int, in_command: bytes, in_environment: bytes) -> bool:
    for file, mark in (("cmdline", in_command), ("environ", in_environment)):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/{file}").read_bytes()
            if mark in text:
                return True
    return False


def _self_and_ancestors() -> set[int]:
    me = psutil.Process()
    pids = {me.pid}
    with contextlib.suppress(psutil.Error):
        pids |= {p.pid for p in me.parents()}
    return pids


def _signal(process: psutil.Process, *, kill: bool) -> None:
    """Send SIGTERM or SIGKILL. psutil checks the start time first, so a reused pid is never hit."""
    with contextlib.suppress(psutil.Error):
        process.kill() if kill else process.terminate()

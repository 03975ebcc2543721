"""CPU time of an app's processes between two looks, by part and by thread.

Parts are told apart by the titles that Ray and vLLM give their processes; an engine takes the role
of the replica that started it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
RAY = "Ray"
"""The part of Ray's own daemons, Serve's controller among them."""


@dataclass(frozen=True)
class Thread:
    """One thread: its process, the process's part, and the thread's own name."""

    pid: int
    tid: int
    part: str
    name: str


@dataclass(frozen=True)
class Look:
    """CPU seconds that each thread had used at a time (monotonic seconds).

    `processes_s` holds the same by process, with the threads that have ended.
    """

    at_s: float
    threads_s: Mapping[Thread, float]
    processes_s: Mapping[tuple[int, str], float]


def part_of(title: str, parent_titles: list[str]) -> str:
    """Return the part of the app that a process is.

    Args:
        title: its command line.
        parent_titles: those of its parent, the parent's parent and so on.
    """
    if title.startswith("VLLM::"):
        roles = [_replica(parent) for parent in parent_titles]
        return f"engine, {next((role for role in roles if role), 'unknown')}"
    if replica := _replica(title):
        return f"replica, {replica}"
    if title.startswith("ray::") and "StoreNode" in title:
        return "StoreNode"
    if "headrace.cli" in title:
        return "headrace up's supervisor"
    return RAY


def _replica(title: str) -> str:
    """Return the deployment of a Serve replica's process; empty for any other process."""
    words = title.split(":")
    is_replica = title.startswith("ray::ServeReplica:") and len(words) >= 5
    return words[4].split(".")[0].split("(")[0] if is_replica else ""


def look(processes: list[psutil.Process]) -> Look:
    """Read the CPU time of all threads of these processes."""
    threads: dict[Thread, float] = {}
    whole: dict[tuple[int, str], float] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            part = part_of(_title(process), [_title(parent) for parent in process.parents()])
            own = process.cpu_times()
            whole[process.pid, part] = own.user + own.system
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    name, used_s = _thread(task)
                    threads[Thread(process.pid, int(task.name), part, name)] = used_s
    return Look(time.monotonic(), threads, whole)


def by_part(first: Look, last: Look) -> dict[str, float]:
    """Cores that each part kept busy between two looks; a process that began later counts whole."""
    wall_s = last.at_s - first.at_s
    out: dict[str, float] = {}
    for key, used_s in last.processes_s.items():
        cores = max(0.0, used_s - first.processes_s.get(key, 0.0)) / wall_s
        out[key[1]] = out.get(key[1], 0.0) + cores
    return out


def busiest(first: Look, last: Look, count: int) -> list[tuple[Thread, float]]:
    """Return the threads that used most, with the cores that each kept busy."""
    wall_s = last.at_s - first.at_s
    cores = {
        thread: (used_s - first.threads_s.get(thread, 0.0)) / wall_s
        for thread, used_s in last.threads_s.items()
    }
    return sorted(cores.items(), key=lambda item: -item[1])[:count]


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()).strip()


def _thread(task: Path) -> tuple[str, float]:
    """Return a thread's name and CPU seconds, from its folder in /proc."""
    head, _, rest = (task / "stat").read_text().rpartition(")")
    fields = rest.split()
    return head.partition("(")[2], (int(fields[11]) + int(fields[12])) / TICKS_PER_S

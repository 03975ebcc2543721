"""This test run: a mark that all its processes carry, a folder, and an end, however pytest ends.

Every process that a test starts, Ray's and those detached included, has `MARK` in its environment.
A watchdog, which is a process without it, kills them all once pytest is gone, even by SIGKILL: the
pipe between the two is closed then.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

MARK = "HEADRACE_TEST_RUN"
STARTS = "HEADRACE_TEST_STARTS"
"""Environment variable: the file that `engine_started` appends to."""
SHM = Path("/dev/shm")
GRACE_S = 2.0
"""For what ends by itself when pytest does."""
PASSES = 5
"""How often the watchdog looks for processes that were starting while it killed the others."""


@cache
def begin() -> str:
    """Mark this process and its future children, start the watchdog; the mark. Once a process."""
    mark = os.environ[MARK] = secrets.token_hex(3)
    (folder := _folder(mark)).mkdir()
    os.environ.setdefault(STARTS, str(folder / "starts"))
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    ours, theirs = os.pipe()
    subprocess.run(
        [sys.executable, "-I", __file__, mark],
        stdin=ours,
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # a signal to pytest's process group does not reach it
        check=True,
    )
    os.close(ours)
    # `theirs` stays open in this process alone, is never written to, and closes when it dies.
    os.register_at_fork(after_in_child=lambda: os.close(theirs))
    return mark


def folder() -> Path:
    """For files that the whole run needs; removed at its end."""
    return _folder(begin())


def _folder(mark: str) -> Path:
    # Short: Ray's Unix sockets lie deep in it, and their paths end at 107 characters.
    return Path("/tmp") / f"hrt-{mark}"


def engine_started(count: int = 1) -> None:
    """Note that vLLM engines were started."""
    if file := os.environ.get(STARTS):
        with open(file, "a") as out:
            out.write("engine\n" * count)


def engine_starts() -> int:
    """Engines started so far."""
    with contextlib.suppress(OSError):
        return len(Path(os.environ[STARTS]).read_text().splitlines())
    return 0


def marked(name: str, value: str) -> list[int]:
    """Live processes, this one aside, that were started with NAME=VALUE in their environment, and
    what descends from them: a process that gives itself a title writes over its environment."""
    wanted = f"{name}={value}".encode()
    children: dict[int, list[int]] = {}
    alive, todo = set[int](), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (pid := int(entry.name)) != os.getpid():
            with contextlib.suppress(OSError):
                state, parent = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append(pid)
                if state != "Z":
                    alive.add(pid)
                if wanted in entry.joinpath("environ").read_bytes().split(b"\0"):
                    todo.append(pid)
    found = set[int]()
    while todo:
        if (pid := todo.pop()) not in found:
            found.add(pid)
            todo += children.get(pid, [])
    return sorted(found & alive)


def command(pid: int) -> str:
    """What a process runs, or "gone"."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return words[:200] or Path(f"/proc/{pid}/comm").read_text().strip()
    return "gone"


def shm_of(pid: int) -> set[str]:
    """Names in /dev/shm that a process has open or mapped."""
    names: set[str] = set()
    prefix = f"{SHM}/"
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if prefix in line:
                names.add(line.partition(prefix)[2].removesuffix(" (deleted)").split("/")[0])
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith(prefix):
                    names.add(target.removeprefix(prefix).split("/")[0])
    return names


def end(mark: str) -> list[str]:
    """Kill what still runs of a run and remove its files; the commands of what ran."""
    shm: set[str] = set()
    killed: dict[int, str] = {}
    for _ in range(PASSES):
        for pid in marked(MARK, mark):
            shm |= shm_of(pid)
            killed.setdefault(pid, command(pid))
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not killed:
            break
        time.sleep(0.2)
    if killed:  # processes that ended by themselves have removed what they own
        for name in shm:
            with contextlib.suppress(OSError):
                (SHM / name).unlink()
    shutil.rmtree(_folder(mark), ignore_errors=True)
    return list(killed.values())


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # the watchdog is no child of pytest's
    sys.stdin.buffer.read()
    time.sleep(GRACE_S)
    end(sys.argv[1])

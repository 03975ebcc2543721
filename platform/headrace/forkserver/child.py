"""Turns a forked child into the process that its launcher asked for."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1

Job = Callable[[], object]


def parse_command(arguments: Sequence[str]) -> tuple[str, str, list[str]]:
    """Return what `python` with these arguments runs: `-c`, `-m` or nothing for a file; the code,
    module or file; its own arguments.

    Raises:
        ValueError: it is none of these, or has an option that a fork cannot follow.
    """
    rest = list(arguments)
    while rest and rest[0] in ("-B", "-u"):
        rest.pop(0)
    kind = rest.pop(0) if rest and rest[0] in ("-c", "-m") else ""
    if not rest or (not kind and rest[0].startswith("-")):
        raise ValueError(f"python {' '.join(arguments)[:80]}")
    return kind, rest[0], rest[1:]


def job_of(arguments: Sequence[str]) -> Job:
    """Return what `python` would do with these arguments."""
    kind, what, rest = parse_command(arguments)
    sys.argv = [kind or what, *rest]
    sys.path[0] = {"-c": "", "-m": os.getcwd()}.get(kind, str(Path(what).parent))
    if kind == "-c":
        code, module = compile(what, "<string>", "exec"), types.ModuleType("__main__")
        sys.modules["__main__"] = module
        return lambda: exec(code, module.__dict__)
    if kind == "-m":
        return lambda: runpy.run_module(what, run_name="__main__", alter_sys=True)
    return lambda: runpy.run_path(what, run_name="__main__")


def renew_libraries() -> None:
    """Give this process its own seed of NumPy and its own number of torch's threads. Python renews
    the seed of `random` in each fork."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > 0 and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))  # read when torch was imported


def take_fds(have: list[int], wanted: list[int]) -> None:
    """Move descriptors to the numbers that they have in the launcher."""
    above = max([*have, *wanted, 2]) + 1
    moved: list[int] = []
    for fd in have:
        moved.append(os.dup2(fd, above + len(moved)))
        os.close(fd)
    for fd, number in zip(moved, wanted, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

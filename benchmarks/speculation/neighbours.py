"""Noisy neighbours: processes of lowest priority that keep cores and caches busy while arms run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

NICE = 19
_BUSY = """
import os, sys, time
parent = int(sys.argv[1])
block = bytearray(8 << 20)
while os.getppid() == parent:
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        block[:] = bytes(len(block))
        sum(range(100_000))
"""


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many of them; they end with this process at the latest."""
    command = ["nice", "-n", str(NICE), sys.executable, "-S", "-c", _BUSY, str(os.getpid())]
    running = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()

"""Run a test many times on a busy machine, and count how often it fails.

    python -m tests.flaky TEST [TIMES]      or      make flaky TEST=... TIMES=...

TEST is what pytest takes. One process for each core computes meanwhile, at the same priority. The
first failure's output is shown, and those of all are kept in build/flaky/. The status is 1 if any
run failed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "flaky"
TIMES = 50


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2 or (times := count_of(arguments)) < 1:
        print("usage: python -m tests.flaky TEST [TIMES]", file=sys.stderr)
        return 2
    shutil.rmtree(KEPT, ignore_errors=True)
    KEPT.mkdir(parents=True)
    failed: list[int] = []
    with busy_machine():
        for number in range(1, times + 1):
            began_s = time.monotonic()
            log = KEPT / f"{number}.log"
            status = run(arguments[0], log)
            if status == 0:
                log.unlink()
            else:
                failed.append(number)
                if len(failed) == 1:
                    print(log.read_text(errors="replace"))
            said = "passed" if status == 0 else f"failed ({status})"
            print(f"{number} of {times}: {said} in {time.monotonic() - began_s:.0f} s", flush=True)
    print(f"{times - len(failed)} of {times} passed" + (f"; logs in {KEPT}" if failed else ""))
    return 1 if failed else 0


def count_of(arguments: list[str]) -> int:
    """How often: the second argument, which must be a positive number."""
    given = arguments[1] if len(arguments) > 1 else str(TIMES)
    return int(given) if given.isdecimal() else 0


def run(test: str, log: Path) -> int:
    """Pytest's exit status."""
    with log.open("wb") as out:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not gpu", test]
        return subprocess.call(command, cwd=ROOT, stdout=out, stderr=out)


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """Meanwhile a process for each core computes."""
    count = len(os.sched_getaffinity(0))
    computing = [
        subprocess.Popen([sys.executable, "-c", "while True: sum(range(10**6))"])
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in computing:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""All tests, in several processes at once: a part begins as soon as the machine has room for it.

    python -m tests.lanes [--check] [pytest's options]

`--check` leaves out what needs an engine or takes long. Each part's log is kept in build/test/, and
shown if a test of it failed; so is what each test cost (PART.json). The end says which tests and
whether the run took longer than they may. With a path among the arguments this is plain pytest.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tests.parts import CHECK, PARTS, Part
from tests.support import run
from tests.support.costs import REPORT, Costs, over_budget, slowest

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "test"
CORES, GB = 2.2, 20.0
"""What parts that run at once may need together, by `Part`'s estimates. With more of them at once
each takes longer, and the whole no less."""
BUDGET_S = {"test": 15 * 60.0, "check": 4 * 60.0}
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
DEFAULTS = {"test": "not gpu and not soak", "check": "not gpu and not soak and not slow"}


def main(arguments: list[str]) -> int:
    mode = "check" if "--check" in arguments else "test"
    arguments = [argument for argument in arguments if argument != "--check"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    marked = ["-m", DEFAULTS[mode]]
    if any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        return subprocess.call([*PYTEST, *marked, *arguments], cwd=ROOT)
    began_s, busy_before_s = time.monotonic(), busy_s()
    shutil.rmtree(KEPT, ignore_errors=True)
    KEPT.mkdir(parents=True)
    parts = CHECK if mode == "check" else PARTS
    print(f"{len(parts)} parts; each writes to {run.folder()}/PART.log", flush=True)

    def test(part: Part) -> int:
        status = run_part(part, [*marked, *arguments])
        for file in (log(part.name), report(part.name)):
            if file.exists():
                shutil.copy(file, KEPT)
        return status

    try:
        statuses = run_all(parts, test)
    except KeyboardInterrupt:
        return pytest.ExitCode.INTERRUPTED
    print_costs(parts, mode, time.monotonic() - began_s, busy_s() - busy_before_s)
    bad = [code for code in statuses if code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)]
    return bad[0] if bad else min(statuses)


def run_all(parts: Sequence[Part], test: Callable[[Part], int]) -> list[int]:
    """Each part's exit status."""
    began_s = time.monotonic()
    ended: queue.Queue[tuple[Part, int]] = queue.Queue()
    waiting, running = list(parts), list[Part]()
    statuses: list[int] = []

    def say(what: str) -> None:
        print(f"{time.monotonic() - began_s:6.0f} s  {what}", flush=True)

    def work(part: Part) -> None:
        status: int = pytest.ExitCode.INTERNAL_ERROR
        try:
            status = test(part)
        finally:
            ended.put((part, status))

    while waiting or running:
        while (part := next_part(waiting, running)) is not None:
            waiting.remove(part)
            running.append(part)
            say(f"{part.name} begins")
            threading.Thread(target=work, args=[part], daemon=True).start()
        try:
            part, status = ended.get()
        except KeyboardInterrupt:
            for _ in running:  # they got it as well
                ended.get()
            raise
        running.remove(part)
        statuses.append(status)
        say(f"{part.name} " + ("passed" if status == 0 else f"ended with status {status}"))
        if status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            print(said(part), flush=True)
    return statuses


def next_part(waiting: Sequence[Part], running: Sequence[Part]) -> Part | None:
    """The first waiting part for which there is room; any, where nothing runs."""
    cores, gb = (sum(part.cores for part in running), sum(part.gb for part in running))
    for part in waiting:
        if not running or (cores + part.cores <= CORES and gb + part.gb <= GB):
            return part
    return None


def said(part: Part) -> str:
    """A part's log."""
    file = log(part.name)
    return file.read_text(errors="replace") if file.exists() else f"{part.name} wrote no log"


def log(name: str) -> Path:
    return run.folder() / f"{name}.log"


def report(name: str) -> Path:
    return run.folder() / f"{name}.json"


def run_part(part: Part, arguments: list[str]) -> int:
    """The exit status of a part's tests. Control-C reaches them, too; they end in their own way."""
    command = [*PYTEST, *arguments, *map(str, part.files)]
    # Python 3.11 parses the lines of a traceback. If the garbage collector has one written while
    # `ast.parse` runs, that fails: "AST constructor recursion depth mismatch".
    environment = {"PYTHONNODEBUGRANGES": "1", **os.environ, REPORT: str(report(part.name))}
    with log(part.name).open("wb") as out:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out).wait()


def busy_s() -> float:
    """Seconds that the machine's cores have worked, for any program."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def print_costs(parts: Sequence[Part], mode: str, seconds: float, busy: float) -> None:
    """The end of a run: what took too long, how many tests there were, the slowest ones, engines,
    time, and once more what failed."""
    if seconds > BUDGET_S[mode]:
        print(f"over budget: {seconds / 60:.1f} minutes; may be {BUDGET_S[mode] / 60:.0f}")
    costs = {
        part.name: Costs(**json.loads(report(part.name).read_text()))
        for part in parts
        if report(part.name).exists()
    }
    for name, cost in costs.items():
        counts = ", ".join(f"{count} {outcome}" for outcome, count in cost.outcomes.items())
        print(f"{name}: {counts or 'nothing'} in {cost.seconds:.0f} s")
    tests = [test for cost in costs.values() for test in cost.tests]
    print(*slowest(tests), *over_budget(tests), sep="\n")
    print(f"vLLM engines started: {run.engine_starts()}; all in {seconds / 60:.1f} minutes")
    print(f"{os.cpu_count()} cores worked {busy / 60:.1f} minutes, for other programs too")
    for cost in costs.values():
        for name, said in cost.failures:
            print(f"\nFAILED {name}\n{said}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

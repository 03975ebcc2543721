"""All tests, in two processes at once: each takes the next part that is left.

    python -m tests.lanes [pytest's options]

The longest part, the apps', prints as it goes; the log of another part is shown at its end and kept
in build/test/, and so is what each test cost (PART.json). What failed is said once more at the end.
With a path among the arguments this is plain pytest.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import run
from tests.support.costs import REPORT, Costs, slowest

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "test"
WORKERS = 2
APPS = "e2e"
DIVIDED, PIECES = "integration", 3


def parts() -> dict[str, list[Path]]:
    """What is tested together, the longest part first. One folder is divided, by files: with
    small parts at the end neither process waits long for the other."""
    tests = ROOT / "tests"
    files = sorted((tests / DIVIDED).glob("test_*.py"))
    pieces = {f"{DIVIDED}-{n + 1}": files[n::PIECES] for n in range(PIECES)}
    return {
        APPS: [tests / APPS],
        "unit": [tests / "unit"],
        **pieces,
        "property": [tests / "property"],
    }


PARTS = parts()
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
DEFAULTS = ["-m", "not gpu and not soak"]


def main(arguments: list[str]) -> int:
    if any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        return subprocess.call([*PYTEST, *DEFAULTS, *arguments], cwd=ROOT)
    started_s, shown = time.monotonic(), threading.Lock()
    KEPT.mkdir(parents=True, exist_ok=True)
    print(f"all tests but the apps' write to {log('*')}", flush=True)

    def test(name: str) -> int:
        status = run_part(name, arguments)
        if report(name).exists():
            shutil.copy(report(name), KEPT)
        if name != APPS:
            shutil.copy(log(name), KEPT)
            with shown:
                print(log(name).read_text(errors="replace"), flush=True)
        return status

    with ThreadPoolExecutor(WORKERS) as workers:
        try:
            statuses = list(workers.map(test, PARTS))
        except KeyboardInterrupt:
            workers.shutdown(cancel_futures=True)
            return pytest.ExitCode.INTERRUPTED
    print_costs(time.monotonic() - started_s)
    bad = [code for code in statuses if code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)]
    return bad[0] if bad else min(statuses)


def log(name: str) -> Path:
    return run.folder() / f"{name}.log"


def report(name: str) -> Path:
    return run.folder() / f"{name}.json"


def run_part(name: str, arguments: list[str]) -> int:
    """The exit status of a part's tests. Control-C reaches them, too; they end in their own way."""
    command = [*PYTEST, *DEFAULTS, *arguments, *map(str, PARTS[name])]
    environment = {**os.environ, REPORT: str(report(name))}
    if name == APPS:
        return subprocess.Popen(command, cwd=ROOT, env=environment).wait()
    with log(name).open("wb") as out:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out).wait()


def print_costs(seconds: float) -> None:
    """The end of `make test`: how many tests there were, the slowest ones, engines, time."""
    parts = {
        name: Costs(**json.loads(report(name).read_text()))
        for name in PARTS
        if report(name).exists()
    }
    for name, costs in parts.items():
        counts = ", ".join(f"{count} {outcome}" for outcome, count in costs.outcomes.items())
        print(f"{name}: {counts or 'nothing'} in {costs.seconds:.0f} s")
    tests = [test for costs in parts.values() for test in costs.tests]
    print(*slowest(tests), sep="\n")
    print(f"vLLM engines started: {run.engine_starts()}; all in {seconds / 60:.1f} minutes")
    for costs in parts.values():
        for test, said in costs.failures:
            print(f"\nFAILED {test}\n{said}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

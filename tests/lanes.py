"""All tests in two processes at once: those of the running app, and all others.

    python -m tests.lanes [pytest's options]

The app's tests print as they go, the others' log is shown at the end and kept in build/test/. With
a path among the arguments this is plain pytest.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import run
from tests.support.costs import REPORT, Costs, slowest

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "test"
LANES = {"app": ["tests/e2e"], "others": ["tests/unit", "tests/property", "tests/integration"]}
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
DEFAULTS = ["-m", "not gpu and not soak"]


def main(arguments: list[str]) -> int:
    if any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        return subprocess.call([*PYTEST, *DEFAULTS, *arguments], cwd=ROOT)
    print(f"all tests but the app's write to {log('others')}", flush=True)
    started_s = time.monotonic()
    lanes = {name: start(name, paths, arguments) for name, paths in LANES.items()}
    statuses = {name: wait(lane) for name, lane in lanes.items()}
    print(log("others").read_text(errors="replace"))
    KEPT.mkdir(parents=True, exist_ok=True)
    shutil.copy(log("others"), KEPT)
    print_costs(time.monotonic() - started_s)
    bad = [
        code for code in statuses.values() if code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    ]
    return bad[0] if bad else min(statuses.values())


def log(name: str) -> Path:
    return run.folder() / f"{name}.log"


def report(name: str) -> Path:
    return run.folder() / f"{name}.json"


def start(name: str, paths: list[str], arguments: list[str]) -> subprocess.Popen[bytes]:
    """Begin a lane; the app's one writes to the terminal, too."""
    command = [*PYTEST, *DEFAULTS, *arguments, *paths]
    environment = {**os.environ, REPORT: str(report(name))}
    if name != "app":
        with log(name).open("wb") as out:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def wait(lane: subprocess.Popen[bytes]) -> int:
    """Its exit status. Control-C reaches the lanes, too, which end in their own way."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return lane.wait()


def print_costs(seconds: float) -> None:
    """The end of `make test`: how many tests there were, the slowest ones, engines, time."""
    lanes = {
        name: Costs(**json.loads(report(name).read_text()))
        for name in LANES
        if report(name).exists()
    }
    for name, costs in lanes.items():
        counts = ", ".join(f"{count} {outcome}" for outcome, count in costs.outcomes.items())
        print(f"{name}: {counts or 'nothing'} in {costs.seconds:.0f} s")
    tests = [test for costs in lanes.values() for test in costs.tests]
    print(*slowest(tests), sep="\n")
    print(f"vLLM engines started: {run.engine_starts()}; all in {seconds / 60:.1f} minutes")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What a run of pytest cost: seconds by test, outcomes, engines; and what failed in it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.support import run

REPORT = "HEADRACE_TEST_REPORT"
"""Environment variable: the file to which costs go instead of to the terminal."""
SLOWEST = 20
FAILURE_LINES = 30


@dataclass(frozen=True)
class Costs:
    """Of one process.

    Attributes:
        tests: (seconds, test), set-up and tear-down included.
        failures: (test, the end of what pytest says of it).
    """

    seconds: float
    outcomes: dict[str, int]
    tests: Sequence[tuple[float, str]]
    failures: Sequence[tuple[str, str]] = ()


class Meter:
    """A pytest plugin that adds up each test's phases."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._failures: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.outcome] += 1
        if report.failed:
            said = report.longreprtext.splitlines()[-FAILURE_LINES:]
            self._failures.append((report.nodeid, "\n".join(said)))

    def costs(self) -> Costs:
        tests = [(seconds, test) for test, seconds in self._seconds.most_common()]
        return Costs(sum(self._seconds.values()), dict(self._outcomes), tests, self._failures)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        costs = self.costs()
        if file := os.environ.get(REPORT):
            Path(file).write_text(json.dumps(asdict(costs)))
            return
        for line in slowest(costs.tests) if costs.tests else ():
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"vLLM engines started: {run.engine_starts()}")


def slowest(tests: Sequence[tuple[float, str]]) -> list[str]:
    """Lines for the slowest tests."""
    chosen = sorted(tests, reverse=True)[:SLOWEST]
    return [f"the {len(chosen)} slowest tests:", *(f"{s:8.1f} s  {test}" for s, test in chosen)]

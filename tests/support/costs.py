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
BUDGET_S, SLOW_BUDGET_S = 10.0, 60.0
"""What a test may take, set-up and tear-down included; one that is marked `slow` the second."""
FAILURE_LINES = 30


@dataclass(frozen=True)
class Costs:
    """Of one process.

    Attributes:
        tests: (seconds, test, budget in seconds), set-up and tear-down included.
        failures: (test, the end of what pytest says of it).
    """

    seconds: float
    outcomes: dict[str, int]
    tests: Sequence[tuple[float, str, float]]
    failures: Sequence[tuple[str, str]] = ()


class Meter:
    """A pytest plugin that adds up each test's phases."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._slow: set[str] = set()
        self._failures: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if "slow" in report.keywords:
            self._slow.add(report.nodeid)
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.outcome] += 1
        if report.failed:
            said = report.longreprtext.splitlines()[-FAILURE_LINES:]
            self._failures.append((report.nodeid, "\n".join(said)))

    def costs(self) -> Costs:
        tests = [
            (seconds, test, SLOW_BUDGET_S if test in self._slow else BUDGET_S)
            for test, seconds in self._seconds.most_common()
        ]
        return Costs(sum(self._seconds.values()), dict(self._outcomes), tests, self._failures)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        costs = self.costs()
        if file := os.environ.get(REPORT):
            Path(file).write_text(json.dumps(asdict(costs)))
            return
        for line in (*slowest(costs.tests), *over_budget(costs.tests)) if costs.tests else ():
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"vLLM engines started: {run.engine_starts()}")


def slowest(tests: Sequence[tuple[float, str, float]]) -> list[str]:
    """Lines for the slowest tests."""
    chosen = sorted(tests, reverse=True)[:SLOWEST]
    return [f"the {len(chosen)} slowest tests:", *(f"{s:8.1f} s  {test}" for s, test, _ in chosen)]


def over_budget(tests: Sequence[tuple[float, str, float]]) -> list[str]:
    """Lines for the tests that took longer than they may."""
    late = [each for each in sorted(tests, reverse=True) if each[0] > each[2]]
    return [f"over budget: {s:.1f} s; may be {budget:.0f}: {test}" for s, test, budget in late]

"""Runs a part in a process of its own, with a limit; what it found is in a file even if the process
had to be stopped."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import models
from benchmarks.gpu.parts import Measurement, Part

ROOT = Path(__file__).parents[2]
DRY = "HEADRACE_GPU_DRY"
"""Variable of the environment that lets the tests of a GPU run on a CPU."""
DRY_LIMIT_S = 900


@dataclass(frozen=True)
class Outcome:
    """Result of a part's process.

    Attributes:
        status: as of `results.Run`.
        seconds: that it took.
        figures, found: what it had measured.
        note: the end of its output, if it failed.
    """

    status: str
    seconds: float
    figures: dict[str, float] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def module(part: Part) -> Measurement:
    """Import the module of a part without tests."""
    found: Any = importlib.import_module(f"benchmarks.gpu.{part.name}")
    return found  # type: ignore[no-any-return]


def run(part: Part, log: Path, dry: bool = False) -> Outcome:
    """Run a part to its end, or to its limit.

    Args:
        log: file that gets its output.
        dry: on a CPU, with tiny shapes.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-") as folder:
        out = Path(folder) / "out"
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        if models.MODEL not in environment or part.tests:
            environment[models.MODEL] = str(
                models.make_model(Path(folder) / "model", dry or bool(part.tests))
            )
        if dry:
            from benchmarks.kvstore.engines import ENVIRONMENT

            environment |= ENVIRONMENT | {DRY: "1"}
            environment |= {"TRITON_INTERPRET": "1"} if part.interpreted else {}
        began_s = time.monotonic()
        limit_s = DRY_LIMIT_S if dry else part.limit_s
        code = _run(_command(part, out, dry), environment, log, limit_s)
        seconds = time.monotonic() - began_s
        found: dict[str, Any] = {}
        if part.tests:
            figures = tests_figures(out)
        else:
            found = json.loads(out.read_text()) if out.exists() else {}
            figures = module(part).figures(found) if found else {}
        if code is None:
            note = f"stopped after {limit_s} s"
            return Outcome("stopped", seconds, figures, found, note)
        if code:
            return Outcome("failed", seconds, figures, found, last_line(log))
        return Outcome("done", seconds, figures, found)


def _command(part: Part, out: Path, dry: bool) -> list[str]:
    if not part.tests:
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", part.name, "--out", str(out)]
        return [*command, "--dry"] if dry else command
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    collect = ["--collect-only"] if dry and part.only_on_gpu else []
    return [*command, f"--junitxml={out}", *collect, *part.tests]


def _run(
    command: list[str], environment: Mapping[str, str], log: Path, limit_s: float
) -> int | None:
    """Return the status of a process; None if it, and all that it started, was stopped."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def tests_figures(report: Path) -> dict[str, float]:
    """Return how many tests passed, failed and were skipped, from pytest's JUnit report; nothing if
    there is none."""
    if not report.exists():
        return {}
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    count = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in count:
            count[name] += int(suite.get(name, "0"))
    failed = count["failures"] + count["errors"]
    return {
        "tests_passed": float(count["tests"] - failed - count["skipped"]),
        "tests_failed": float(failed),
        "tests_skipped": float(count["skipped"]),
    }


def last_line(log: Path) -> str:
    """Return the last line of a log that names an error, else its last line; at most 200
    characters."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [
        line for line in lines if re.match(r"(E +|FAILED |ERROR )?\w*(Error|Exception)\b", line)
    ]
    return (errors or lines or ["no output"])[-1][:200]

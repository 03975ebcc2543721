"""Arctic Inference's wheel, in a folder of its own outside this project's environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.kvstore.timing import CannotRun

PACKAGE, VERSION = "arctic-inference", "0.3.0"
FOLDER = Path("~/.cache/headrace/bench").expanduser() / f"arctic-{VERSION}"
DOWNLOAD_S = 300.0


def install() -> Path:
    """Return the folder that holds the package `arctic_inference`, filled from PyPI the first time.

    Raises:
        CannotRun: it cannot be had.
    """
    if not (FOLDER / "arctic_inference").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet"]
        command += ["--target", str(FOLDER), f"{PACKAGE}=={VERSION}"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotRun(f"{PACKAGE} was not installed: {error}") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise CannotRun(f"{PACKAGE} was not installed: {last}")
    return FOLDER

"""The CLI as the benchmarks use it to start and stop an instance."""

from __future__ import annotations

import subprocess
import sys

START_TIMEOUT_S = 480.0


def headrace(*arguments: str, check: bool = True) -> None:
    """Run the CLI. Raises RuntimeError with its last words if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    if check and done.returncode != 0:
        text = done.stdout.decode("utf-8", errors="replace")[-2000:]
        raise RuntimeError(f"headrace {arguments[0]} ended with {done.returncode}: {text}")

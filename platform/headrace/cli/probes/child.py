"""Runs code that can crash or hang in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping


def in_process(
    code: str, timeout_s: float, env: Mapping[str, str] | None = None
) -> tuple[str | None, str]:
    """Return (the text that `code` printed after FOUND, ""), or (None, its last line of stderr).

    Args:
        env: variables set in addition to this process's own.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env={**os.environ, **(env or {})},
        )
    except subprocess.TimeoutExpired:
        return None, f"no result within {timeout_s:g} s"
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            return line.removeprefix("FOUND "), ""
    words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode < 0:
        last = f": {words[-1][:300]}" if words else ""
        return None, f"crashed (signal {-done.returncode}){last}"
    return None, words[-1] if words else f"exit status {done.returncode}"

"""Tests of Triton kernels without a GPU, in Triton's interpreter.

Triton interprets only what it is told to before it is imported. So a file with such tests is run
again by a process of its own, in which `INTERPRETED` is true.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that interprets")
outside = pytest.mark.skipif(INTERPRETED, reason="is that process")


def passes_in_the_interpreter(*tests: str) -> None:
    """Run them in that process; fails if one fails.

    Args:
        tests: files, or single tests as pytest names them.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]

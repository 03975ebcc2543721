"""What the environment says in each process of the tests, and in what they start."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support import compiled
from tests.support.startup import sitecustomize


def prepare() -> None:
    """Have this process's environment say it. Before numba or torch is imported."""
    compiled.keep_compiled()
    # Two threads of torch that wait for each other on busy cores take a hundred times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Ray's workers have niceness 15 otherwise, and get 3 % of a core beside another test.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # A Ray node starts as many workers as it has cores otherwise, whether or not they are needed.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    startup = str(Path(sitecustomize.__file__).parent)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if startup not in before:
        os.environ["PYTHONPATH"] = os.pathsep.join([startup, *filter(None, before)])

"""These tests need a GPU. Without one they end before the first, and say so in one line.

python -m pytest -p no:cacheprovider tests/gpu

In a dry run of `python -m benchmarks.gpu`, tests of engines run on a CPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from benchmarks.gpu.models import MODEL
from benchmarks.gpu.process import DRY
from tests.support.tiny import tiny_llama

if DRY in os.environ and os.environ.get("TRITON_INTERPRET") == "1":
    from tests.support.as_card import take_for_card

    take_for_card()  # before any test imports vLLM


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    wanted = [item for item in session.items if item.get_closest_marker("gpu")]
    runs = torch.cuda.is_available() or DRY in os.environ or session.config.option.collectonly
    if wanted and not runs:
        pytest.exit(f"there is no GPU, and {len(wanted)} tests of tests/gpu need one", returncode=1)


@pytest.fixture(scope="session", autouse=True)
def model() -> None:
    """The tests' own, unless the environment names another one."""
    if MODEL not in os.environ:
        os.environ[MODEL] = str(tiny_llama())

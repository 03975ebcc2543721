"""These tests need a GPU. Without one they end before the first, and say so in one line.

python -m pytest -p no:cacheprovider tests/gpu
"""

from __future__ import annotations

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    wanted = [item for item in session.items if item.get_closest_marker("gpu")]
    if wanted and not session.config.option.collectonly and not torch.cuda.is_available():
        pytest.exit(f"there is no GPU, and {len(wanted)} tests of tests/gpu need one", returncode=1)

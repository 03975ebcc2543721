"""What unit tests of several parts share."""

from __future__ import annotations

import pytest

from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    """Stands still until the test moves it."""
    return Clock()

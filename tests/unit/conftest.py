"""What unit tests of several parts share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clock import Clock
from tests.support.kvworker import Node


@pytest.fixture
def clock() -> Clock:
    """Stands still until the test moves it."""
    return Clock()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """An arena, for worker halves of engines."""
    node = Node(tmp_path)
    yield node
    for worker in node.workers:
        worker.close()

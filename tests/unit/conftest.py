"""What unit tests of several parts share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clock import Clock

if TYPE_CHECKING:
    from headrace_kvstore.nvme.file_io import FileIo
    from tests.support.kvworker import Node


@pytest.fixture
def clock() -> Clock:
    """Stands still until the test moves it."""
    return Clock()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """An arena, for worker halves of engines."""
    # Not above: what imports torch or numba has to wait for `pytest_configure`, which says how many
    # threads they may have and where compiled code is kept.
    from tests.support.kvworker import Node

    node = Node(tmp_path)
    yield node
    for worker in node.workers:
        worker.close()


@pytest.fixture(scope="module")
def file_io() -> Iterator[FileIo]:
    """Threads that read and write files."""
    from headrace_kvstore.nvme.file_io import FileIo

    file_io = FileIo()
    yield file_io
    assert file_io.close()

"""What integration tests of several parts share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.kvobjects import Line

# Modules that import torch or numba are imported inside the fixtures; see `tests/unit/conftest.py`.


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    """The port of a real S3 API on loopback."""
    from tests.support.kvobjects import s3_server

    with s3_server() as port:
        yield port


@pytest.fixture
def line(s3_port: int) -> Iterator[Line]:
    """A line to it that fails on demand."""
    from tests.support.kvobjects import Line

    line = Line(s3_port)
    yield line
    line.close()

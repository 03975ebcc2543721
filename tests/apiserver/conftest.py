"""The one API server of all tests of this folder, which `make test-apiserver` runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import run
from tests.support.apiserver import HOW_TO_GET, ApiServer, assets, running


@pytest.fixture(scope="session")
def server() -> Iterator[ApiServer]:
    """The running server."""
    if assets() is None:
        pytest.skip(HOW_TO_GET)
    folder = run.folder() / "apiserver"
    folder.mkdir()
    with running(folder) as made:
        yield made


@pytest.fixture
def namespace(server: ApiServer) -> str:
    """A new namespace, in which pods may do anything."""
    return server.namespace(**{"pod-security.kubernetes.io/enforce": "privileged"})

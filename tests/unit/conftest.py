"""What unit tests of several parts share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clock import Clock

if TYPE_CHECKING:
    from headrace_kvstore.node.node import StoreNode
    from headrace_kvstore.nvme.file_io import FileIo
    from headrace_kvstore.nvme.nvme_tier import NvmeTier
    from headrace_kvstore.objects.object_tier import ObjectTier
    from tests.support.kvarena import Make
    from tests.support.kvfiles import Bench
    from tests.support.kvnode import Engine, Reader
    from tests.support.kvobjects import Blocks, FakeStore
    from tests.support.kvworker import Node

# Modules that import torch or numba are imported inside the fixtures: they have to wait for
# `pytest_configure`, which sets the number of their threads and the folder of compiled code.


@pytest.fixture
def clock() -> Clock:
    """Stands still until the test moves it."""
    return Clock()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """An arena, for the workers of engines."""
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


# The store's tiers


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes arenas in one folder, and closes them."""
    from tests.support.kvarena import arenas

    with arenas(tmp_path) as make:
        yield make


@pytest.fixture
def bench(file_io: FileIo) -> Bench:
    """Writes blocks of known bytes to an NVMe tier, and reads them back."""
    from tests.support.kvfiles import Bench

    return Bench(file_io)


@pytest.fixture
def tier(tmp_path: Path, file_io: FileIo) -> Iterator[NvmeTier]:
    """An empty NVMe tier."""
    from headrace_kvstore.nvme.nvme_tier import NvmeTier
    from tests.support.kvfiles import SEGMENT_BYTES, SIZE_BYTES

    tier = NvmeTier.open(tmp_path / "kv", SIZE_BYTES, SEGMENT_BYTES, file_io)
    yield tier
    tier.close()


@pytest.fixture
def store() -> FakeStore:
    """An object store that fails on demand."""
    from tests.support.kvobjects import FakeStore

    return FakeStore()


@pytest.fixture
def begin(store: FakeStore) -> Iterator[Callable[..., ObjectTier]]:
    """Makes object tiers over `store`, and closes them."""
    from tests.support.kvobjects import tiers

    with tiers(store) as made:
        yield made


@pytest.fixture
def blocks() -> Blocks:
    """Writes blocks of known bytes to an object tier, and reads them back."""
    from tests.support.kvobjects import Blocks

    return Blocks()


# An engine of a store node, which is the file's own fixture `node`


@pytest.fixture
def engine(node: StoreNode) -> Iterator[Engine]:
    """Stores blocks of known bytes in the arena of `node`."""
    from tests.support.kvnode import Engine

    engine = Engine(node.settings)
    yield engine
    engine.close()


@pytest.fixture
def reader(file_io: FileIo) -> Iterator[Reader]:
    """Reads the blocks that a node locates, as an engine's worker does."""
    from tests.support.kvnode import Reader

    reader = Reader(file_io)
    yield reader
    reader.close()

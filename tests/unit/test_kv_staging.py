"""The threads that move blocks: an error costs the blocks of its task, and nothing for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace_kvstore.arena.arena import Arena, LockBusyError
from headrace_kvstore.nvme.record import BlockShape, padded
from headrace_kvstore.staging import transfer_pool as crew
from headrace_kvstore.staging.prefetch import Prefetcher
from headrace_kvstore.staging.sources import SourceBlock
from headrace_kvstore.staging.transfer_pool import TransferPool
from tests.support.kvnode import until

DIGEST, LAYERS, LAYER_BYTES = b"d" * 16, 2, 4096
SHAPE = BlockShape(DIGEST, LAYERS, LAYER_BYTES)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "ERROR_PAUSE_S", 0.001)


class Counting(TransferPool[int]):
    """One thread; each task is a number, and some fail when they are taken or done."""

    def __init__(self, tasks: list[int], fails_in: str) -> None:
        super().__init__("counting", 1)
        self.tasks, self.done, self.fails_in = tasks, [], fails_in
        self._start_threads()

    def _next_task(self) -> int | None:
        task = self.tasks.pop(0) if self.tasks else None
        if task == 1 and self.fails_in == "taking":
            raise LockBusyError("busy")
        return task

    def _run_task(self, task: int) -> None:
        if task == 1 and self.fails_in == "doing":
            raise OSError("no disk")
        self.done.append(task)

    def _cancel_all(self) -> None:
        self.tasks.clear()


@pytest.mark.parametrize("fails_in", ["taking", "doing"])
def test_a_thread_survives_an_error(fails_in: str) -> None:
    moved = Counting([0, 1, 2, 3], fails_in)
    until(lambda: moved.done == [0, 2, 3])
    assert moved._busy == 0
    assert moved.close(5.0)


class Reading:
    """A read whose blocks are there when the test says so."""

    def __init__(self, blocks: int) -> None:
        self.blocks, self.there, self.waited = blocks, threading.Event(), False

    def abort(self) -> None:
        self.there.set()

    def wait(self) -> np.ndarray:
        assert self.there.wait(20)
        self.waited = True
        return np.ones(self.blocks, np.bool_)


class Disk:
    """A source that has all blocks, and fails at the read of the given number."""

    batch_blocks = 4

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at, self.reads = fails_at, list[Reading]()
        self.found: list[SourceBlock] = []
        self.closed: list[Sequence[int]] = []

    def split(self, blocks: int, block_bytes: int) -> list[int]:
        return [1] * blocks

    def open(self, digest: bytes, hashes: Sequence[bytes]) -> Disk:
        sums = np.zeros(LAYERS, np.uint64)
        self.found = [SourceBlock(padded(name), SHAPE, sums) for name in hashes]
        return self

    def read(self, which: Sequence[int], addresses: np.ndarray) -> Reading:
        if len(self.reads) == self.fails_at:
            raise OSError("no disk")
        self.reads.append(Reading(len(which)))
        return self.reads[-1]

    def close(self, bad: Sequence[int]) -> None:
        self.closed.append(bad)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    size = LAYERS * LAYER_BYTES
    made = Arena.create_or_attach("a", 4 << 20, folder=tmp_path, block_bytes=size, layers=LAYERS)
    yield made
    made.close()


def fails_once(call: Callable[..., object]) -> Callable[..., object]:
    failed: list[int] = []

    def failing(*given: object, **named: object) -> object:
        if not failed:
            failed.append(1)
            raise LockBusyError("another process holds the arena")
        return call(*given, **named)

    return failing


@pytest.mark.parametrize("fails", ["read", "abandon", "publish"])
def test_reads_that_began_are_waited_for_whatever_fails(
    arena: Arena, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(fails_at=2 if fails != "publish" else None)
    if fails != "read":
        monkeypatch.setattr(arena, fails, fails_once(getattr(arena, fails)))
    prefetcher = Prefetcher(arena, disk, 1 << 20)
    came = prefetcher.fetch(DIGEST, [bytes([n]) * 32 for n in range(4)])
    began = 4 if fails == "publish" else 2
    until(lambda: len(disk.reads) == began)
    size = LAYERS * LAYER_BYTES
    assert prefetcher.stats()["reading_bytes"] == began * size and not came.done()
    for read in disk.reads:
        read.there.set()
    assert came.result(20) == (3 if fails == "publish" else 2)
    until(lambda: prefetcher.idle)
    assert all(read.waited for read in disk.reads)
    assert prefetcher.stats()["reading_bytes"] == 0 and not prefetcher._fills
    disk.fails_at = None
    again = prefetcher.fetch(DIGEST, [b"x" * 32])
    until(lambda: len(disk.reads) == began + 1)
    disk.reads[-1].there.set()
    assert again.result(20) == 1, "its threads live"
    assert prefetcher.close(5.0)

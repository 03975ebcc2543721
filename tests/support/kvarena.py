"""Small arenas of blocks with known hashes and checksums, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.arena.geometry import PAGE_BYTES, Geometry
from headrace_kvstore.blocks.slot_record import hash_word
from tests.support.clock import Clock

BLOCK, LAYERS = 4000, 3
BIG_BLOCK = 10_000
SLOT_BYTES = PAGE_BYTES
"""What a BLOCK takes."""
DIGEST, OTHER = b"n" * 16, b"o" * 16

Make = Callable[..., Arena]


def machine_clock() -> Clock:
    """A clock that begins at the machine's, which an arena's times are of."""
    return Clock(time.monotonic())


def block_hash(number: int) -> bytes:
    """Of block `number`; no two begin alike."""
    return (number + 1).to_bytes(32, "little")


def hashes(*numbers: int) -> list[bytes]:
    """Of blocks."""
    return [block_hash(number) for number in numbers]


def sums_of(numbers: tuple[int, ...], layers: int = LAYERS) -> np.ndarray:
    """Checksums of blocks, made up."""
    return np.array([[number * 100 + layer for layer in range(layers)] for number in numbers])


@contextmanager
def arenas(folder: Path) -> Iterator[Make]:
    """Makes arenas in a folder, for `blocks` blocks of BLOCK bytes; closes them at the end."""
    made: list[Arena] = []

    def make(blocks: int = 8, name: str = "arena", **options: object) -> Arena:
        size = blocks * SLOT_BYTES
        tables = 0
        while True:
            try:
                plan = Geometry.plan(size + tables, BLOCK, LAYERS, BLOCK)
            except ValueError:
                tables += 4096
                continue
            if plan.size_bytes - plan.data_offset >= size:
                break
            tables += 4096
        options = {"folder": folder, "smallest_block_bytes": BLOCK} | options
        arena = Arena.create_or_attach(
            name, size + tables, block_bytes=BLOCK, layers=LAYERS, **options
        )
        made.append(arena)
        return arena

    try:
        yield make
    finally:
        for arena in made:
            arena.close()


def store(arena: Arena, row: int, *numbers: int, **how: object) -> np.ndarray:
    """Store blocks that follow each other in one prefix; their slots, -1 where refused."""
    parents = [0, *(hash_word(block_hash(number)) for number in numbers)][: len(numbers)]
    slots = arena.reserve(row, hashes(*numbers), parents, range(len(numbers)), **how)
    there = slots >= 0
    sums = sums_of(numbers, arena.namespaces()[row].layers)
    assert arena.publish(slots[there], sums[there]).all()
    return slots


def present(arena: Arena, row: int, *numbers: int) -> list[int]:
    """Which of these blocks can be read."""
    found = arena.lookup(row, hashes(*numbers))
    return [number for number, slot in zip(numbers, found, strict=True) if slot >= 0]

"""Blocks of known bytes for tests of file tiers, and a checksum that is only meant for tests."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np

from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.nvme.nvme_tier import NvmeTier
from headrace_kvstore.nvme.record import PAGE_BYTES, BlockShape, WriteRequest
from headrace_kvstore.nvme.segment import page_memory

SHAPE = BlockShape(b"namespace-digest", layers=4, layer_bytes=2 * PAGE_BYTES)
SEGMENT_BYTES = PAGE_BYTES + 4 * SHAPE.record_bytes
SIZE_BYTES = 3 * SEGMENT_BYTES
"""Three segments of four blocks."""


def sums_at(
    digest: bytes, block_hash: bytes, first_layer: int, addresses: np.ndarray, layer_bytes: int
) -> np.ndarray:
    """One u64 a layer, seeded with namespace, block and layer: a `segment.Verify`."""
    sums = []
    for layer, address in enumerate(addresses.tolist(), first_layer):
        seed = digest + block_hash.ljust(32, b"\0") + layer.to_bytes(4, "little")
        content = ctypes.string_at(address, layer_bytes)
        sums.append(hashlib.blake2b(seed + content, digest_size=8).digest())
    return np.frombuffer(b"".join(sums), "<u8")


def key(number: int) -> bytes:
    """The hash of block `number`."""
    return hashlib.sha256(b"%d" % number).digest()


@contextmanager
def no_descriptors_left(folder: Path) -> Iterator[None]:
    """Have every `open` below the folder fail as in a process with too many open files."""
    opens = os.open

    def refuse(path: str, *rest: int) -> int:
        if str(path).startswith(str(folder)):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return opens(path, *rest)

    with patch.object(os, "open", refuse):
        yield


class Bench:
    """Memory with room for some blocks of one shape: filled, saved, loaded, compared."""

    def __init__(self, file_io: FileIo, shape: BlockShape = SHAPE, blocks: int = 64) -> None:
        self.file_io, self.shape, self.blocks = file_io, shape, blocks
        self._stride = -(-shape.payload_bytes // PAGE_BYTES) * PAGE_BYTES
        self.memory, self.address = page_memory(2 * blocks * self._stride)

    def content(self, number: int) -> np.ndarray:
        """The bytes of block `number`, u8 (layers, layer_bytes)."""
        size = (self.shape.layers, self.shape.layer_bytes)
        return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)

    def save(self, number: int, room: int) -> WriteRequest:
        """Block `number`, put into memory at position `room`."""
        begin = room * self._stride
        self.memory[begin : begin + self.shape.payload_bytes] = self.content(number).reshape(-1)
        address = self.address + begin
        layers = address + np.arange(self.shape.layers) * self.shape.layer_bytes
        sums = sums_at(self.shape.digest, key(number), 0, layers, self.shape.layer_bytes)
        parent = key(number - 1) if number else b""
        return WriteRequest(key(number), address, sums, parent=parent, depth=number)

    def write(self, tier: NvmeTier, *numbers: int) -> list[bool]:
        """Save blocks and wait."""
        saves = [self.save(number, room) for room, number in enumerate(numbers)]
        return [future.result(20) for future in tier.write(self.shape, saves)]

    def has(self, tier: NvmeTier, *numbers: int) -> list[bool]:
        """Which of these the tier says it has."""
        found = tier.contains(self.shape.digest, [key(number) for number in numbers])
        return [bool(each) for each in found]

    def load(
        self,
        tier: NvmeTier,
        *numbers: int,
        between: Callable[[], None] = lambda: None,
    ) -> list[bool]:
        """Which of these arrive with the right bytes, checked by sum and against the content.

        A block that passes the tier's check and has other bytes than were saved fails the test.
        """
        places = [tier.locate(self.shape.digest, key(number)) for number in numbers]
        there = [(i, place) for i, place in enumerate(places) if place is not None]
        begin = self.blocks * self._stride
        self.memory[begin:] = 0xEE
        first = self.address + begin
        rows = np.array([first + i * self._stride for i, _ in there], dtype=np.int64)
        layers = np.arange(self.shape.layers) * self.shape.layer_bytes
        between()
        addresses = (rows[:, None] + layers).reshape(len(there), self.shape.layers)
        ok = tier.read([place for _, place in there], addresses, verify=sums_at).wait(20)
        right = [False] * len(numbers)
        for (i, _), good in zip(there, ok.tolist(), strict=True):
            right[i] = good
            at = begin + i * self._stride
            got = self.memory[at : at + self.shape.payload_bytes]
            assert not good or (got == self.content(numbers[i]).reshape(-1)).all(), numbers[i]
        return right


def reopen(tier: NvmeTier, size_bytes: int = SIZE_BYTES) -> NvmeTier:
    """Close a tier, and open its folder again."""
    tier.close()
    return NvmeTier.open(tier.folder, size_bytes, SEGMENT_BYTES, tier.file_io)


def files_bytes(tier: NvmeTier) -> int:
    """The size of all files of a tier."""
    return sum(os.stat(path).st_size for path in tier.folder.iterdir())

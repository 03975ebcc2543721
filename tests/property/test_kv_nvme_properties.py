"""The NVMe tier against naive models: pieces, headers, and a folder driven at random."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.nvme.nvme_tier import NvmeTier
from headrace_kvstore.nvme.record import (
    PAGE_BYTES,
    BlockShape,
    RecordHeader,
    TierEvent,
    pack_header,
    unpack_header,
)
from headrace_kvstore.nvme.segment import plan_pieces
from tests.support.kvfiles import SHAPE, Bench, key

SEGMENT_BYTES = PAGE_BYTES + 3 * SHAPE.record_bytes
SEGMENTS = 3
NUMBERS = st.lists(st.integers(0, 14), min_size=1, max_size=5, unique=True)
MOVER: list[FileIo] = []


@given(data=st.data(), blocks=st.integers(0, 4), layers=st.integers(1, 6))
def test_pieces_bring_each_layer_to_its_address_and_are_fewest(
    data: st.DataObject, blocks: int, layers: int
) -> None:
    width, first = 4, data.draw(st.integers(0, 3))
    rooms = data.draw(st.permutations(range(blocks * layers)))
    addresses = np.array(rooms, dtype=np.int64).reshape(blocks, layers) * width
    payloads = np.arange(blocks) * 1000
    pieces = list(zip(*plan_pieces(payloads, addresses, first, width), strict=True))
    moved = {}
    for block, target, offset, length in pieces:
        for step in range(0, length, width):
            moved[int(target + step)] = (int(block), int(offset + step))
    wanted = {
        int(addresses[b, i]): (b, b * 1000 + (first + i) * width)
        for b in range(blocks)
        for i in range(layers)
    }
    assert moved == wanted
    joints = (np.diff(addresses, axis=1) == width).sum() if blocks else 0
    assert len(pieces) == blocks * layers - joints


@given(
    layers=st.integers(1, 1100),
    layer_bytes=st.integers(1, 2**40),
    block_hash=st.binary(min_size=32, max_size=32),
    depth=st.integers(0, 2**32 - 1),
    sequence=st.integers(0, 2**64 - 1),
    seed=st.integers(0, 2**32),
    flip=st.integers(0, 10**9),
)
def test_a_header_gives_back_what_went_in_and_bears_no_flipped_bit(
    layers: int,
    layer_bytes: int,
    block_hash: bytes,
    depth: int,
    sequence: int,
    seed: int,
    flip: int,
) -> None:
    shape = BlockShape(b"d" * 16, layers, layer_bytes)
    sums = np.random.default_rng(seed).integers(0, 2**64, layers, dtype=np.uint64)
    block = RecordHeader(block_hash, depth=depth, sequence=sequence, sums=sums)
    header = pack_header(shape, block)
    again = unpack_header(shape, header)
    assert again == block and (again.sums == sums).all()
    damaged = bytearray(header)
    position = flip % (8 * (len(header) - (PAGE_BYTES - 144 - 8 * layers) % PAGE_BYTES))
    damaged[position // 8] ^= 1 << position % 8
    assert unpack_header(shape, bytes(damaged)) is None


class TierMachine(RuleBasedStateMachine):
    """A tier of three segments of three blocks, beside a set of the blocks that it told of."""

    def __init__(self) -> None:
        super().__init__()
        if not MOVER:
            MOVER.append(FileIo())
        self.folder = Path(tempfile.mkdtemp())
        self.bench = Bench(MOVER[0], blocks=8)
        self.told: set[bytes] = set()
        self.open()

    def open(self) -> None:
        self.tier = NvmeTier.open(
            self.folder, SEGMENTS * SEGMENT_BYTES, SEGMENT_BYTES, MOVER[0], events=[self.hear]
        )

    def hear(self, event: TierEvent) -> None:
        assert (event.hash in self.told) != event.stored, event
        (self.told.add if event.stored else self.told.remove)(event.hash)

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.folder)

    @rule(numbers=NUMBERS)
    def write(self, numbers: list[int]) -> None:
        assert all(self.bench.write(self.tier, *numbers))

    @rule(numbers=NUMBERS)
    def load(self, numbers: list[int]) -> None:
        expected = [key(number) in self.told for number in numbers]
        assert self.bench.load(self.tier, *numbers) == expected

    @rule(number=st.integers(0, 14))
    def discard(self, number: int) -> None:
        there = key(number) in self.told
        assert self.tier.discard(SHAPE.digest, key(number)) == there

    @rule(number=st.integers(0, 14), layer=st.integers(0, SHAPE.layers - 1))
    def flip_a_payload_bit(self, number: int, layer: int) -> None:
        place = self.tier.locate(SHAPE.digest, key(number))
        if place is not None:
            with open(place.path, "r+b") as file:
                file.seek(place.payload_offset + layer * SHAPE.layer_bytes)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))
            assert self.bench.load(self.tier, number) == [False]
            assert key(number) not in self.told

    @rule()
    def restart(self) -> None:
        self.tier.close()
        before, self.told = self.told, set()
        self.open()
        assert self.told == before

    @invariant()
    def it_has_what_it_told_of_and_keeps_to_its_size(self) -> None:
        found = self.bench.has(self.tier, *range(15))
        assert found == [key(number) in self.told for number in range(15)]
        sizes = [path.stat().st_size for path in self.folder.iterdir()]
        assert sum(sizes) <= SEGMENTS * SEGMENT_BYTES
        assert self.tier.state == "on"


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=15, stateful_step_count=25)

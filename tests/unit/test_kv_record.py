"""The file format: which bytes count as a block."""

import numpy as np
import pytest

from headrace_kvstore.nvme import record
from headrace_kvstore.nvme.record import (
    MAX_LAYERS,
    PAGE_BYTES,
    BlockShape,
    RecordHeader,
    pack_header,
    pack_segment,
    unpack_header,
    unpack_segment,
)

SHAPE = BlockShape(b"namespace-digest", layers=3, layer_bytes=1000)
BLOCK = RecordHeader(
    hash=b"h" * 32,
    parent=b"p" * 32,
    depth=7,
    tenant=2**32 - 1,
    compute_s=0.25,
    wall_s=1.5e9,
    sequence=2**60,
    sums=np.array([1, 2**64 - 1, 3], np.uint64),
)


def test_a_header_gives_back_what_went_in() -> None:
    header = pack_header(SHAPE, BLOCK)
    assert len(header) == PAGE_BYTES
    again = unpack_header(SHAPE, header)
    assert again == BLOCK
    assert (again.sums == BLOCK.sums).all()


def test_a_short_hash_is_zero_padded() -> None:
    again = unpack_header(SHAPE, pack_header(SHAPE, RecordHeader(b"short", sums=BLOCK.sums)))
    assert again is not None and again.hash == b"short" + bytes(27)


def test_any_flipped_bit_of_the_fields_or_sums_unmakes_a_header() -> None:
    header = pack_header(SHAPE, BLOCK)
    used = len(header.rstrip(b"\0"))
    for position in range(used):
        for bit in (1, 0x80):
            flipped = bytearray(header)
            flipped[position] ^= bit
            assert unpack_header(SHAPE, bytes(flipped)) is None, (position, bit)


@pytest.mark.parametrize("length", [0, 8, 100, 167])
def test_a_cut_header_does_not_count(length: int) -> None:
    assert unpack_header(SHAPE, pack_header(SHAPE, BLOCK)[:length]) is None


def test_zeros_are_no_header() -> None:
    assert unpack_header(SHAPE, bytes(PAGE_BYTES)) is None


@pytest.mark.parametrize(
    "other",
    [
        BlockShape(b"another--digest!", 3, 1000),
        BlockShape(SHAPE.digest, 2, 1000),
        BlockShape(SHAPE.digest, 3, 1001),
    ],
)
def test_a_record_of_another_namespace_or_shape_does_not_count(other: BlockShape) -> None:
    assert unpack_header(other, pack_header(SHAPE, BLOCK)) is None


def test_another_version_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    header, segment = pack_header(SHAPE, BLOCK), pack_segment(SHAPE)
    monkeypatch.setattr(record, "VERSION", record.VERSION + 1)
    assert unpack_header(SHAPE, header) is None
    assert unpack_segment(segment) is None


def test_sums_take_further_pages_where_one_is_not_enough() -> None:
    layers = (PAGE_BYTES - record._FIXED_BYTES) // 8
    assert BlockShape(SHAPE.digest, layers, 1).header_bytes == PAGE_BYTES
    assert BlockShape(SHAPE.digest, layers + 1, 1).header_bytes == 2 * PAGE_BYTES
    shape = BlockShape(SHAPE.digest, 3000, 4096)
    block = RecordHeader(b"x", sums=np.arange(3000, dtype=np.uint64))
    again = unpack_header(shape, pack_header(shape, block))
    assert again is not None and (again.sums == block.sums).all()


def test_records_begin_and_payloads_lie_on_pages() -> None:
    assert SHAPE.record_bytes == 2 * PAGE_BYTES  # 3,000 bytes of payload take one page
    assert SHAPE.header_offset(0) == PAGE_BYTES
    assert SHAPE.payload_offset(5) == PAGE_BYTES + 5 * SHAPE.record_bytes + PAGE_BYTES


def test_slots_fill_a_segment_to_the_byte() -> None:
    assert SHAPE.slots(PAGE_BYTES + 2 * SHAPE.record_bytes) == 2
    assert SHAPE.slots(PAGE_BYTES + 2 * SHAPE.record_bytes - 1) == 1
    assert SHAPE.slots(0) == 0


@pytest.mark.parametrize(
    "digest, layers, layer_bytes",
    [(b"short", 1, 1), (b"d" * 16, 0, 1), (b"d" * 16, 1, 0), (b"d" * 16, MAX_LAYERS + 1, 1)],
)
def test_impossible_shapes_are_refused(digest: bytes, layers: int, layer_bytes: int) -> None:
    with pytest.raises(ValueError):
        BlockShape(digest, layers, layer_bytes)


def test_a_block_wants_one_sum_a_layer_and_a_hash_of_32_bytes() -> None:
    with pytest.raises(ValueError):
        pack_header(SHAPE, RecordHeader(b"x", sums=np.zeros(2, np.uint64)))
    with pytest.raises(ValueError):
        pack_header(SHAPE, RecordHeader(b"x" * 33, sums=BLOCK.sums))


def test_a_segment_header_gives_back_its_shape_and_any_flipped_bit_unmakes_it() -> None:
    header = pack_segment(SHAPE)
    assert len(header) == PAGE_BYTES and unpack_segment(header) == SHAPE
    for position in range(len(header.rstrip(b"\0"))):
        flipped = bytearray(header)
        flipped[position] ^= 4
        assert unpack_segment(bytes(flipped)) is None, position
    assert unpack_segment(header[:30]) is None

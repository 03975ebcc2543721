"""The file format: the layout of a block's bytes on disk, and the rule which bytes count as a
block.

    segment  = [segment header: 1 page][record 0][record 1]...     one namespace, fixed record size
    record   = [header: 1 or more pages][payload, padded to a page]
    payload  = [layer 0][layer 1]...                               `layer_bytes` each
    page     = 4,096 bytes

A record counts if its header verifies: magic, version, the namespace and shape of its segment, and
the header's own checksum. A writer writes the payload first and the header last, so a torn record
has no valid header. Payload bytes are covered by one u64 sum per layer, kept in the header and
checked when a layer is loaded. Numbers are little-endian.

The header's checksum is blake2b, 8 bytes, over the fixed fields and the sums. Padding has no
meaning and no checksum.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

import numpy as np

from headrace_kvstore.blocks.slot_record import HASH_BYTES

PAGE_BYTES = 4096
DIGEST_BYTES = 16
VERSION = 1

_RECORD_MAGIC, _SEGMENT_MAGIC = b"HRKVREC\n", b"HRKVSEG\n"
_SUM = struct.Struct("<Q")
_SHAPE = struct.Struct("<8sHHIQ16s")  # magic, version, header pages, layers, layer bytes, digest
_BLOCK = struct.Struct("<32s32sIIf4xdQ")  # the fields of Block in their order, without sums
_FIXED_BYTES = _SHAPE.size + _BLOCK.size + _SUM.size

MAX_LAYERS = (0xFFFF * PAGE_BYTES - _FIXED_BYTES) // 8


def pages(length: int) -> int:
    """Return the number of pages that hold `length` bytes."""
    return -(-length // PAGE_BYTES)


def padded(block_hash: bytes) -> bytes:
    """Return a block hash as tables and files hold it: 32 bytes, zero-padded."""
    if len(block_hash) > HASH_BYTES:
        raise ValueError(f"a block hash has at most {HASH_BYTES} bytes, not {len(block_hash)}")
    return block_hash.ljust(HASH_BYTES, b"\0")


@dataclass(frozen=True)
class BlockShape:
    """Properties that all records of a namespace share."""

    digest: bytes
    layers: int
    layer_bytes: int

    def __post_init__(self) -> None:
        if len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"a namespace digest has {DIGEST_BYTES} bytes, not {len(self.digest)}")
        if not 1 <= self.layers <= MAX_LAYERS or self.layer_bytes < 1:
            raise ValueError(f"no block has {self.layers} layers of {self.layer_bytes} bytes")

    @property
    def payload_bytes(self) -> int:
        """Bytes of the layers, without padding."""
        return self.layers * self.layer_bytes

    @property
    def header_bytes(self) -> int:
        """Whole pages for the fixed fields and one sum a layer."""
        return pages(_FIXED_BYTES + 8 * self.layers) * PAGE_BYTES

    @property
    def record_bytes(self) -> int:
        """Bytes that one block occupies."""
        return self.header_bytes + pages(self.payload_bytes) * PAGE_BYTES

    def slots(self, segment_bytes: int) -> int:
        """Return the number of records that a segment of this size holds."""
        return max(0, segment_bytes - PAGE_BYTES) // self.record_bytes

    def header_offset(self, slot: int) -> int:
        """Return the offset in its segment at which a record begins."""
        return PAGE_BYTES + slot * self.record_bytes

    def payload_offset(self, slot: int) -> int:
        """Return the offset in its segment at which a record's layer 0 begins."""
        return self.header_offset(slot) + self.header_bytes


@dataclass(frozen=True)
class RecordHeader:
    """A record's facts about its block besides the shape. `hash` and `parent`: 32 bytes."""

    hash: bytes
    parent: bytes = bytes(HASH_BYTES)
    depth: int = 0
    tenant: int = 0
    compute_s: float = 0.0
    """Predicted seconds to compute it at its place in the prompt; a float32 on disk."""
    wall_s: float = 0.0
    """time.time() when it was stored."""
    sequence: int = 0
    """Number that grows with each record of a folder: of two records of one key the later
    counts."""
    sums: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64), compare=False)
    """One u64 a layer, (layers,)."""


@dataclass(frozen=True)
class WriteRequest:
    """A block to write. Its payload lies at `address`, layer after layer, until it is written."""

    hash: bytes
    address: int
    sums: np.ndarray
    """One u64 a layer, (layers,)."""
    parent: bytes = bytes(HASH_BYTES)
    depth: int = 0
    tenant: int = 0
    compute_s: float = 0.0


@dataclass(frozen=True)
class TierEvent:
    """Notice that a block can be found from now on, or no longer."""

    stored: bool
    digest: bytes
    hash: bytes
    """32 bytes, zero-padded."""
    reason: str
    """"written", "scanned"; "evicted", "discarded", "corrupt", "unreadable"."""


def pack_header(shape: BlockShape, block: RecordHeader) -> bytes:
    """Return a record's header, `shape.header_bytes` long."""
    sums = np.ascontiguousarray(block.sums, dtype="<u8")
    if sums.shape != (shape.layers,):
        raise ValueError(f"{shape.layers} layers want as many sums, not {sums.shape}")
    head = _pack_shape(_RECORD_MAGIC, shape, shape.header_bytes // PAGE_BYTES) + _BLOCK.pack(
        padded(block.hash),
        padded(block.parent),
        block.depth,
        block.tenant,
        block.compute_s,
        block.wall_s,
        block.sequence,
    )
    tail = sums.tobytes()
    return (head + _checksum(head, tail) + tail).ljust(shape.header_bytes, b"\0")


def unpack_header(shape: BlockShape, header: bytes | memoryview) -> RecordHeader | None:
    """Return the block whose record begins with these bytes, or None if it does not count."""
    sums_end = _FIXED_BYTES + 8 * shape.layers
    if len(header) < sums_end:
        return None
    head_bytes = _SHAPE.size + _BLOCK.size
    head, tail = bytes(header[:head_bytes]), bytes(header[_FIXED_BYTES:sums_end])
    expected = _pack_shape(_RECORD_MAGIC, shape, shape.header_bytes // PAGE_BYTES)
    if not head.startswith(expected) or header[head_bytes:_FIXED_BYTES] != _checksum(head, tail):
        return None
    sums = np.frombuffer(tail, "<u8").astype(np.uint64)
    block_hash, parent, depth, tenant, compute_s, wall_s, sequence = _BLOCK.unpack_from(
        head, _SHAPE.size
    )
    return RecordHeader(block_hash, parent, depth, tenant, compute_s, wall_s, sequence, sums)


def pack_segment(shape: BlockShape) -> bytes:
    """Return a segment's header, one page."""
    head = _pack_shape(_SEGMENT_MAGIC, shape, 1)
    return (head + _checksum(head)).ljust(PAGE_BYTES, b"\0")


def unpack_segment(header: bytes) -> BlockShape | None:
    """Return the shape of a segment's blocks, or None if the header is damaged, unfinished or of
    another version."""
    head = header[: _SHAPE.size]
    if len(head) < _SHAPE.size or header[_SHAPE.size : _SHAPE.size + 8] != _checksum(head):
        return None
    magic, version, _, layers, layer_bytes, digest = _SHAPE.unpack(head)
    if (magic, version) != (_SEGMENT_MAGIC, VERSION):
        return None
    try:
        return BlockShape(digest, layers, layer_bytes)
    except ValueError:
        return None


def _pack_shape(magic: bytes, shape: BlockShape, header_pages: int) -> bytes:
    return _SHAPE.pack(magic, VERSION, header_pages, shape.layers, shape.layer_bytes, shape.digest)


def _checksum(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=_SUM.size).digest()

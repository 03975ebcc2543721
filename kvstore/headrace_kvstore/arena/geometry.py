"""The layout of the arena's file: a function of six numbers, which the header holds.

    header | namespaces | segments | slots | readers | free chain | buckets | events | sums | state
    | data

The data area is cut into segments of equal size (the last one takes what is left). A segment that
holds blocks belongs to one namespace, and is cut into that namespace's slots: block bytes, padded
to whole pages. So slot i of segment s is always row `s * slots_per_segment + i` of the slot table,
and memory moves between namespaces of different block sizes a segment at a time. The checksums of
a segment's blocks lie block after block in its part of `sums`: peers may reach the data, and
nothing before it. Below the connector a block is a number of equal "layers" with a checksum each.
These are the parts of the model's layers (`headrace_kvstore.blocks.sharding`).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np

from headrace_kvstore.blocks.slot_record import EVENT, SLOT

MAGIC = b"HRARENA\0"
VERSION = 6
HEADER_BYTES = 72
PAGE_BYTES = 4096
NAMESPACES = 256
SEGMENTS = 64
"""Number of segments aimed at: memory moves between namespaces one segment at a time."""
BLOCKS_PER_SEGMENT = 16
"""Minimum number of blocks a segment holds, if the arena is large enough."""

# Words of the header that change while the arena lives, from byte WORDS_OFFSET on.
WORDS_OFFSET = 512
WORDS = 64
SECTION = 0  # grows when a critical section begins and when it ends: odd inside one
NAMESPACE_COUNT = 1
EVENT_HEAD = 2  # sequence number of the next event
EVENT_FLOOR = 3  # readers at an earlier number have missed events
STORED_TOTAL = 4
EVICTED_TOTAL = 5
DISCARDED_TOTAL = 6
HITS_TOTAL = 7
MISSES_TOTAL = 8
RECLAIMED_TOTAL = 9  # slots taken back from writers that died
REPAIRS_TOTAL = 10
POLICY = 11  # code of the policy that evicts
DROPPED = 13  # blocks cleared, and reservations abandoned
TOTALS = {
    "stored_total": STORED_TOTAL,
    "evicted_total": EVICTED_TOTAL,
    "discarded_total": DISCARDED_TOTAL,
    "hits_total": HITS_TOTAL,
    "misses_total": MISSES_TOTAL,
    "reclaimed_total": RECLAIMED_TOTAL,
    "repairs_total": REPAIRS_TOTAL,
}
"""Words that only grow, by the names under which they are reported."""

NAMESPACE = np.dtype(
    [("digest", "u8", (2,)), ("block_bytes", "u8"), ("slot_bytes", "u8"), ("layers", "u4")],
    align=True,
)
SEGMENT = np.dtype(
    [
        ("bytes", "u8"),
        ("namespace", "i4"),  # NONE: of no namespace
        ("used", "i4"),  # slots that are not FREE
        ("free", "i4"),  # first slot of its free chain, or NONE
    ],
    align=True,
)
NONE = -1


def _hash_as_words(record: np.dtype) -> np.dtype:
    """Return a dtype of the same bytes with the hash as four words, which numba can read."""
    fields = dict(record.fields or {})
    return np.dtype(
        {
            "names": list(fields),
            "formats": [("u8", (4,)) if name == "hash" else fields[name][0] for name in fields],
            "offsets": [fields[name][1] for name in fields],
            "itemsize": record.itemsize,
        },
        align=True,
    )


KERNEL_SLOT = _hash_as_words(SLOT)
KERNEL_EVENT = _hash_as_words(EVENT)


class ArenaFormatError(ValueError):
    """Error: the file is no arena, an arena of another version, or its header is damaged."""


class Tables(NamedTuple):
    """The arena's tables, as views of the mapped file. All but `data` are small.

    `buckets[p]` is 0 (empty) or (tag << 32 | slot + 1), where tag is the upper half of the key's
    mixed hash and p follows from it by linear probing. `free` chains the FREE slots of a segment
    that belongs to a namespace. `readers` counts the leases of a slot since they last all ran out.
    `state` is the policy's.
    """

    words: np.ndarray
    namespaces: np.ndarray
    segments: np.ndarray
    table: np.ndarray
    readers: np.ndarray
    free: np.ndarray
    buckets: np.ndarray
    events: np.ndarray
    sums: np.ndarray
    state: np.ndarray


@dataclass(frozen=True)
class Geometry:
    """The six numbers that fix all offsets. `layers`: number of sums for which a segment has room
    in each slot."""

    size_bytes: int
    segments: int
    segment_bytes: int
    slots_per_segment: int
    layers: int
    state_bytes: int

    @classmethod
    def plan(
        cls,
        size_bytes: int,
        block_bytes: int,
        layers: int,
        smallest_block_bytes: int,
        state_bytes: int = 0,
    ) -> Geometry:
        """Plan an arena of `size_bytes`, whole pages. Most blocks have `block_bytes`, and no block
        is much smaller than `smallest_block_bytes`.

        state_bytes: of the policy's state.

        Raises ValueError if not even one block would fit.
        """
        if not 1 <= smallest_block_bytes <= block_bytes or layers < 1:
            raise ValueError("blocks have at least one byte and one layer; the smallest is no")
        # Room for one sum a page: the creator need not know the engines' layers.
        layers = max(layers, smallest_block_bytes // PAGE_BYTES)
        slot = _pages(block_bytes)
        blocks = min(
            max(BLOCKS_PER_SEGMENT, size_bytes // (SEGMENTS * slot)), size_bytes // 4 // slot
        )
        segment_bytes = max(1, blocks) * slot
        slots_per_segment = segment_bytes // _pages(smallest_block_bytes)

        def cut(segments: int) -> Geometry:
            return cls(size_bytes, segments, segment_bytes, slots_per_segment, layers, state_bytes)

        segments = -(-size_bytes // segment_bytes)
        while segments > 1 and cut(segments).last_segment_bytes < slot:
            segments -= 1
        planned = cut(max(1, segments))
        if planned.last_segment_bytes < slot:
            raise ValueError(
                f"an arena of {size_bytes} bytes holds no block of {block_bytes}: "
                f"{planned.data_offset + slot} are the least"
            )
        return planned

    def slot_bytes(self, block_bytes: int, layers: int) -> int:
        """Return the bytes that one slot takes: the block, in whole pages. More if the segment
        would otherwise lack room for its blocks' checksums."""
        if layers > self.layers:
            sums = self.slots_per_segment * self.layers
            block_bytes = max(block_bytes, -(-self.segment_bytes * layers // sums))
        return _pages(block_bytes)

    @property
    def slots(self) -> int:
        return self.segments * self.slots_per_segment

    @property
    def data_offset(self) -> int:
        offset, dtype, count = _regions(self)[-1][1:]
        return _pages(offset + dtype.itemsize * count)

    @property
    def last_segment_bytes(self) -> int:
        """Bytes of the last segment; negative if so many segments do not fit."""
        before = self.data_offset + (self.segments - 1) * self.segment_bytes
        return min(self.segment_bytes, self.size_bytes - before)

    def header(self) -> bytes:
        """Return the header's fixed part: magic, version, these numbers, and a checksum of them."""
        fixed = MAGIC + struct.pack("<7Q", VERSION, *astuple(self))
        return fixed + hashlib.blake2b(fixed, digest_size=8).digest()

    @classmethod
    def parse(cls, header: bytes, size_bytes: int) -> Geometry:
        """Read the header of a file of `size_bytes`; raises ArenaFormatError."""
        if header[: len(MAGIC)] != MAGIC or len(header) < HEADER_BYTES:
            raise ArenaFormatError("it is no arena")
        version, *numbers = struct.unpack_from("<7Q", header, len(MAGIC))
        if version != VERSION:
            raise ArenaFormatError(f"it is an arena of version {version}, and this is {VERSION}")
        geometry = cls(*numbers)
        if header[:HEADER_BYTES] != geometry.header() or geometry.size_bytes != size_bytes:
            raise ArenaFormatError("its header is damaged")
        return geometry

    def tables(self, memory: np.ndarray) -> Tables:
        """View `memory` (u8, the whole file) as tables."""
        return Tables(
            **{
                name: memory[offset : offset + dtype.itemsize * count].view(dtype)
                for name, offset, dtype, count in _regions(self)
            }
        )

    def format(self, tables: Tables, policy: int = 0) -> None:
        """Fill the tables of a file that is all zeros. policy: code of the one that evicts."""
        tables.words[POLICY] = policy
        tables.segments["bytes"] = self.segment_bytes
        tables.segments["bytes"][-1] = self.last_segment_bytes
        tables.segments["namespace"] = NONE
        tables.segments["free"] = NONE


def _regions(geometry: Geometry) -> list[tuple[str, int, np.dtype, int]]:
    """Return the name, offset in bytes, dtype and length of each table, in file order."""
    slots = geometry.slots
    u4, u8 = np.dtype("u4"), np.dtype("u8")
    sizes = [
        ("words", u8, WORDS),
        ("namespaces", NAMESPACE, NAMESPACES),
        ("segments", SEGMENT, geometry.segments),
        ("table", KERNEL_SLOT, slots),
        ("readers", u4, slots),
        ("free", np.dtype("i4"), slots),
        ("buckets", u8, _power_of_two(2 * slots)),
        ("events", KERNEL_EVENT, min(max(256, _power_of_two(slots)), 1 << 16)),
        ("sums", u8, slots * geometry.layers),
        ("state", np.dtype("u1"), geometry.state_bytes),
    ]
    regions, offset = [], WORDS_OFFSET
    for name, dtype, count in sizes:
        regions.append((name, offset, dtype, count))
        offset += -(-dtype.itemsize * count // 64) * 64
    return regions


def _power_of_two(at_least: int) -> int:
    return 1 << max(0, at_least - 1).bit_length()


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES

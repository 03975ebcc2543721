"""The start-up scan, which finds the blocks in a folder of segments by their headers only.

A segment is removed if its own header does not verify: its writer died early, or it has
another version. A record is skipped if its header does not verify.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from headrace_kvstore.nvme.catalog import Catalog, Segment
from headrace_kvstore.nvme.file_io import FileIo, IoBatchError
from headrace_kvstore.nvme.record import (
    PAGE_BYTES,
    BlockShape,
    RecordHeader,
    unpack_header,
    unpack_segment,
)
from headrace_kvstore.nvme.record_writer import remove_segment
from headrace_kvstore.nvme.segment import SegmentFiles, page_memory

logger = logging.getLogger("headrace.kvstore")

_NAME = re.compile(r"segment-(\d{10})(?:-[0-9a-f]{8})?\.kv")


@dataclass
class Scan:
    """Result of a scan."""

    seconds: float = 0.0
    segments: int = 0
    blocks: int = 0
    damaged_headers: int = 0
    """Number of records whose header is not blank and does not verify."""
    segments_removed: int = 0
    last_segment: int = 0
    last_sequence: int = 0

    def as_dict(self) -> dict[str, float]:
        """Return a JSON-able view."""
        return asdict(self)


def new_segment_path(folder: Path, number: int) -> str:
    """Return a name that no segment had before.

    After a restart numbers continue from the highest segment that is left, so they may repeat.
    A reader that still has the removed file open would take it for the new one. So a random part
    follows the number.
    """
    return str(folder / f"segment-{number:010d}-{secrets.token_hex(4)}.kv")


def scan_folder(folder: Path, file_io: FileIo, files: SegmentFiles, catalog: Catalog) -> Scan:
    """Fill an empty catalog with every block whose header verifies. Raises OSError."""
    started, result = time.monotonic(), Scan()
    segments = []
    for name in sorted(os.listdir(folder)):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        number = max(int(match[1]), result.last_segment + 1)  # a copied file may repeat a number
        segment = _open_segment(str(folder / name), number)
        result.last_segment = number
        if segment is None:
            logger.warning("%s is unfinished, damaged or of another version: removed", name)
            remove_segment(str(folder / name))
            result.segments_removed += 1
        else:
            segments.append(segment)
    sequences: dict[bytes, int] = {}
    for segment in segments:
        for slot, block in _read_headers(segment, file_io, files):
            if block is None:
                result.damaged_headers += 1
                continue
            result.last_sequence = max(result.last_sequence, block.sequence)
            segment.next_slot = max(segment.next_slot, slot + 1)
            _add_newest(catalog, segment, slot, block, sequences)
        catalog.segments[segment.number] = segment
    result.segments, result.blocks = len(segments), len(catalog)
    result.seconds = time.monotonic() - started
    return result


def _open_segment(path: str, number: int) -> Segment | None:
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        shape: BlockShape | None = unpack_segment(file.read(PAGE_BYTES))
    return None if shape is None else Segment(number, path, size, shape, shape.slots(size))


def _read_headers(
    segment: Segment, file_io: FileIo, files: SegmentFiles
) -> Iterator[tuple[int, RecordHeader | None]]:
    """Yield each slot whose header is not blank, with its block or None."""
    length = segment.shape.header_bytes
    memory, address = page_memory(segment.slots * length)
    begins = np.arange(segment.slots) * length
    offsets = np.array([segment.shape.header_offset(i) for i in range(segment.slots)], np.int64)
    lengths = np.full(segment.slots, length)
    file = files.acquire(segment.path)
    try:
        fds = file.choose_fds(address + begins, offsets, lengths)
        file_io.read(address + begins, fds, offsets, lengths).result()
    except IoBatchError as error:
        logger.warning("%d headers cannot be read: %s", len(error.pieces), error)
        for i in error.pieces:
            memory[begins[i] : begins[i] + length] = 0
    finally:
        files.release(file)
    for slot, begin in enumerate(begins.tolist()):
        header = memory[begin : begin + length]
        if header.any():
            yield slot, unpack_header(segment.shape, header.tobytes())


def _add_newest(
    catalog: Catalog, segment: Segment, slot: int, block: RecordHeader, sequences: dict[bytes, int]
) -> None:
    """Add a block to the catalog unless a later record of its key is known."""
    key = segment.shape.digest + block.hash
    if sequences.get(key, -1) >= block.sequence:
        return
    earlier = catalog.row(segment.shape.digest, block.hash)
    if earlier is not None:
        catalog.remove(earlier)
    sequences[key] = block.sequence
    catalog.segments[segment.number] = segment
    age_s = max(0.0, time.time() - block.wall_s)
    catalog.add(segment, slot, block, time.monotonic() - age_s)

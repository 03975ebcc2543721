"""What a replica's log says: segments and versions of corpora, in names instead of numbers.

Interned numbers mean nothing to another process, so that tenant, corpus and digests are
written out. A batch of a log is

    magic | u64 checksum of all behind it | replica, partition's key | records

with the first 8 bytes of blake2b as checksum, numbers little-endian, tokens int32. A batch is taken
whole or not at all. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MAGIC = b"HRLOG002"
SEGMENT, FLIPPED = 1, 2
_SUM = struct.Struct("<Q")
_RECORD = struct.Struct("<QBI")
_FIXED = struct.Struct("<QddIBI")
_FLIPPED = struct.Struct("<I")


class DamagedError(ValueError):
    """Bytes that are not what was written."""


@dataclass(frozen=True)
class SegmentRecord:
    """A segment with its header. Fields as in `layout.HEADER`, names for numbers."""

    uid: int
    created_s: float
    expires_s: float
    version: int
    source: int
    corpus: str
    model: bytes
    tokenizer: bytes
    tokens: NDArray[np.int32] = field(compare=False)


@dataclass(frozen=True)
class FlippedRecord:
    """A version of a corpus took over; one of which nothing was put in means that it was dropped.
    Versions in force only grow, so that it does not matter in which order such records come."""

    corpus: str
    version: int


Record = SegmentRecord | FlippedRecord


@dataclass(frozen=True)
class Batch:
    """Part of one replica's log of one partition: (sequence number, record), ascending."""

    replica: int
    scope: str
    tenant: str
    records: tuple[tuple[int, Record], ...]


def checksum(*parts: bytes | memoryview) -> int:
    """First 8 bytes of blake2b over the parts' concatenation."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def encode_record(number: int, record: Record) -> bytes:
    """One record of a batch."""
    if isinstance(record, FlippedRecord):
        kind, body = FLIPPED, _FLIPPED.pack(record.version) + record.corpus.encode()
    else:
        kind, body = SEGMENT, _segment_body(record)
    return _RECORD.pack(number, kind, len(body)) + body


def encode_batch(replica: int, scope: str, tenant: str, records: Iterable[bytes]) -> bytes:
    """A batch of encoded records."""
    names = _named(scope.encode()) + _named(tenant.encode())
    body = _SUM.pack(replica) + names + b"".join(records)
    return MAGIC + _SUM.pack(checksum(body)) + body


def decode_batch(data: bytes, name: str) -> Batch:
    """The batch that `encode_batch` wrote.

    Args:
        name: what the data is called in an error.

    Raises:
        DamagedError: no batch, or not what was written.
    """
    if data[:8] != MAGIC or len(data) < 24:
        raise DamagedError(f"{name} is no log batch: it begins with {data[:8]!r}, not {MAGIC!r}")
    body = data[16:]
    if _SUM.unpack_from(data, 8)[0] != checksum(body):
        raise DamagedError(f"{name}: its {len(body)} bytes have another checksum than was written")
    try:
        (replica,) = _SUM.unpack_from(body)
        scope, at = _name(body, 8)
        tenant, at = _name(body, at)
        records = []
        while at < len(body):
            number, kind, length = _RECORD.unpack_from(body, at)
            at += _RECORD.size
            records.append((number, _decode(kind, body[at : at + length])))
            at += length
        return Batch(replica, scope.decode(), tenant.decode(), tuple(records))
    except (struct.error, ValueError) as error:
        raise DamagedError(f"{name} does not parse: {error}") from error


def _decode(kind: int, body: bytes) -> Record:
    if kind == FLIPPED:
        return FlippedRecord(body[_FLIPPED.size :].decode(), *_FLIPPED.unpack_from(body))
    if kind != SEGMENT:
        raise ValueError(f"a record is of kind {kind}; known are 1 to {FLIPPED}")
    uid, created_s, expires_s, version, source, count = _FIXED.unpack_from(body)
    corpus, at = _name(body, _FIXED.size)
    model, at = _name(body, at)
    tokenizer, at = _name(body, at)
    if len(body) - at != 4 * count:
        raise ValueError(f"{count} tokens in {len(body) - at} bytes")
    return SegmentRecord(
        uid,
        created_s,
        expires_s,
        version,
        source,
        corpus.decode(),
        model,
        tokenizer,
        np.frombuffer(body, "<i4", offset=at).astype(np.int32),
    )


def _segment_body(record: SegmentRecord) -> bytes:
    fixed = _FIXED.pack(
        record.uid,
        record.created_s,
        record.expires_s,
        record.version,
        record.source,
        len(record.tokens),
    )
    names = (record.corpus.encode(), record.model, record.tokenizer)
    return fixed + b"".join(map(_named, names)) + record.tokens.astype("<i4").tobytes()


def _named(name: bytes) -> bytes:
    return struct.pack("<H", len(name)) + name


def _name(body: bytes, at: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<H", body, at)
    return body[at + 2 : at + 2 + length], at + 2 + length

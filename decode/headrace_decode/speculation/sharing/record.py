"""What replicas send each other: segments and versions of corpora, in names instead of numbers.

Interned numbers mean nothing to another process, so tenant, corpus and digests are written out. A
batch is of one partition:

    magic | first 8 bytes of blake2b over all behind them | msgpack of `Batch`

A batch is taken whole or not at all. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAGIC = b"HRLOG003"
SUM_BYTES = 8

Version = Annotated[int, Meta(ge=0, lt=2**32)]


class DamagedError(ValueError):
    """Bytes that are not what was written."""


class SegmentRecord(msgspec.Struct, array_like=True, frozen=True, tag="segment"):
    """A segment with its header. Fields as in `segments.HEADER`, names for numbers; `tokens` is
    int32, little-endian."""

    uid: Annotated[int, Meta(ge=0)]
    created_s: float
    expires_s: float
    version: Version
    source: int
    corpus: str
    model: bytes
    tokenizer: bytes
    tokens: bytes


class FlippedRecord(msgspec.Struct, array_like=True, frozen=True, tag="flipped"):
    """A version of a corpus took over; one of which nothing was put in means that it was dropped.
    Versions in force only grow, so that it does not matter in which order such records come."""

    corpus: str
    version: Version


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """What one replica sends of one partition, in the order in which it happened."""

    replica: int
    scope: Literal["tenant", "public"]
    tenant: str
    records: list[SegmentRecord | FlippedRecord]


def pack(batch: Batch) -> bytes:
    """The bytes of a batch."""
    body = msgspec.msgpack.encode(batch)
    return MAGIC + _sum(body) + body


def unpack(data: bytes, name: str) -> Batch:
    """The batch that `pack` wrote.

    Args:
        name: what the data is called in an error.

    Raises:
        DamagedError: no batch, or not what was written.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise DamagedError(f"{name} is no batch: it begins with {data[:8]!r}, not {MAGIC!r}")
    start = len(MAGIC) + SUM_BYTES
    if data[len(MAGIC) : start] != _sum(data[start:]):
        raise DamagedError(f"{name}: its {len(data)} bytes have another checksum than was written")
    try:
        return msgspec.msgpack.decode(data[start:], type=Batch)
    except msgspec.MsgspecError as error:
        raise DamagedError(f"{name} does not parse: {error}") from error


def _sum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=SUM_BYTES).digest()

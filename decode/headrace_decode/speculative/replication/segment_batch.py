"""The format of the batches that replicas send each other: segments and versions of corpora.

Interned numbers mean nothing to another process, so the names of tenants and corpora are written
out. A batch belongs to one partition:

    magic | first 8 bytes of blake2b over the rest | msgpack of `SegmentBatch`

A batch is decoded whole or not at all. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAGIC = b"HRLOG003"
SUM_BYTES = 8

Version = Annotated[int, Meta(ge=0, lt=2**32)]


class CorruptBatchError(ValueError):
    """Error: the bytes differ from the bytes that were written."""


class SegmentRecord(msgspec.Struct, array_like=True, frozen=True, tag="segment"):
    """A segment with its header.

    The fields are those of `layout.HEADER_DTYPE`, with names instead of interned numbers; `tokens`
    is int32, little-endian.
    """

    uid: Annotated[int, Meta(ge=0)]
    created_s: float
    expires_s: float
    version: Version
    source: int
    corpus: str
    model: bytes
    tokenizer: bytes
    tokens: bytes


class VersionRecord(msgspec.Struct, array_like=True, frozen=True, tag="flipped"):
    """A version of a corpus that took over.

    A version without segments means that the corpus was dropped. Versions in force only grow, so
    that the order of such records does not matter.
    """

    corpus: str
    version: Version


class SegmentBatch(msgspec.Struct, array_like=True, frozen=True):
    """Records of one replica for one partition, in the order of the events."""

    replica: int
    scope: Literal["tenant", "public"]
    tenant: str
    records: list[SegmentRecord | VersionRecord]


def pack(batch: SegmentBatch) -> bytes:
    """Return the bytes of a batch."""
    body = msgspec.msgpack.encode(batch)
    return MAGIC + _sum(body) + body


def unpack(data: bytes, name: str) -> SegmentBatch:
    """Return the batch that `pack` wrote.

    Args:
        data: the bytes.
        name: name of the data in errors.

    Raises:
        CorruptBatchError: the data is not a batch, or differs from the bytes that were written.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise CorruptBatchError(f"{name} is no batch: it begins with {data[:8]!r}, not {MAGIC!r}")
    start = len(MAGIC) + SUM_BYTES
    if data[len(MAGIC) : start] != _sum(data[start:]):
        raise CorruptBatchError(f"{name}: the checksum of its {len(data)} bytes is wrong")
    try:
        return msgspec.msgpack.decode(data[start:], type=SegmentBatch)
    except msgspec.MsgspecError as error:
        raise CorruptBatchError(f"{name} does not parse: {error}") from error


def _sum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=SUM_BYTES).digest()

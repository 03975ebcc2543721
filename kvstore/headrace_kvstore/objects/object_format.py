"""The format of an object, which holds one KV block. The name holds everything but the block's
bytes.

    name   = NAMESPACE_DIGEST/BLOCK_HASH.PLACE.WRITER         digest, hash and place in hex
    place  = layers u32, layer bytes u64, parent u64, depth u32, tenant u32, one zero byte,
             seconds to compute it f32                        little-endian
    object = [one u64 checksum a layer][layer 0][layer 1]...

So a listing describes all blocks of a store, without reading any object. The size follows from the
name, so a listing also shows which objects are truncated. Objects of equal names have equal bytes,
so writing an object again repairs it.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass

import numpy as np

from headrace_kvstore.blocks.checksum import block_seed, copy_sum, layer_seeds
from headrace_kvstore.nvme.record import BlockShape, WriteRequest, padded

WRITER = r"[A-Za-z0-9_-]{1,64}"
_PLACE = struct.Struct("<IQQIIxf")
_NAME = re.compile(
    rf"([0-9a-f]{{32}})/([0-9a-f]{{64}})\.([0-9a-f]{{{2 * _PLACE.size}}})\.({WRITER})"
)
_SUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class ObjectName:
    """Fields of an object's name. `hash`: 32 bytes; `parent`: as in SLOT."""

    shape: BlockShape
    hash: bytes
    writer: str
    parent: int = 0
    depth: int = 0
    tenant: int = 0
    compute_s: float = 0.0

    @classmethod
    def of(cls, shape: BlockShape, writer: str, save: WriteRequest) -> ObjectName:
        """Return the name under which a block is stored. Raises ValueError for a hash that is too
        long."""
        parent = int.from_bytes(save.parent[:8], "little")
        where = save.depth, save.tenant, save.compute_s
        return cls(shape, padded(save.hash), writer, parent, *where)

    @classmethod
    def parse(cls, text: str) -> ObjectName | None:
        """Parse a name; return None if it is not of this format."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        digest, block_hash, place, writer = match.groups()
        layers, layer_bytes, parent, depth, tenant, compute_s = _PLACE.unpack(bytes.fromhex(place))
        if not (math.isfinite(compute_s) and compute_s >= 0):
            return None
        try:
            shape = BlockShape(bytes.fromhex(digest), layers, layer_bytes)
        except ValueError:
            return None
        where = parent, depth, tenant, compute_s
        return cls(shape, bytes.fromhex(block_hash), writer, *where)

    def __str__(self) -> str:
        shape = self.shape
        place = _PLACE.pack(
            *(shape.layers, shape.layer_bytes, self.parent, self.depth, self.tenant),
            self.compute_s,
        )
        return f"{shape.digest.hex()}/{self.hash.hex()}.{place.hex()}.{self.writer}"

    @property
    def size_bytes(self) -> int:
        """Size of the whole object."""
        return object_bytes(self.shape)


def object_bytes(shape: BlockShape) -> int:
    """Return the size of an object that holds a block of this shape."""
    return _SUM_BYTES * shape.layers + shape.payload_bytes


def pack(shape: BlockShape, save: WriteRequest) -> memoryview | None:
    """Return an object's bytes; None if the bytes in memory do not match their sums.

    So no lease is needed: another block may take the memory at any time.
    """
    data = np.empty(object_bytes(shape), np.uint8)
    start = data.ctypes.data + _SUM_BYTES * shape.layers
    data[: _SUM_BYTES * shape.layers] = np.ascontiguousarray(save.sums, "<u8").view(np.uint8)
    same = np.array_equal(_copied(shape, save.hash, save.address, _layers(shape, start)), save.sums)
    return data.data if same else None


def unpack(
    shape: BlockShape, block_hash: bytes, data: memoryview, to: np.ndarray
) -> np.ndarray | None:
    """Copy an object's layers to u64 addresses (layers,); return their sums, u64 (layers,), or None
    if the bytes do not match them. `data` must have the right length."""
    sums = np.frombuffer(data, "<u8", shape.layers).astype(np.uint64)
    start = np.frombuffer(data, np.uint8).ctypes.data + _SUM_BYTES * shape.layers
    return sums if np.array_equal(_copied(shape, block_hash, start, to), sums) else None


def _copied(shape: BlockShape, block_hash: bytes, source: int, to: np.ndarray) -> np.ndarray:
    seeds = layer_seeds(block_seed(shape.digest, block_hash), shape.layers)
    return copy_sum(to, _layers(shape, source), shape.layer_bytes, seeds)


def _layers(shape: BlockShape, start: int) -> np.ndarray:
    return np.uint64(start) + np.arange(shape.layers, dtype=np.uint64) * np.uint64(
        shape.layer_bytes
    )

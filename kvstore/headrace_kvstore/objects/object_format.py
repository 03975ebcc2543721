"""The format of an object of KV blocks, and what its name alone says.

    name    = NAMESPACE_DIGEST/WRITER.TOKEN.COUNTxLAYERSxLAYER_BYTES      digest in hex
    object  = [payload 0]...[payload COUNT - 1][header 0]...[header COUNT - 1]
    payload = [layer 0][layer 1]...                                       LAYERS of LAYER_BYTES

Headers are those of `record`: each describes its block and holds one checksum a layer. They follow
the payloads, so that a truncated object lacks them. Sizes and offsets follow from the name: a
listing shows which objects are whole, and one ranged read of the headers shows their blocks.

Objects never change: a token is random and never reused. An object holds several blocks of one
prefix, because a request costs tens of milliseconds at any size. One GET of 1, 4 and 16 MiB
moves 0.3, 0.7 and 1.4 GB/s (`python -m benchmarks.kvstore --parts object`). So a name has no
room for the hashes of its blocks, and headers are read.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from headrace_kvstore.nvme.record import Block, Shape, pack_header, unpack_header

MAX_BLOCKS = 1024
MAX_HEADERS_BYTES = 16 * 2**20
"""Objects with more are none of ours."""
WRITER = r"[A-Za-z0-9_-]{1,64}"
_NAME = re.compile(
    rf"([0-9a-f]{{32}})/({WRITER})\.([0-9a-f]{{16}})\.(\d{{1,4}})x(\d{{1,8}})x(\d{{1,12}})"
)


@dataclass(frozen=True)
class ObjectName:
    """An object's name, taken apart."""

    shape: Shape
    writer: str
    token: str
    count: int
    """Blocks in it."""

    @classmethod
    def new(cls, shape: Shape, writer: str, count: int) -> ObjectName:
        """A name that no object has."""
        return cls(shape, writer, secrets.token_hex(8), count)

    @classmethod
    def parse(cls, text: str) -> ObjectName | None:
        """None for a name that is none of ours, or describes what nobody here writes."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        digest, writer, token, count, layers, layer_bytes = match.groups()
        try:
            shape = Shape(bytes.fromhex(digest), int(layers), int(layer_bytes))
        except ValueError:
            return None
        name = cls(shape, writer, token, int(count))
        usual = 1 <= name.count <= MAX_BLOCKS and name.headers_bytes <= MAX_HEADERS_BYTES
        return name if usual and str(name) == text else None

    def __str__(self) -> str:
        shape = self.shape
        return (
            f"{shape.digest.hex()}/{self.writer}.{self.token}"
            f".{self.count}x{shape.layers}x{shape.layer_bytes}"
        )

    def payload_offset(self, position: int) -> int:
        """Where a block's layer 0 begins."""
        return position * self.shape.payload_bytes

    @property
    def headers_offset(self) -> int:
        """Where header 0 begins."""
        return self.payload_offset(self.count)

    @property
    def headers_bytes(self) -> int:
        """All headers together."""
        return self.count * self.shape.header_bytes

    @property
    def size_bytes(self) -> int:
        """The whole object."""
        return self.headers_offset + self.headers_bytes


def most_blocks(shape: Shape, object_bytes: int) -> int:
    """How many blocks an object of about that size holds: at least one."""
    each = shape.payload_bytes + shape.header_bytes
    headers = MAX_HEADERS_BYTES // shape.header_bytes
    return max(1, min(object_bytes // each, MAX_BLOCKS, headers))


def pack_headers(shape: Shape, blocks: Sequence[Block]) -> bytes:
    """All headers of an object, in the order of its payloads."""
    return b"".join(pack_header(shape, block) for block in blocks)


def unpack_headers(name: ObjectName, data: bytes | memoryview) -> list[Block | None]:
    """The block at each position; None where a header does not verify."""
    step, view = name.shape.header_bytes, memoryview(data)
    return [unpack_header(name.shape, view[i * step : (i + 1) * step]) for i in range(name.count)]

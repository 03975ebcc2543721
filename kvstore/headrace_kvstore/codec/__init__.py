"""Codecs: how one layer of one KV block is stored. Pure: numpy and numba, no I/O, no engine.

`raw` is the default and exact. `fp8` and `int4` are lossy, opted into, and live in namespaces of
their own (`tag` and version go into the digest).

There is no lossless one. No coder of single bytes saves more than a third of real bfloat16 KV. zstd
does, and unpacks 1.3 GB/s on one core; lz4 saves a sixth at 2.4 GB/s. Unpacked after the transfer,
either is faster than raw bytes only over media below 0.4 GB/s. Disks here read 1.8 GB/s and a copy
moves 12 (`python -m benchmarks.kvcodec`). Blocks would also no longer be of one size.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace_kvstore.codec.base import Codec, Coder, QuantizationRangeError, Raw, tag
from headrace_kvstore.codec.fp8 import Fp8
from headrace_kvstore.codec.int4 import Int4
from headrace_kvstore.codec.shape import LayerShape, Order

CODECS: Mapping[str, type[Codec]] = {"raw": Raw, "fp8": Fp8, "int4": Int4}
"""Codecs by the name that an operator gives."""

__all__ = [
    "CODECS",
    "Codec",
    "Coder",
    "Fp8",
    "Int4",
    "LayerShape",
    "Order",
    "QuantizationRangeError",
    "Raw",
    "tag",
]

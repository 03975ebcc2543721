"""Codecs: how one layer of one KV block is stored. Pure: numpy and numba, no I/O, no engine.

`raw` is the default and exact. `fp8` and `int4` are lossy, opted into, and live in namespaces of
their own (`tag` and version go into the digest).

There is no lossless one. No coder of single bytes saves more than a third of real bfloat16 KV; zstd
does and unpacks 1.3 GB/s on one core, lz4 saves a sixth at 2.4 GB/s. Unpacked after the transfer,
either is faster than raw bytes only over media below 0.4 GB/s, where disks here read 1.8 and a copy
moves 12 (`python -m benchmarks.kvcodec`); and blocks would no longer be of one size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace_kvstore.codec.base import Codec, Coder, Errors, Unfit, tag, warm
from headrace_kvstore.codec.fp8 import Fp8
from headrace_kvstore.codec.int4 import Int4
from headrace_kvstore.codec.raw import Raw
from headrace_kvstore.codec.shape import LayerShape, Order
from headrace_kvstore.codec.window import raw_blocks, window_codec

CODECS: Mapping[str, Callable[..., Codec]] = {"raw": Raw, "fp8": Fp8, "int4": Int4}
"""Codecs by the name that an operator gives."""

__all__ = [
    "CODECS",
    "Codec",
    "Coder",
    "Errors",
    "Fp8",
    "Int4",
    "LayerShape",
    "Order",
    "Raw",
    "Unfit",
    "codec",
    "raw_blocks",
    "tag",
    "warm",
    "window_codec",
]


def codec(name: str, /, **parameters: int) -> Codec:
    """The codec of this name; ValueError for an unknown name or parameter."""
    if name not in CODECS:
        raise ValueError(f"no codec {name!r}: there are {', '.join(CODECS)}")
    try:
        made = CODECS[name](**parameters)
    except TypeError:
        raise ValueError(f"codec {name} does not take all of {', '.join(parameters)}") from None
    if unknown := set(parameters) - set(made.parameters):
        raise ValueError(f"codec {name} has no parameter {', '.join(sorted(unknown))}")
    return made

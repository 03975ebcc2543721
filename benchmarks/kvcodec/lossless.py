"""Would a lossless codec pay? Byte planes and a general compressor, on real KV.

The high bytes of bfloat16 (sign, seven exponent bits) repeat, the low ones (an exponent bit, the
mantissa) hardly do: so the planes are parted and each is compressed if that makes it smaller.

Loading S bytes over a medium of B bytes/s takes S/B raw, and S/(r B) + S/D with a codec of ratio r
that decodes D bytes/s: it pays where B < D (1 - 1/r), or, with a core to spare that decodes beside
the transfer, B < D at the very most.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
from numba import njit

Bytes = npt.NDArray[np.uint8]
CODECS = {"lz4": ("lz4_raw", None), "zstd1": ("zstd", 1), "zstd3": ("zstd", 3)}


@njit(nogil=True)
def part(layer: Any, low: Any, high: Any) -> None:
    """Even bytes into `low`, odd ones into `high`."""
    for i in range(low.size):
        low[i], high[i] = layer[2 * i], layer[2 * i + 1]


@njit(nogil=True)
def join(low: Any, high: Any, elements: Any) -> None:
    """The reverse, two bytes at a time."""
    for i in range(low.size):
        elements[i] = low[i] | (np.uint16(high[i]) << 8)


def entropy_ratio(layers: list[Bytes]) -> float:
    """Return the best ratio of any order-0 coder of the byte planes, layer by layer."""
    bits = 0.0
    for layer in layers:
        for plane in (layer[0::2], layer[1::2]):
            share = np.bincount(plane, minlength=256) / plane.size
            share = share[share > 0]
            bits -= plane.size * float((share * np.log2(share)).sum())
    return 8 * sum(layer.size for layer in layers) / bits


def measure(layers: list[Bytes]) -> dict[str, float]:
    """`NAME.ratio`, `NAME.encode_gb_s`, `NAME.decode_gb_s` for each compressor."""
    figures: dict[str, float] = {}
    low, high = (np.empty(layers[0].size // 2, np.uint8) for _ in range(2))
    joined = np.empty(layers[0].size // 2, np.uint16)
    part(layers[0], low, high)
    join(low, high, joined)
    for name, (kind, level) in CODECS.items():
        codec = pyarrow.Codec(kind, compression_level=level)
        size, encode_s, decode_s = 0, [], []
        for layer in layers:
            began = time.perf_counter()
            part(layer, low, high)
            planes = []
            for plane in (low, high):
                packed = codec.compress(plane)
                planes.append(packed if len(packed) < plane.size else plane.copy())
            encode_s.append(time.perf_counter() - began)
            size += sum(len(plane) for plane in planes)
            began = time.perf_counter()
            opened = [
                plane
                if isinstance(plane, np.ndarray)
                else np.frombuffer(codec.decompress(plane, low.size), np.uint8)
                for plane in planes
            ]
            join(*opened, joined)
            decode_s.append(time.perf_counter() - began)
            if not np.array_equal(joined.view(np.uint8), layer):
                raise RuntimeError(f"{name} did not give the layer back")
        figures[f"{name}.ratio"] = sum(layer.size for layer in layers) / size
        figures[f"{name}.encode_gb_s"] = layers[0].size / statistics.median(encode_s) / 1e9
        figures[f"{name}.decode_gb_s"] = layers[0].size / statistics.median(decode_s) / 1e9
    return figures

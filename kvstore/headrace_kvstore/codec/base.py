"""What a codec is: one layer of one KV block into stored bytes, and back.

Stored bytes have one fixed size for a shape, so that arena slots and file records are all alike. A
lossy codec is opted into; its tag and version stand in the namespace digest, so that what it
decoded is never taken for exact KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace_kvstore.codec.lanes import BITS
from headrace_kvstore.codec.shape import LayerShape, Plane

Bytes = npt.NDArray[np.uint8]

ALIGN_BYTES = 64
"""Stored layers are whole cache lines, so that each layer of a payload begins on one."""


class Unfit(ValueError):
    """The layer holds a value that the codec cannot keep within its bound: do not store it.

    NaN, infinity, or a magnitude of 2^126 and more (float16: 2^15), a quarter (half) of the
    format's largest: KV that no attention survives anyway.
    """


@dataclass(frozen=True)
class Errors:
    """Measured on SmolLM2-135M in bfloat16, with a codec's default parameters, over 1,024 tokens.

    By `python -m benchmarks.kvcodec`; another model has its own.
    """

    k_rms: float
    """RMS of K's error by RMS of K."""
    v_rms: float
    attention_rms: float
    """RMS error of softmax(q K^T) V by its RMS, K and V both decoded."""
    kl: float
    """Mean KL divergence, in nats, of the next token's distribution from the exact one."""
    top1: float
    """Share of positions whose likeliest next token stays the same."""


EXACT = Errors(0.0, 0.0, 0.0, 0.0, 1.0)


class Coder(Protocol):
    """A codec bound to one shape. Methods are thread-safe and release the GIL at work."""

    @property
    def layer_bytes(self) -> int: ...

    @property
    def stored_bytes(self) -> int: ...

    def encode(self, layer: Bytes, stored: Bytes) -> None:
        """Fill `stored` from `layer`; same bytes in, same bytes out.

        Both are contiguous uint8 arrays of exactly `layer_bytes` and `stored_bytes`, the layer
        aligned to its elements and `stored` to 2 bytes. ValueError where they are not; `Unfit` for
        values that the codec refuses (`stored` is then undefined).
        """
        ...

    def decode(self, stored: Bytes, layer: Bytes) -> None:
        """Fill `layer` from what `encode` made. ValueError for buffers as above.

        Any bytes decode without fault, to whatever numbers they mean: checksums come before.
        """
        ...


class Codec(Protocol):
    """One way to store layers."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int:
        """Grows when stored bytes change in meaning."""
        ...

    @property
    def parameters(self) -> Mapping[str, int]:
        """What else decides the bytes; part of the namespace through `tag`."""
        ...

    @property
    def lossy(self) -> bool:
        """Decoded bytes may differ from the engine's own, or stem from such bytes."""
        ...

    @property
    def identity(self) -> bool:
        """Stored bytes are the layer's own: move them without calling encode or decode."""
        ...

    @property
    def window_tokens(self) -> int:
        """A prompt's last tokens whose blocks stay raw (see `window`)."""
        ...

    @property
    def errors(self) -> Errors: ...

    def stored_bytes(self, shape: LayerShape) -> int:
        """Bytes of one stored layer; ValueError for a shape that the codec does not take."""
        ...

    def bind(self, shape: LayerShape) -> Coder:
        """A coder of such layers; ValueError as above."""
        ...


def tag(codec: Codec) -> str:
    """Name and parameters in one string, for the namespace: `int4:group=32,window_tokens=128`."""
    inside = ",".join(f"{key}={value}" for key, value in sorted(codec.parameters.items()))
    return f"{codec.name}:{inside}" if inside else codec.name


def warm(coder: Coder) -> None:
    """Compile what this coder needs (seconds once on a machine, then cached on disk)."""
    layer = np.zeros(coder.layer_bytes, np.uint8)
    stored = np.zeros(coder.stored_bytes, np.uint8)
    coder.encode(layer, stored)
    coder.decode(stored, layer)


def round_up(size_bytes: int) -> int:
    """The next multiple of `ALIGN_BYTES`."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def check(name: str, buffer: Bytes, size_bytes: int) -> Bytes:
    """`buffer`; ValueError unless it is a contiguous uint8 array of this size."""
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ValueError(f"{name} is no contiguous one-dimensional uint8 array")
    if buffer.size != size_bytes:
        raise ValueError(f"{name} has {buffer.size} bytes, not {size_bytes}")
    return buffer


def view(name: str, buffer: Bytes, size_bytes: int, element: Any) -> Any:
    """`buffer` as an array of `element`; ValueError as in `check`, and if it is not aligned."""
    elements = check(name, buffer, size_bytes).view(element)
    if not elements.flags.aligned:
        raise ValueError(f"{name} begins within an element of {elements.itemsize} bytes")
    return elements


def quantisable(codec: str, shape: LayerShape) -> tuple[Plane, Plane]:
    """K and V of the shape; ValueError where it has no numbers that `codec` could quantise."""
    if shape.dtype not in BITS:
        raise ValueError(f"{codec} takes {', '.join(BITS)}, not {shape.dtype}")
    return shape.planes


def limit_bits(shape: LayerShape) -> int:
    """Bits of the float32 from whose magnitude on values are refused (see `Unfit`).

    Below it, neither rounding up nor m + 15 s of int4 can reach infinity.
    """
    limit = 2.0**15 if shape.dtype == "float16" else 2.0**126
    return int(np.float32(limit).view(np.int32))

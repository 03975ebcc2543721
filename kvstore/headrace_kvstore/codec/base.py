"""Codecs: from one layer of one KV block to stored bytes, and back.

All layers of one shape have the same number of stored bytes, so arena slots and file records have
one size. A lossy codec is opted into. Its tag and version are part of the namespace digest, so
decoded KV is never taken for exact KV.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from headrace_kvstore.codec.bitcast import BITS
from headrace_kvstore.codec.shape import LayerShape, Order

Bytes = npt.NDArray[np.uint8]

ALIGN_BYTES = 64
"""Size of a cache line; stored layers are whole lines, so each layer of a payload begins on one."""


class QuantizationRangeError(ValueError):
    """Error: the layer holds a value that the codec cannot keep within its bound. Do not store it.

    Such values are NaN, infinity, and magnitudes from 2^126 (float16: 2^15) on, a quarter (half) of
    the format's largest. No attention survives such KV anyway.
    """


class Coder:
    """A codec bound to one shape. Methods are thread-safe and release the GIL at work.

    Subclasses implement `write` and `read`, which see layers in `Order.VEC`: elements that share a
    scale follow each other. Layers in another order are reordered on the way.

    Args:
        codec: the codec's name, for messages.
        end_bytes: bytes that `write` fills. The size of a stored layer is this, rounded up to
            `ALIGN_BYTES`.
    """

    def __init__(self, codec: str, shape: LayerShape, end_bytes: int) -> None:
        if shape.dtype not in BITS:
            raise ValueError(f"{codec} takes {', '.join(BITS)}, not {shape.dtype}")
        self.codec, self.layer_bytes, self.end_bytes = codec, shape.layer_bytes, end_bytes
        self._shape, self._vec = shape, replace(shape, order=Order.VEC)
        self.stored_bytes = -(-end_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self.bits = BITS[shape.dtype]
        # Values from here on are refused (see `QuantizationRangeError`). Below, neither rounding up
        # nor int4's m + 15 s can reach infinity.
        limit = 2.0**15 if shape.dtype == "float16" else 2.0**126
        self.limit = int(np.float32(limit).view(np.int32))

    def write(self, layer: Any, stored: Bytes) -> bool:
        """Fill `stored` up to `end_bytes`; return False if the codec refuses a value."""
        raise NotImplementedError

    def read(self, stored: Bytes, layer: Any) -> None:
        """Fill `layer`, whose elements are `bitcast` integers."""
        raise NotImplementedError

    def encode(self, layer: Bytes, stored: Bytes) -> None:
        """Fill `stored` from `layer`; same bytes in, same bytes out.

        Both are contiguous uint8 arrays of exactly `layer_bytes` and `stored_bytes`, the layer
        aligned to its elements and `stored` to 2 bytes. Raises ValueError if they are not, and
        `QuantizationRangeError` for values that the codec refuses (`stored` is then undefined).
        """
        source = view("layer", layer, self.layer_bytes, self.bits)
        if self._shape != self._vec:
            source = turned(source, self._shape, self._vec)
        if not self.write(source, view("stored", stored, self.stored_bytes, np.uint8)):
            raise QuantizationRangeError(
                f"{self.codec} refuses a layer with values not finite or too large"
            )
        stored[self.end_bytes :] = 0

    def decode(self, stored: Bytes, layer: Bytes) -> None:
        """Fill `layer` from the bytes that `encode` made. Raises ValueError for wrong buffers.

        Any bytes decode without an error, to some numbers. So compare checksums before.
        """
        target = view("layer", layer, self.layer_bytes, self.bits)
        source = view("stored", stored, self.stored_bytes, np.uint8)
        if self._shape == self._vec:
            return self.read(source, target)
        vec = np.empty_like(target)
        self.read(source, vec)
        target[:] = turned(vec, self._vec, self._shape)

    def warm(self) -> None:
        """Compile what this coder needs (seconds once on a machine, then cached on disk)."""
        layer = np.zeros(self.layer_bytes, np.uint8)
        stored = np.zeros(self.stored_bytes, np.uint8)
        self.encode(layer, stored)
        self.decode(stored, layer)


@dataclass(frozen=True)
class Codec:
    """One way to store layers. Its dataclass fields are its parameters."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Version, incremented when stored bytes change in meaning."""
    lossy: ClassVar[bool] = True
    """Whether decoded bytes may differ from the engine's own."""

    @property
    def parameters(self) -> dict[str, int]:
        """Other parameters that decide the bytes; part of the namespace through `tag`."""
        return asdict(self)

    @property
    def window_tokens(self) -> int:
        """Number of a prompt's last tokens that are computed whatever the store holds."""
        return 0

    def bind(self, shape: LayerShape) -> Coder:
        """Return a coder of such layers. Raises ValueError for a shape that the codec does not
        take."""
        raise NotImplementedError

    def stored_bytes(self, shape: LayerShape) -> int:
        """Return the bytes of one stored layer. Raises ValueError as `bind`."""
        return self.bind(shape).stored_bytes


@dataclass(frozen=True)
class Raw(Codec):
    """The default: stored bytes are the layer's own, of any shape. Nothing is encoded."""

    name = "raw"
    lossy = False

    def stored_bytes(self, shape: LayerShape) -> int:
        return shape.layer_bytes


def tag(codec: Codec) -> str:
    """Return name and parameters for the namespace, such as `int4:group=32,window_tokens=128`."""
    inside = ",".join(f"{key}={value}" for key, value in sorted(codec.parameters.items()))
    return f"{codec.name}:{inside}" if inside else codec.name


def turned(layer: Any, order: LayerShape, wanted: LayerShape) -> Any:
    """Return the layer's elements in another order."""
    result = np.empty_like(layer)
    for to, of in zip(wanted.halves(result), order.halves(layer), strict=True):
        to[...] = of
    return result


def view(name: str, buffer: Bytes, size_bytes: int, element: Any) -> Any:
    """Return `buffer` as an array of `element`. Raises ValueError unless it is an aligned,
    contiguous, one-dimensional uint8 array of this size."""
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ValueError(f"{name} is no contiguous one-dimensional uint8 array")
    if buffer.size != size_bytes:
        raise ValueError(f"{name} has {buffer.size} bytes, not {size_bytes}")
    elements = buffer.view(element)
    if not elements.flags.aligned:
        raise ValueError(f"{name} begins within an element of {elements.itemsize} bytes")
    return elements

"""KV layers as an engine lays them out, written naively from the definition of each order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace_kvstore.codec import LayerShape, Order

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_AXES = {"hnd": (0, 1, 2), "nhd": (1, 0, 2)}
"""Where heads, tokens and channels of [heads, tokens, channels] go."""


def to_bits(numbers: Floats, dtype: str) -> Bytes:
    """Elements of `dtype` nearest to the numbers, ties to even, as bytes."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        kept = np.where(np.isnan(numbers), (bits >> 16) | 0x40, rounded)
        return kept.astype(np.uint16).ravel().view(np.uint8)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(numbers).astype(dtype).ravel().view(np.uint8)


def from_bits(layer: Bytes, dtype: str) -> Floats:
    """The numbers again."""
    if dtype == "bfloat16":
        return (layer.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return layer.view(dtype).astype(np.float32)


def to_layer(shape: LayerShape, keys: Floats, values: Floats) -> Bytes:
    """One layer of a block from K and V, each [heads, tokens, channels]."""
    if shape.order is Order.VEC:
        both = np.stack((keys.swapaxes(1, 2).reshape(len(keys), -1), values.reshape(len(keys), -1)))
        return to_bits(both.swapaxes(0, 1), shape.dtype)
    axes = _AXES[shape.order.removesuffix("_apart")]
    turned = [part.transpose(axes) for part in (keys, values)]
    apart = shape.order.endswith("_apart")
    return to_bits(np.stack(turned) if apart else np.concatenate(turned, axis=2), shape.dtype)


def from_layer(shape: LayerShape, layer: Bytes) -> tuple[Floats, Floats]:
    """K and V of one layer, each [heads, tokens, channels]."""
    h, n, d = shape.kv_heads, shape.block_tokens, shape.head_dim
    numbers = from_bits(layer, shape.dtype)
    if shape.order is Order.VEC:
        both = numbers.reshape(h, 2, n * d)
        return both[:, 0].reshape(h, d, n).swapaxes(1, 2), both[:, 1].reshape(h, n, d)
    axes = _AXES[shape.order.removesuffix("_apart")]
    outer = [(h, n, d)[axis] for axis in axes[:2]]
    if shape.order.endswith("_apart"):
        keys, values = numbers.reshape(2, *outer, d)
    else:
        keys, values = np.split(numbers.reshape(*outer, 2 * d), 2, axis=2)
    return keys.transpose(axes), values.transpose(axes)

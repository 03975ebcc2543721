"""KV that is held in fewer bits, by the codecs of the store: what they make of it, and bytes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.longcontext.held import Held
from headrace_kvstore.codec import CODECS, Coder, LayerShape, Order

TOKENS = 32
"""Tokens of a head that share scales; the last ones are padded with the head's last token."""
ENGINE_BYTES = 2
"""Bytes of an element of the KV to which shares refer."""


def coder_of(codec: str, dim: int) -> Coder:
    """Return the coder of a head's pages."""
    return CODECS[codec]().bind(LayerShape(1, TOKENS, dim, "float32", Order.VEC))


def ratio(codec: str, dim: int) -> float:
    """Return the codec's bytes over those of the engine's own KV."""
    return coder_of(codec, dim).stored_bytes / (2 * TOKENS * dim * ENGINE_BYTES)


def quantised(held: Held, codec: str) -> Held:
    """Return KV after encoding and decoding with a codec."""
    found, coder = Held([], []), coder_of(codec, held.keys[0][0].shape[1])
    for keys, values in zip(held.keys, held.values, strict=True):
        both = [_there_and_back(coder, k, v) for k, v in zip(keys, values, strict=True)]
        found.keys.append([k for k, _ in both])
        found.values.append([v for _, v in both])
    return found


def _there_and_back(coder: Coder, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    count, dim = keys.shape
    if not count:
        return keys, values
    places = torch.arange(-(-count // TOKENS) * TOKENS).clamp(max=count - 1)
    k, v = (one[places].unflatten(0, (-1, TOKENS)) for one in (keys, values))
    pages = torch.cat([k.transpose(1, 2).flatten(1), v.flatten(1)], 1).numpy()
    stored = np.zeros(coder.stored_bytes, np.uint8)
    for page in pages:
        coder.encode(page.view(np.uint8), stored)
        coder.decode(stored, page.view(np.uint8))
    found = torch.from_numpy(pages).unflatten(1, (2, -1))
    k = found[:, 0].unflatten(1, (dim, TOKENS)).transpose(1, 2)
    v = found[:, 1].unflatten(1, (TOKENS, dim))
    return k.flatten(0, 1)[:count], v.flatten(0, 1)[:count]

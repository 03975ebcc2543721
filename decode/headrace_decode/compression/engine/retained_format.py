"""Bytes that describe the blocks of retained KV: which head has which head pages, and the
predictor's scores.

    int32 [layers, kv_heads]          number of head pages of each head (`RetainedPages.counts`)
    fp32 [head pages, page_tokens]    the predictor's scores of their tokens
                                      (`RetainedContext.predicted`)

Head pages are in the order of `RetainedPages.of`, so nothing else is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_decode.compression.engine.compressed_attention import (
    RetainedPages,
    filled_places,
)
from headrace_decode.compression.engine.head_pages import HeadPages
from headrace_decode.compression.engine.incremental import RetainedContext
from headrace_decode.compression.scores import ABSENT


def encode_retained(held: RetainedContext) -> NDArray[np.uint8]:
    """Return the bytes that describe retained KV."""
    counts = held.dropped.counts.cpu().numpy()
    predicted = held.predicted[held.predicted > ABSENT].cpu().numpy()
    parts = counts.astype("<i4"), predicted.astype("<f4")
    return np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])


def decode_retained(
    data: NDArray[np.uint8], tokens: int, blocks: Sequence[int], head_pages: HeadPages
) -> RetainedContext:
    """Return the retained KV of a context from blocks that came from a store.

    Args:
        data: its description. tokens: number of tokens of the context. blocks: blocks that hold it.

    A wrong description yields wrong KV, and has no other effect.
    """
    room, shape = head_pages.of_blocks(blocks), (head_pages.layers, head_pages.kv_heads)
    at = 4 * shape[0] * shape[1]
    numbers = data[:at].view("<i4").reshape(shape).astype(np.int64)
    if (numbers < 0).any() or numbers.sum() > len(room):
        numbers[:] = 0
    per, total, device = head_pages.page_tokens, int(numbers.sum()), head_pages.device
    counts = torch.from_numpy(numbers).to(device)
    filled = filled_places(counts)[1]
    predicted = torch.full((*filled.shape, per), ABSENT, device=device)
    found = data[at : at + 4 * total * per].view("<f4").reshape(total, per)
    predicted[filled] = torch.from_numpy(np.nan_to_num(np.abs(found))).to(device)
    return RetainedContext(RetainedPages.filled(tokens, counts, room), predicted.flatten(-2))

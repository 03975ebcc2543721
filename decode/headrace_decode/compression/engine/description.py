"""Bytes that describe the blocks of kept KV: which head has which cells, and the gate's scores.

    int32 [layers, kv_heads]              number of cells of each head (`Dropped.counts`)
    fp32 [cells, unit_tokens]             the gate's scores of their tokens (`Held.told`)

Cells are in the order of `Dropped.of`, so nothing else is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_decode.compression.engine.cells import Cells
from headrace_decode.compression.engine.dropped import Dropped
from headrace_decode.compression.engine.streaming import Held
from headrace_decode.compression.scores import NOWHERE


def describe(held: Held) -> NDArray[np.uint8]:
    """Return the bytes that describe kept KV."""
    counts = held.dropped.counts
    told = held.told[held.told > NOWHERE].numpy()
    parts = counts.astype("<i4"), told.astype("<f4")
    return np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])


def described(data: NDArray[np.uint8], tokens: int, blocks: Sequence[int], cells: Cells) -> Held:
    """Return the kept KV of a context from blocks that came from a store.

    Args:
        data: its description. tokens: number of tokens of the context. blocks: blocks that hold it.

    A wrong description yields wrong KV, and has no other effect.
    """
    room, shape = cells.of_blocks(blocks), (len(cells.layers), cells.kv_heads)
    at = 4 * shape[0] * shape[1]
    counts = data[:at].view("<i4").reshape(shape).astype(np.int64)
    if (counts < 0).any() or counts.sum() > len(room):
        counts[:] = 0
    per, total = cells.unit_tokens, int(counts.sum())
    filled = np.arange(int(counts.max())) < counts[..., None]
    table = np.zeros(filled.shape, np.int32)
    table[filled] = room[:total]
    told = torch.full((*filled.shape, per), NOWHERE)
    found = data[at : at + 4 * total * per].view("<f4").reshape(total, per)
    told[torch.from_numpy(filled)] = torch.from_numpy(np.nan_to_num(np.abs(found)))
    return Held(Dropped(tokens, table, counts), told.flatten(-2))

"""The tokens of stored blocks, in a ring of fixed size that overwrites the oldest blocks.

A place is an ever growing number: token `place % block_tokens` of block `place // block_tokens`.
The block's index in the ring is its number modulo the ring's size. A block points to the one before
it in its prompt, so a prompt that extends another stores only its new blocks, and prompts form a
tree.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.numba_jit import jit

DIGEST_BYTES = 32
"""Length of a block's digest."""


class Texts(NamedTuple):
    """Arrays over the ring's blocks.

    Attributes:
        tokens: int32 [blocks, block_tokens].
        previous: int64, the block before it in its prompt; -1 for a first one.
        number: int64, the block's index in its prompt, from 0.
        tenant: uint64.
        digests: uint8 [blocks, DIGEST_BYTES].
    """

    tokens: NDArray[np.int32]
    previous: NDArray[np.int64]
    number: NDArray[np.int64]
    tenant: NDArray[np.uint64]
    digests: NDArray[np.uint8]

    @staticmethod
    def of(blocks: int, block_tokens: int) -> Texts:
        return Texts(
            np.zeros((blocks, block_tokens), np.int32),
            np.full(blocks, -1, np.int64),
            np.zeros(blocks, np.int64),
            np.zeros(blocks, np.uint64),
            np.zeros((blocks, DIGEST_BYTES), np.uint8),
        )


@jit(nogil=True)
def back(texts, tokens, at, place, first):  # type: ignore[no-untyped-def]
    """Return how many tokens agree, backwards from tokens[at] and the token at `place`.

    Args:
        first: the oldest block that the ring still holds.
    """
    size, blocks = texts.tokens.shape[1], len(texts.tokens)
    block, offset, count = place // size, place % size, 0
    while at >= 0 and texts.tokens[block % blocks, offset] == tokens[at]:
        count, at, offset = count + 1, at - 1, offset - 1
        if offset < 0:
            block = texts.previous[block % blocks]
            if block < first:
                break
            offset = size - 1
    return count


@jit(nogil=True)
def forth(texts, tokens, at, place, end):  # type: ignore[no-untyped-def]
    """Return how many tokens agree, forwards from tokens[at] and the token after `place`.

    Args:
        end: the block number after the latest block.

    Returns:
        The number of tokens, and the place of the last one that agrees.
    """
    size, blocks = texts.tokens.shape[1], len(texts.tokens)
    block, offset, count = place // size, place % size, 0
    while at < len(tokens):
        if offset + 1 == size:
            after = block + 1
            if after >= end or texts.previous[after % blocks] != block:
                break
            if texts.tokens[after % blocks, 0] != tokens[at]:
                break
            block, offset = after, 0
        elif texts.tokens[block % blocks, offset + 1] == tokens[at]:
            offset += 1
        else:
            break
        count, at = count + 1, at + 1
    return count, block * size + offset

"""How much each token's key will be attended to: from queries that stand for later ones.

Which questions come is not known when KV is dropped. Two kinds of queries stand for them:

    repeating   of rows that repeat the context behind itself. Every token is looked up once, by
                the heads that look up (KVzip, arXiv 2505.23416). `repeats` plans those rows.
    earlier     of the context's own rows, turned to positions behind it: what its text asks for as
                it goes on (the queries that Expected Attention, arXiv 2510.00636, takes for normal)

Facts are lost without the first, and the thread of a text without the second. `Received` gathers
the attention that queries pay; `pooled` adds both. KVzip keeps the largest weight that a key gets.
The root of the mean square is better here: a key that many queries need a little counts, too, and
a single query counts less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

ROWS_AT_ONCE = 256
LEAD_TOKENS = 8
"""Of a context's part that stand before its repetition, so that heads know where to look."""


def repeats(tokens: int, block_tokens: int = 2048) -> Iterator[tuple[int, int, int]]:
    """(lead, begin, end) of each part: tokens `lead` to `end` follow the context once more.

    Attention of the rows from `begin` on counts. Parts bound the memory that repeating takes.
    """
    if tokens < 1 or block_tokens < 1:
        raise ValueError(f"nothing to repeat: {tokens} tokens in blocks of {block_tokens}")
    for begin in range(0, tokens, block_tokens):
        yield max(0, begin - LEAD_TOKENS), begin, min(tokens, begin + block_tokens)


class Received:
    """Attention that keys of one layer get, over queries that come in parts.

    Args:
        keys: fp32 [heads, tokens, head_dim], rotated.
        scale: of the logits.
    """

    def __init__(self, keys: Tensor, scale: float) -> None:
        self._keys, self._scale = keys, scale
        self._squares = torch.zeros(keys.shape[:2])
        self._sums = torch.zeros(keys.shape[:2])
        self._largest = torch.zeros(keys.shape[:2])
        self._rows = 0

    def add(self, queries: Tensor) -> None:
        """Queries behind all keys, fp32 [rows, heads * group, head_dim], rotated."""
        by_head = queries.unflatten(1, (len(self._keys), -1)).transpose(0, 1).flatten(1, 2)
        self._rows += by_head.shape[1]
        for some in (by_head * self._scale).split(ROWS_AT_ONCE, 1):
            weights = (some @ self._keys.transpose(1, 2)).softmax(-1)
            self._squares += weights.square().sum(1)
            self._sums += weights.sum(1)
            torch.maximum(self._largest, weights.amax(1), out=self._largest)

    def _seen(self) -> int:
        if not self._rows:
            raise ValueError("no queries were added")
        return self._rows

    def root_mean_square(self) -> Tensor:
        """fp32 [heads, tokens]."""
        return (self._squares / self._seen()).sqrt()

    def mean(self) -> Tensor:
        """fp32 [heads, tokens]."""
        return self._sums / self._seen()

    def largest(self) -> Tensor:
        """fp32 [heads, tokens], over queries and the heads of the group."""
        self._seen()
        return self._largest


def pooled(parts: Sequence[Received]) -> Tensor:
    """Scores of one layer from kinds of queries that count alike, however many each has.

    Returns:
        fp32 [heads, tokens]: the root of the sum of their mean squares.
    """
    squares = [one.root_mean_square().square() for one in parts]
    return torch.stack(squares).sum(0).sqrt()

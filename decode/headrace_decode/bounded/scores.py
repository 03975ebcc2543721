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

from headrace_engine.rope import Rope

ROWS_AT_ONCE = 64
PART_TOKENS = 256
"""Of a context that are repeated together. In longer parts, rows look more into their own part and
less into the context."""
LEAD_TOKENS = 8
"""Of a context that stand before the repetition of a part, so that heads know where to look."""
BEHIND_TOKENS = 64
"""Positions behind a context that its own rows are turned to, one after the other."""
NOWHERE = -1.0
"""Score of a place without a token: below all others."""


def repeats(tokens: int, part_tokens: int = PART_TOKENS) -> Iterator[tuple[int, int, int]]:
    """(lead, begin, end) of each part: tokens `lead` to `end` follow the context once more.

    Attention of the rows from `begin` on counts.
    """
    if tokens < 1 or part_tokens < 1:
        raise ValueError(f"nothing to repeat: {tokens} tokens in parts of {part_tokens}")
    for begin in range(0, tokens, part_tokens):
        yield max(0, begin - LEAD_TOKENS), begin, min(tokens, begin + part_tokens)


def turned_by(rows: Tensor, first: int, tokens: int) -> Tensor:
    """Positions that a context's own rows are turned by: int64 [rows].

    Args:
        rows: int64 [rows], their positions. first: of the first that counts.
        tokens: of the context.
    """
    return tokens + (rows - first) % BEHIND_TOKENS - rows


def as_later(asked: Tensor, rope: Rope) -> Tensor:
    """Queries of the newest rows, fp32 [rows, heads, head_dim], as if they came behind the last of
    them."""
    return rope.shift(asked, turned_by(torch.arange(len(asked)), 0, len(asked)))


class Received:
    """Attention that keys of one layer get, over queries that come in parts.

    Args:
        heads: of KV. tokens: of the context.
        scale: of the logits.
    """

    def __init__(self, heads: int, tokens: int, scale: float) -> None:
        self._scale, self._rows = scale, 0
        self._squares = torch.zeros(heads, tokens)

    def add(self, queries: Tensor, keys: Tensor, absent: Tensor | None = None) -> None:
        """
        Args:
            queries: behind all keys, fp32 [rows, heads * group, head_dim], rotated.
            keys: fp32 [heads, tokens, head_dim], rotated; the same ones each time.
            absent: bool [heads, tokens], places without a key, which get nothing.
        """
        by_head = queries.unflatten(1, (len(keys), -1)).transpose(0, 1).flatten(1, 2)
        self._rows += by_head.shape[1]
        for some in (by_head * self._scale).split(ROWS_AT_ONCE, 1):
            logits = some @ keys.transpose(1, 2)
            if absent is not None:
                logits.masked_fill_(absent[:, None], -torch.inf)
            self.see(logits.softmax(-1))

    def see(self, weights: Tensor) -> None:
        """Attention of some rows, fp32 [heads, rows, tokens]; overwritten."""
        self._squares += weights.square_().sum(1)

    def root_mean_square(self) -> Tensor:
        """fp32 [heads, tokens].

        Raises:
            ValueError: no queries were added.
        """
        if not self._rows:
            raise ValueError("no queries were added")
        return (self._squares / self._rows).sqrt()


def pooled(parts: Sequence[Received]) -> Tensor:
    """Scores of one layer from kinds of queries that count alike, however many each has.

    Returns:
        fp32 [heads, tokens]: the root of the sum of their mean squares.
    """
    squares = [one.root_mean_square().square() for one in parts]
    return torch.stack(squares).sum(0).sqrt()


def with_gate(told: Tensor, asked: Tensor, keys: Tensor, scale: float) -> Tensor:
    """One layer's scores of what is there: fp32 [kv_heads, places], `NOWHERE` where nothing is.

    Args:
        told: of the gate, fp32 [kv_heads, places], below 0 where nothing is.
        asked: of `as_later`.
        keys: fp32 [kv_heads, places, head_dim], rotated. scale: of the logits.
    """
    own = Received(len(told), told.shape[1], scale)
    own.add(asked, keys, told < 0)
    return torch.hypot(told, own.root_mean_square()).masked_fill_(told < 0, NOWHERE)

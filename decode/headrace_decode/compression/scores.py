"""Scores for how much each token's key will be attended to, from queries that stand for later ones.

The later questions are not known when KV is dropped. Two kinds of queries stand for them:

    repeating   queries of rows that repeat the context after its end. Every token is looked up
                once, by the heads that look up (KVzip, arXiv 2505.23416). `plan_repeats` plans
                these rows.
    earlier     queries of the context's own last rows, turned to positions after its end. They ask
                for what the text needs as it continues (Expected Attention, arXiv 2510.00636,
                models these queries as normally distributed)

Facts are lost without the first, and the thread of a text without the second. `AttentionReceived`
sums the attention that queries pay; `combined_scores` combines both kinds. KVzip keeps the largest
weight that a key gets. The root mean square is better here: a key that many queries need a little
counts as well, and a single query counts less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headrace_engine.rope import Rope

ROWS_AT_ONCE = 64
PART_TOKENS = 256
"""Tokens of a context that are repeated together. In longer parts, rows look more into their own
part and less into the context."""
LEAD_TOKENS = 8
"""Context tokens repeated before each part, so that heads know where to look."""
LATER_POSITIONS = 64
"""Number of positions after a context that its own rows are turned to, in rotation."""
ABSENT = -1.0
"""Score of a place without a token: below all others."""


def plan_repeats(tokens: int, part_tokens: int = PART_TOKENS) -> Iterator[tuple[int, int, int]]:
    """Yield (lead, begin, end) of each part: tokens `lead` to `end` are appended to the context.

    Only the attention of the rows from `begin` on counts.

    Raises:
        ValueError: there are no tokens, or the parts have none.
    """
    if tokens < 1 or part_tokens < 1:
        raise ValueError(f"nothing to repeat: {tokens} tokens in parts of {part_tokens}")
    for begin in range(0, tokens, part_tokens):
        yield max(0, begin - LEAD_TOKENS), begin, min(tokens, begin + part_tokens)


def later_offsets(rows: Tensor, first: int, tokens: int) -> Tensor:
    """Return the positions by which a context's own rows are turned: int64 [rows].

    Args:
        rows: int64 [rows], their positions. first: position of the first row that counts.
        tokens: number of tokens of the context.
    """
    return tokens + (rows - first) % LATER_POSITIONS - rows


def to_later_positions(asked: Tensor, rope: Rope) -> Tensor:
    """Turn queries of the newest rows, fp32 [rows, heads, head_dim], to positions after the last of
    these rows."""
    rows = torch.arange(len(asked), device=asked.device)
    return rope.shift(asked, later_offsets(rows, 0, len(asked)))


class AttentionReceived:
    """Attention that the keys of one layer get, summed over queries that come in parts.

    Args:
        heads: number of KV heads. tokens: number of tokens of the context.
        scale: scale of the logits. device: device of the queries and keys; None for the CPU.
    """

    def __init__(
        self, heads: int, tokens: int, scale: float, device: torch.device | None = None
    ) -> None:
        self._scale, self._rows = scale, 0
        self._squares = torch.zeros(heads, tokens, device=device)

    def add(self, queries: Tensor, keys: Tensor, absent: Tensor | None = None) -> None:
        """Add the attention that queries pay to the keys.

        Args:
            queries: fp32 [rows, heads * group, head_dim], rotated, at positions after all keys.
            keys: fp32 [heads, tokens, head_dim], rotated; the same in each call.
            absent: bool [heads, tokens], places without a key, which get no attention.
        """
        by_head = queries.unflatten(1, (len(keys), -1)).transpose(0, 1).flatten(1, 2)
        self._rows += by_head.shape[1]
        for some in (by_head * self._scale).split(ROWS_AT_ONCE, 1):
            logits = some @ keys.transpose(1, 2)
            if absent is not None:
                logits.masked_fill_(absent[:, None], -torch.inf)
            self.add_weights(logits.softmax(-1))

    def add_weights(self, weights: Tensor) -> None:
        """Add the attention weights of some rows, fp32 [heads, rows, tokens]; overwrites them."""
        self._squares += weights.square_().sum(1)

    def root_mean_square(self) -> Tensor:
        """Return the root mean square of the weights that each key got: fp32 [heads, tokens].

        Raises:
            ValueError: no queries were added.
        """
        if not self._rows:
            raise ValueError("no queries were added")
        return (self._squares / self._rows).sqrt()


def combined_scores(parts: Sequence[AttentionReceived]) -> Tensor:
    """Combine kinds of queries into the scores of one layer. Kinds have equal weight, whatever
    their numbers of queries.

    Returns:
        fp32 [heads, tokens]: the root of the sum of their mean squares.
    """
    squares = [one.root_mean_square().square() for one in parts]
    return torch.stack(squares).sum(0).sqrt()


def predicted_scores(predicted: Tensor, asked: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return one layer's scores: fp32 [kv_heads, places], `ABSENT` where a place has no token.

    Args:
        predicted: the predictor's scores, fp32 [kv_heads, places], below 0 where a place has no
            token.
        asked: queries that `to_later_positions` returned.
        keys: fp32 [kv_heads, places, head_dim], rotated. scale: scale of the logits.
    """
    own = AttentionReceived(len(predicted), predicted.shape[1], scale, keys.device)
    own.add(asked, keys, predicted < 0)
    return torch.hypot(predicted, own.root_mean_square()).masked_fill_(predicted < 0, ABSENT)

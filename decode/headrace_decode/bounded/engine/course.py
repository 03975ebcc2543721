"""Decides when a bounded request reads its context again, in which parts, and when it may drop; and
of one whose context is streamed, when it chooses what it holds.

    prompt computed -> part by part, each a request of its own -> the rest is scored -> what will
    stay is fitted -> as soon as there is room: drop

Queries of a part are scored while the next part is read, one layer after the other, and layers are
fitted one after the other, so that no step has much of it.

What is dropped are whole blocks of the prompt. The rest of it, and the answer, stay as they are.

A context is streamed (`Stream`) with a gate, which reads nothing again: what is held is chosen anew
whenever the prompt is a segment longer, and when it is all there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace_decode.bounded.engine.reading import Again
from headrace_decode.bounded.scores import LEAD_TOKENS, PART_TOKENS, repeats

EARLIER_TOKENS = 256
"""The context's last rows, whose queries stand for later ones."""
LEAST_PART = 64
"""Positions behind a prompt that the model must have left."""
LEAST_FREED = 4
"""Blocks that dropping has to free to be worth reading a context again."""
SEGMENT_TOKENS = 1024
"""Of a streamed context, between two choices: what is held is larger by them meanwhile."""


def kept_blocks(blocks: int, share: float) -> int:
    """Blocks that a context of so many whole blocks is kept in."""
    return max(1, math.ceil(share * blocks))


@dataclass(frozen=True)
class Part:
    """One request that reads a context again.

    Attributes:
        name: its own, as a request.
        tokens: its prompt.
        cached: first of them whose KV is taken from the context's blocks.
        again: which of its rows count.
    """

    name: str
    tokens: list[int]
    cached: int
    again: Again


class Course:
    """One bounded request.

    Args:
        prompt: token ids. share: of the context's KV that it keeps.
        block_tokens: of the scheduler. longest: positions of the model. layers: of it.
        gated: whether a gate stands for rows that repeat. Then one part computes the context's
            last rows anew, and that is all.
    """

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        share: float,
        block_tokens: int,
        longest: int,
        layers: int,
        gated: bool = False,
    ) -> None:
        self.request_id, self._block_tokens, self._layers = request_id, block_tokens, layers
        self.blocks = len(prompt) // block_tokens
        """Of the context."""
        self._context = prompt[: self.blocks * block_tokens]
        self.kept = kept_blocks(self.blocks, share)
        """Blocks that it is kept in."""
        tokens = len(self._context)
        size = min(PART_TOKENS, longest - 1 - tokens - LEAD_TOKENS)
        self._parts: list[tuple[int, int, int]] = []
        if self.blocks - self.kept < LEAST_FREED:
            pass  # it is not worth it
        elif gated:
            self._parts = [(tokens, tokens, tokens)]
        elif size >= LEAST_PART:
            self._parts = list(repeats(tokens, size))
        self._at = 0
        self.reader = ""
        """Name of the part that was begun last."""
        self._unscored = self._unfitted = layers
        self.dropped = False

    @property
    def worthwhile(self) -> bool:
        """Whether it ever drops."""
        return bool(self._parts)

    @property
    def all_read(self) -> bool:
        return self._at == len(self._parts)

    @property
    def all_scored(self) -> bool:
        return self._unscored == 0

    def score(self, rows: int, reading: bool) -> int:
        """Layers to score in a step.

        Args:
            rows: that read again in this step or, if none does any more, might have.
            reading: whether a part is being read.
        """
        layers = self._layers_beside(rows)
        if self.all_read and not reading:
            layers = min(layers, self._unscored)
            self._unscored -= layers
        return layers

    @property
    def all_fitted(self) -> bool:
        return self._unfitted == 0

    def fit(self, rows: int) -> int:
        """Layers to fit in a step, once all are scored; `rows` that might have read again in it."""
        layers = min(self._layers_beside(rows), self._unfitted)
        self._unfitted -= layers
        return layers

    def _layers_beside(self, rows: int) -> int:
        """To score a layer, or to fit it, takes about as long as scoring it for a part."""
        return math.ceil(self._layers * rows / PART_TOKENS)

    def next_part(self) -> Part:
        """The part that follows those before."""
        (lead, begin, end), tokens = self._parts[self._at], len(self._context)
        earlier = tokens if self._at else max(0, tokens - EARLIER_TOKENS)
        self._at += 1
        self.reader = f"{self.request_id}-again-{self._at}"
        cached = earlier // self._block_tokens * self._block_tokens
        again = Again(self.request_id, tokens, earlier, tokens + begin - lead)
        return Part(self.reader, self._context + self._context[lead:end], cached, again)

    def start_over(self) -> None:
        """Its KV is gone."""
        self._at, self._unscored, self._unfitted = 0, self._layers, self._layers
        self.dropped = False


class Stream:
    """One bounded request whose context is streamed.

    Args:
        prompt_tokens: of it. share: of the context's KV that it keeps.
        block_tokens: of the scheduler.

    Attributes:
        blocks: of the context. kept: that it is kept in.
        dropped: of the context's first blocks that were chosen from.
    """

    def __init__(self, prompt_tokens: int, share: float, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.blocks = prompt_tokens // block_tokens
        self.kept = kept_blocks(self.blocks, share)
        self.dropped = 0
        self._preemptions = 0

    def begin_at(self, blocks: int, preemptions: int) -> None:
        """Go on from what is held of these first blocks."""
        self.dropped, self._preemptions = blocks, preemptions

    @property
    def worthwhile(self) -> bool:
        """Whether it frees enough."""
        return self.blocks - self.kept >= LEAST_FREED

    def window(self, step_tokens: int) -> int:
        """Most blocks that it holds before its prompt is computed, if a step has no more tokens of
        it than these."""
        segment = math.ceil(SEGMENT_TOKENS / self._block_tokens)
        return self.kept + segment + math.ceil(step_tokens / self._block_tokens)

    def due(self, computed_tokens: int, preemptions: int) -> int | None:
        """First blocks of the context to choose from now, which are then `dropped`; None to go on.

        Args:
            computed_tokens: of the request. preemptions: how often it was preempted.
        """
        if preemptions != self._preemptions:  # its KV was gone, and is computed anew
            self._preemptions, self.dropped = preemptions, 0
        there = min(computed_tokens // self._block_tokens, self.blocks)
        new = there - self.dropped
        least = math.ceil(SEGMENT_TOKENS / self._block_tokens)
        if not self.dropped:
            least += self.kept
        return None if new < (1 if there == self.blocks else least) else there

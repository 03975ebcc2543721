"""Decides when a compressed request reads its context again, in which parts, and when it drops KV.
For an incrementally compressed context: decides when the request chooses the KV that it keeps.

    prompt computed -> context read again part by part, each part a request of its own ->
    remaining queries scored -> KV to keep fitted -> other KV dropped, once there is room

Queries of a part are scored while the next part is read. Layers are scored one after the other, and
then fitted one after the other, so that no step has much of this work.

The context is the prompt's whole blocks. KV of the rest of the prompt, and of the answer, is not
changed.

An incrementally compressed context (`IncrementalJob`) needs a predictor and is not read again. The
request chooses the KV that it keeps whenever the prompt has grown by a segment, and when the prompt
is complete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace_decode.compression.engine.context_scorer import RereadRows
from headrace_decode.compression.scores import LEAD_TOKENS, PART_TOKENS, plan_repeats

EARLIER_TOKENS = 256
"""The context's last rows, whose queries stand for later ones."""
MIN_PART = 64
"""Minimum tokens of a part. A context is not read again if the model has no positions left for a
part of this size after it."""
MIN_FREED_TOKENS = 512
"""Minimum number of tokens whose blocks dropping must free to be worth the work."""
MIN_KEPT_TOKENS = 32
"""Minimum number of tokens of the kept blocks. The tokens that each head always keeps fit in."""
SEGMENT_TOKENS = 1024
"""Tokens of an incrementally compressed context between two choices. The request holds them in
addition to the kept KV until the next choice."""


def retained_blocks(blocks: int, keep_ratio: float, block_tokens: int) -> int:
    """Return the number of blocks that a context of so many whole blocks is kept in."""
    return max(math.ceil(MIN_KEPT_TOKENS / block_tokens), math.ceil(keep_ratio * blocks))


@dataclass(frozen=True)
class RereadRequest:
    """One request that reads a context again.

    Attributes:
        name: its request id.
        tokens: its prompt.
        cached: number of its first tokens whose KV is taken from the context's blocks.
        rows: which of its rows count.
    """

    name: str
    tokens: list[int]
    cached: int
    rows: RereadRows


class CompressionJob:
    """Progress of one compressed request whose context is read again.

    Args:
        prompt: token ids. keep_ratio: part of the context's KV that it keeps.
        block_tokens: tokens of a block of the scheduler.
        longest: number of positions of the model. layers: number of its layers.
        has_predictor: whether a predictor replaces rows that repeat. Then there is only one
            part, which computes the context's last rows again.
    """

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        keep_ratio: float,
        block_tokens: int,
        longest: int,
        layers: int,
        has_predictor: bool = False,
    ) -> None:
        self.request_id, self._block_tokens, self._layers = request_id, block_tokens, layers
        self.blocks = len(prompt) // block_tokens
        """Number of whole blocks of the context."""
        self._context = prompt[: self.blocks * block_tokens]
        self.kept = retained_blocks(self.blocks, keep_ratio, block_tokens)
        """Number of blocks that the context is kept in."""
        tokens = len(self._context)
        size = min(PART_TOKENS, longest - 1 - tokens - LEAD_TOKENS)
        self._parts: list[tuple[int, int, int]] = []
        if (self.blocks - self.kept) * block_tokens < MIN_FREED_TOKENS:
            pass  # it frees too little
        elif has_predictor:
            self._parts = [(tokens, tokens, tokens)]
        elif size >= MIN_PART:
            self._parts = list(plan_repeats(tokens, size))
        self._at = 0
        self.reader = ""
        """Request id of the part that was begun last."""
        self._unscored = self._unfitted = layers
        self.dropped = False

    @property
    def is_worthwhile(self) -> bool:
        """Whether the request will drop KV."""
        return bool(self._parts)

    @property
    def all_read(self) -> bool:
        return self._at == len(self._parts)

    @property
    def all_scored(self) -> bool:
        return self._unscored == 0

    def score(self, rows: int, is_reading: bool) -> int:
        """Return the number of layers to score in a step.

        Args:
            rows: number of rows that read again in this step; if there are none, the number that
                the step may have.
            is_reading: whether a part is being read.
        """
        layers = self._layers_beside(rows)
        if self.all_read and not is_reading:
            layers = min(layers, self._unscored)
            self._unscored -= layers
        return layers

    @property
    def all_fitted(self) -> bool:
        return self._unfitted == 0

    def fit(self, rows: int) -> int:
        """Return the number of layers to fit in a step, once all are scored.

        Args:
            rows: number of rows that read again that the step may have.
        """
        layers = min(self._layers_beside(rows), self._unfitted)
        self._unfitted -= layers
        return layers

    def _layers_beside(self, rows: int) -> int:
        """Return the number of layers to score, or to fit, in a step with so many rows.

        Fitting a layer takes about as long as scoring it for a part.
        """
        return math.ceil(self._layers * rows / PART_TOKENS)

    def next_part(self) -> RereadRequest:
        """Begin the next part, and return it."""
        (lead, begin, end), tokens = self._parts[self._at], len(self._context)
        earlier = tokens if self._at else max(0, tokens - EARLIER_TOKENS)
        self._at += 1
        self.reader = f"{self.request_id}-again-{self._at}"
        cached = earlier // self._block_tokens * self._block_tokens
        rereads = RereadRows(self.request_id, tokens, earlier, tokens + begin - lead)
        return RereadRequest(self.reader, self._context + self._context[lead:end], cached, rereads)

    def restart(self) -> None:
        """Begin again, since the context's KV is missing."""
        self._at, self._unscored, self._unfitted = 0, self._layers, self._layers
        self.dropped = False


class IncrementalJob:
    """Progress of one compressed request whose context is streamed.

    Args:
        prompt_tokens: tokens of its prompt. keep_ratio: part of the context's KV that it keeps.
        block_tokens: tokens of a block of the scheduler.

    Attributes:
        blocks: number of whole blocks of the context.
        kept: number of blocks that the context is kept in.
        dropped: number of the context's first blocks that the retained KV was chosen from.
    """

    def __init__(self, prompt_tokens: int, keep_ratio: float, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.blocks = prompt_tokens // block_tokens
        self.kept = retained_blocks(self.blocks, keep_ratio, block_tokens)
        self.dropped = 0
        self._preemptions = 0

    def begin_at(self, blocks: int, preemptions: int) -> None:
        """Continue from KV that was kept of these first blocks."""
        self.dropped, self._preemptions = blocks, preemptions

    @property
    def is_worthwhile(self) -> bool:
        """Whether dropping frees enough blocks."""
        return (self.blocks - self.kept) * self._block_tokens >= MIN_FREED_TOKENS

    def window(self, step_tokens: int) -> int:
        """Return the maximum number of blocks that it holds until its prompt is computed.

        Args:
            step_tokens: maximum number of its tokens in a step.
        """
        segment = math.ceil(SEGMENT_TOKENS / self._block_tokens)
        return self.kept + segment + math.ceil(step_tokens / self._block_tokens)

    def due(self, computed_tokens: int, preemptions: int) -> int | None:
        """Return how many of the context's first blocks to choose from now; None if no choice is
        due. The caller sets `dropped` to this number when the request chooses.

        Args:
            computed_tokens: the request's computed tokens.
            preemptions: how often the request was preempted.
        """
        if preemptions != self._preemptions:  # its KV was freed, and is computed again
            self._preemptions, self.dropped = preemptions, 0
        there = min(computed_tokens // self._block_tokens, self.blocks)
        new = there - self.dropped
        least = math.ceil(SEGMENT_TOKENS / self._block_tokens)
        if not self.dropped:
            least += self.kept
        return None if new < (1 if there == self.blocks else least) else there

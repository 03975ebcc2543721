"""Size of an offloaded request in the engine's memory, which does not grow with its context.

slots     SLOTS times the pages that a step chooses at the request's maximum length
window    the newest blocks: those that steps in flight write, the one before, which rows may still
          attend to in place, and the one that is being filled
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SLOTS = 1.5
"""Slots over pages that a step chooses (`python -m benchmarks.sparse.prefetch`)."""


@dataclass(frozen=True)
class Footprint:
    """Blocks that one offloaded request takes.

    Attributes:
        slots: blocks for its working set; 0 if it attends densely.
        window: maximum blocks for its newest tokens.
        host: maximum blocks in host memory.
    """

    slots: int
    window: int
    host: int

    @property
    def blocks(self) -> int:
        """Maximum blocks in the engine's memory."""
        return self.slots + self.window


def footprint(
    max_tokens: int, chosen: int | None, page_tokens: int, block_tokens: int, step_tokens: int
) -> Footprint:
    """Return the footprint of a request.

    Args:
        max_tokens: maximum tokens of prompt and answer.
        chosen: pages that a step chooses of them; None if the request attends densely.
        step_tokens: maximum tokens of the request in all steps that may be in flight at once.
    """
    whole = math.ceil(max_tokens / block_tokens)
    slots = 0
    if chosen is not None:
        slots = math.ceil(SLOTS * chosen * page_tokens / block_tokens)
    window = math.ceil(min(step_tokens, max_tokens) / block_tokens) + 2
    return Footprint(slots, min(window, whole), whole)

"""How much of the engine's memory an offloaded request takes, which does not grow with its context.

slots     SLOTS times the units that a step chooses at the request's longest
window    the newest blocks: those that steps under way write, the one before, which may still
          be attended to in place, and the one that is being filled
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SLOTS = 1.5
"""Over the units that a step chooses (`python -m benchmarks.sparse.prefetch`)."""


@dataclass(frozen=True)
class Footprint:
    """Blocks of one offloaded request.

    Attributes:
        slots: for its working set; 0 for one that attends densely.
        window: most for its newest tokens.
        host: most in host memory.
    """

    slots: int
    window: int
    host: int

    @property
    def blocks(self) -> int:
        """Of the engine's."""
        return self.slots + self.window


def footprint(
    most_tokens: int, chosen: int | None, unit_tokens: int, block_tokens: int, step_tokens: int
) -> Footprint:
    """What a request takes.

    Args:
        most_tokens: of prompt and answer.
        chosen: units that a step chooses of them; None for a request that attends densely.
        step_tokens: most tokens of the request in all steps that may be under way at once.
    """
    whole = math.ceil(most_tokens / block_tokens)
    slots = 0
    if chosen is not None:
        slots = math.ceil(SLOTS * chosen * unit_tokens / block_tokens)
    window = math.ceil(min(step_tokens, most_tokens) / block_tokens) + 2
    return Footprint(slots, min(window, whole), whole)

"""Decides how many rows read a context again beside the answers of one step.

A row that reads again takes as long as a prompt's. Many in a step keep the answers in it waiting,
few make reading take longer and longer. So a step with them takes `LONGER` times what its answers
take alone: the number of rows goes up a little after each step that took less, and down by a
quarter after each that took more.
"""

from __future__ import annotations

from headrace_decode.bounded.scores import PART_TOKENS

LONGER = 2.0
"""Of steps in which a context is read again."""
FIRST, LEAST = 16, 4
UP, DOWN = 1.1, 0.75


class Pace:
    """
    Args:
        least: rows that a step may always have.

    Attributes:
        rows: of the next step, at most.
    """

    def __init__(self, least: int = LEAST) -> None:
        self._least = max(least, LEAST)
        self._rows = float(max(FIRST, self._least))

    @property
    def rows(self) -> int:
        return int(self._rows)

    def saw(self, seconds: float, alone_s: float) -> None:
        """A step with as many rows as it may have is over.

        Args:
            seconds: that it took. alone_s: what its answers would have taken alone.
        """
        change = DOWN if seconds > LONGER * alone_s else UP
        self._rows = min(max(self._rows * change, self._least), PART_TOKENS)

"""Decides how many rows read a context again beside the answers of one step.

A row that reads again takes as long as a prompt's. Many such rows in a step delay its answers. With
few of them, reading takes long. The target is a step that takes `LONGER` times as long as its
answers alone. The number of rows rises by a tenth after each step that took less, and falls by a
quarter after each that took more.
"""

from __future__ import annotations

from headrace_decode.compression.scores import PART_TOKENS

LONGER = 2.0
"""Target for the duration of a step in which a context is read again, over its answers alone."""
FIRST, LEAST = 16, 4
UP, DOWN = 1.1, 0.75


class RereadRateController:
    """Number of rows that may read again in a step.

    Args:
        least: number of rows that a step may always have.

    Attributes:
        rows: maximum for the next step.
    """

    def __init__(self, least: int = LEAST) -> None:
        self._least = max(least, LEAST)
        self._rows = float(max(FIRST, self._least))

    @property
    def rows(self) -> int:
        return int(self._rows)

    def record_step(self, seconds: float, alone_s: float) -> None:
        """Adapt to a step that is over and had as many rows as it could have.

        Args:
            seconds: duration of the step.
            alone_s: predicted duration of its answers alone.
        """
        change = DOWN if seconds > LONGER * alone_s else UP
        self._rows = min(max(self._rows * change, self._least), PART_TOKENS)

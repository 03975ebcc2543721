"""Which numbered batch of a source comes next: what to do with one that has come. Pure.

A source numbers its batches of events from 0 and sends each once, but what carries them may lose
them, repeat them, and bring a replay beside what is new. A batch that begins with
`AllBlocksCleared` needs none before it. A source that begins anew at 0 must be told apart by other
means (its generation); whoever learns of that makes a new `Sequence`.
"""

from __future__ import annotations

from enum import Enum


class Fate(Enum):
    """Of a batch."""

    TAKE = "take"
    """It is the next one, or needs none before it."""
    SKIP = "skip"
    """It was taken already."""
    WAIT = "wait"
    """Batches before it are missing: have them replayed from `wanted`."""


class Sequence:
    """The numbers of one source."""

    def __init__(self) -> None:
        self.next: int | None = None
        """Number of the batch that comes next; None: none was taken yet."""

    @property
    def wanted(self) -> int:
        """Number of the batch that the source is to replay from."""
        return 0 if self.next is None else self.next

    def judge(self, seq: int, whole: bool) -> Fate:
        """What to do with a batch. `whole`: it needs none before it."""
        if seq < self.wanted:
            return Fate.SKIP
        return Fate.TAKE if whole or seq == self.wanted else Fate.WAIT

    def taken(self, seq: int) -> None:
        """This batch was taken."""
        self.next = seq + 1

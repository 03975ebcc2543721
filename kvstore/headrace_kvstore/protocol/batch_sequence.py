"""The order of a source's numbered batches: the rule for each batch that arrives. Pure.

A source numbers its batches of events from 0 and sends each once. The transport may lose batches,
repeat them, and deliver a replay beside new batches. A batch that begins with `AllBlocksCleared`
needs none before it. If a source starts again at 0, the caller must notice that by other means (its
generation), and make a new `BatchSequence`.
"""

from __future__ import annotations

from enum import Enum


class BatchAction(Enum):
    """Treatment of a batch."""

    TAKE = "take"
    """Take the batch: it is the next one, or needs none before it."""
    SKIP = "skip"
    """Skip the batch: it was taken already."""
    WAIT = "wait"
    """Wait: batches before it are missing. Have them replayed from `wanted`."""


class BatchSequence:
    """The numbers of one source."""

    def __init__(self) -> None:
        self.next: int | None = None
        """Number of the next batch; None: none was taken yet."""

    @property
    def wanted(self) -> int:
        """Number of the batch from which the source is to replay."""
        return 0 if self.next is None else self.next

    def classify(self, seq: int, whole: bool) -> BatchAction:
        """Return what to do with a batch. `whole`: whether it needs none before it."""
        if seq < self.wanted:
            return BatchAction.SKIP
        return BatchAction.TAKE if whole or seq == self.wanted else BatchAction.WAIT

    def mark_applied(self, seq: int) -> None:
        """Record that this batch was taken."""
        self.next = seq + 1

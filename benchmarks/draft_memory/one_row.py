"""A drafting memory that is asked about one request at a time, as replays and tests do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.draft_batch import DraftBatch
from headrace_decode.speculative.retrieval.draft_memory import DraftMemory, MemorySettings


@dataclass(frozen=True)
class Draft:
    """One row of a `DraftBatch`, cut to its length."""

    batch: DraftBatch

    def __len__(self) -> int:
        return int(self.batch.lengths[0])

    @property
    def tokens(self) -> NDArray[np.int32]:
        return self.batch.tokens[0, : len(self)]

    @property
    def survival(self) -> NDArray[np.float32]:
        return self.batch.survival[0, : len(self)]

    @property
    def source(self) -> int:
        return int(self.batch.source[0])

    @property
    def match_tokens(self) -> int:
        return int(self.batch.match_tokens[0])


class OneRowMemory(DraftMemory):
    """A memory whose batches have one row.

    Args:
        learns: False keeps the acceptance model at its prior.
        failures: False empties the tables of refusals after each step.
    """

    def __init__(
        self,
        settings: MemorySettings | None = None,
        clock: Callable[[], float] = time.time,
        *,
        learns: bool = True,
        failures: bool = True,
    ) -> None:
        super().__init__(settings, clock)
        self._learns, self._failures = learns, failures

    def feedback_many(
        self, batch: DraftBatch, offered_k: NDArray[np.int32], accepted_k: NDArray[np.int32]
    ) -> None:
        learned = (
            self.acceptance.parameters.weights,
            self.acceptance.parameters.sampling,
            self._effects,
        )
        before = [values.copy() for values in learned]
        super().feedback_many(batch, offered_k, accepted_k)
        if not self._learns:
            for values, old in zip(learned, before, strict=True):
                values[:] = old
            self.acceptance.update_votes()
        if not self._failures:
            for _, row in self.pool.items():
                part = self.pool.parts[row]
                self.pool.arena.words[part["failures"] : part["granules"]] = 0

    def extend(self, handle: int, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        run = np.asarray(tokens, np.int32)
        self.extend_many([handle], run, np.array([len(run)], np.int32))

    def draft(self, handle: int, max_tokens: int) -> Draft:
        return Draft(self.draft_many([handle], max_tokens))

    def feedback(self, draft: Draft, offered_k: int, accepted_k: int) -> None:
        self.feedback_many(
            draft.batch, np.array([offered_k], np.int32), np.array([accepted_k], np.int32)
        )

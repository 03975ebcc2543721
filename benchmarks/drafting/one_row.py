"""A drafting memory that is asked about one request at a time, as replays and tests do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.draft import DraftBatch
from headrace_decode.speculative.retrieval.draft_memory import Memory


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


class OneRowMemory(Memory):
    """A memory whose batches have one row."""

    def extend(self, handle: int, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        run = np.asarray(tokens, np.int32)
        self.extend_many([handle], run, np.array([len(run)], np.int32))

    def draft(self, handle: int, max_tokens: int) -> Draft:
        return Draft(self.draft_many([handle], max_tokens))

    def feedback(self, draft: Draft, offered_k: int, accepted_k: int) -> None:
        self.feedback_many(
            draft.batch, np.array([offered_k], np.int32), np.array([accepted_k], np.int32)
        )

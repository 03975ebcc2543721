"""Counts drafted and accepted tokens by the source of the text that they were read from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.draft_batch import DraftSource

DRAFTED, ACCEPTED = 0, 1


class AcceptanceCounter:
    """Tokens given to the engine and accepted by it, by source.

    If an answer ends or a draft is cut short, a token that the engine did not verify may count as
    drafted. vLLM's own totals (`vllm:spec_decode_num_*`) are exact, but not by source.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((len(DraftSource), 2), np.int64)

    def record(
        self,
        source: NDArray[np.int32],
        limits: NDArray[np.int32],
        taken: NDArray[np.int32],
        accepted: NDArray[np.int32],
        places: NDArray[np.int64],
    ) -> None:
        """Count the drafts of one step.

        Args:
            source: int32 [m], `DraftSource` of each draft.
            limits: int32 [m], maximum number of tokens allowed in each draft.
            taken: int32 [m], number of tokens given to the engine.
            accepted: int32 [m], number of tokens that the next output confirmed, given to the
                engine or not.
            places: indices of the drafts that got a next output, -1 for none.
        """
        at = places[places >= 0]
        at = at[limits[at] > 0]
        known = np.where((source >= 0) & (source < len(DraftSource)), source, DraftSource.NONE)[at]
        np.add.at(self._counts[:, DRAFTED], known, taken[at])
        np.add.at(self._counts[:, ACCEPTED], known, np.minimum(accepted, taken)[at])

    def by_source(self) -> dict[str, dict[str, int]]:
        """Return `drafted` and `accepted` tokens of each source with drafts, since the start."""
        return {
            DraftSource(number).name.lower(): {"drafted": drafted, "accepted": accepted}
            for number, (drafted, accepted) in enumerate(self._counts.tolist())
            if drafted
        }

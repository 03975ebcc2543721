"""What became of drafts, counted by the text that they were read from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculation.draft import Source

RECENT_TOKENS = 1024.0
"""Memory of the recent acceptance, in tokens put to the test."""
DRAFTED, ACCEPTED = 0, 1


class Tally:
    """Tokens given to the engine and accepted by it, by source; and how good drafts are of late.

    Where an answer ends or a draft is cut short, a token that the engine did not verify may count
    as drafted; vLLM's own totals (`vllm:spec_decode_num_*`) are exact, and know no source.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((len(Source), 2), np.int64)
        self._recent = np.zeros(2)  # put to the test, right

    def book(
        self,
        source: NDArray[np.int32],
        caps: NDArray[np.int32],
        taken: NDArray[np.int32],
        offered: NDArray[np.int32],
        accepted: NDArray[np.int32],
        places: NDArray[np.int64],
    ) -> None:
        """Count the drafts of one step.

        Args:
            source: int32 [m], `Source` of each draft.
            caps: int32 [m], most tokens that each was allowed.
            taken: int32 [m], tokens given to the engine.
            offered, accepted: int32 [m], tokens that what came next put to the test, taken or not,
                and how many of those were right.
            places: the drafts that something came after, -1 for none.
        """
        at = places[places >= 0]
        at = at[caps[at] > 0]
        known = np.where((source >= 0) & (source < len(Source)), source, Source.NONE)[at]
        np.add.at(self._counts[:, DRAFTED], known, taken[at])
        np.add.at(self._counts[:, ACCEPTED], known, np.minimum(accepted, taken)[at])
        tested = int(np.maximum(offered[at], 1).sum())
        self._recent *= max(1.0 - tested / RECENT_TOKENS, 0.0)
        self._recent += tested, accepted[at].sum()

    @property
    def recent(self) -> tuple[float, float]:
        """Of late: tokens put to the test, and how many of them were right.

        A look-up that finds nothing counts as one token that was wrong: the ratio is the chance
        that the next token of a request is drafted rightly.
        """
        return float(self._recent[0]), float(self._recent[1])

    def by_source(self) -> dict[str, dict[str, int]]:
        """Since the start: `drafted` and `accepted` tokens of each source that was drafted from."""
        return {
            Source(number).name.lower(): {"drafted": drafted, "accepted": accepted}
            for number, (drafted, accepted) in enumerate(self._counts.tolist())
            if drafted
        }

"""What a memory hands to the planner: drafted tokens, and how likely each is to be accepted.

This file is the border between the memory, which says what might come next, and the planner, which
decides how much of that is worth verifying.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Source(IntEnum):
    """Where the text lies that a draft was mostly read from."""

    NONE = 0
    OPERATOR = 1
    """A corpus that the operator loaded."""
    RESPONSE = 2
    """A past response to the same tenant."""
    PROMPT = 3
    """This request's own prompt."""
    OUTPUT = 4
    """What this request has answered so far."""


class DraftBatch(NamedTuple):
    """The drafts of one step, as arrays over its n rows. Compiled functions take it as it is.

    Attributes:
        tokens: int32 [n, K]; those from `lengths[row]` on mean nothing.
        survival: float32 [n, K], non-increasing: probability that tokens[: i + 1] are all accepted;
            0 from `lengths[row]` on, so that the planner may sort it whole.
        lengths: int32 [n], each at most K; 0 where nothing was found.
        source: int32 [n], `Source` of the text that weighed most.
        match_tokens: int32 [n], how many of the request's last tokens stood before that text, too.
        handles: int64 [n]. This and what follows is the memory's own, for `feedback_many`.
        cells, keys: int32 and int64 [n, K], of each token: what it is known by (`acceptance`), and
            its key in the failure memory (`refusals`).
        header_rows, generations: int32 and int64 [n], of the segment that the first token was
            mostly read from; -1 where that is the request's own text.
    """

    tokens: NDArray[np.int32]
    survival: NDArray[np.float32]
    lengths: NDArray[np.int32]
    source: NDArray[np.int32]
    match_tokens: NDArray[np.int32]
    handles: Any = None
    cells: Any = None
    keys: Any = None
    header_rows: Any = None
    generations: Any = None

"""The drafts that a memory hands to the planner: tokens, and their probabilities of acceptance.

This file is the interface between the memory, which predicts the next tokens, and the planner,
which decides how many of them are worth verifying.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class DraftSource(IntEnum):
    """The kind of text that a draft was mostly read from."""

    NONE = 0
    OPERATOR = 1
    """A corpus that the operator loaded."""
    RESPONSE = 2
    """A past response to the same tenant."""
    PROMPT = 3
    """This request's own prompt."""
    OUTPUT = 4
    """This request's own answer so far."""


class DraftBatch(NamedTuple):
    """The drafts of one step, as arrays over its n rows. Compiled functions use it directly.

    Attributes:
        tokens: int32 [n, K]; entries from `lengths[row]` on have no meaning.
        survival: float32 [n, K], non-increasing: probability that tokens[: i + 1] are all accepted;
            0 from `lengths[row]` on, so that the planner may sort the whole array.
        lengths: int32 [n], each at most K; 0 if nothing was found.
        source: int32 [n], `DraftSource` of the text that weighed most.
        match_tokens: int32 [n], how many of the request's last tokens also stood before that text.
        handles: int64 [n]. This and the following fields are the memory's own, for `feedback_many`.
        cells, keys: int32 and int64 [n, K]: cell of each token's features (`acceptance`), and its
            key in the failure memory (`failure_table`).
        header_rows, generations: int32 and int64 [n], header row and generation of the segment that
            the first token was mostly read from; row -1 for the request's own text.
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

"""The memory's data layout: the columns of a partition, and the fields of a segment's header.

All tokens and indexes are in one int32 array, the arena, whose length is the memory's capacity. A
*partition* is a run of it: a ring of tokens with the index over them. There is one for each tenant,
one public partition, and a small one for each open request. Partitions share no structure, so that
neither the result nor the work of a look-up in one depends on another.

A *segment* is a sequence that was inserted as a whole: an answer, a document. It starts at a
multiple of GRANULE tokens and is followed by at least one SEPARATOR, so that comparing backwards or
reading forwards stops at its ends without reading its header.

*Positions* are logical: they only grow. A ring of C tokens has the positions [tail, head) with
head - tail <= C. Index entries of positions below the tail are invalid, so that no index needs to
be changed when a segment is evicted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ANCHORS = (1, 2, 4, 8)
"""Lengths of the indexed k-grams, ascending."""
LENGTHS = len(ANCHORS)
CONTEXT = 32
"""Number of last tokens that are compared; longer matches count as this long."""
GRANULE = 8
SEPARATOR = -1
NONE = -1

PARTITION_DTYPE = np.dtype(
    [
        ("tokens", "i8"),  # offset of int32 [capacity] in the arena
        ("capacity", "i8"),  # tokens that the ring holds
        ("links", "i8"),  # offset of int32 [capacity, LENGTHS]: where the k-gram stood before
        ("granules", "i8"),  # offset of int32 [capacity / GRANULE]: header row of the segment there
        ("heads", "i8"),  # offset of int32 [LENGTHS, 2^head_bits]: newest position by hash
        ("head_bits", "i8"),
        ("failures", "i8"),  # offset of int32 [2^failure_bits, 2]
        ("failure_bits", "i8"),  # NONE in a request's own partition, which has no failures
        ("head", "i8"),  # position of the next token
        ("tail", "i8"),  # oldest position that the ring holds
        ("lap", "i8"),  # position whose token is the first in the ring's array
        ("words", "i8"),  # length of the whole run in the arena
    ]
)
"""A row of the partition table."""

MAX_POSITION = 2**31 - 2**26
"""Position before which a ring is numbered again, so that its positions fit into int32."""

HEADER_DTYPE = np.dtype(
    [
        ("uid", "u8"),  # the same on every replica
        ("created_s", "f8"),  # time.time()
        ("expires_s", "f8"),
        ("start", "i8"),  # position of its first token
        ("tokens", "i4"),
        ("partition", "i4"),  # row of its partition, which has a tenant; NONE while the row is free
        ("accepted", "u4"),  # drafts read from it of which at least one token was accepted
        ("refused", "u4"),  # drafts read from it of which none was
        ("generation", "u4"),  # incremented for each segment that the row holds
        ("version", "u4"),
        ("corpus", "u2"),  # interned; 0: of no corpus, then the version has no meaning
        ("source", "u1"),  # `DraftSource`
        ("foreign", "u1"),  # came from another replica
    ],
    align=True,
)
"""A segment's header. Its tenant and scope are those of its partition."""


class Store(NamedTuple):
    """The arrays of a memory, for compiled functions.

    Attributes:
        words: int32, the arena.
        parts: PARTITION_DTYPE [partitions].
        headers: HEADER_DTYPE [rows].
        versions: u4 [65536]: each corpus's version in force.
    """

    words: NDArray[np.int32]
    parts: Any
    headers: Any
    versions: NDArray[np.uint32]

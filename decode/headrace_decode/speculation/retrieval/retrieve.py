"""Which positions of a partition may tell how the context goes on: a few survivors, longest first.

Coarse stage of the two: from the longest anchor to the shortest, walk the chain of the k-gram in
which the context ends, newest first; compare tokens, since a hash proves nothing, which extends the
match backwards; drop what is expired, of a superseded version or for another model.
Stop as soon as an anchor has given anything, or a few have survived. The work is bounded by
constants, not by what the partition holds.
"""

from __future__ import annotations

from typing import Any

from headrace_decode.speculation.draft import Source
from headrace_decode.speculation.jit import jit
from headrace_decode.speculation.retrieval.anchors import first_of, match_length, next_of, place
from headrace_decode.speculation.retrieval.segments import ANCHORS, CONTEXT, GRANULE, LENGTHS, NONE

SURVIVORS = 8
"""Per partition."""
ENOUGH = (8, 8, 4, 3)
"""Survivors that suffice, by anchor length: places that share more with the context agree more."""
HOPS = 2
"""Chain links followed per survivor that is wanted."""
CANDIDATES = 3 * SURVIVORS
"""Of the request's own partition, its tenant's and the public one together."""

# Columns of a candidate, int64 [CANDIDATES, COLUMNS].
POSITION, PARTITION, MATCH, SOURCE, ROW, COLUMNS = range(6)

# Columns of the request table, int64 [requests, REQUEST_COLUMNS].
(
    HANDLE,  # the handle that is good now; 0 while the row is free
    OWN,  # its own partition
    TENANT,  # its tenant's partition, or NONE
    MODEL,
    TOKENIZER,
    PROMPT_END,  # position of the first answered token
    REQUEST_COLUMNS,
) = range(7)

_PROMPT, _OUTPUT = int(Source.PROMPT), int(Source.OUTPUT)


@jit
def move(found: Any, which: int, to: int) -> None:
    """Copy a candidate to another row. By hand: assigning slices costs more than all else here."""
    for column in range(COLUMNS):
        found[to, column] = found[which, column]


@jit
def usable(header: Any, versions: Any, model: int, tokenizer: int, now_s: float) -> bool:
    """Whether a segment may be read for a request of this model and tokenizer: not expired, and of
    its corpus's version in force."""
    if header.tokenizer != tokenizer or (header.model != 0 and header.model != model):
        return False
    current = header.corpus == 0 or header.version == versions[header.corpus]
    return current and header.expires_s > now_s


@jit
def find(
    store: Any,
    partition: int,
    context: Any,
    length: int,
    hashes: Any,
    request: Any,
    now_s: float,
    found: Any,
) -> int:
    """Survivors in a partition: in the request's own one, whose last tokens are the context
    itself, or among the segments of its tenant's or of the public one.

    The request's own partition needs no hash: its last position links to the one before it in each
    of its chains.

    Args:
        hashes: of the context (`anchors.hash_context`).
        request: row of the request table.
    """
    words, part, headers = store.words, store.parts[partition], store.headers
    own = partition == request[OWN]
    count, below = 0, CONTEXT + 1
    for which in range(LENGTHS - 1, -1, -1):
        if length < ANCHORS[which]:
            continue
        if own:
            position = next_of(words, part, part.head - 1, which)
        else:
            position = first_of(words, part, hashes, which)
        for _ in range(HOPS * ENOUGH[which]):
            if position < part.tail or count == ENOUGH[which]:
                break
            match = match_length(words, part, position, context, length)
            if match >= ANCHORS[which] and match < below:
                row, fits = NONE, True
                source = _PROMPT if position + 1 < request[PROMPT_END] else _OUTPUT
                if not own:
                    row = words[part.granules + place(part, position) // GRANULE]
                    fits = usable(
                        headers[row], store.versions, request[MODEL], request[TOKENIZER], now_s
                    )
                    source = headers[row].source
                if fits:
                    found[count, POSITION] = position
                    found[count, PARTITION] = partition
                    found[count, MATCH] = match
                    found[count, SOURCE] = source
                    found[count, ROW] = row
                    count += 1
            position = next_of(words, part, position, which)
        below = ANCHORS[which]
        if count:
            break
    return count

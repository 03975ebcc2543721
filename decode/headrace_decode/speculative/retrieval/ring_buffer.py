"""A partition's ring: appending segments, and evicting the oldest when it is full."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace_decode.speculative.jit import jit
from headrace_decode.speculative.retrieval.layout import GRANULE, NONE, SEPARATOR
from headrace_decode.speculative.retrieval.ngram_index import (
    index_positions,
    read_tokens,
    ring_offset,
    write_tokens,
)


@jit
def padded_length(tokens: int) -> int:
    """Return the number of ring positions that a segment takes with its separator."""
    return (tokens // GRANULE + 1) * GRANULE


@jit
def is_obsolete(header: Any, versions: Any, now_s: float) -> bool:
    """Return whether a segment will never be read again: expired, or of a superseded version.

    A version above the one in force is not obsolete, since it is still being loaded.
    """
    if header.expires_s <= now_s:
        return True
    return header.corpus != 0 and header.version < versions[header.corpus]


@jit
def free_header(headers: Any, free: Any, row: int) -> None:
    """Free a header row.

    Args:
        headers: HEADER_DTYPE [rows].
        free: i4 [rows + 1], a stack of free rows; its last entry is the stack's height.
        row: the row.
    """
    headers[row].partition = NONE
    free[free[-1]] = row
    free[-1] += 1


@jit
def _advance(part: Any, positions: int) -> None:
    part.head += positions
    if part.head - part.lap >= part.capacity:
        part.lap += part.capacity


@jit
def append_tokens(words: Any, part: Any, tokens: Any) -> None:
    """Append to a ring without segments; the oldest positions are overwritten."""
    begin = part.head
    for token in tokens:
        words[part.tokens + begin - part.lap] = token
        begin += 1
        _advance(part, 1)
    part.tail = max(part.tail, part.head - part.capacity)
    first = part.head - len(tokens)
    index_positions(words, part, max(first, part.tail), part.head, part.tail)


@jit
def append_segment(words: Any, part: Any, headers: Any, row: int, run: Any) -> None:
    """Append a segment for which `make_room` has made room."""
    start, tokens = part.head, len(run)
    size = padded_length(tokens)
    write_tokens(words, part, start, run)
    headers[row].tokens = tokens
    for position in range(start + tokens, start + size):
        words[part.tokens + ring_offset(part, position)] = SEPARATOR
    for position in range(start, start + size, GRANULE):
        words[part.granules + ring_offset(part, position) // GRANULE] = row
    headers[row].start = start
    _advance(part, size)
    # The last token is not an anchor, since no token follows it.
    index_positions(words, part, start, start + tokens - 1, start)


@jit
def evict_oldest(words: Any, part: Any, headers: Any, free: Any) -> None:
    """Evict the oldest segment."""
    row = words[part.granules + ring_offset(part, part.tail) // GRANULE]
    part.tail += padded_length(headers[row].tokens)
    free_header(headers, free, row)


@jit
def make_room(words: Any, part: Any, headers: Any, free: Any, tokens: int) -> int:
    """Evict segments until one of so many tokens fits; return the number of evicted segments.

    An empty ring must be able to hold the segment.
    """
    evicted = 0
    while part.head + padded_length(tokens) - part.tail > part.capacity:
        evict_oldest(words, part, headers, free)
        evicted += 1
    return evicted


@jit
def copy_segments(
    source: Any,
    old: Any,
    words: Any,
    new: Any,
    headers: Any,
    free: Any,
    versions: Any,
    now_s: float,
) -> None:
    """Move the newest segments that fit and are not obsolete from a ring into an empty one.

    Args:
        source, old: arena and row of the present ring.
        words, new: arena and row of the empty ring; it may be smaller.
        headers, free: the segments' headers and the free rows (`free_header`).
        versions: each corpus's version in force.
        now_s: time of time.time().
    """
    while old.head - old.tail > new.capacity:
        evict_oldest(source, old, headers, free)
    position = old.tail
    while position < old.head:
        row = source[old.granules + ring_offset(old, position) // GRANULE]
        position += padded_length(headers[row].tokens)
        if is_obsolete(headers[row], versions, now_s):
            free_header(headers, free, row)
        else:
            tokens = np.empty(headers[row].tokens, np.int32)
            read_tokens(source, old, headers[row].start, tokens)
            append_segment(words, new, headers, row, tokens)

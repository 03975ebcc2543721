"""A partition's ring: appending segments, and giving up the oldest when it is full."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace_decode.speculation.jit import jit
from headrace_decode.speculation.retrieval.anchors import place, post, read, write
from headrace_decode.speculation.retrieval.segments import GRANULE, NONE, SEPARATOR


@jit
def padded(tokens: int) -> int:
    """Ring positions that a segment takes, its separator included."""
    return (tokens // GRANULE + 1) * GRANULE


@jit
def is_over(header: Any, versions: Any, now_s: float) -> bool:
    """Never to be read again: expired, or of a version that another has superseded. A version
    above the one in force still waits for its turn."""
    if header.expires_s <= now_s:
        return True
    return header.corpus != 0 and header.version < versions[header.corpus]


@jit
def free_row(headers: Any, free: Any, row: int) -> None:
    """`free` i4 [rows + 1]: a stack of free rows under its own height, which is the last entry."""
    headers[row].partition = NONE
    free[free[-1]] = row
    free[-1] += 1


@jit
def _advance(part: Any, positions: int) -> None:
    part.head += positions
    if part.head - part.lap >= part.capacity:
        part.lap += part.capacity


@jit
def append_run(words: Any, part: Any, tokens: Any) -> None:
    """Append to a ring without segments; the oldest positions fall out."""
    begin = part.head
    for token in tokens:
        words[part.tokens + begin - part.lap] = token
        begin += 1
        _advance(part, 1)
    part.tail = max(part.tail, part.head - part.capacity)
    first = part.head - len(tokens)
    post(words, part, max(first, part.tail), part.head, part.tail)


@jit
def append_segment(words: Any, part: Any, headers: Any, row: int, run: Any) -> None:
    """Put a segment in, for which `make_room` has made room."""
    start, tokens = part.head, len(run)
    size = padded(tokens)
    write(words, part, start, run)
    headers[row].tokens = tokens
    for position in range(start + tokens, start + size):
        words[part.tokens + place(part, position)] = SEPARATOR
    for position in range(start, start + size, GRANULE):
        words[part.granules + place(part, position) // GRANULE] = row
    headers[row].start = start
    _advance(part, size)
    # The last token is no anchor: nothing follows it.
    post(words, part, start, start + tokens - 1, start)


@jit
def evict_oldest(words: Any, part: Any, headers: Any, free: Any) -> None:
    """Give up the oldest segment, whatever it is worth."""
    row = words[part.granules + place(part, part.tail) // GRANULE]
    part.tail += padded(headers[row].tokens)
    free_row(headers, free, row)


@jit
def make_room(words: Any, part: Any, headers: Any, free: Any, tokens: int) -> int:
    """Evict until a segment of so many tokens, which an empty ring must hold, fits; how many
    segments went."""
    evicted = 0
    while part.head + padded(tokens) - part.tail > part.capacity:
        evict_oldest(words, part, headers, free)
        evicted += 1
    return evicted


@jit
def rebuild(
    source: Any,
    old: Any,
    words: Any,
    new: Any,
    headers: Any,
    free: Any,
    versions: Any,
    now_s: float,
) -> None:
    """Move those segments of a ring that are not over, the newest that fit, into an empty one.

    Args:
        source, old: arena and row of the ring as it is.
        words, new: arena and row of the empty ring; it may be smaller.
    """
    while old.head - old.tail > new.capacity:
        evict_oldest(source, old, headers, free)
    position = old.tail
    while position < old.head:
        row = source[old.granules + place(old, position) // GRANULE]
        position += padded(headers[row].tokens)
        if is_over(headers[row], versions, now_s):
            free_row(headers, free, row)
        else:
            tokens = np.empty(headers[row].tokens, np.int32)
            read(source, old, headers[row].start, tokens)
            append_segment(words, new, headers, row, tokens)

"""A partition's ring: appending segments, and which of them to give up when it is full.

The oldest segment goes first, unless it was read with success since it last came round: then it is
put in again at the head, once (second chance, as the CLOCK algorithm gives pages: F. J. Corbató, A
Paging Experiment with the Multics System, 1968). Dead segments get none. What is moved for one
insertion is bounded by a multiple of what is inserted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace_decode.speculation.jit import jit
from headrace_decode.speculation.retrieval.anchors import place, post, read, write
from headrace_decode.speculation.retrieval.segments import GRANULE, NONE, SEPARATOR

SPARED_TOKENS_PER_TOKEN = 4
"""Second chances move at most so many times the tokens that are inserted."""


@jit
def padded(tokens: int) -> int:
    """Ring positions that a segment takes, its separator included."""
    return (tokens // GRANULE + 1) * GRANULE


@jit
def is_live(header: Any, versions: Any, now_s: float) -> bool:
    """Not expired, and of its corpus's version in force; `versions` u4 [corpora]."""
    if header.expires_s <= now_s:
        return False
    return header.corpus == 0 or header.version == versions[header.corpus]


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
def _settle(words: Any, part: Any, headers: Any, row: int, tokens: int) -> None:
    """Give the segment whose tokens lie from the head on its separators, rows and postings."""
    start, size = part.head, padded(tokens)
    for position in range(start + tokens, start + size):
        words[part.tokens + place(part, position)] = SEPARATOR
    for position in range(start, start + size, GRANULE):
        words[part.granules + place(part, position) // GRANULE] = row
    headers[row].start = start
    _advance(part, size)
    # The last token is no anchor: nothing follows it.
    post(words, part, start, start + tokens - 1, start)


@jit
def append_segment(words: Any, part: Any, headers: Any, row: int, tokens: Any) -> None:
    """Put a segment in, for which `make_room` has made room."""
    write(words, part, part.head, tokens)
    headers[row].tokens = len(tokens)
    _settle(words, part, headers, row, len(tokens))


@jit
def oldest_row(words: Any, part: Any) -> int:
    """Header row of the oldest segment of a ring that has one."""
    return words[part.granules + place(part, part.tail) // GRANULE]


@jit
def evict_oldest(words: Any, part: Any, headers: Any, free: Any) -> None:
    """Give up the oldest segment, whatever it is worth."""
    row = oldest_row(words, part)
    part.tail += padded(headers[row].tokens)
    free_row(headers, free, row)


@jit
def make_room(
    words: Any, part: Any, headers: Any, free: Any, versions: Any, tokens: int, now_s: float
) -> int:
    """Evict until a segment of so many tokens fits; how many segments went.

    The segment must fit an empty ring. A moved segment takes what its old place gives free.
    """
    need, evicted = padded(tokens), 0
    spare_tokens = SPARED_TOKENS_PER_TOKEN * need
    while part.head + need - part.tail > part.capacity:
        row = oldest_row(words, part)
        header = headers[row]
        size = padded(header.tokens)
        if header.used and spare_tokens >= size and is_live(header, versions, now_s):
            spare_tokens -= size
            headers[row].used = 0
            source, length = part.tail, header.tokens
            part.tail += size
            # The head lies at or before the old place in the ring: going forwards, nothing is
            # overwritten before it is read.
            for ahead in range(length):
                words[part.tokens + place(part, part.head + ahead)] = words[
                    part.tokens + place(part, source + ahead)
                ]
            _settle(words, part, headers, row, length)
        else:
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
    live, position = 0, old.tail
    while position < old.head:
        header = headers[source[old.granules + place(old, position) // GRANULE]]
        if not is_over(header, versions, now_s):
            live += padded(header.tokens)
        position += padded(header.tokens)
    position = old.tail
    while position < old.head:
        row = source[old.granules + place(old, position) // GRANULE]
        length = headers[row].tokens
        size = padded(length)
        keep = not is_over(headers[row], versions, now_s)
        if keep and live <= new.capacity:
            tokens = np.empty(length, np.int32)
            read(source, old, position, tokens)
            write(words, new, new.head, tokens)
            _settle(words, new, headers, row, length)
        else:
            if keep:
                live -= size
            free_row(headers, free, row)
        position += size

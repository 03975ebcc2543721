"""An index of the positions that end in the same k-gram, for several lengths, newest first.

For every length L in ANCHORS, a table maps the hash of L tokens to the newest position that ends in
them; each position links to the one before it in the same bucket. A chain is therefore a list of
candidates from the newest to the oldest. Some of them have the same hash only by chance, so readers
compare the tokens. One posting costs two stores for each length. No posting is ever removed: a
position below the ring's tail ends its chain, because all positions after it in the chain are
older.

Each length is twice the one before it, so the hash of a k-gram joins those of its two halves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace_decode.speculative.jit import jit
from headrace_decode.speculative.retrieval.layout import (
    ANCHORS,
    CONTEXT,
    LENGTHS,
    NONE,
    SEPARATOR,
)

_MULTIPLIER = -7046029254386353131  # 2^64 / golden ratio, as a signed number
_LONGEST = ANCHORS[-1]
assert tuple(1 << level for level in range(LENGTHS)) == ANCHORS


@jit
def ring_offset(part: Any, position: int) -> int:
    """Return the index in the ring of a position within one capacity of the head."""
    ahead, capacity = position - part.lap, part.capacity
    if ahead < 0:
        return ahead + capacity
    return ahead if ahead < capacity else ahead - capacity


@jit
def read_tokens(words: Any, part: Any, position: int, tokens: Any) -> None:
    """Fill `tokens` [n] from the ring, from a position on."""
    for ahead in range(len(tokens)):
        tokens[ahead] = words[part.tokens + ring_offset(part, position + ahead)]


@jit
def write_tokens(words: Any, part: Any, position: int, tokens: Any) -> None:
    """Write `tokens` [n] into the ring, from a position on."""
    for ahead in range(len(tokens)):
        words[part.tokens + ring_offset(part, position + ahead)] = tokens[ahead]


@jit
def extend_hash(state: int, token: int) -> int:
    """Return the hash of a sequence with one more token; the hash of an empty sequence is 0."""
    return (state ^ (token + 1)) * _MULTIPLIER


@jit
def _join(newer: int, older: int) -> int:
    """Return the hash of a k-gram from the hashes of its two halves."""
    return (newer ^ (newer >> 32)) * _MULTIPLIER + older


@jit
def _bucket(state: int, length_index: int, bits: int) -> int:
    mixed = state ^ (state >> 29)
    mixed *= _MULTIPLIER
    return (length_index << bits) + ((mixed >> (63 - bits)) & ((1 << bits) - 1))


@jit
def index_positions(words: Any, part: Any, first: int, last: int, begin: int) -> None:
    """Index the positions [first, last); k-grams begin at `begin` at the earliest.

    The lengths are indexed one after the other, so that only one table is in the processor's caches
    at a time.
    """
    capacity, links, heads, bits = part.capacity, part.links, part.heads, part.head_bits
    start = max(begin, first - _LONGEST + 1)
    state = np.empty(max(last - start, 0), np.int64)
    read_tokens(words, part, start, state)
    for ahead in range(len(state)):
        state[ahead] = extend_hash(0, state[ahead])
    for which in range(LENGTHS):
        half = ANCHORS[which] // 2
        if half:
            for ahead in range(len(state) - 1, half - 1, -1):
                state[ahead] = _join(state[ahead], state[ahead - half])
        at, reached = ring_offset(part, first), begin + ANCHORS[which] - 1
        for position in range(first, last):
            link = links + at * LENGTHS + which
            if position < reached:
                words[link] = NONE
            else:
                bucket = heads + _bucket(state[position - start], which, bits)
                words[link] = words[bucket]
                words[bucket] = position
            at += 1
            if at == capacity:
                at = 0


@jit
def hash_context(context: Any, length: int, scratch: Any, hashes: Any) -> None:
    """Compute the hashes of the last k-grams of `context`, whose newest token is the first.

    Args:
        context, length: the tokens and their number.
        scratch: i8 [ANCHORS[-1]], working array.
        hashes: i8 [LENGTHS], output; hashes of k-grams longer than `length` have no meaning.
    """
    longest = min(length, _LONGEST)
    for back in range(longest):
        scratch[back] = extend_hash(0, context[back])
    for which in range(LENGTHS):
        half = ANCHORS[which] // 2
        if half:
            for back in range(longest - half):
                scratch[back] = _join(scratch[back], scratch[back + half])
        hashes[which] = scratch[0]


@jit
def newest_position(words: Any, part: Any, hashes: Any, length_index: int) -> int:
    """Return the newest position that may end in the k-gram of this hash (`hash_context`)."""
    return words[part.heads + _bucket(hashes[length_index], length_index, part.head_bits)]


@jit
def older_position(words: Any, part: Any, position: int, length_index: int) -> int:
    """Return the next older position in the chain of a live position."""
    return words[part.links + ring_offset(part, position) * LENGTHS + length_index]


@jit
def match_length(words: Any, part: Any, position: int, context: Any, length: int) -> int:
    """Return how many tokens backwards from `position` equal those of `context` [length]."""
    tokens, capacity = part.tokens, part.capacity
    at = ring_offset(part, position)
    longest = min(length, position - part.tail + 1)
    for back in range(longest):
        where = at - back
        if words[tokens + (where if where >= 0 else where + capacity)] != context[back]:
            return back
    return longest


@jit
def read_context(words: Any, part: Any, context: Any) -> int:
    """Write the partition's last tokens, newest first, to `context` [CONTEXT].

    Return their number.
    """
    base, capacity = part.tokens, part.capacity
    longest = min(part.head - part.tail, CONTEXT)
    at = ring_offset(part, part.head - 1)
    for back in range(longest):
        token = words[base + at]
        if token == SEPARATOR:
            return back
        context[back] = token
        at = (at if at > 0 else capacity) - 1
    return longest

"""Which positions end in the same k-gram: hashed postings of several lengths, newest first.

For every length L in ANCHORS a table has, by the hash of the L tokens that end there, the newest
position; each position links to the one before it in the same bucket. A chain is therefore a list
of candidates from the newest to the oldest, among them positions whose hash is only by chance the
same: whoever reads it compares tokens. One posting costs two stores a length, and nothing is ever
removed: a position below the ring's tail ends its chain, because all that follow are older.
"""

from __future__ import annotations

from typing import Any

from headrace_decode.speculation.jit import jit
from headrace_decode.speculation.layout import (
    ANCHORS,
    CAPACITY,
    CONTEXT,
    HEAD,
    HEAD_BITS,
    HEADS,
    LAP,
    LENGTHS,
    LINKS,
    NONE,
    SEPARATOR,
    TAIL,
    TOKENS,
)

_MULTIPLIER = -7046029254386353131  # 2^64 / golden ratio, as a signed number
_LONGEST = ANCHORS[-1]


@jit
def place(part: Any, position: int) -> int:
    """Where in the ring a position within one capacity of the head lies."""
    ahead, capacity = position - part[LAP], part[CAPACITY]
    if ahead < 0:
        return ahead + capacity
    return ahead if ahead < capacity else ahead - capacity


@jit
def add_token(state: int, token: int) -> int:
    """The hash of a k-gram, token by token from its last to its first."""
    return (state ^ (token + 1)) * _MULTIPLIER


@jit
def bucket_of(state: int, length_index: int, bits: int) -> int:
    mixed = state ^ (state >> 29)
    mixed *= _MULTIPLIER
    return (length_index << bits) + ((mixed >> (63 - bits)) & ((1 << bits) - 1))


@jit
def post(words: Any, part: Any, first: int, last: int, begin: int) -> None:
    """Index the positions [first, last); k-grams reach back to `begin` at most."""
    tokens, capacity, links, heads = part[TOKENS], part[CAPACITY], part[LINKS], part[HEADS]
    bits = part[HEAD_BITS]
    for position in range(first, last):
        at = place(part, position)
        link = links + at * LENGTHS
        state, which = 0, 0
        available = min(position - begin + 1, _LONGEST)
        for back in range(available):
            where = at - back
            state = add_token(state, words[tokens + (where if where >= 0 else where + capacity)])
            if back + 1 == ANCHORS[which]:
                bucket = heads + bucket_of(state, which, bits)
                words[link + which] = words[bucket]
                words[bucket] = position
                which += 1
        for rest in range(which, LENGTHS):
            words[link + rest] = NONE


@jit
def first_of(words: Any, part: Any, context: Any, length_index: int) -> int:
    """Newest position that may end in the first ANCHORS[length_index] tokens of `context`, which
    runs from the newest token backwards."""
    state = 0
    for back in range(ANCHORS[length_index]):
        state = add_token(state, context[back])
    return words[part[HEADS] + bucket_of(state, length_index, part[HEAD_BITS])]


@jit
def next_of(words: Any, part: Any, position: int, length_index: int) -> int:
    """The position before a live one in its chain."""
    return words[part[LINKS] + place(part, position) * LENGTHS + length_index]


@jit
def match_length(words: Any, part: Any, position: int, context: Any, length: int) -> int:
    """How many tokens, going backwards from `position`, are those of `context` [length]."""
    tokens, capacity = part[TOKENS], part[CAPACITY]
    at = place(part, position)
    most = min(length, position - part[TAIL] + 1)
    for back in range(most):
        where = at - back
        if words[tokens + (where if where >= 0 else where + capacity)] != context[back]:
            return back
    return most


@jit
def read_context(words: Any, part: Any, context: Any) -> int:
    """Write the partition's last tokens, newest first, to `context` [CONTEXT]; how many."""
    most = min(part[HEAD] - part[TAIL], CONTEXT)
    for back in range(most):
        token = words[part[TOKENS] + place(part, part[HEAD] - 1 - back)]
        if token == SEPARATOR:
            return back
        context[back] = token
    return most

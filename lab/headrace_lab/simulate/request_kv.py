"""A request's KV on an engine: finding its prefix, taking, filling and releasing blocks."""

from __future__ import annotations

import numpy as np

from headrace_kvstore.numba_jit import jit
from headrace_lab.simulate import block_pool
from headrace_lab.simulate.state import LOG_ROWS, State

inner = block_pool.inner

find, use, add, room = block_pool.find, block_pool.use, block_pool.add, block_pool.room
evict, release, touch = block_pool.evict, block_pool.release, block_pool.touch
CLEARED = -1
"""Key of a change that clears all blocks of a holder."""


@inner
def blocks_of(s: State, tokens: int) -> int:
    """Return the number of blocks for this many tokens; the last block may be partly filled."""
    return -(-tokens // s.limits.block_tokens)


@jit()
def pairs_between(first: int, last: int) -> float:
    """Return the attention pairs of a prompt's tokens from `first` to before `last`."""
    return 0.5 * (float(last) * (last + 1) - float(first) * (first + 1))


@inner
def log_change(s: State, now: float, holder: int, key: int, stored: int) -> None:
    """Log a change of a holder, for the router's knowledge of the caches (`known_blocks`)."""
    n = s.ev.count[2]
    if n < LOG_ROWS:
        row = s.ev.log[n]
        row.at_s, row.holder, row.key, row.stored = now, holder, key, stored
    s.ev.count[2] = n + 1


@inner
def key_of(s: State, r: int, block: int) -> int:
    return s.keys[s.req[r].chain + block] + s.req[r].offset


@inner
def usable(s: State, r: int) -> int:
    """Return how many blocks of a prompt a cache may supply: at least one token is computed."""
    return min(s.req[r].blocks, (s.req[r].need - 1) // s.limits.block_tokens)


@inner
def match(s: State, r: int, holder: int) -> int:
    """Return how many leading blocks of a request a holder has."""
    most, c = usable(s, r), s.kv
    n, chain, offset = 0, s.req[r].chain, s.req[r].offset
    while n < most and find(c, holder, s.keys[chain + n] + offset) >= 0:
        n += 1
    return n


@inner
def match_further(s: State, r: int, holder: int, first: int) -> int:
    """Return the end of the run of blocks from `first` on that a holder has.

    The blocks before `first` are in another cache.
    """
    most, n = usable(s, r), first
    while n < most and find(s.kv, holder, key_of(s, r, n)) >= 0:
        n += 1
    return n


@inner
def fits(s: State, r: int, e: int, matched: int, fresh: int) -> bool:
    """Return whether an engine has room for `fresh` blocks beside the request's matched ones."""
    left = room(s.kv, e) - fresh
    for n in range(matched):
        left -= s.kv.slot[find(s.kv, e, key_of(s, r, n))].refs == 0
    return left >= 0


@inner
def take(s: State, e: int, fresh: int, now: float) -> None:
    """Take `fresh` more blocks without keys; evict unused blocks to make room."""
    c = s.kv
    capacity = c.of[e + 1].first - c.of[e].first
    while c.of[e].held + c.of[e].plain + fresh > capacity:
        log_change(s, now, e, evict(c, e), 0)
    c.of[e].plain += fresh


@inner
def hold(s: State, r: int, e: int, matched: int) -> None:
    """Reference the leading blocks of a request."""
    for n in range(matched):
        use(s.kv, e, find(s.kv, e, key_of(s, r, n)))


@inner
def commit(s: State, r: int, e: int, first: int, tokens: int, now: float) -> int:
    """Give keys to the request's blocks from `first` on that `tokens` tokens fill.

    The blocks had no keys, and can be found from now on. If the engine has got the same block from
    another request in the meantime, the request uses that one.

    Returns:
        The number of the request's full blocks.
    """
    c = s.kv
    full = max(first, min(s.req[r].blocks, tokens // s.limits.block_tokens))
    for n in range(first, full):
        key = key_of(s, r, n)
        c.of[e].plain -= 1
        slot = find(c, e, key)
        if slot >= 0:
            use(c, e, slot)
        else:
            add(c, e, key, 1)
            log_change(s, now, e, key, 1)
    if s.limits.store > 0 and full > first:
        _to_store(s, r, e, full, now)
    return full


@inner
def _to_store(s: State, r: int, e: int, full: int, now: float) -> None:
    """Copy each block to the node's store, or mark it there as recently used."""
    c, holder = s.kv, len(s.eng) + s.eng[e].node
    for n in range(full - 1, -1, -1):
        key = key_of(s, r, n)
        slot = find(c, holder, key)
        if slot >= 0:
            touch(c, holder, slot)
            continue
        if c.of[holder].held >= s.limits.store:
            log_change(s, now, holder, evict(c, holder), 0)
        add(c, holder, key, 0)
        log_change(s, now, holder, key, 1)


@inner
def release_blocks(s: State, r: int, e: int, held: int, plain: int) -> None:
    """Release a request's blocks on an engine, the last first."""
    s.kv.of[e].plain -= plain
    for n in range(held - 1, -1, -1):
        release(s.kv, e, find(s.kv, e, key_of(s, r, n)))


@inner
def clear_cache(s: State, e: int, now: float) -> None:
    """Clear all blocks of a holder that lost its memory."""
    block_pool.clear(s.kv, e)
    log_change(s, now, e, np.int64(CLEARED), 0)

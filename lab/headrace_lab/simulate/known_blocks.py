"""The router's delayed knowledge of the holders of each block.

Changes of caches arrive as events, after a delay. The blocks that a placement will make count from
the placement on, as in the gateway's own index. A (block, holder) pair is usable only with all
blocks before it in the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.numba_jit import jit
from headrace_lab.simulate import block_pool
from headrace_lab.simulate.block_pool import Caches, new_caches
from headrace_lab.simulate.request_kv import CLEARED
from headrace_lab.simulate.state import LOG_ROWS, Events, State

find, add, drop, inner = block_pool.find, block_pool.add, block_pool.drop, block_pool.inner


class KnownBlocks(NamedTuple):
    """Rows of bits, one bit for each holder; `rows` maps a block to its row."""

    rows: Caches
    bits: NDArray[np.uint64]
    holders: int


def new_known_blocks(capacities: Sequence[int], *, ahead: int) -> KnownBlocks:
    """Return empty knowledge.

    Args:
        ahead: number of expected blocks for which there is room, in addition to `capacities`.
    """
    size = int(sum(capacities)) + ahead
    words = -(-len(capacities) // 64)
    return KnownBlocks(new_caches([size]), np.zeros((size, words), np.uint64), len(capacities))


@jit()
def apply_changes(k: KnownBlocks, ev: Events, until: float) -> None:
    """Apply the changes up to a time; later changes stay in the log."""
    count = min(ev.count[2], LOG_ROWS)
    n = 0
    while n < count and ev.log[n].at_s <= until:
        holder, key = ev.log[n].holder, ev.log[n].key
        if key == CLEARED:
            clear_holder(k, holder)
        elif ev.log[n].stored:
            add_holder(k, holder, key)
        else:
            remove_holder(k, holder, key)
        n += 1
    for left in range(count - n):
        ev.log[left] = ev.log[n + left]
    ev.count[2] = count - n


@inner
def add_holder(k: KnownBlocks, holder: int, key: int) -> None:
    """Record that a holder has a block; without a free row, the record is dropped."""
    row = find(k.rows, 0, key)
    if row < 0:
        if k.rows.of[0].held >= k.rows.of[1].first:
            return
        row = add(k.rows, 0, key, 0)
        k.bits[row, :] = 0
    k.bits[row, holder >> 6] |= np.uint64(1) << np.uint64(holder & 63)


@inner
def remove_holder(k: KnownBlocks, holder: int, key: int) -> None:
    row = find(k.rows, 0, key)
    if row < 0:
        return
    k.bits[row, holder >> 6] &= ~(np.uint64(1) << np.uint64(holder & 63))
    for word in range(k.bits.shape[1]):
        if k.bits[row, word] != 0:
            return
    drop(k.rows, 0, row)


@inner
def clear_holder(k: KnownBlocks, holder: int) -> None:
    """Record that a holder is empty."""
    gone = ~(np.uint64(1) << np.uint64(holder & 63))
    for row in range(len(k.bits)):
        k.bits[row, holder >> 6] &= gone


@jit()
def expect_blocks(k: KnownBlocks, s: State, r: int, holder: int) -> None:
    """Record the blocks that a placed request will leave with a holder."""
    for n in range(s.req[r].blocks):
        add_holder(k, holder, s.keys[s.req[r].chain + n] + s.req[r].offset)


@jit()
def match_blocks(k: KnownBlocks, s: State, r: int, depth: NDArray[np.int32]) -> None:
    """Write to `depth` [holders] how many leading blocks of a request each holder has."""
    words = k.bits.shape[1]
    alive = np.empty(words, np.uint64)
    for word in range(words):
        alive[word] = ~np.uint64(0)
    depth[:] = 0
    one = np.uint64(1)
    for n in range(s.req[r].blocks + 1):
        row = -1
        if n < s.req[r].blocks:
            row = find(k.rows, 0, s.keys[s.req[r].chain + n] + s.req[r].offset)
        left = np.uint64(0)
        for word in range(words):
            now = alive[word] & k.bits[row, word] if row >= 0 else np.uint64(0)
            lost = alive[word] & ~now
            if lost != 0 and n > 0:
                for bit in range(64):
                    holder = 64 * word + bit
                    if holder < k.holders and (lost >> np.uint64(bit)) & one:
                        depth[holder] = n
            alive[word] = now
            left |= now
        if left == 0:
            return

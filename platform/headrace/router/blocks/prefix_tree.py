"""Prefix tree of blocks and the holders that can use them: the compiled half of `BlockIndex`.

Invariants between two calls:
- A node exists as long as its block has a holder.
- A linked node has a parent, and all nodes before it have parents, up to the root. Therefore links
  form no circle, whatever the events contain.
- usable(node) = held(node) & usable(parent); the usable set of a node that is not linked is empty.
  Therefore usable sets only shrink along a prefix, and all sets between two equal ones are equal.

Bits of a slot that is being swept out (`sweep`) may break the last invariant for that slot only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.router.blocks.hash_table import enter, erase, find
from headrace.router.blocks.holder_sets import (
    BLOCKS,
    DROPPED,
    EVERYONE,
    FREE_NODE,
    FULL,
    MINUS,
    NODES,
    OR,
    WORDS,
    Int,
    Tables,
    combine,
    drop,
    has,
    intern,
    keep,
    popcount,
    put_orphan,
    put_usable,
    size_of,
    word_of,
)
from headrace_kvstore.numba_jit import jit

ROOT = 1
_ZERO = np.uint64(0)


@jit(_nrt=False)
def create(t: Tables, key: Int) -> Int:
    """Return a new node without holders; 0 if there is no room."""
    node = t.state[FREE_NODE]
    if node != 0:
        t.state[FREE_NODE] = np.int64(t.nodes[node].next)
    elif t.state[NODES] < t.nodes.size:
        node = t.state[NODES]
        t.state[NODES] += 1
    else:
        return np.int64(0)
    t.nodes[node].key = key
    t.nodes[node].usable = 0
    t.nodes[node].orphan = 0
    t.nodes[node].parent = 0
    t.nodes[node].child = 0
    t.nodes[node].before = 0
    t.nodes[node].next = 0
    t.state[BLOCKS] += 1
    enter(t, node)
    return node


@jit(_nrt=False)
def attach(t: Tables, node: Int, parent: Int) -> None:
    """Make an unlinked node a child of `parent`."""
    sibling = t.nodes[parent].child
    t.nodes[node].parent = parent
    t.nodes[node].before = 0
    t.nodes[node].next = sibling
    if sibling != 0:
        t.nodes[sibling].before = node
    t.nodes[parent].child = node


@jit(_nrt=False)
def detach(t: Tables, node: Int) -> None:
    before, after = t.nodes[node].before, t.nodes[node].next
    if after != 0:
        t.nodes[after].before = before
    if before != 0:
        t.nodes[before].next = after
    elif t.nodes[node].parent != 0:
        t.nodes[t.nodes[node].parent].child = after
    t.nodes[node].parent = 0
    t.nodes[node].before = 0
    t.nodes[node].next = 0


@jit(_nrt=False)
def release(t: Tables, node: Int, forget: bool) -> None:
    """Unlink a node and all its descendants, and free the nodes that have no holder.

    No holder can use these nodes afterwards. With `forget`, holders after a hole are removed as
    well, and all removed holders count as dropped.
    """
    detach(t, node)
    pending = node
    while pending != 0:
        one = pending
        pending = np.int64(t.nodes[one].next)
        child = np.int64(t.nodes[one].child)
        while child != 0:
            after = np.int64(t.nodes[child].next)
            t.nodes[child].parent = 0
            t.nodes[child].before = 0
            t.nodes[child].next = pending
            pending = child
            child = after
        t.nodes[one].child = 0
        t.nodes[one].next = 0
        if forget:
            t.state[DROPPED] += size_of(t, np.int64(t.nodes[one].usable))
            t.state[DROPPED] += size_of(t, np.int64(t.nodes[one].orphan))
            put_orphan(t, one, 0)
        put_usable(t, one, 0)
        if t.nodes[one].orphan == 0:
            erase(t, one)
            t.nodes[one].next = t.state[FREE_NODE]
            t.state[FREE_NODE] = one
            t.state[BLOCKS] -= 1


@jit(_nrt=False)
def refresh(t: Tables, node: Int) -> Int:
    """Recompute which holders of a linked node can use it, and which cannot.

    Returns:
        1 if the sets changed, 0 if not, -1 if there was no room for the sets (nothing changed).
    """
    parent = np.int64(t.nodes[node].parent)
    above = np.int64(EVERYONE) if parent == ROOT else np.int64(t.nodes[parent].usable)
    usable, orphan = np.int64(t.nodes[node].usable), np.int64(t.nodes[node].orphan)
    changed = False
    for w in range(t.state[WORDS]):
        was = word_of(t, usable, w)
        held = was | word_of(t, orphan, w)
        now = held & word_of(t, above, w)
        t.scratch[0, w] = now
        t.scratch[1, w] = held & ~now
        changed |= now != was
    if not changed:
        return 0
    now_usable = intern(t, 0)
    if now_usable == FULL:
        return -1
    keep(t, now_usable)  # no node counts for its row until `put_usable`
    now_orphan = intern(t, 1)
    if now_orphan == FULL:
        drop(t, now_usable)
        return -1
    put_orphan(t, node, now_orphan)
    put_usable(t, node, now_usable)
    drop(t, now_usable)
    return 1


@jit(_nrt=False)
def settle(t: Tables, top: Int) -> None:
    """Refresh the descendants of `top` after its usable set has changed."""
    node = np.int64(t.nodes[top].child)
    while node != 0:
        parent, after = np.int64(t.nodes[node].parent), np.int64(t.nodes[node].next)
        changed = refresh(t, node)
        if changed < 0:
            release(t, node, True)
        elif changed > 0 and t.nodes[node].child != 0:
            node = np.int64(t.nodes[node].child)
            continue
        while after == 0 and parent != top:
            after = np.int64(t.nodes[parent].next)
            parent = np.int64(t.nodes[parent].parent)
        node = after


@jit(_nrt=False)
def link(t: Tables, node: Int, parent: Int) -> bool:
    """Make a node a child of a linked one, and return whether a holder can use it.

    The node's holders that can use the parent can use the node from now on.
    """
    attach(t, node, parent)
    if refresh(t, node) < 0:
        release(t, node, True)
        return False
    return t.nodes[node].usable != 0


# Operations of the index


@jit(_nrt=False)
def store(
    t: Tables, slot: Int, first: bool, parent_key: Int, keys: NDArray[np.uint64], start: Int
) -> Int:
    """Add a run of blocks to a slot, from block `start` on.

    Args:
        first: whether the run begins a prompt; otherwise `parent_key` is the block before it.

    Returns:
        The block before which the table must grow; the number of blocks if all are done.
    """
    me = np.int64(slot + 1)
    if start > 0:
        above = find(t, keys[start - 1])
    elif first:
        above = np.int64(ROOT)
    else:
        above = find(t, parent_key)
    if above != 0 and above != ROOT and t.nodes[above].parent == 0:
        above = np.int64(0)
    was, becomes = np.int64(0), me  # the last set that grew, and what it became
    for i in range(start, keys.size):
        if 4 * (t.state[BLOCKS] + 1) > 3 * t.table.size:
            return i
        node = find(t, keys[i])
        if node == 0:
            node = create(t, keys[i])
            if node == 0:
                t.state[DROPPED] += keys.size - i
                return keys.size
            if above != 0:
                attach(t, node, above)
        elif t.nodes[node].parent == 0 and above != 0:
            link(t, node, above)
            was, becomes = np.int64(0), me
            if t.nodes[node].usable == 0 and t.nodes[node].orphan == 0:
                continue  # dropped: there was no room for its sets
        parent = np.int64(t.nodes[node].parent)
        usable = np.int64(t.nodes[node].usable)
        if has(t, usable, slot):
            above = node
            continue
        orphan = np.int64(t.nodes[node].orphan)
        if parent != 0 and (parent == ROOT or has(t, np.int64(t.nodes[parent].usable), slot)):
            if usable != was:
                was, becomes = usable, combine(t, usable, me, OR)
            if becomes == FULL:
                was, becomes = np.int64(0), me
                t.state[DROPPED] += 1
            else:
                put_usable(t, node, becomes)
                if has(t, orphan, slot):
                    without(t, node, slot)
                    was, becomes = np.int64(0), me
                if t.nodes[node].child != 0:
                    settle(t, node)
                    was, becomes = np.int64(0), me
        elif not has(t, orphan, slot):
            more = combine(t, orphan, me, OR)
            was, becomes = np.int64(0), me
            if more == FULL:
                t.state[DROPPED] += 1
            else:
                put_orphan(t, node, more)
        if t.nodes[node].usable == 0 and t.nodes[node].orphan == 0:
            release(t, node, True)  # there was no room for its only holder
            above = np.int64(0)
        else:
            above = node if t.nodes[node].parent != 0 else np.int64(0)
    return keys.size


@jit(_nrt=False)
def without(t: Tables, node: Int, slot: Int) -> None:
    """Remove a slot from a node's orphans; remove all if there is no room for the remaining set."""
    orphan = np.int64(t.nodes[node].orphan)
    rest = combine(t, orphan, np.int64(slot + 1), MINUS)
    if rest == FULL:
        t.state[DROPPED] += size_of(t, orphan) - 1
        rest = np.int64(0)
    put_orphan(t, node, rest)


@jit(_nrt=False)
def remove(t: Tables, slot: Int, keys: NDArray[np.uint64]) -> None:
    """Remove these blocks from a slot."""
    was, becomes = np.int64(0), np.int64(0)
    for i in range(keys.size):
        node = find(t, keys[i])
        if node == 0:
            continue
        usable, orphan = np.int64(t.nodes[node].usable), np.int64(t.nodes[node].orphan)
        if has(t, usable, slot):
            if usable != was:
                was, becomes = usable, combine(t, usable, np.int64(slot + 1), MINUS)
            if becomes == FULL:
                was, becomes = np.int64(0), np.int64(0)
                release(t, node, True)
                continue
            put_usable(t, node, becomes)
            if t.nodes[node].child != 0:
                settle(t, node)
                was, becomes = np.int64(0), np.int64(0)
        elif has(t, orphan, slot):
            without(t, node, slot)
            was, becomes = np.int64(0), np.int64(0)
        if t.nodes[node].usable == 0 and t.nodes[node].orphan == 0:
            release(t, node, False)


@jit(_nrt=False)
def is_usable(t: Tables, slot: Int, key: Int) -> bool:
    """Return whether the slot has the block and all blocks before it."""
    node = find(t, key)
    return node != 0 and has(t, np.int64(t.nodes[node].usable), slot)


@jit(_nrt=False)
def usable_at(t: Tables, keys: NDArray[np.uint64], i: Int) -> Int:
    node = find(t, keys[i])
    return np.int64(t.nodes[node].usable) if node != 0 else np.int64(0)


@jit(_nrt=False)
def leave(t: Tables, one: Int, rest: Int, blocks: Int, out: NDArray[np.int32]) -> None:
    """Write `blocks` to `out` for each slot that is in set `one` and not in set `rest`."""
    for w in range(t.state[WORDS]):
        gone = word_of(t, one, w) & ~word_of(t, rest, w)
        while gone != _ZERO:
            low = gone & (~gone + np.uint64(1))
            out[w * 64 + popcount(low - np.uint64(1))] = blocks
            gone ^= low


@jit(_nrt=False)
def match(t: Tables, keys: NDArray[np.uint64], out: NDArray[np.int32]) -> None:
    """Write to `out` how many leading blocks each slot can use.

    All blocks between two with equal usable sets have that set, so the search skips them and halves
    any other range. That is O(d log(n / d)) look-ups for n blocks if slots drop out at d of them.
    Blocks whose parent was unknown are linked on the way.
    """
    out[:] = 0
    ends, sets = t.stack[0], t.stack[1]
    done = 0  # blocks of which `current` is the usable set of the last one
    current = np.int64(EVERYONE)
    last = np.int64(ROOT)
    while True:
        # No holder is known to be able to use the next block: link it if it is not linked yet.
        while done < keys.size:
            node = find(t, keys[done])
            if node == 0:
                break
            if t.nodes[node].parent == 0 and not link(t, node, last):
                break
            if t.nodes[node].parent != last:
                break  # another prefix by the same key, or no prompt from its first block on
            now = np.int64(t.nodes[node].usable)
            if now == 0:
                break
            if now != current:
                if current != EVERYONE:
                    leave(t, current, now, done, out)
                current = now
            last = node
            done += 1
            if done == keys.size or usable_at(t, keys, done) != 0:
                break
        if done == 0:
            return
        if done == keys.size or usable_at(t, keys, done) == 0:
            leave(t, current, np.int64(0), done, out)
            return
        depth = 0
        ends[0] = keys.size - 1
        sets[0] = usable_at(t, keys, keys.size - 1)
        while True:
            if sets[depth] == current:
                done = ends[depth] + 1
            elif ends[depth] == done:
                if sets[depth] == 0:
                    break
                leave(t, current, sets[depth], done, out)
                current = sets[depth]
                done += 1
            else:
                middle = (done + ends[depth]) >> 1
                depth += 1
                ends[depth] = middle
                sets[depth] = usable_at(t, keys, middle)
                continue
            depth -= 1
            if depth < 0:
                break
        last = find(t, keys[done - 1])


@jit(_nrt=False)
def sweep(t: Tables, dead: NDArray[np.uint64], start: Int, count: Int) -> Int:
    """Remove dead slots from `count` nodes; return the node where the next sweep continues."""
    end = min(t.state[NODES], start + count)
    was, becomes = np.int64(0), np.int64(0)
    for node in range(start, end):
        usable, orphan = np.int64(t.nodes[node].usable), np.int64(t.nodes[node].orphan)
        if usable == 0 and orphan == 0:
            continue
        if usable != 0:
            if usable != was:
                was, becomes = usable, alive(t, usable, dead)
            if becomes == FULL:
                was, becomes = np.int64(0), np.int64(0)
                release(t, node, True)
                continue
            if becomes != usable:
                put_usable(t, node, becomes)
        if orphan != 0:
            rest = alive(t, orphan, dead)
            was, becomes = np.int64(0), np.int64(0)
            if rest == FULL:
                t.state[DROPPED] += size_of(t, orphan)
                rest = np.int64(0)
            if rest != orphan:
                put_orphan(t, node, rest)
        if t.nodes[node].usable == 0 and t.nodes[node].orphan == 0:
            release(t, node, False)
            was, becomes = np.int64(0), np.int64(0)
    return end


@jit(_nrt=False)
def alive(t: Tables, one: Int, dead: NDArray[np.uint64]) -> Int:
    """Return a set without the dead slots."""
    changed = False
    for w in range(t.state[WORDS]):
        word = word_of(t, one, w)
        t.scratch[0, w] = word & ~dead[w]
        changed |= (word & dead[w]) != _ZERO
    return intern(t, 0) if changed else np.int64(one)

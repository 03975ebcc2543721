"""Compiled code of the arena's critical sections.

All of it runs under the arena's lock, and a process may be killed between any two stores. That is
harmless for these reasons:

- The slot table is the truth, and a record's `state` tells whether the rest of it is valid. Index,
  segments and free chains are rebuilt from the table (`repair`) whenever a section was left in the
  middle, so they may be left in any state.
- A record is filled while FREE and becomes WRITING by one store of one byte, in a call of its own
  (`commit`), since a compiler may reorder stores within a call. So no record that is not FREE is
  half-written.
- READY follows WRITING by one byte too, after the checksums (`write_sums`, an earlier call).
- Only single aligned fields change while READY (leases, counters, `kept_until_s`), each valid at
  any value: at worst a lease or a count is lost.
- If an event was not written, `repair` makes all readers start over.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import numpy as np

from headrace_kvstore.arena.geometry import (
    DROPPED,
    EVENT_FLOOR,
    EVENT_HEAD,
    HITS_TOTAL,
    KERNEL_SLOT,
    MISSES_TOTAL,
    NAMESPACE_COUNT,
    NONE,
    RECLAIMED_TOTAL,
    REPAIRS_TOTAL,
    STORED_TOTAL,
    Geometry,
    Tables,
)
from headrace_kvstore.arena.index import ABSENT, Int, find, insert, lookup, remove
from headrace_kvstore.blocks.slot_record import FREE, READY, REMOVED, STORED, WRITING
from headrace_kvstore.numba_jit import jit

NO_ROOM = -2  # `place`: no slot was free
STALE = -3  # `place`: the slot's writer has exceeded its time

_ONE = np.uint64(1)


@jit()
def _per_segment(t: Tables) -> int:
    return t.table.size // t.segments.size


@jit()
def _capacity(t: Tables, segment: Int, namespace_id: int) -> Int:
    fit: Int = np.int64(t.segments[segment].bytes // t.namespaces[namespace_id].slot_bytes)
    return min(fit, np.int64(_per_segment(t)))


@jit()
def _chain(t: Tables, slot: Int, segment: Int) -> None:
    t.free[slot] = t.segments[segment].free
    t.segments[segment].free = slot


@jit()
def _chain_free(t: Tables, segment: Int, namespace_id: int) -> None:
    """Chain all FREE slots of a segment that the namespace holds, in ascending order."""
    first = segment * _per_segment(t)
    for slot in range(first + _capacity(t, segment, namespace_id) - 1, first - 1, -1):
        if t.table[slot].state == FREE:
            _chain(t, slot, segment)


@jit()
def _take_slot(t: Tables, namespace_id: int, segment: Int) -> tuple[Int, Int]:
    """Take a FREE slot for the namespace; return it and its segment, or (ABSENT, ABSENT).

    The slot is from `segment` if that has one, else from the namespace's fullest segment that has
    one (so that the others become empty), else from a segment of no namespace.
    """
    if segment == ABSENT or t.segments[segment].free == NONE:
        segment, unheld = ABSENT, ABSENT
        for other in range(t.segments.size):
            held = t.segments[other]
            if held.namespace == namespace_id and held.free != NONE:
                if segment == ABSENT or held.used > t.segments[segment].used:
                    segment = other
            elif held.namespace == NONE and unheld == ABSENT and _capacity(t, other, namespace_id):
                unheld = other
        if segment == ABSENT:
            if unheld == ABSENT:
                return ABSENT, ABSENT
            segment = unheld
            t.segments[segment].namespace = namespace_id
            _chain_free(t, segment, namespace_id)
    slot: Int = np.int64(t.segments[segment].free)
    t.segments[segment].free = t.free[slot]
    t.segments[segment].used += 1
    return slot, segment


@jit()
def _wipe(record: Any) -> None:
    record.state = FREE
    record.kept_until_s = 0.0
    record.bytes = 0.0
    record.lease_until_s = 0.0


@jit()
def _free_slot(t: Tables, slot: Int) -> None:
    """Make the slot FREE; a segment without blocks then belongs to no namespace."""
    remove(t, slot)
    _wipe(t.table[slot])
    segment = slot // _per_segment(t)
    _chain(t, slot, segment)
    t.segments[segment].used -= 1
    if t.segments[segment].used == 0:
        t.segments[segment].namespace = NONE
        t.segments[segment].free = NONE


@jit()
def _append_event(t: Tables, kind: int, slot: Int) -> None:
    head = t.words[EVENT_HEAD]
    at = np.int64(head) & (t.events.size - 1)
    event, record = t.events[at], t.table[slot]
    event.seq = head
    event.kind = kind
    event.namespace = record.namespace
    for i in range(4):
        event.hash[i] = record.hash[i]
    t.words[EVENT_HEAD] = head + _ONE


@jit()
def lease(
    t: Tables,
    namespace_id: int,
    keys: np.ndarray,
    now_s: float,
    until_s: float,
    used: bool,
    readers: int,
    slots: np.ndarray,
) -> None:
    """Look blocks up, and lease those that are there until `until_s` or until `readers` more
    readers have released them. With `used` they also count as used once."""
    lookup(t, namespace_id, keys, slots)
    for slot in slots:
        if slot == ABSENT:
            t.words[MISSES_TOTAL] += np.uint64(used)
            continue
        record = t.table[slot]
        others = np.int64(t.readers[slot]) if record.lease_until_s > now_s else 0
        t.readers[slot] = others + readers
        record.lease_until_s = max(record.lease_until_s, until_s)
        if used:
            t.words[HITS_TOTAL] += _ONE
            record.used_s = now_s
            record.hits += 1


@jit()
def release(t: Tables, slots: np.ndarray, now_s: float) -> None:
    """End one lease of each slot; the last reader's ends the slot's."""
    for slot in slots:
        record = t.table[slot]
        if record.state == READY and record.lease_until_s > now_s:
            if t.readers[slot] > 1:
                t.readers[slot] -= 1
            else:
                t.readers[slot] = 0
                record.lease_until_s = now_s


@jit()
def place(
    t: Tables, rows: np.ndarray, stuck_before_s: float, writer: int, slots: np.ndarray
) -> int:
    """Fill a slot for each block whose slots[i] is NO_ROOM; `commit` must follow.

    rows: KERNEL_SLOT [n], FREE, of one namespace and owner; writer: the caller's bit of
        `pending_writers`.
    slots[i] becomes the slot, which may be one that the caller's group has begun to fill and the
    caller has not. It becomes ABSENT if the key is stored or being written by others, and STALE if
    they have had the slot since before `stuck_before_s`. Else it stays NO_ROOM. Returns how many
    are STALE or NO_ROOM.
    """
    segment: Int = ABSENT
    left = 0
    for i in range(rows.size):
        if slots[i] != NO_ROOM and slots[i] != STALE:
            continue
        namespace_id = np.int64(rows[i].namespace)
        there = find(t, namespace_id, rows[i].hash)
        if there != ABSENT:
            record = t.table[there]
            stuck = record.state == WRITING and record.stored_s < stuck_before_s
            slots[i] = STALE if stuck else ABSENT
            left += stuck
            shared = record.state == WRITING and record.owner < 0
            if (
                shared
                and record.owner == rows[i].owner
                and not stuck
                and record.pending_writers & writer
            ):
                slots[i] = there
            continue
        slot, segment = _take_slot(t, namespace_id, segment)
        if slot == ABSENT:
            slots[i] = NO_ROOM
            left += 1
            continue
        rows[i].generation = t.table[slot].generation + 1
        rows[i].bytes = t.namespaces[namespace_id].slot_bytes
        t.table[slot] = rows[i]
        t.readers[slot] = 0
        insert(t, slot)
        slots[i] = slot
    return left


@jit()
def commit(t: Tables, slots: np.ndarray) -> None:
    """Make the slots that `place` filled WRITING."""
    for slot in slots:
        if slot >= 0 and t.table[slot].state == FREE:
            t.table[slot].state = WRITING


@jit()
def _is_mine(t: Tables, slot: Int, owner: int) -> bool:
    if slot < 0 or slot >= t.table.size:
        return False
    return t.table[slot].state == WRITING and t.table[slot].owner == owner


@jit()
def _is_ticket(t: Tables, slot: Int, generation: Any, owner: int) -> bool:
    """Whether `owner` still fills the slot for the block that it was reserved for."""
    return _is_mine(t, slot, owner) and t.table[slot].generation == generation


@jit()
def write_sums(
    t: Tables,
    offsets: np.ndarray,
    slots: np.ndarray,
    generations: np.ndarray,
    owner: int,
    layers: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Put sums[i], those of some layers, into the table of sums from offsets[i] on, for slots that
    `owner` writes."""
    for i in range(slots.size):
        if _is_ticket(t, slots[i], generations[i], owner):
            for j in range(layers.size):
                t.sums[offsets[i] + layers[j]] = sums[i, j]


@jit()
def publish(
    t: Tables,
    slots: np.ndarray,
    generations: np.ndarray,
    owner: int,
    writer: int,
    now_s: float,
    done: np.ndarray,
) -> None:
    """Mark slots as filled by one writer of `owner`; the last writer makes them READY. done[i]
    becomes whether the slot was this writer's to fill. writer: its bit of `pending_writers`."""
    for i in range(slots.size):
        ours = _is_ticket(t, slots[i], generations[i], owner)
        done[i] = ours and t.table[slots[i]].pending_writers & writer != 0
        if done[i]:
            record = t.table[slots[i]]
            record.pending_writers &= ~np.uint32(writer)
            if record.pending_writers:
                continue
            record.stored_s = now_s
            record.used_s = now_s
            record.state = READY
            t.words[STORED_TOTAL] += _ONE
            _append_event(t, STORED, slots[i])


@jit()
def unfinished(
    t: Tables, namespace_id: int, keys: np.ndarray, owner: int, slots: np.ndarray
) -> None:
    """Set slots[i] to the slot of keys[i] that `owner` has begun to fill, or ABSENT."""
    for i in range(keys.shape[0]):
        slot = find(t, namespace_id, keys[i])
        slots[i] = slot if slot != ABSENT and _is_mine(t, slot, owner) else ABSENT


@jit()
def drop(
    t: Tables, slots: np.ndarray, generations: np.ndarray, state: int, now_s: float, total: int
) -> int:
    """Free each slot that still has its generation and `state`, and is neither kept nor leased at
    `now_s`; if `now_s` is infinite, kept and leased ones too. Adds the number of freed slots to
    words[total] and returns it."""
    dropped = 0
    for i in range(slots.size):
        record = t.table[slots[i]]
        if record.generation != generations[i] or record.state != state:
            continue
        if record.kept_until_s > now_s or record.lease_until_s > now_s:
            continue
        if state == READY:
            _append_event(t, REMOVED, slots[i])
        _free_slot(t, slots[i])
        dropped += 1
    t.words[total] += np.uint64(dropped)
    return dropped


@jit()
def repair(t: Tables) -> None:
    """Rebuild index, segments and free chains from the slot table; free records that are invalid.

    A process may be killed in here; the next one begins the repair again.
    """
    t.buckets[:] = 0
    for segment in range(t.segments.size):
        t.segments[segment].namespace = NONE
        t.segments[segment].used = 0
        t.segments[segment].free = NONE
    for slot in range(t.table.size):
        record = t.table[slot]
        if record.state == FREE:
            _wipe(record)
            continue
        segment = slot // _per_segment(t)
        namespace_id = np.int64(record.namespace)
        holder = t.segments[segment].namespace
        if (
            (record.state != WRITING and record.state != READY)
            or namespace_id >= np.int64(t.words[NAMESPACE_COUNT])
            or (holder != NONE and holder != namespace_id)
            or slot - segment * _per_segment(t) >= _capacity(t, segment, namespace_id)
            or find(t, namespace_id, record.hash) != ABSENT
        ):
            _wipe(record)
            t.words[RECLAIMED_TOTAL] += _ONE
            continue
        t.segments[segment].namespace = namespace_id
        t.segments[segment].used += 1
        insert(t, slot)
    for segment in range(t.segments.size):
        namespace_id = np.int64(t.segments[segment].namespace)
        if namespace_id != NONE:
            _chain_free(t, segment, namespace_id)
    t.words[EVENT_HEAD] += _ONE
    t.words[EVENT_FLOOR] = t.words[EVENT_HEAD]
    t.words[REPAIRS_TOTAL] += _ONE


_warming = threading.Lock()


def warm() -> None:
    """Compile everything, once a process, so that no thread compiles while it holds the lock.

    After this a call with arguments of other types is an error; it does not compile.
    """
    with _warming:
        _compile()


@lru_cache(maxsize=1)
def _compile() -> None:
    geometry = Geometry.plan(1 << 18, 4096, 1, 4096)
    memory = np.zeros(geometry.size_bytes, np.uint8)
    t = geometry.tables(memory)
    geometry.format(t)
    t.namespaces["slot_bytes"] = geometry.slot_bytes(4096, 1)
    t.words[NAMESPACE_COUNT] = 1
    keys, rows = np.zeros((1, 4), np.uint64), np.zeros(1, KERNEL_SLOT)
    slots, done = np.full(1, NO_ROOM, np.int64), np.zeros(1, np.bool_)
    rows["pending_writers"] = 1
    place(t, rows, 0.0, 1, slots)
    commit(t, slots)
    offsets, sums = np.zeros(1, np.int64), np.zeros((1, 1), np.uint64)
    generations = np.zeros(1, np.uint32)
    write_sums(t, offsets, slots, generations, 0, offsets, sums)
    unfinished(t, 0, keys, 0, slots.copy())
    publish(t, slots, generations, 0, 1, 0.0, done)
    lookup(t, 0, keys, slots)
    lease(t, 0, keys, 0.0, 0.0, True, 1, slots)
    release(t, slots, 0.0)
    drop(t, slots, np.zeros(1, np.uint32), READY, 0.0, DROPPED)
    repair(t)
    for kernel in (
        *(place, commit, write_sums, publish, unfinished, lookup, lease, release, drop, repair),
    ):
        kernel.disable_compile()

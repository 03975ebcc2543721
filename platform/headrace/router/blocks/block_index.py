"""Index of the blocks of every holder; answers how much of a prompt each holder can use.

A block is named by a *key*: the low 64 bits of vLLM's block hash (`hashing.keys_of`). vLLM's own
events carry the same 64 bits as numbers. The hash covers everything before the block and the salt,
so equal keys mean equal prefixes. Two prefixes that share a key are treated as one. This happens by
chance once in 2**64 / n**2 for n blocks, and a client can provoke it under a hash that is not
cryptographic. It leads to a wrong price, never to wrong KV, since engines and stores compare whole
hashes.

A *holder* is a place that can hold blocks: the HBM of an engine, the DRAM of a node. A holder can
use a block if it has it and all blocks before it. Blocks after a hole are kept, and count as soon
as the hole is filled.

Some layers of an engine may need only the last blocks of a prefix (`windows`). Their blocks are
indexed apart, as those of a further holder, and shorten the prefix that the engine can use.

Memory is bounded. Without room for another block, the index leaves out this block and the blocks
after it in the same run, so a prefix keeps its beginning. Without room for another set of holders,
the index leaves out the newest holder of a block. If a holder leaves a block and the remaining set
cannot be stored, the index drops the block and all blocks after it. `dropped` counts all of these.
A dropped block is indexed again when it is stored again.

One thread owns an index: it applies events and asks in turn, without locks. The time of a call
depends on the blocks that it is given, not on the size of the index: each call moves a few entries
to a larger table, and removes a few blocks of expired holders. The exception is a block that leaves
the middle of a prefix, or fills a hole: the call visits the blocks after it that the holder has,
and their siblings. Engines evict from the end, where no blocks follow.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.router.blocks import hash_table, prefix_tree, windows
from headrace.router.blocks.holder_sets import (
    BLOCKS,
    DRAINED,
    DROPPED,
    NODE,
    NODES,
    PAIRS,
    ROWS,
    SECRET,
    SET,
    SETS,
    SINGLES,
    STATES,
    WORDS,
    Tables,
)

CAPACITY_BYTES = 256 * 2**20
MAX_HOLDERS = SINGLES // 2
"""Maximum number of open holders. As many more slots may wait for the sweep."""
SET_SHARE = 8
"""Divisor of the memory: 1/8 of it is for sets of holders."""
FIRST_SLOTS = 1 << 10
SWEPT_BLOCKS, DRAINED_SLOTS = 8, 16
"""Blocks swept, and table slots moved, in a call for each block that the call is given."""

Keys = NDArray[np.uint64]
_NONE = np.zeros(1, np.uint64)


class _Windows(NamedTuple):
    needed: tuple[int, ...]
    slots: list[int]
    has_states: bool


class BlockIndex:
    """Blocks by holder.

    Args:
        capacity_bytes: maximum memory of the index.
        max_holders: maximum number of open holders and windows, at most 32,768.

    Raises:
        ValueError: a limit is out of range.
    """

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES, max_holders: int = 4096) -> None:
        if not 1 <= max_holders <= MAX_HOLDERS:
            raise ValueError(f"max_holders must be 1 to {MAX_HOLDERS}, not {max_holders}")
        if capacity_bytes < 2**20:
            raise ValueError(f"capacity_bytes must be at least 1 MiB, not {capacity_bytes}")
        set_bytes = 8 * _words(max_holders) + SET.itemsize + 2 * 4
        max_sets = max(16, capacity_bytes // SET_SHARE // set_bytes)
        left = capacity_bytes - capacity_bytes // SET_SHARE
        self.max_blocks, self._max_slots = _room(left)
        self.max_holders = max_holders
        state = np.zeros(STATES, np.int64)
        state[SECRET] = secrets.randbits(62)
        state[NODES], state[ROWS], state[WORDS] = prefix_tree.ROOT + 1, 1, 1
        # Pages that were never written take no memory, so the arrays get their full size now.
        self.tables = Tables(
            nodes=np.zeros(self.max_blocks + prefix_tree.ROOT + 1, NODE),
            table=np.zeros(min(FIRST_SLOTS, self._max_slots), np.uint64),
            old=_NONE,
            sets=np.zeros(max_sets + 1, SET),
            bits=np.zeros((max_sets + 1, 1), np.uint64),
            set_table=np.zeros(1 << (2 * max_sets - 1).bit_length(), np.uint32),
            scratch=np.zeros((2, 1), np.uint64),
            stack=np.zeros((2, 64), np.int64),
            state=state,
        )
        self._slots: list[int] = []
        """Slot of each holder; -1: the holder is not open."""
        self._slot_of = np.zeros(0, np.int64)
        self._windows: dict[int, _Windows] = {}
        """Windows of the holders that have some."""
        self._free_holders: list[int] = []
        self._free_slots: list[int] = []
        self._next_slot = 0
        self.dead: list[int] = []
        """Slots of closed holders that wait for the next sweep."""
        self.swept: list[int] = []
        self._mask = np.zeros(1, np.uint64)
        self._at = self._end = 0
        self._reach = np.zeros(64, np.int32)

    # Holders

    def open(self, needed: Sequence[int] = ()) -> int:
        """Return a new, empty holder: a small number, perhaps one that was used before.

        Args:
            needed: number of blocks that each of its windows needs before the end of a prefix; 0:
                the last one, of which the holder may have no state.

        Raises:
            OverflowError: `max_holders` are open.
        """
        slots = len(self._slots) - len(self._free_holders)
        slots += sum(len(each.slots) for each in self._windows.values())
        if slots + 1 + len(needed) > self.max_holders:
            raise OverflowError(f"there are {self.max_holders} holders already")
        slot = self._take_slot()
        of_windows = [self._take_slot() for _ in needed]
        least = tuple(max(1, each) for each in needed)
        if self._free_holders:
            holder = self._free_holders.pop()
            self._slots[holder] = slot
        else:
            holder = len(self._slots)
            self._slots.append(slot)
        if needed:
            self._windows[holder] = _Windows(least, of_windows, 0 in needed)
        self._slot_of = np.array(self._slots, np.int64)
        return holder

    def expire(self, holder: int) -> None:
        """Close a holder. Its number may be given out again at once.

        Raises:
            KeyError: no such holder.
        """
        self.dead.append(self._slot(holder))
        if holder in self._windows:
            self.dead += self._windows.pop(holder).slots
        self._slots[holder] = -1
        self._free_holders.append(holder)
        self._slot_of = np.array(self._slots, np.int64)

    def cleared(self, holder: int) -> None:
        """Remove all blocks of a holder.

        Raises:
            KeyError: no such holder.
        """
        self.dead.append(self._slot(holder))
        self._slots[holder] = -1  # the holder does not count while a slot is searched for
        self._slots[holder] = self._take_slot()
        if holder in self._windows:
            slots = self._windows[holder].slots
            self.dead += slots
            slots[:] = [self._take_slot() for _ in slots]
        self._slot_of = np.array(self._slots, np.int64)

    @property
    def holders(self) -> int:
        """One more than the highest number of a holder: the length of the result of `match`."""
        return len(self._slots)

    # Events

    def stored(self, holder: int, parent: int | None, keys: Keys, window: int = 0) -> None:
        """Add a run of blocks to a holder, each block the parent of the next.

        Args:
            parent: key of the block before the run; None: the run begins a prompt.
            keys: [blocks] u64.
            window: 0, or the number of the holder's window that has the blocks, from 1 on.

        Raises:
            KeyError: no such holder or window.
        """
        slot, start = self._slot(holder, window), 0
        first, before = parent is None, np.uint64(parent or 0)
        self._work(len(keys))
        while True:
            start = prefix_tree.store(self.tables, slot, first, before, keys, start)
            if start >= len(keys):
                return
            self._grow()

    def removed(self, holder: int, keys: Keys, window: int = 0) -> None:
        """Remove these blocks from a holder, or from one of its windows.

        Raises:
            KeyError: no such holder or window.
        """
        slot = self._slot(holder, window)
        self._work(len(keys))
        prefix_tree.remove(self.tables, slot, keys)

    def maintain(self, blocks: int = 4096) -> bool:
        """Do a part of the pending work, and return whether any is left.

        The work is to move entries to a larger table and to sweep out closed holders. Calls with
        events do a part of it, too.
        """
        self._work(-(-blocks // SWEPT_BLOCKS))
        return bool(self.dead or self.swept) or self.tables.old.size > 1

    # Questions

    def match(self, keys: Keys) -> NDArray[np.int32]:
        """Return how many leading blocks of a prompt each holder can use: [holders] i32.

        The entry of an unused number is 0.

        Args:
            keys: keys of the prompt's full blocks, from the first on, [blocks] u64.
        """
        if len(keys) == 0 or not self._slots:
            return np.zeros(len(self._slots), np.int32)
        prefix_tree.match(self.tables, keys, self._reach)
        found = self._reach[self._slot_of]
        if self._free_holders:
            found[self._slot_of < 0] = 0
        if self._windows:
            self._shorten(keys, found)
        return found

    def usable(self, holder: int, key: int) -> bool:
        """Return whether a holder has a block and all blocks before it, whatever its windows have.

        False if the block's place in a prefix is unknown.
        """
        return bool(prefix_tree.is_usable(self.tables, self._slot(holder), np.uint64(key)))

    def has_states(self, holder: int) -> bool:
        """Return whether a holder's hits end only at blocks of which it has a state."""
        return holder in self._windows and self._windows[holder].has_states

    @property
    def blocks(self) -> int:
        """Number of blocks with at least one holder."""
        return int(self.tables.state[BLOCKS])

    @property
    def entries(self) -> int:
        """Number of pairs of block and holder; closed holders count until they are swept out."""
        return int(self.tables.state[PAIRS])

    @property
    def dropped(self) -> int:
        """Number of pairs that were not stored, or were dropped, for lack of room."""
        return int(self.tables.state[DROPPED])

    @property
    def bytes(self) -> int:
        """Bytes of memory in use now."""
        t = self.tables
        row_bytes = SET.itemsize + t.bits.itemsize * t.bits.shape[1]
        return int(
            t.state[NODES] * NODE.itemsize
            + t.table.nbytes
            + t.old.nbytes
            + t.state[ROWS] * row_bytes
            + t.set_table.nbytes
        )

    def stats(self) -> dict[str, Any]:
        """Return counts for JSON."""
        return {
            "holders": len(self._slots) - len(self._free_holders),
            "blocks": self.blocks,
            "entries": self.entries,
            "sets": int(self.tables.state[SETS]),
            "dropped": self.dropped,
            "bytes": self.bytes,
        }

    # Inside

    def _slot(self, holder: int, window: int = 0) -> int:
        if not 0 <= holder < len(self._slots) or self._slots[holder] < 0:
            raise KeyError(f"there is no holder {holder}")
        if not window:
            return self._slots[holder]
        slots = self._windows[holder].slots if holder in self._windows else []
        if not 1 <= window <= len(slots):
            raise KeyError(f"holder {holder} has no window {window}")
        return slots[window - 1]

    def _shorten(self, keys: Keys, found: NDArray[np.int32]) -> None:
        """Shorten the prefixes of holders with windows."""
        holders = [holder for holder in self._windows if found[holder]]
        each = [self._windows[holder] for holder in holders]
        starts = np.cumsum([0, *(len(one.slots) for one in each)])
        slots = np.array([slot for one in each for slot in one.slots], np.int64)
        needed = np.array([blocks for one in each for blocks in one.needed], np.int64)
        ends = found[holders].astype(np.int64)
        windows.shorten(self.tables, keys, ends, starts, slots, needed)
        found[holders] = ends

    def _take_slot(self) -> int:
        """Return a slot that no block has."""
        while not self._free_slots and self._next_slot == 2 * self.max_holders:
            self._sweep(self.max_blocks)  # all slots are in use or wait for the sweep
        if self._free_slots:
            return self._free_slots.pop()
        slot = self._next_slot
        self._next_slot += 1
        words = _words(slot + 1)
        if words > self.tables.bits.shape[1]:
            self._widen(2 * self.tables.bits.shape[1])
        self.tables.state[WORDS] = words
        return slot

    def _widen(self, words: int) -> None:
        """Widen the rows of sets to this many words."""
        t = self.tables
        bits = np.zeros((t.bits.shape[0], words), np.uint64)
        rows = int(t.state[ROWS])
        bits[:rows, : t.bits.shape[1]] = t.bits[:rows]
        self.tables = t._replace(bits=bits, scratch=np.zeros((2, words), np.uint64))
        self._mask = np.zeros(words, np.uint64)
        for slot in self.swept:
            self._mask[slot >> 6] |= np.uint64(1 << (slot & 63))
        self._reach = np.zeros(64 * words, np.int32)

    def _grow(self) -> None:
        """Make a table of twice the size; later calls move the entries, a few at a time."""
        t = self.tables
        if t.old.size > 1:
            hash_table.drain(t, t.old.size)
        t.state[DRAINED] = 0
        self.tables = t._replace(table=np.zeros(2 * t.table.size, np.uint64), old=t.table)

    def _work(self, blocks: int) -> None:
        t = self.tables
        if t.old.size > 1 and hash_table.drain(t, DRAINED_SLOTS * blocks):
            self.tables = t._replace(old=_NONE)
        if self.swept or self.dead:
            self._sweep(SWEPT_BLOCKS * blocks)

    def _sweep(self, blocks: int) -> None:
        if not self.swept:
            self.swept, self.dead = self.dead, []
            self._mask[:] = 0
            for slot in self.swept:
                self._mask[slot >> 6] |= np.uint64(1 << (slot & 63))
            self._at, self._end = prefix_tree.ROOT + 1, int(self.tables.state[NODES])
        count = min(blocks, self._end - self._at)
        self._at = int(prefix_tree.sweep(self.tables, self._mask, self._at, count))
        if self._at >= self._end:
            self._free_slots += self.swept
            self.swept = []


def warm() -> None:
    """Compile everything, so that no call waits. Takes ten seconds if the disk cache is empty."""
    index = BlockIndex(2**20)
    holder = index.open()
    for start in range(0, 4 * FIRST_SLOTS, 64):
        index.stored(holder, None, np.arange(start, start + 64, dtype=np.uint64))
    index.match(np.arange(64, dtype=np.uint64))
    index.removed(holder, np.arange(64, dtype=np.uint64))
    index.usable(holder, 64)
    index.expire(holder)
    holder = index.open([1])
    index.stored(holder, None, np.arange(64, dtype=np.uint64))
    index.match(np.arange(64, dtype=np.uint64))
    index.expire(holder)
    while index.maintain():
        pass


def _words(slots: int) -> int:
    return -(-slots // 64)


def _room(capacity_bytes: int) -> tuple[int, int]:
    """Return how many blocks fit, and the slots of the largest table.

    The table is at most 3/4 full. While it is filled from a table of half its size, both exist.
    """
    choices = []
    for bits in range(10, 33):
        slots = 1 << bits
        blocks = (capacity_bytes - 12 * slots) // NODE.itemsize
        choices.append((min(blocks, 3 * slots // 4 - 1), slots))
    return max(choices, key=lambda choice: choice[0])

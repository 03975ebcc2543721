"""Divides the arena among partitions, which grow while there is room and shrink for others.

A partition grows by half when a segment does not fit. If the arena has no room for that, the
largest kept partition is halved, as long as it is larger than the growing one would be. Otherwise
the partition keeps its size and evicts its own oldest segments. A tenant that stores little is
therefore never displaced by one that stores much.

Partitions are a cache. The partitions of the smallest size are the crowd: once they take more than
the largest partition does, the least recently used one of them is dropped for a new one. Tenants
with a single request therefore displace each other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.retrieval import ring
from headrace_decode.speculative.retrieval.segments import (
    GRANULE,
    HEADER,
    LENGTHS,
    MAX_POSITION,
    NONE,
    PART,
    Store,
)

SMALLEST_TOKENS = 512
LONGEST_SEGMENT_TOKENS = 8192
"""Length above which a sequence becomes several segments."""
RESERVE_SHARE = 8
"""Divisor of the arena's length that gives the words reserved for open requests."""
BYTES_PER_HEADER = 2048
"""Capacity in bytes for each header: short answers take about as much of the arena."""
_OFFSETS = ("tokens", "links", "granules", "heads", "failures")


class CapacityError(ValueError):
    """Error: the capacity is too small for a memory."""


class Arena:
    """Allocator of the words of one int32 array: best fit, freed neighbours are joined.

    The array is the memory's whole capacity, so the capacity cannot be exceeded. Physical pages are
    used only where data is written.
    """

    def __init__(self, words: int) -> None:
        self.words: NDArray[np.int32] = np.zeros(words, np.int32)
        self.free_words = words
        self._free = [(0, words)]  # (offset, length), by offset, no two of them adjacent

    def longest_around(self, offset: int, words: int) -> int:
        """Return the length of the longest free run if this run were given back."""
        start, end = offset, offset + words
        for run, length in self._free:
            if run + length == offset:
                start = run
            if run == offset + words:
                end = run + length
        return max([end - start, *(length for _, length in self._free)])

    def take(self, words: int) -> int | None:
        """Allocate a run, whose content is arbitrary.

        Return its offset; None if no free run is that long.
        """
        fitting = [(length, offset) for offset, length in self._free if length >= words]
        if not fitting:
            return None
        length, offset = min(fitting)
        self.free_words -= words
        at = self._free.index((offset, length))
        self._free[at : at + 1] = [(offset + words, length - words)] if length > words else []
        return offset

    def give(self, offset: int, words: int) -> None:
        """Free a whole run that was taken."""
        self.free_words += words
        at = bisect_left(self._free, (offset, 0))
        first, last = at, at
        start, end = offset, offset + words
        if at > 0 and sum(self._free[at - 1]) == offset:
            first, start = at - 1, self._free[at - 1][0]
        if at < len(self._free) and self._free[at][0] == end:
            last, end = at + 1, sum(self._free[at])
        self._free[first:last] = [(start, end - start)]


@dataclass(frozen=True)
class SegmentInfo:
    """The fields that `Pool.insert` writes to a segment's header.

    Times are of time.time(); names and digests are interned.
    """

    source: int
    created_s: float
    expires_s: float = float("inf")
    model: int = 0
    tokenizer: int = 0
    corpus: int = 0
    version: int = 0
    uid: int = 0
    foreign: int = 0


class Pool:
    """Partitions in one arena.

    Attributes:
        arena: the int32 array and its free runs.
        parts: PART [rows]; replaced when it grows.
        headers: HEADER [rows]; row 0 stays unused.
        versions: u4 [65536]: each corpus's version in force.
        evicted_segments: number of segments evicted since the start.
    """

    def __init__(
        self, capacity_bytes: int, dropped: Callable[[int], None] = lambda row: None
    ) -> None:
        """Args:
        capacity_bytes: the memory's capacity.
        dropped: called with the row of each kept partition just before it is dropped.
        """
        rows = max(capacity_bytes // BYTES_PER_HEADER, 16)
        words = (capacity_bytes - rows * (HEADER.itemsize + 4)) // 4
        if words < 2 * _MIN_WORDS:
            raise CapacityError(
                f"a memory of {capacity_bytes} bytes is too small: "
                f"two partitions of {SMALLEST_TOKENS} tokens need "
                f"{8 * _MIN_WORDS + rows * HEADER.itemsize}"
            )
        self.capacity_bytes = capacity_bytes
        self.arena = Arena(words)
        self.parts = np.zeros(64, PART)
        self.headers: Any = np.zeros(rows, HEADER)
        self.headers["partition"] = NONE
        self.versions = np.zeros(2**16, np.uint32)
        self.evicted_segments = 0
        self._free_headers = np.zeros(rows + 1, np.int32)
        self._free_headers[: rows - 1] = np.arange(rows - 1, 0, -1)
        self._free_headers[-1] = rows - 1
        self._free_parts = list(range(63, -1, -1))
        self._kept: dict[Hashable, int] = {}  # least recently used first
        self._dropped = dropped

    @property
    def store(self) -> Store:
        """The memory's present arrays, for compiled functions."""
        return Store(self.arena.words, self.parts, self.headers, self.versions)

    @property
    def used_bytes(self) -> int:
        """Bytes given to partitions and headers."""
        headers = len(self.headers) - 1 - int(self._free_headers[-1])
        arena = len(self.arena.words) - self.arena.free_words
        return 4 * arena + headers * HEADER.itemsize

    def find(self, key: Hashable) -> int | None:
        """Return the row of a kept partition, or None."""
        return self._kept.get(key)

    def kept(self) -> Iterator[tuple[Hashable, int]]:
        """Iterate over all kept partitions with their rows."""
        return iter(list(self._kept.items()))

    def keep(self, key: Hashable) -> int | None:
        """Return the row of this key's kept partition, which is made if there is none.

        The partition becomes the most recently used. Return None if there is no room.
        """
        row = self._kept.pop(key, None)
        if row is None:
            spare = len(self.arena.words) // RESERVE_SHARE
            if self.arena.free_words - _MIN_WORDS < spare:
                self._give_way(_MIN_WORDS, 0.0)
            row = self._add(SMALLEST_TOKENS, kept=True, now_s=0.0)
        if row is not None:
            self._kept[key] = row
        return row

    def use(self, key: Hashable) -> None:
        """Make this key's kept partition, if there is one, the most recently used."""
        if key in self._kept:
            self._kept[key] = self._kept.pop(key)

    def open_run(self, tokens: int) -> int | None:
        """Make a partition without segments for a request; return its row, or None without room."""
        return self._add(_rounded(tokens), kept=False, now_s=0.0)

    def close_run(self, row: int) -> None:
        """Free a request's partition."""
        self.arena.give(int(self.parts[row]["tokens"]), int(self.parts[row]["words"]))
        self.parts[row] = np.zeros((), PART)
        self._free_parts.append(row)

    def drop(self, key: Hashable) -> bool:
        """Remove a kept partition with its content; return whether there was one."""
        row = self._kept.pop(key, None)
        if row is None:
            return False
        for header in self.segments(row):
            ring.free_row(self.headers, self._free_headers, header)
        self._dropped(row)
        self.close_run(row)
        return True

    def segments(self, row: int) -> list[int]:
        """Return the header rows of a kept partition's segments, oldest first, with dead ones."""
        part, found = self.parts[row], []
        position = int(part["tail"])
        while position < part["head"]:
            at = (position - part["lap"]) % part["capacity"]
            header = int(self.arena.words[part["granules"] + at // GRANULE])
            found.append(header)
            position += ring.padded(int(self.headers[header]["tokens"]))
        return found

    def tokens_of(self, header: int) -> NDArray[np.int32]:
        """Return a copy of a segment's tokens, int32 [n]."""
        part = self.parts[self.headers[header]["partition"]]
        start, count = self.headers[header]["start"], self.headers[header]["tokens"]
        at = (start - part["lap"] + np.arange(count)) % part["capacity"]
        return self.arena.words[part["tokens"] + at]

    def widen(self, row: int, tokens: int, now_s: float = 0.0) -> None:
        """Enlarge a partition to hold so many tokens, if the arena has room."""
        if tokens > self.parts[row]["capacity"]:
            self._resize(row, _rounded(tokens), now_s)

    def run_tokens(self, row: int, start: int) -> NDArray[np.int32]:
        """Return a copy of a request's tokens, int32 [n], from a position that it still holds."""
        part = self.parts[row]
        at = (np.arange(start, part["head"]) - part["lap"]) % part["capacity"]
        return self.arena.words[part["tokens"] + at]

    def insert(self, key: Hashable, tokens: NDArray[np.int32], info: SegmentInfo) -> int | None:
        """Put a segment of 2 to LONGEST_SEGMENT_TOKENS tokens into a kept partition.

        Returns:
            Its header row; None if there is no room.
        """
        row = self.keep(key)
        if row is None:
            return None
        need = ring.padded(len(tokens))
        self._make_fit(row, need, info.created_s)
        part = self.parts[row]
        if need > part["capacity"]:
            return None
        self.evicted_segments += ring.make_room(
            self.arena.words, part, self.headers, self._free_headers, len(tokens)
        )
        header = self._take_header(row)
        if header is None:
            return None
        generation = self.headers[header]["generation"] + 1
        self.headers[header] = np.zeros((), HEADER)
        fields = self.headers[header]
        for name, value in vars(info).items():
            fields[name] = value
        fields["generation"], fields["partition"] = generation, row
        ring.append_segment(self.arena.words, part, self.headers, header, tokens)
        return header

    def _make_fit(self, row: int, need: int, now_s: float) -> None:
        part = self.parts[row]
        held = int(part["head"] - part["tail"])
        if part["head"] + need > MAX_POSITION:
            self._relay(row, int(part["capacity"]), now_s)
        elif held + need > part["capacity"]:
            self._resize(row, _rounded(max(int(part["capacity"]) * 3 // 2, held + need)), now_s)

    def _take_header(self, row: int) -> int | None:
        """Take a free header row; return None if there is none.

        If all are taken, the partition's own oldest segment is evicted, or that of the largest
        partition if the partition has no segment.
        """
        if self._free_headers[-1] == 0:
            if self.parts[row]["head"] == self.parts[row]["tail"]:
                held = self.parts["head"] - self.parts["tail"]
                row = int((held * (self.parts["failure_bits"] != NONE)).argmax())
            part = self.parts[row]
            if part["head"] == part["tail"]:
                return None
            ring.evict_oldest(self.arena.words, part, self.headers, self._free_headers)
            self.evicted_segments += 1
        self._free_headers[-1] -= 1
        return int(self._free_headers[self._free_headers[-1]])

    def _add(self, tokens: int, *, kept: bool, now_s: float) -> int | None:
        words = _words_of(tokens, kept=kept)
        while (offset := self.arena.take(words)) is None:
            if words <= _MIN_WORDS:
                found = self._give_way(words, now_s)
            else:
                found = self._halve_largest(NONE, words, now_s)
            if not found:
                return None
        if not self._free_parts:
            rows = len(self.parts)
            self.parts = np.concatenate([self.parts, np.zeros_like(self.parts)])
            self._free_parts = list(range(2 * rows - 1, rows - 1, -1))
        row = self._free_parts.pop()
        self.parts[row] = self._laid_out(offset, tokens, kept=kept)
        return row

    def _laid_out(self, offset: int, tokens: int, *, kept: bool) -> Any:
        """Return a row for an empty ring at this offset, and clear its tables."""
        part = np.zeros((), PART)
        bits, failure_bits = _table_bits(tokens)
        failure_bits = failure_bits if kept else NONE
        part["tokens"], part["capacity"], part["head_bits"] = offset, tokens, bits
        part["links"] = offset + tokens
        part["heads"] = part["links"] + LENGTHS * tokens
        part["failures"] = part["heads"] + (LENGTHS << bits)
        part["failure_bits"] = failure_bits
        part["granules"] = part["failures"] + ((2 << failure_bits) if kept else 0)
        part["words"] = _words_of(tokens, kept=kept)
        self.arena.words[part["heads"] : part["failures"]] = NONE
        self.arena.words[part["failures"] : part["granules"]] = 0
        return part

    def _give_way(self, words: int, now_s: float) -> bool:
        """Drop the least recently used partition of the crowd to make room.

        If the largest partition takes more than the crowd does, halve that one instead. Return
        whether there was such a partition.
        """
        sizes = self._sizes(NONE)
        crowd = sizes < 2 * _MIN_WORDS
        if sizes[crowd].sum() < sizes.max():
            return self._halve_largest(NONE, words, now_s)
        oldest = next((key for key, row in self._kept.items() if crowd[row]), None)
        if oldest is None:
            return False
        self.evicted_segments += len(self.segments(self._kept[oldest]))
        return self.drop(oldest)

    def _sizes(self, asking: int) -> NDArray[np.int64]:
        """Return the words of each kept partition except `asking`, and 0 for all other rows."""
        sizes = np.where(self.parts["failure_bits"] != NONE, self.parts["words"], 0)
        if asking != NONE:
            sizes[asking] = 0
        return sizes

    def _resize(self, row: int, tokens: int, now_s: float) -> None:
        """Enlarge a partition if the arena has room for more than an eighth more tokens.

        Larger kept partitions are halved for it. A kept partition leaves the reserve to open
        requests.
        """
        part, words = self.parts[row], _words_of(tokens, kept=True)
        own, kept = int(part["words"]), part["failure_bits"] != NONE
        spare = len(self.arena.words) // RESERVE_SHARE if kept else 0
        while self.arena.free_words + own - words < spare:
            if not self._halve_largest(row, words, now_s):
                break
        around = self.arena.longest_around(int(part["tokens"]), own)
        room = min(around, self.arena.free_words + own - spare)
        tokens = min(tokens, _fitting(room))
        if 8 * tokens > 9 * part["capacity"]:
            self._relay(row, tokens, now_s)

    def _halve_largest(self, asking: int, words: int, now_s: float) -> bool:
        """Halve the largest kept partition except `asking`, if it has more than `words` words.

        Return whether one was halved.
        """
        sizes = self._sizes(asking)
        largest = int(sizes.argmax())
        if sizes[largest] <= words:
            return False
        tokens = _rounded(int(self.parts[largest]["capacity"]) // 2)
        if tokens == self.parts[largest]["capacity"]:
            return False
        self._relay(largest, tokens, now_s)
        return True

    def _relay(self, row: int, tokens: int, now_s: float) -> None:
        """Move a partition into a new run for `tokens` tokens; there must be room.

        Its content is copied out in the meantime.
        """
        old = self.parts[row].copy()
        offset, kept = int(old["tokens"]), bool(old["failure_bits"] != NONE)
        aside = self.arena.words[offset : offset + old["words"]].copy()
        for column in _OFFSETS:
            old[column] -= offset
        self.arena.give(offset, int(old["words"]))
        place = self.arena.take(_words_of(tokens, kept=kept))
        assert place is not None, "the caller looked for room"
        self.parts[row] = self._laid_out(place, tokens, kept=kept)
        part = self.parts[row]
        if not kept:
            part["head"] = part["tail"] = part["lap"] = old["tail"]
            at = (np.arange(old["tail"], old["head"]) - old["lap"]) % old["capacity"]
            ring.append_run(self.arena.words, part, aside[at])
            return
        before = int(self._free_headers[-1])
        ring.rebuild(
            aside,
            old,
            self.arena.words,
            part,
            self.headers,
            self._free_headers,
            self.versions,
            now_s,
        )
        self.evicted_segments += int(self._free_headers[-1]) - before


def _rounded(tokens: int) -> int:
    return max(SMALLEST_TOKENS, -(-tokens // 64) * 64)


def _words_of(tokens: int, *, kept: bool) -> int:
    """Return the arena words of a ring of so many tokens with its indexes."""
    bits, failure_bits = _table_bits(tokens)
    words = tokens * (1 + LENGTHS) + (LENGTHS << bits)
    return words + (tokens // GRANULE + (2 << failure_bits) if kept else 0)


def _table_bits(tokens: int) -> tuple[int, int]:
    """Return the sizes of a ring's tables, as binary logarithms.

    The first is the number of buckets of an anchor length, one for 2 to 4 tokens of the ring. The
    second is the number of entries of the failure memory, one for 16 to 32 tokens.
    """
    return tokens.bit_length() - 2, max(tokens.bit_length() - 5, 4)


def _fitting(words: int) -> int:
    """Return the maximum number of tokens that a kept ring in so many arena words holds."""
    low, high = SMALLEST_TOKENS // 64, max(words // (1 + LENGTHS) // 64, SMALLEST_TOKENS // 64)
    while low < high:
        middle = (low + high + 1) // 2
        if _words_of(64 * middle, kept=True) <= words:
            low = middle
        else:
            high = middle - 1
    return 64 * low


_MIN_WORDS = _words_of(SMALLEST_TOKENS, kept=True)

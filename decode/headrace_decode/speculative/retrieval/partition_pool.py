"""Divides the arena among partitions, which grow while there is room and shrink for others.

A partition grows by half when a segment does not fit. If the arena has no room for that, the
largest stored partition is halved, as long as it is larger than the growing one would be. Otherwise
the partition keeps its size and evicts its own oldest segments. A tenant that stores little is
therefore never displaced by one that stores much.

Partitions are a cache. Once the partitions of the smallest size take more than the largest
partition does, the least recently used one of them is dropped for a new one. Tenants with a single
request therefore displace each other.

Stored partitions have segments: answers and corpora. The partition of an open request has none.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.retrieval import ring_buffer
from headrace_decode.speculative.retrieval.arena import Arena
from headrace_decode.speculative.retrieval.layout import (
    GRANULE,
    HEADER_DTYPE,
    LENGTHS,
    MAX_POSITION,
    NONE,
    PARTITION_DTYPE,
    Store,
)

MIN_PARTITION_TOKENS = 512
MAX_SEGMENT_TOKENS = 8192
"""Length above which a sequence becomes several segments."""
RESERVE_DIVISOR = 8
"""Divisor of the arena's length that gives the words reserved for open requests."""
BYTES_PER_HEADER = 2048
"""Capacity in bytes for each header: short answers take about as much of the arena."""
_OFFSETS = ("tokens", "links", "granules", "heads", "failures")


class CapacityError(ValueError):
    """Error: the capacity is too small for a memory."""


@dataclass(frozen=True)
class SegmentInfo:
    """The fields that `PartitionPool.insert` writes to a segment's header.

    Times are of time.time(); the corpus is interned.
    """

    source: int
    created_s: float
    expires_s: float = float("inf")
    corpus: int = 0
    version: int = 0
    uid: int = 0
    foreign: int = 0


class PartitionPool:
    """Partitions in one arena.

    Attributes:
        arena: the int32 array and its free runs.
        parts: PARTITION_DTYPE [rows]; replaced when it grows.
        headers: HEADER_DTYPE [rows]; row 0 stays unused.
        versions: u4 [65536]: each corpus's version in force.
        evicted_segments: number of segments evicted since the start.
    """

    def __init__(
        self, capacity_bytes: int, on_drop: Callable[[int], None] = lambda row: None
    ) -> None:
        """Args:
        capacity_bytes: the memory's capacity.
        on_drop: called with the row of each stored partition just before it is dropped.
        """
        rows = max(capacity_bytes // BYTES_PER_HEADER, 16)
        words = (capacity_bytes - rows * (HEADER_DTYPE.itemsize + 4)) // 4
        if words < 2 * MIN_PARTITION_WORDS:
            raise CapacityError(
                f"a memory of {capacity_bytes} bytes is too small: "
                f"two partitions of {MIN_PARTITION_TOKENS} tokens need "
                f"{8 * MIN_PARTITION_WORDS + rows * HEADER_DTYPE.itemsize}"
            )
        self.capacity_bytes = capacity_bytes
        self.arena = Arena(words)
        self.parts = np.zeros(64, PARTITION_DTYPE)
        self.headers: Any = np.zeros(rows, HEADER_DTYPE)
        self.headers["partition"] = NONE
        self.versions = np.zeros(2**16, np.uint32)
        self.evicted_segments = 0
        self._free_headers = np.zeros(rows + 1, np.int32)
        self._free_headers[: rows - 1] = np.arange(rows - 1, 0, -1)
        self._free_headers[-1] = rows - 1
        self._free_parts = list(range(63, -1, -1))
        self._partitions: dict[Hashable, int] = {}  # least recently used first
        self._on_drop = on_drop

    @property
    def store(self) -> Store:
        """The memory's present arrays, for compiled functions."""
        return Store(self.arena.words, self.parts, self.headers, self.versions)

    @property
    def used_bytes(self) -> int:
        """Bytes given to partitions and headers."""
        headers = len(self.headers) - 1 - int(self._free_headers[-1])
        arena = len(self.arena.words) - self.arena.free_words
        return 4 * arena + headers * HEADER_DTYPE.itemsize

    def find(self, key: Hashable) -> int | None:
        """Return the row of a stored partition, or None."""
        return self._partitions.get(key)

    def items(self) -> Iterator[tuple[Hashable, int]]:
        """Iterate over all stored partitions with their rows."""
        return iter(list(self._partitions.items()))

    def get_or_create(self, key: Hashable) -> int | None:
        """Return the row of this key's stored partition, which is made if there is none.

        The partition becomes the most recently used. Return None if there is no room.
        """
        row = self._partitions.pop(key, None)
        if row is None:
            spare = len(self.arena.words) // RESERVE_DIVISOR
            if self.arena.free_words - MIN_PARTITION_WORDS < spare:
                self._free_room(MIN_PARTITION_WORDS, 0.0)
            row = self._add(MIN_PARTITION_TOKENS, is_stored=True, now_s=0.0)
        if row is not None:
            self._partitions[key] = row
        return row

    def touch(self, key: Hashable) -> None:
        """Make this key's stored partition, if there is one, the most recently used."""
        if key in self._partitions:
            self._partitions[key] = self._partitions.pop(key)

    def open_request_partition(self, tokens: int) -> int | None:
        """Make a partition without segments for a request; return its row, or None without room."""
        return self._add(_round_up(tokens), is_stored=False, now_s=0.0)

    def release(self, row: int) -> None:
        """Free a partition's words and row."""
        self.arena.free(int(self.parts[row]["tokens"]), int(self.parts[row]["words"]))
        self.parts[row] = np.zeros((), PARTITION_DTYPE)
        self._free_parts.append(row)

    def drop(self, key: Hashable) -> bool:
        """Remove a stored partition with its content; return whether there was one."""
        row = self._partitions.pop(key, None)
        if row is None:
            return False
        for header in self.segments(row):
            ring_buffer.free_header(self.headers, self._free_headers, header)
        self._on_drop(row)
        self.release(row)
        return True

    def segments(self, row: int) -> list[int]:
        """Return the header rows of a partition's segments, oldest first, with expired ones."""
        part, found = self.parts[row], []
        position = int(part["tail"])
        while position < part["head"]:
            at = (position - part["lap"]) % part["capacity"]
            header = int(self.arena.words[part["granules"] + at // GRANULE])
            found.append(header)
            position += ring_buffer.padded_length(int(self.headers[header]["tokens"]))
        return found

    def tokens_of(self, header: int) -> NDArray[np.int32]:
        """Return a copy of a segment's tokens, int32 [n]."""
        part = self.parts[self.headers[header]["partition"]]
        start, count = self.headers[header]["start"], self.headers[header]["tokens"]
        at = (start - part["lap"] + np.arange(count)) % part["capacity"]
        return self.arena.words[part["tokens"] + at]

    def grow(self, row: int, tokens: int, now_s: float = 0.0) -> None:
        """Enlarge a partition to hold so many tokens, if the arena has room."""
        if tokens > self.parts[row]["capacity"]:
            self._resize(row, _round_up(tokens), now_s)

    def request_tokens(self, row: int, start: int) -> NDArray[np.int32]:
        """Return a copy of a request's tokens, int32 [n], from a position that it still holds."""
        part = self.parts[row]
        at = (np.arange(start, part["head"]) - part["lap"]) % part["capacity"]
        return self.arena.words[part["tokens"] + at]

    def insert(self, key: Hashable, tokens: NDArray[np.int32], info: SegmentInfo) -> int | None:
        """Put a segment of 2 to MAX_SEGMENT_TOKENS tokens into a stored partition.

        Returns:
            Its header row; None if there is no room.
        """
        row = self.get_or_create(key)
        if row is None:
            return None
        need = ring_buffer.padded_length(len(tokens))
        self._reserve(row, need, info.created_s)
        part = self.parts[row]
        if need > part["capacity"]:
            return None
        self.evicted_segments += ring_buffer.make_room(
            self.arena.words, part, self.headers, self._free_headers, len(tokens)
        )
        header = self._take_header(row)
        if header is None:
            return None
        generation = self.headers[header]["generation"] + 1
        self.headers[header] = np.zeros((), HEADER_DTYPE)
        fields = self.headers[header]
        for name, value in vars(info).items():
            fields[name] = value
        fields["generation"], fields["partition"] = generation, row
        ring_buffer.append_segment(self.arena.words, part, self.headers, header, tokens)
        return header

    def _reserve(self, row: int, need: int, now_s: float) -> None:
        part = self.parts[row]
        used = int(part["head"] - part["tail"])
        if part["head"] + need > MAX_POSITION:
            self._relocate(row, int(part["capacity"]), now_s)
        elif used + need > part["capacity"]:
            self._resize(row, _round_up(max(int(part["capacity"]) * 3 // 2, used + need)), now_s)

    def _take_header(self, row: int) -> int | None:
        """Take a free header row; return None if there is none.

        If all are taken, the partition's own oldest segment is evicted, or that of the largest
        partition if the partition has no segment.
        """
        if self._free_headers[-1] == 0:
            if self.parts[row]["head"] == self.parts[row]["tail"]:
                used = self.parts["head"] - self.parts["tail"]
                row = int((used * (self.parts["failure_bits"] != NONE)).argmax())
            part = self.parts[row]
            if part["head"] == part["tail"]:
                return None
            ring_buffer.evict_oldest(self.arena.words, part, self.headers, self._free_headers)
            self.evicted_segments += 1
        self._free_headers[-1] -= 1
        return int(self._free_headers[self._free_headers[-1]])

    def _add(self, tokens: int, *, is_stored: bool, now_s: float) -> int | None:
        words = _partition_words(tokens, is_stored=is_stored)
        while (offset := self.arena.allocate(words)) is None:
            if words <= MIN_PARTITION_WORDS:
                found = self._free_room(words, now_s)
            else:
                found = self._halve_largest(NONE, words, now_s)
            if not found:
                return None
        if not self._free_parts:
            rows = len(self.parts)
            self.parts = np.concatenate([self.parts, np.zeros_like(self.parts)])
            self._free_parts = list(range(2 * rows - 1, rows - 1, -1))
        row = self._free_parts.pop()
        self.parts[row] = self._new_ring(offset, tokens, is_stored=is_stored)
        return row

    def _new_ring(self, offset: int, tokens: int, *, is_stored: bool) -> Any:
        """Return a row for an empty ring at this offset, and clear its tables."""
        part = np.zeros((), PARTITION_DTYPE)
        bits, failure_bits = _table_bits(tokens)
        failure_bits = failure_bits if is_stored else NONE
        part["tokens"], part["capacity"], part["head_bits"] = offset, tokens, bits
        part["links"] = offset + tokens
        part["heads"] = part["links"] + LENGTHS * tokens
        part["failures"] = part["heads"] + (LENGTHS << bits)
        part["failure_bits"] = failure_bits
        part["granules"] = part["failures"] + ((2 << failure_bits) if is_stored else 0)
        part["words"] = _partition_words(tokens, is_stored=is_stored)
        self.arena.words[part["heads"] : part["failures"]] = NONE
        self.arena.words[part["failures"] : part["granules"]] = 0
        return part

    def _free_room(self, words: int, now_s: float) -> bool:
        """Drop the least recently used of the partitions of the smallest size.

        If the largest partition takes more than all of these, halve it instead. Return whether
        there was such a partition.
        """
        sizes = self._sizes(NONE)
        smallest = sizes < 2 * MIN_PARTITION_WORDS
        if sizes[smallest].sum() < sizes.max():
            return self._halve_largest(NONE, words, now_s)
        oldest = next((key for key, row in self._partitions.items() if smallest[row]), None)
        if oldest is None:
            return False
        self.evicted_segments += len(self.segments(self._partitions[oldest]))
        return self.drop(oldest)

    def _sizes(self, excluded: int) -> NDArray[np.int64]:
        """Return the words of each stored partition except `excluded`, and 0 for all other rows."""
        sizes = np.where(self.parts["failure_bits"] != NONE, self.parts["words"], 0)
        if excluded != NONE:
            sizes[excluded] = 0
        return sizes

    def _resize(self, row: int, tokens: int, now_s: float) -> None:
        """Enlarge a partition if the arena has room for more than an eighth more tokens.

        Larger stored partitions are halved for it. A stored partition leaves the reserve to open
        requests.
        """
        part, words = self.parts[row], _partition_words(tokens, is_stored=True)
        own, is_stored = int(part["words"]), part["failure_bits"] != NONE
        spare = len(self.arena.words) // RESERVE_DIVISOR if is_stored else 0
        while self.arena.free_words + own - words < spare:
            if not self._halve_largest(row, words, now_s):
                break
        around = self.arena.largest_free_run(int(part["tokens"]), own)
        room = min(around, self.arena.free_words + own - spare)
        tokens = min(tokens, _max_tokens_in(room))
        if 8 * tokens > 9 * part["capacity"]:
            self._relocate(row, tokens, now_s)

    def _halve_largest(self, excluded: int, words: int, now_s: float) -> bool:
        """Halve the largest stored partition except `excluded`, if it has more than `words` words.

        Return whether one was halved.
        """
        sizes = self._sizes(excluded)
        largest = int(sizes.argmax())
        if sizes[largest] <= words:
            return False
        tokens = _round_up(int(self.parts[largest]["capacity"]) // 2)
        if tokens == self.parts[largest]["capacity"]:
            return False
        self._relocate(largest, tokens, now_s)
        return True

    def _relocate(self, row: int, tokens: int, now_s: float) -> None:
        """Move a partition into a new run for `tokens` tokens; there must be room.

        Its content is copied out first.
        """
        old = self.parts[row].copy()
        offset, is_stored = int(old["tokens"]), bool(old["failure_bits"] != NONE)
        aside = self.arena.words[offset : offset + old["words"]].copy()
        for column in _OFFSETS:
            old[column] -= offset
        self.arena.free(offset, int(old["words"]))
        place = self.arena.allocate(_partition_words(tokens, is_stored=is_stored))
        assert place is not None, "the caller looked for room"
        self.parts[row] = self._new_ring(place, tokens, is_stored=is_stored)
        part = self.parts[row]
        if not is_stored:
            part["head"] = part["tail"] = part["lap"] = old["tail"]
            at = (np.arange(old["tail"], old["head"]) - old["lap"]) % old["capacity"]
            ring_buffer.append_tokens(self.arena.words, part, aside[at])
            return
        before = int(self._free_headers[-1])
        ring_buffer.copy_segments(
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


def _round_up(tokens: int) -> int:
    return max(MIN_PARTITION_TOKENS, -(-tokens // 64) * 64)


def _partition_words(tokens: int, *, is_stored: bool) -> int:
    """Return the arena words of a ring of so many tokens with its indexes."""
    bits, failure_bits = _table_bits(tokens)
    words = tokens * (1 + LENGTHS) + (LENGTHS << bits)
    return words + (tokens // GRANULE + (2 << failure_bits) if is_stored else 0)


def _table_bits(tokens: int) -> tuple[int, int]:
    """Return the sizes of a ring's tables, as binary logarithms.

    The first is the number of buckets of an anchor length, one for 2 to 4 tokens of the ring. The
    second is the number of entries of the failure table, one for 16 to 32 tokens.
    """
    return tokens.bit_length() - 2, max(tokens.bit_length() - 5, 4)


def _max_tokens_in(words: int) -> int:
    """Return the maximum number of tokens that a stored ring in so many arena words holds."""
    low = MIN_PARTITION_TOKENS // 64
    high = max(words // (1 + LENGTHS) // 64, low)
    while low < high:
        middle = (low + high + 1) // 2
        if _partition_words(64 * middle, is_stored=True) <= words:
            low = middle
        else:
            high = middle - 1
    return 64 * low


MIN_PARTITION_WORDS = _partition_words(MIN_PARTITION_TOKENS, is_stored=True)

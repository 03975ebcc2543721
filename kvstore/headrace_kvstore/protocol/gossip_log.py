"""A log of entries that processes of one machine leave for each other.

An *entry* is bytes that the log does not interpret. Its writer numbers the entries of each stream.
The log refuses an entry whose number is not above the last one of that writer and stream, so
appending an entry twice is safe. Readers get entries in the order of their arrival, and so each
writer's stream in its own order.

A full log evicts the oldest entry of the largest stream, whichever process wrote it. Of two
streams of equal size, it evicts the older entry. So a busy stream never displaces a quiet one.

A restarted node has an empty log of a new *generation*, which every answer names. When it changes,
readers start from the beginning, and writers append their remaining entries again. A writer names
the generation that it appends to, since entries in the wrong order would be refused.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAX_NAME_BYTES = 64
MAX_ENTRY_BYTES = 2**20
ENTRY_COST_BYTES = 512
"""Bytes counted for each entry in addition to its data."""

Name = Annotated[bytes, Meta(max_length=MAX_NAME_BYTES)]
Number = Annotated[int, Meta(ge=0, lt=2**62)]


class GossipEntry(msgspec.Struct, array_like=True, frozen=True):
    """An entry. `last`: number of the last item in `data`, within the writer's stream."""

    writer: Name
    stream: Name
    last: Number
    data: Annotated[bytes, Meta(max_length=MAX_ENTRY_BYTES)]


class EntryPage(msgspec.Struct, array_like=True, tag="entries"):
    """Entries in their order; the place to continue from in this generation; the log's current
    end."""

    generation: Annotated[str, Meta(max_length=64)]
    after: Number
    head: Number
    entries: list[GossipEntry] = []


@dataclass
class _Stream:
    size_bytes: int = 0
    numbers: deque[int] = field(default_factory=deque)


class GossipLog:
    """Log of entries. Thread-safe.

    Args:
        capacity_bytes: for all entries, each with ENTRY_COST_BYTES.
        generation: unique to this log.
    """

    def __init__(self, capacity_bytes: int, generation: str) -> None:
        self.capacity_bytes, self.generation = capacity_bytes, generation
        self._lock = threading.Lock()
        self._head = 0
        self._entries: dict[int, tuple[GossipEntry, bool]] = {}
        self._numbers: list[int] = []
        """Numbers of entries, ascending: those in `_entries`, and some of removed ones."""
        self._streams: dict[bytes, _Stream] = {}
        self._by_writer: dict[tuple[bytes, bytes], deque[int]] = {}
        """Numbers of the entries that are here, by writer and stream."""
        self._size_bytes = 0
        self._counts: Counter[str] = Counter()

    def append(self, entry: GossipEntry, *, own: bool = True) -> bool:
        """Append an entry; return False if it has nothing new, or is larger than the log.

        own: whether it is of this machine, and not from another one's log.
        """
        with self._lock:
            size_bytes = len(entry.data) + ENTRY_COST_BYTES
            pair = entry.writer, entry.stream
            theirs = self._by_writer.get(pair)
            last = self._entries[theirs[-1]][0].last if theirs else -1
            if size_bytes > self.capacity_bytes or entry.last <= last:
                self._counts["not_taken"] += 1
                return False
            self._head += 1
            self._entries[self._head] = entry, own
            self._numbers.append(self._head)
            stream = self._streams.setdefault(entry.stream, _Stream())
            stream.numbers.append(self._head)
            stream.size_bytes += size_bytes
            self._by_writer.setdefault(pair, deque()).append(self._head)
            self._size_bytes += size_bytes
            self._counts["taken"] += 1
            while self._size_bytes > self.capacity_bytes:
                self._evict_one()
            return True

    def read(
        self,
        after: int,
        most_bytes: int,
        *,
        generation: str,
        except_writer: bytes = b"",
        own: bool = False,
    ) -> EntryPage:
        """Return the entries after a place: at most `most_bytes`, but at least one if there is any.

        Args:
            generation: the one of `after`; in another generation, reading begins at the start.
            except_writer: a writer whose entries are left out.
            own: whether to leave out entries from other logs.
        """
        entries: list[GossipEntry] = []
        size_bytes = 0
        with self._lock:
            after = min(after, self._head) if generation == self.generation else 0
            for index in range(bisect_right(self._numbers, after), len(self._numbers)):
                entry, is_own = self._entries.get(self._numbers[index], (None, False))
                if entry is not None and entry.writer != except_writer and (is_own or not own):
                    size_bytes += len(entry.data)
                    if entries and size_bytes > most_bytes:
                        return EntryPage(self.generation, after, self._head, entries)
                    entries.append(entry)
                after = self._numbers[index]
            return EntryPage(self.generation, self._head, self._head, entries)

    @property
    def head(self) -> int:
        """Number of the last entry so far."""
        return self._head

    def stats(self) -> dict[str, Any]:
        """Return JSON-able sizes and counts."""
        with self._lock:
            return {
                "entries": len(self._entries),
                "bytes": self._size_bytes,
                "size_bytes": self.capacity_bytes,
                "streams": len(self._streams),
                **{n: self._counts[n] for n in ("taken", "not_taken", "evicted")},
            }

    def _evict_one(self) -> None:
        stream = max(self._streams.values(), key=lambda each: (each.size_bytes, -each.numbers[0]))
        self._counts["evicted"] += 1
        self._drop(stream.numbers[0])

    def _drop(self, number: int) -> None:
        entry, _ = self._entries.pop(number)
        stream = self._streams[entry.stream]
        stream.numbers.remove(number)  # it is among the oldest, which are first
        size_bytes = len(entry.data) + ENTRY_COST_BYTES
        stream.size_bytes -= size_bytes
        self._size_bytes -= size_bytes
        if not stream.numbers:
            del self._streams[entry.stream]
        pair = entry.writer, entry.stream
        self._by_writer[pair].remove(number)
        if not self._by_writer[pair]:
            del self._by_writer[pair]
        if len(self._numbers) > 2 * len(self._entries) + 64:
            self._numbers = list(self._entries)

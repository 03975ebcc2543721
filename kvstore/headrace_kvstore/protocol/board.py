"""A board of notes that processes of one machine leave for each other.

A *note* is bytes that the board does not interpret. Its writer numbers the notes of each stream.
The board refuses a note whose number is not above the last one of that writer and stream, so
posting a note twice is safe. Readers get notes in the order of their arrival, and so each writer's
stream in its own order.

A full board evicts the oldest note of the largest stream, whichever process wrote it. Of two
streams of equal size, it evicts the older note. So a busy stream never displaces a quiet one.

A restarted node has a board with a new *generation*, empty or with notes restored from a backup
(`node.board_backup`). Every answer names the generation. When it changes, readers start from the
beginning, and writers post their remaining notes again. A writer names the generation that it posts
for, since posts in the wrong order would be refused. Once a writer posts, its restored notes are
removed, because it posts all notes that it still has.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAX_NAME_BYTES = 64
MAX_NOTE_BYTES = 2**20
NOTE_COST_BYTES = 512
"""Bytes counted for each note in addition to its data."""

Name = Annotated[bytes, Meta(max_length=MAX_NAME_BYTES)]
Number = Annotated[int, Meta(ge=0, lt=2**62)]


class Note(msgspec.Struct, array_like=True, frozen=True):
    """A note. `last`: number of the last item in `data`, within the writer's stream."""

    writer: Name
    stream: Name
    last: Number
    data: Annotated[bytes, Meta(max_length=MAX_NOTE_BYTES)]


class Page(msgspec.Struct, array_like=True, tag="notes"):
    """Notes in their order; the place to continue from in this generation; the board's current
    end."""

    generation: Annotated[str, Meta(max_length=64)]
    after: Number
    head: Number
    notes: list[Note] = []


class Kept(msgspec.Struct, array_like=True, frozen=True):
    """A note in a backup. `own`: whether it is of the machine that saved it."""

    note: Note
    own: bool


@dataclass
class _Stream:
    size_bytes: int = 0
    numbers: deque[int] = field(default_factory=deque)


class Board:
    """Board of notes. Thread-safe.

    Args:
        capacity_bytes: for all notes, each with NOTE_COST_BYTES.
        generation: unique to this board.
    """

    def __init__(self, capacity_bytes: int, generation: str) -> None:
        self.capacity_bytes, self.generation = capacity_bytes, generation
        self._lock = threading.Lock()
        self._head = 0
        self._notes: dict[int, tuple[Note, bool]] = {}
        self._numbers: list[int] = []
        """Numbers of notes, ascending: those in `_notes`, and some of removed notes."""
        self._streams: dict[bytes, _Stream] = {}
        self._theirs: dict[tuple[bytes, bytes], deque[int]] = {}
        """Numbers of the notes that are here, by writer and stream."""
        self._size_bytes = 0
        self._restored: dict[bytes, list[int]] = {}
        """Numbers of restored notes, by writer; some of the notes may be removed already."""
        self._counts: Counter[str] = Counter()

    def post(self, note: Note, *, own: bool = True) -> bool:
        """Put a note up; return False if it has nothing new, or is larger than the board.

        own: whether it is of this machine, and not from another one's board.
        """
        with self._lock:
            taken = self._post(note, own)
            for number in self._restored.pop(note.writer, ()) if taken else ():
                if number in self._notes:
                    self._drop(number)
            return taken

    def keep(self) -> list[Kept]:
        """Return all notes in their order, for a backup."""
        with self._lock:
            return [Kept(note, own) for note, own in self._notes.values()]

    def restore(self, kept: Iterable[Kept]) -> int:
        """Put up the notes of a backup; return how many were new."""
        before = self._counts["restored"]
        for each in kept:
            with self._lock:
                if self._post(each.note, each.own):
                    self._restored.setdefault(each.note.writer, []).append(self._head)
                    self._counts["restored"] += 1
        return self._counts["restored"] - before

    def _post(self, note: Note, own: bool) -> bool:
        size_bytes = len(note.data) + NOTE_COST_BYTES
        pair = note.writer, note.stream
        theirs = self._theirs.get(pair)
        last = self._notes[theirs[-1]][0].last if theirs else -1
        if size_bytes > self.capacity_bytes or note.last <= last:
            self._counts["not_taken"] += 1
            return False
        self._head += 1
        self._notes[self._head] = note, own
        self._numbers.append(self._head)
        stream = self._streams.setdefault(note.stream, _Stream())
        stream.numbers.append(self._head)
        stream.size_bytes += size_bytes
        self._theirs.setdefault(pair, deque()).append(self._head)
        self._size_bytes += size_bytes
        self._counts["taken"] += 1
        while self._size_bytes > self.capacity_bytes:
            self._drop_one()
        return True

    def read(
        self, after: int, most_bytes: int, *, generation: str, but: bytes = b"", own: bool = False
    ) -> Page:
        """Return the notes after a place: at most `most_bytes`, but at least one if there is any.

        Args:
            generation: the one of `after`; in another generation, reading begins at the start.
            but: a writer whose notes are left out.
            own: whether to leave out notes from other boards.
        """
        notes: list[Note] = []
        size_bytes = 0
        with self._lock:
            after = min(after, self._head) if generation == self.generation else 0
            for index in range(bisect_right(self._numbers, after), len(self._numbers)):
                note, is_own = self._notes.get(self._numbers[index], (None, False))
                if note is not None and note.writer != but and (is_own or not own):
                    size_bytes += len(note.data)
                    if notes and size_bytes > most_bytes:
                        return Page(self.generation, after, self._head, notes)
                    notes.append(note)
                after = self._numbers[index]
            return Page(self.generation, self._head, self._head, notes)

    @property
    def head(self) -> int:
        """Number of the last note so far."""
        return self._head

    def stats(self) -> dict[str, Any]:
        """Return JSON-able sizes and counts."""
        with self._lock:
            return {
                "notes": len(self._notes),
                "bytes": self._size_bytes,
                "size_bytes": self.capacity_bytes,
                "streams": len(self._streams),
                **{n: self._counts[n] for n in ("taken", "not_taken", "evicted", "restored")},
            }

    def _drop_one(self) -> None:
        stream = max(self._streams.values(), key=lambda each: (each.size_bytes, -each.numbers[0]))
        self._counts["evicted"] += 1
        self._drop(stream.numbers[0])

    def _drop(self, number: int) -> None:
        note, _ = self._notes.pop(number)
        stream = self._streams[note.stream]
        stream.numbers.remove(number)  # it is among the oldest, which are first
        size_bytes = len(note.data) + NOTE_COST_BYTES
        stream.size_bytes -= size_bytes
        self._size_bytes -= size_bytes
        if not stream.numbers:
            del self._streams[note.stream]
        pair = note.writer, note.stream
        self._theirs[pair].remove(number)
        if not self._theirs[pair]:
            del self._theirs[pair]
        if len(self._numbers) > 2 * len(self._notes) + 64:
            self._numbers = list(self._notes)

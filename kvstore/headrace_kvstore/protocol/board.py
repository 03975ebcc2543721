"""A board of notes that processes of one machine leave for each other, and which notes it keeps.

A *note* is bytes that the board does not interpret. Its writer numbers the notes of each stream.
The board refuses a note whose number is not above the last one of that writer and stream, so
posting a note twice is safe. Readers get notes in the order of their arrival, and so each writer's
stream in its own order.

A full board evicts the oldest note of the largest stream, whoever wrote it; of two streams of
equal size, the older note. So a busy stream never displaces a quiet one.

A restarted node has a board with a new *generation*, empty or with notes restored from a backup
(`node.board_backup`). Every answer names the generation.
When it changes, readers start from the beginning, and writers post again what they still have. A
writer names the generation that it posts for, since posts in the wrong order would be refused.
Once a writer posts, its restored notes go, because it posts all that it still has.
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
"""What a note takes beside its bytes."""

Name = Annotated[bytes, Meta(max_length=MAX_NAME_BYTES)]
Number = Annotated[int, Meta(ge=0, lt=2**62)]


class Note(msgspec.Struct, array_like=True, frozen=True):
    """`last`: number of the last thing in `data`, within the writer's stream."""

    writer: Name
    stream: Name
    last: Number
    data: Annotated[bytes, Meta(max_length=MAX_NOTE_BYTES)]


class Page(msgspec.Struct, array_like=True, tag="notes"):
    """Notes in their order; where to read on in this generation; and where the board ends now."""

    generation: Annotated[str, Meta(max_length=64)]
    after: Number
    head: Number
    notes: list[Note] = []


class Kept(msgspec.Struct, array_like=True, frozen=True):
    """A note in a backup. `own`: of the machine that saved it."""

    note: Note
    own: bool


@dataclass
class _Stream:
    size_bytes: int = 0
    numbers: deque[int] = field(default_factory=deque)


class Board:
    """Thread-safe.

    Args:
        capacity_bytes: for all notes, each with NOTE_COST_BYTES.
        generation: of no other board.
    """

    def __init__(self, capacity_bytes: int, generation: str) -> None:
        self.capacity_bytes, self.generation = capacity_bytes, generation
        self._lock = threading.Lock()
        self._head = 0
        self._notes: dict[int, tuple[Note, bool]] = {}
        self._numbers: list[int] = []
        """Ascending: those of `_notes`, and of some that are gone."""
        self._streams: dict[bytes, _Stream] = {}
        self._theirs: dict[tuple[bytes, bytes], deque[int]] = {}
        """By writer and stream, the numbers of their notes that are here."""
        self._size_bytes = 0
        self._restored: dict[bytes, list[int]] = {}
        """By writer, the numbers of its restored notes; some may be gone."""
        self._counts: Counter[str] = Counter()

    def post(self, note: Note, *, own: bool = True) -> bool:
        """Put a note up; False if it says nothing new, or is larger than the board.

        own: of this machine, not brought from another one's board.
        """
        with self._lock:
            taken = self._post(note, own)
            for number in self._restored.pop(note.writer, ()) if taken else ():
                if number in self._notes:
                    self._drop(number)
            return taken

    def keep(self) -> list[Kept]:
        """All notes, in their order."""
        with self._lock:
            return [Kept(note, own) for note, own in self._notes.values()]

    def restore(self, kept: Iterable[Kept]) -> int:
        """Put up notes of a backup; how many say something new."""
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
        """Notes behind a place: at least one if there is any, else `most_bytes` of them at most.

        Args:
            generation: in which `after` was given; in another one reading begins at the start.
            but: a writer whose notes are left out. own: leave out what other boards had.
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
        """JSON-able."""
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
        stream.numbers.remove(number)  # it is among the oldest, which stand first
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

"""The board against a list that is searched from its start."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace_kvstore.protocol.gossip_log import ENTRY_COST_BYTES, GossipEntry, GossipLog
from headrace_kvstore.protocol.gossip_log import SavedEntry as Saved

CAPACITY_BYTES = 8 * ENTRY_COST_BYTES
NAMES = st.sampled_from([b"a", b"b", b"c"])


@dataclass
class SavedEntry:
    number: int
    note: GossipEntry
    own: bool
    restored: bool

    @property
    def size_bytes(self) -> int:
        return len(self.note.data) + ENTRY_COST_BYTES


class Boards(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.board = GossipLog(CAPACITY_BYTES, "g")
        self.kept: list[SavedEntry] = []
        self.head = 0
        self.place = 0

    @rule(
        writer=NAMES,
        stream=NAMES,
        last=st.integers(0, 20),
        size=st.integers(0, CAPACITY_BYTES // 2) | st.just(CAPACITY_BYTES),
        own=st.booleans(),
    )
    def post(self, writer: bytes, stream: bytes, last: int, size: int, own: bool) -> None:
        if self.put(writer, stream, last, size, own, restored=False):
            self.kept = [k for k in self.kept if k.note.writer != writer or not k.restored]

    @rule(writer=NAMES, stream=NAMES, last=st.integers(0, 20), size=st.integers(0, CAPACITY_BYTES))
    def restore(self, writer: bytes, stream: bytes, last: int, size: int) -> None:
        self.put(writer, stream, last, size, True, restored=True)

    def put(
        self, writer: bytes, stream: bytes, last: int, size: int, own: bool, *, restored: bool
    ) -> bool:
        note = GossipEntry(writer, stream, last, bytes(size))
        theirs = [k.note.last for k in self.kept if (k.note.writer, k.note.stream) == note_of(note)]
        new = all(last > other for other in theirs) and size + ENTRY_COST_BYTES <= CAPACITY_BYTES
        if restored:
            assert self.board.restore([Saved(note, own)]) == new
        else:
            assert self.board.append(note, own=own) == new
        if new:
            self.head += 1
            self.kept.append(SavedEntry(self.head, note, own, restored))
            while sum(kept.size_bytes for kept in self.kept) > CAPACITY_BYTES:
                self.kept.remove(self.first_of_largest())
        return new

    def first_of_largest(self) -> SavedEntry:
        sizes = {
            kept.note.stream: sum(
                k.size_bytes for k in self.kept if k.note.stream == kept.note.stream
            )
            for kept in self.kept
        }
        largest = max(sizes, key=lambda stream: (sizes[stream], -self.oldest(stream).number))
        return self.oldest(largest)

    def oldest(self, stream: bytes) -> SavedEntry:
        return next(kept for kept in self.kept if kept.note.stream == stream)

    @rule(
        most_bytes=st.integers(0, CAPACITY_BYTES),
        except_writer=NAMES | st.just(b""),
        own=st.booleans(),
    )
    def read_on(self, most_bytes: int, except_writer: bytes, own: bool) -> None:
        page = self.board.read(
            self.place, most_bytes, generation="g", except_writer=except_writer, own=own
        )
        wanted, size = [], 0
        for kept in self.kept:
            if (
                kept.number <= self.place
                or kept.note.writer == except_writer
                or (own and not kept.own)
            ):
                continue
            size += len(kept.note.data)
            if wanted and size > most_bytes:
                break
            wanted.append(kept)
        assert page.entries == [kept.note for kept in wanted]
        assert self.place <= page.after <= page.head == self.head
        skipped = [k for k in self.kept if self.place < k.number <= page.after and k not in wanted]
        assert all(k.note.writer == except_writer or not k.own for k in skipped), (
            "nothing else is skipped"
        )
        self.place = page.after

    @rule()
    def begin_again(self) -> None:
        self.place = 0

    @invariant()
    def it_keeps_to_its_size(self) -> None:
        stats = self.board.stats()
        assert stats["bytes"] == sum(kept.size_bytes for kept in self.kept) <= CAPACITY_BYTES
        assert stats["notes"] == len(self.kept)


def note_of(note: GossipEntry) -> tuple[bytes, bytes]:
    return note.writer, note.stream


TestBoards = Boards.TestCase
TestBoards.settings = settings(max_examples=60, stateful_step_count=40)

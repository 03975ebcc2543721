"""The gossip log against a list that is searched from its start."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace_kvstore.protocol.gossip_log import ENTRY_COST_BYTES, GossipEntry, GossipLog

CAPACITY_BYTES = 8 * ENTRY_COST_BYTES
NAMES = st.sampled_from([b"a", b"b", b"c"])


@dataclass
class KeptEntry:
    number: int
    entry: GossipEntry
    own: bool

    @property
    def size_bytes(self) -> int:
        return len(self.entry.data) + ENTRY_COST_BYTES


class GossipLogs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.log = GossipLog(CAPACITY_BYTES, "g")
        self.kept: list[KeptEntry] = []
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
        entry = GossipEntry(writer, stream, last, bytes(size))
        theirs = [
            k.entry.last for k in self.kept if (k.entry.writer, k.entry.stream) == stream_of(entry)
        ]
        new = all(last > other for other in theirs) and size + ENTRY_COST_BYTES <= CAPACITY_BYTES
        assert self.log.append(entry, own=own) == new
        if new:
            self.head += 1
            self.kept.append(KeptEntry(self.head, entry, own))
            while sum(kept.size_bytes for kept in self.kept) > CAPACITY_BYTES:
                self.kept.remove(self.first_of_largest())

    def first_of_largest(self) -> KeptEntry:
        sizes = {
            kept.entry.stream: sum(
                k.size_bytes for k in self.kept if k.entry.stream == kept.entry.stream
            )
            for kept in self.kept
        }
        largest = max(sizes, key=lambda stream: (sizes[stream], -self.oldest(stream).number))
        return self.oldest(largest)

    def oldest(self, stream: bytes) -> KeptEntry:
        return next(kept for kept in self.kept if kept.entry.stream == stream)

    @rule(
        most_bytes=st.integers(0, CAPACITY_BYTES),
        except_writer=NAMES | st.just(b""),
        own=st.booleans(),
    )
    def read_on(self, most_bytes: int, except_writer: bytes, own: bool) -> None:
        page = self.log.read(
            self.place, most_bytes, generation="g", except_writer=except_writer, own=own
        )
        wanted, size = [], 0
        for kept in self.kept:
            if (
                kept.number <= self.place
                or kept.entry.writer == except_writer
                or (own and not kept.own)
            ):
                continue
            size += len(kept.entry.data)
            if wanted and size > most_bytes:
                break
            wanted.append(kept)
        assert page.entries == [kept.entry for kept in wanted]
        assert self.place <= page.after <= page.head == self.head
        skipped = [k for k in self.kept if self.place < k.number <= page.after and k not in wanted]
        assert all(k.entry.writer == except_writer or not k.own for k in skipped), (
            "nothing else is skipped"
        )
        self.place = page.after

    @rule()
    def begin_again(self) -> None:
        self.place = 0

    @invariant()
    def it_keeps_to_its_size(self) -> None:
        stats = self.log.stats()
        assert stats["bytes"] == sum(kept.size_bytes for kept in self.kept) <= CAPACITY_BYTES
        assert stats["entries"] == len(self.kept)


def stream_of(entry: GossipEntry) -> tuple[bytes, bytes]:
    return entry.writer, entry.stream


TestGossipLogs = GossipLogs.TestCase
TestGossipLogs.settings = settings(max_examples=60, stateful_step_count=40)

"""The gossip log: what is taken, in which order it is read, and what is evicted."""

from __future__ import annotations

from itertools import count

import pytest

from headrace_kvstore.protocol.gossip_log import ENTRY_COST_BYTES, GossipEntry, GossipLog

KIB = 1024


def log(entries: int = 100, of_bytes: int = KIB) -> GossipLog:
    return GossipLog(entries * (of_bytes + ENTRY_COST_BYTES), "g")


def entry(last: int, writer: bytes = b"a", stream: bytes = b"s", size: int = KIB) -> GossipEntry:
    return GossipEntry(writer, stream, last, bytes([last % 256]) * size)


def lasts(on: GossipLog, after: int = 0, most_bytes: int = 1 << 30, **how: object) -> list[int]:
    page = on.read(after, most_bytes, generation="g", **how)  # type: ignore[arg-type]
    return [each.last for each in page.entries]


class TestTaking:
    def test_entries_are_read_in_the_order_in_which_they_came(self) -> None:
        on = log()
        for last in (3, 5, 9):
            assert on.append(entry(last))
        assert lasts(on) == [3, 5, 9]

    @pytest.mark.parametrize("last", [1, 5])
    def test_what_says_nothing_new_is_not_taken(self, last: int) -> None:
        on = log()
        assert on.append(entry(5))
        assert not on.append(entry(last))
        assert lasts(on) == [5]

    def test_writers_and_streams_are_numbered_each_for_itself(self) -> None:
        on = log()
        assert on.append(entry(5))
        assert on.append(entry(5, writer=b"b"))
        assert on.append(entry(5, stream=b"t"))
        assert on.stats()["streams"] == 2

    def test_an_entry_that_the_log_cannot_hold_is_not_taken(self) -> None:
        on = log(entries=2)
        assert not on.append(entry(1, size=3 * KIB))
        assert on.stats()["entries"] == 0


class TestReading:
    def test_a_reader_goes_on_where_it_was(self) -> None:
        on = log()
        on.append(entry(1))
        page = on.read(0, 1 << 20, generation="g")
        assert (page.after, page.head) == (1, 1)
        on.append(entry(2))
        assert lasts(on, page.after) == [2]

    def test_a_page_holds_no_more_bytes_than_wanted_but_one_entry_at_least(self) -> None:
        on = log()
        for last in range(1, 6):
            on.append(entry(last))
        assert lasts(on, most_bytes=1) == [1]
        page = on.read(1, 3 * KIB, generation="g")
        assert [each.last for each in page.entries] == [2, 3, 4]
        assert (page.after, page.head) == (4, 5)

    def test_a_writer_does_not_read_its_own(self) -> None:
        on = log()
        on.append(entry(1))
        on.append(entry(2, writer=b"b"))
        on.append(entry(3))
        page = on.read(0, 1 << 20, generation="g", except_writer=b"a")
        assert [each.last for each in page.entries] == [2]
        assert page.after == page.head == 3

    def test_other_logs_get_only_what_was_posted_here(self) -> None:
        on = log()
        on.append(entry(1), own=False)
        on.append(entry(2))
        assert lasts(on, own=True) == [2]
        assert lasts(on) == [1, 2]

    def test_a_reader_of_another_generation_begins_at_the_start(self) -> None:
        on = log()
        on.append(entry(1))
        page = on.read(1, 1 << 20, generation="before the restart")
        assert [each.last for each in page.entries] == [1]
        assert page.generation == "g"

    def test_a_place_behind_the_end_is_the_end(self) -> None:
        on = log()
        on.append(entry(1))
        assert lasts(on, 99) == []
        on.append(entry(2))
        assert on.read(99, 1, generation="g").after == 2


class TestFull:
    def test_the_oldest_entry_goes(self) -> None:
        on = log(entries=3)
        for last in range(1, 6):
            on.append(entry(last))
        assert lasts(on) == [3, 4, 5]
        assert on.stats()["evicted"] == 2
        assert on.stats()["bytes"] <= on.capacity_bytes

    def test_of_the_stream_that_holds_most(self) -> None:
        on = log(entries=4)
        on.append(entry(1, stream=b"quiet"))
        numbers = count(1)
        for _ in range(50):
            on.append(entry(next(numbers), stream=b"loud"))
        assert lasts(on) == [1, 48, 49, 50]

    def test_a_reader_passes_over_what_is_gone(self) -> None:
        on = log(entries=2)
        page = None
        for last in range(1, 300):
            on.append(entry(last))
            if last == 1:
                page = on.read(0, 1, generation="g")
        assert page is not None
        assert lasts(on, page.after) == [298, 299]

    def test_an_entry_that_went_may_be_posted_again(self) -> None:
        on = log(entries=1)
        on.append(entry(1))
        on.append(entry(1, stream=b"t"))
        assert on.stats()["entries"] == 1
        assert on.append(entry(1))

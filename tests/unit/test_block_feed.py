"""Streams of events: order, gaps, snapshots, restarts, silence, and events that cannot be."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from vllm.distributed import kv_events as vllm_events

from headrace.router.blocks import feed as feed_module
from headrace.router.blocks.feed import ANY, GPU, STORE_MEDIA, Ask, Feed, FeedError, Kind
from headrace.router.blocks.hashing import key_of
from headrace.router.blocks.index import BlockIndex
from headrace_kvstore.protocol import events as store_events

HASHES = [bytes([i]) * 32 for i in range(1, 30)]
KEYS = np.array([key_of(one) for one in HASHES], np.uint64)
DIGEST = "ab" * 16
ENGINE = Kind(block_tokens=16)
STORE = Kind(STORE_MEDIA, ownership=DIGEST)
CLEARED = vllm_events.AllBlocksCleared()


def stored(first: int, last: int, numbers: bool = False, **changes: object) -> object:
    """As an engine tells of the blocks of one prompt."""
    parent = HASHES[first - 1] if first else None
    names = [key_of(one) if numbers else one for one in HASHES[first:last]]
    fields: dict[str, object] = dict(
        block_hashes=names,
        parent_block_hash=key_of(parent) if numbers and parent else parent,
        token_ids=list(range(16 * len(names))),
        block_size=16,
        lora_id=None,
        medium=GPU,
        lora_name=None,
        group_idx=0,
    )
    return vllm_events.BlockStored(**{**fields, **changes})  # type: ignore[arg-type]


def removed(first: int, last: int) -> object:
    return vllm_events.BlockRemoved(block_hashes=HASHES[first:last], medium=GPU, group_idx=0)


def in_store(kind: type, medium: str, *blocks: int, digest: str = DIGEST) -> object:
    hashes = [HASHES[i] for i in blocks]
    where = {"locality": "LOCAL", "ownership": digest}
    if kind is store_events.BlockRemoved:
        return kind(hashes, medium, **where)
    return kind(hashes, None, [], 0, None, medium, None, **where)


def batch(*events: object) -> bytes:
    return msgspec.msgpack.encode(vllm_events.KVEventBatch(1.0, list(events), 0))  # type: ignore[arg-type]


class Bench:
    """A feed with one source, `e`."""

    def __init__(self, kind: Kind = ENGINE) -> None:
        self.index = BlockIndex(2**20)
        self.feed = Feed(self.index, silent_s=10.0)
        self.holders = self.feed.join("e", "1", kind, 0.0)
        self.now_s = 0.0

    def hear(self, seq: int, *events: object, epoch: str = "1", replay: bool = False) -> None:
        self.feed.heard("e", epoch, seq, batch(*events), self.now_s, replay)

    def begin(self, *events: object) -> Bench:
        """Batch 0 was taken."""
        self.hear(0, *events)
        return self

    def asked(self) -> list[int]:
        return [ask.seq for ask in self.feed.turn(self.now_s).asks]

    def answer(self, *parts: tuple[int, tuple[object, ...]], epoch: str = "1") -> None:
        for seq, events in parts:
            self.hear(seq, *events, replay=True, epoch=epoch)
        self.feed.replayed("e", epoch, self.now_s)

    def blocks(self, medium: str = GPU) -> int:
        return int(self.index.match(KEYS)[self.holders[medium]])


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    assert made.asked() == [0]
    made.answer((0, ()))
    return made


@pytest.mark.parametrize("numbers", [False, True])
def test_an_engines_events_say_what_it_holds(bench: Bench, numbers: bool) -> None:
    bench.hear(1, stored(0, 5, numbers), stored(5, 9, numbers))
    assert bench.blocks() == 9
    bench.hear(2, removed(7, 9))
    assert bench.blocks() == 7
    bench.hear(3, CLEARED)
    assert bench.blocks() == 0


def test_a_newcomer_that_has_told_nothing_is_complete() -> None:
    bench = Bench()
    assert not bench.feed.complete("e")
    assert bench.asked() == [0]
    bench.answer()
    assert bench.feed.complete("e") and bench.asked() == []
    bench.hear(0, stored(0, 3))
    assert bench.blocks() == 3


def test_a_batch_that_came_before_is_skipped(bench: Bench) -> None:
    bench.hear(1, stored(0, 3))
    bench.hear(2, removed(2, 3))
    bench.hear(1, stored(0, 3))
    assert bench.blocks() == 2 and bench.feed.complete("e")


def test_a_gap_is_asked_for_once_and_what_came_meanwhile_is_taken_in_order(bench: Bench) -> None:
    bench.hear(3, removed(2, 3))
    bench.hear(4, stored(2, 4))
    assert bench.blocks() == 0
    assert bench.asked() == [1] and bench.asked() == []
    bench.hear(5, stored(4, 5))
    bench.answer((1, (stored(0, 2),)), (2, (stored(2, 3),)))
    assert bench.blocks() == 5
    assert bench.feed.complete("e") and bench.asked() == []


def test_a_batch_that_none_followed_is_asked_for_once_its_number_is_known(bench: Bench) -> None:
    bench.hear(1, stored(0, 2))
    bench.feed.alive("e", 0.0, 2)
    assert bench.asked() == []
    bench.feed.alive("e", 0.0, 3)
    assert bench.asked() == [2]
    bench.answer((2, (stored(2, 4),)))
    assert bench.blocks() == 4 and bench.asked() == []


def test_a_replay_that_brings_a_part_is_asked_to_go_on(bench: Bench) -> None:
    bench.hear(4, stored(3, 4))
    assert bench.asked() == [1]
    bench.answer((1, (stored(0, 1),)), (2, (stored(1, 2),)))
    assert bench.blocks() == 2 and bench.asked() == [3]
    bench.answer((3, (stored(2, 3),)))
    assert bench.blocks() == 4


def test_an_answer_that_does_not_come_is_asked_for_again(bench: Bench) -> None:
    bench.hear(2, stored(0, 1))
    assert bench.asked() == [1]
    bench.now_s = feed_module.ASK_AGAIN_S
    assert bench.asked() == []
    bench.now_s += 0.1
    assert bench.asked() == [1]


def test_what_the_source_has_forgotten_clears_what_was_known(bench: Bench) -> None:
    bench.hear(1, stored(0, 3))
    bench.hear(9, stored(0, 2))
    assert bench.asked() == [2]
    bench.answer((6, (stored(0, 1),)), (7, ()), (8, ()))
    assert bench.blocks() == 2
    assert bench.feed.counts["lost_batches"] == 4 and bench.feed.complete("e")


def test_a_source_that_cannot_replay_counts_from_what_it_last_sent(bench: Bench) -> None:
    bench.hear(1, stored(0, 3))
    bench.hear(9, stored(0, 2))
    assert bench.asked() == [2]
    bench.answer()
    assert bench.blocks() == 2 and bench.feed.complete("e")


def test_a_snapshot_comes_in_pages_with_events_meanwhile() -> None:
    bench = Bench()
    assert bench.asked() == [0]
    bench.hear(9, stored(4, 5))
    bench.hear(6, CLEARED, stored(0, 2), replay=True)
    bench.hear(10, removed(4, 5))
    bench.hear(7, stored(2, 3), replay=True)
    bench.answer((8, (stored(3, 4),)))
    assert bench.blocks() == 4
    assert bench.feed.complete("e") and bench.feed.counts["lost_batches"] == 0


def test_a_snapshot_that_comes_unasked_ends_a_gap(bench: Bench) -> None:
    bench.hear(1, stored(0, 9))
    bench.hear(5, CLEARED, stored(0, 1))
    bench.hear(6, stored(1, 2))
    assert bench.blocks() == 2 and bench.feed.complete("e") and bench.asked() == []


def test_an_old_snapshot_is_skipped(bench: Bench) -> None:
    bench.hear(1, CLEARED)
    bench.hear(2, stored(0, 4))
    bench.hear(1, CLEARED)
    assert bench.blocks() == 4


def test_what_waits_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "KEPT_BATCHES", 3)
    for seq in range(2, 9):
        bench.hear(seq, stored(seq - 1, seq))
    bench.answer((1, (stored(0, 1),)))
    assert bench.blocks() == 4 and not bench.feed.complete("e")
    assert bench.asked() == [5]


def test_a_restarted_source_begins_anew_and_its_past_is_not_believed(bench: Bench) -> None:
    bench.hear(1, stored(0, 3))
    bench.hear(1, stored(1, 2), epoch="2")
    assert bench.blocks() == 0 and bench.asked() == [0]
    bench.answer((0, (stored(0, 1),)), epoch="2")
    assert bench.blocks() == 2
    bench.hear(2, stored(1, 3), epoch="1")
    assert bench.blocks() == 2 and bench.feed.counts["late"] == 1
    bench.hear(0, stored(0, 1), epoch="3")
    assert bench.blocks() == 1 and bench.feed.counts["late"] == 1
    bench.feed.replayed("e", "1", 0.0)
    assert bench.feed.join("e", "4", ENGINE, 0.0) == bench.holders
    assert bench.blocks() == 0


def test_a_silent_source_expires_with_its_holders(bench: Bench) -> None:
    bench.hear(1, stored(0, 3))
    assert bench.feed.turn(10.0).expired == []
    bench.feed.alive("e", 5.0)
    assert bench.feed.turn(15.0).expired == []
    assert bench.feed.turn(15.1).expired == ["e"]
    assert bench.index.match(KEYS).tolist() == [0]
    with pytest.raises(KeyError):
        bench.hear(2)
    assert bench.feed.join("f", "1", ENGINE, 16.0) == {GPU: 0}


def test_sources_and_holders_are_bounded() -> None:
    feed = Feed(BlockIndex(2**20, most_holders=4), most_sources=2)
    feed.join("a", "1", STORE, 0.0)
    with pytest.raises(OverflowError, match="holders"):
        feed.join("b", "1", STORE, 0.0)
    feed.join("b", "1", ENGINE, 0.0)
    with pytest.raises(OverflowError, match="sources"):
        feed.join("c", "1", ENGINE, 0.0)
    assert feed.stats()["sources"] == 2


def test_another_kind_under_the_same_name_is_another_source() -> None:
    feed = Feed(BlockIndex(2**20))
    feed.join("a", "1", ENGINE, 0.0)
    assert set(feed.join("a", "1", STORE, 0.0)) == {*STORE_MEDIA, ANY}
    with pytest.raises(ValueError, match="medium"):
        Kind(())


# A store


def test_a_store_tells_of_two_media_and_a_block_on_either_can_be_used() -> None:
    bench = Bench(STORE)
    gone, there = store_events.BlockRemoved, store_events.BlockStored
    bench.hear(0, CLEARED, in_store(there, "DRAM", 3, 0, 2), in_store(there, "NVME", 1, 2))
    assert [bench.blocks(medium) for medium in ("DRAM", "NVME", ANY)] == [1, 0, 4]
    bench.hear(1, in_store(gone, "DRAM", 2))
    assert [bench.blocks(medium) for medium in ("DRAM", "NVME", ANY)] == [1, 0, 4]
    bench.hear(2, in_store(gone, "NVME", 2), in_store(there, "DRAM", 1))
    assert [bench.blocks(medium) for medium in ("DRAM", "NVME", ANY)] == [2, 0, 2]
    bench.hear(3, in_store(there, "DRAM", 2))
    assert [bench.blocks(medium) for medium in ("DRAM", "NVME", ANY)] == [4, 0, 4]


def test_what_the_stores_publisher_sends_is_understood() -> None:
    bench = Bench(STORE)
    changes = [
        store_events.Change(True, "DRAM", bytes.fromhex(DIGEST), HASHES[i]) for i in range(6)
    ]
    log = store_events.EventLog(2**20)
    encoder = msgspec.msgpack.Encoder()
    for events in ([store_events.AllBlocksCleared()], *store_events.batches(changes)):
        log.add(encoder.encode(store_events.EventBatch(1.0, list(events), 0)))
    first, found = log.read(bench.asked()[0])
    for seq, payload in enumerate(found, first):
        bench.feed.heard("e", "1", seq, payload, 0.0, replay=True)
    assert bench.blocks("DRAM") == bench.blocks(ANY) == 6


def test_other_namespaces_media_groups_and_block_sizes_are_not_followed(bench: Bench) -> None:
    bench.hear(
        1,
        stored(0, 3, medium="CPU"),
        stored(0, 3, group_idx=1),
        stored(0, 3, block_size=4),
        stored(0, 3, ownership=DIGEST),
        stored(0, 3, locality="REMOTE"),
    )
    assert bench.index.blocks == 0 and bench.feed.counts["not_followed"] == 5
    store = Bench(STORE).begin(
        CLEARED, in_store(store_events.BlockStored, "DRAM", 0, digest="cd" * 16)
    )
    assert store.index.blocks == 0


# What cannot be


@pytest.mark.parametrize(
    "field, wrong",
    [
        ("block_hashes", [b"short"]),
        ("block_hashes", [b"x" * 33]),
        ("block_hashes", [1.5]),
        ("block_hashes", [-1]),
        ("block_hashes", 7),
        ("parent_block_hash", "text"),
        ("block_size", -1),
        ("medium", "m" * 65),
        ("group_idx", -1),
    ],
)
def test_an_event_that_cannot_be_names_its_field_and_loses_nothing_else(
    bench: Bench, field: str, wrong: object
) -> None:
    with pytest.raises(FeedError, match=rf"e: batch 1, event 1: .*{field}"):
        bench.hear(1, stored(0, 2), stored(2, 4, **{field: wrong}), stored(2, 3))
    assert bench.blocks() == 3
    bench.hear(2, stored(3, 4))
    assert bench.blocks() == 4 and bench.feed.counts["bad"] == 1


def test_a_hash_of_more_than_64_bits_cannot_be_a_number(bench: Bench) -> None:
    assert key_of(2**64 + 5) == 5


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01", msgspec.msgpack.encode([1, 2, 3])])
def test_a_batch_that_cannot_be_read_is_asked_for_and_then_passed(
    bench: Bench, payload: bytes
) -> None:
    with pytest.raises(FeedError, match="e: batch 1"):
        bench.feed.heard("e", "1", 1, payload, 0.0)
    bench.hear(2, stored(0, 4))
    assert bench.blocks() == 0 and bench.asked() == [1]
    with pytest.raises(FeedError, match="e: batch 1"):
        bench.feed.heard("e", "1", 1, payload, 0.0, replay=True)
    assert bench.blocks() == 4 and bench.feed.complete("e")


def test_a_batch_that_waits_tells_its_error_once(bench: Bench) -> None:
    with pytest.raises(FeedError, match="e: batch 2, event 0"):
        bench.hear(2, stored(0, 1, medium=1), stored(0, 2))
    bench.hear(1)
    assert bench.blocks() == 2


def test_numbers_and_sizes_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_BATCH_BYTES", 100)
    with pytest.raises(FeedError, match="number -1"):
        bench.hear(-1)
    with pytest.raises(FeedError, match="more than 100 bytes"):
        bench.hear(1, stored(0, 20))


def test_events_with_more_fields_than_are_known_are_understood(bench: Bench) -> None:
    event = {"type": "BlockStored", "block_hashes": HASHES[:2], "block_size": 16, "new": [1]}
    payload = msgspec.msgpack.encode([1.0, [event], 0, "more"])
    bench.feed.heard("e", "1", 1, payload, 0.0)
    assert bench.blocks() == 2


def test_asks_name_the_epoch(bench: Bench) -> None:
    bench.hear(5)
    assert bench.feed.turn(0.0).asks == [Ask("e", "1", 1)]

"""Streams of events: order, gaps, snapshots, restarts, silence, and events that cannot be."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from vllm.distributed import kv_events as vllm_events

from headrace.router.blocks import kv_events as events_module
from headrace.router.blocks.block_index import BlockIndex
from headrace.router.blocks.kv_events import KvEventError, KvEventProcessor, ReplayRequest
from headrace_kvstore.identity.prompt_hash import key_of

HASHES = [bytes([i]) * 32 for i in range(1, 30)]
KEYS = np.array([key_of(one) for one in HASHES], np.uint64)
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
        medium="GPU",
        lora_name=None,
        group_idx=0,
    )
    return vllm_events.BlockStored(**{**fields, **changes})  # type: ignore[arg-type]


def removed(first: int, last: int) -> object:
    return vllm_events.BlockRemoved(block_hashes=HASHES[first:last], medium="GPU", group_idx=0)


def batch(*events: object) -> bytes:
    return msgspec.msgpack.encode(vllm_events.KVEventBatch(1.0, list(events), 0))  # type: ignore[arg-type]


class Bench:
    """A processor with one source, `e`."""

    def __init__(self) -> None:
        self.index = BlockIndex(2**20)
        self.events = KvEventProcessor(self.index, silent_s=10.0)
        self.holder = self.events.add_source("e", "1", 0.0)
        self.now_s = 0.0

    def hear(self, seq: int, *events: object, epoch: str = "1", replay: bool = False) -> None:
        self.events.on_batch("e", epoch, seq, batch(*events), self.now_s, replay)

    def asked(self) -> list[int]:
        return [request.seq for request in self.events.poll(self.now_s).requests]

    def answer(self, *parts: tuple[int, tuple[object, ...]], epoch: str = "1") -> None:
        for seq, events in parts:
            self.hear(seq, *events, replay=True, epoch=epoch)
        self.events.on_replay_end("e", epoch, self.now_s)

    def blocks(self) -> int:
        return int(self.index.match(KEYS)[self.holder])

    def is_complete(self) -> bool:
        return self.events.stats()["incomplete"] == 0


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
    assert not bench.is_complete()
    assert bench.asked() == [0]
    bench.answer()
    assert bench.is_complete() and bench.asked() == []
    bench.hear(0, stored(0, 3))
    assert bench.blocks() == 3


def test_a_batch_that_came_before_is_skipped(bench: Bench) -> None:
    bench.hear(1, stored(0, 3))
    bench.hear(2, removed(2, 3))
    bench.hear(1, stored(0, 3))
    assert bench.blocks() == 2 and bench.is_complete()


def test_a_gap_is_asked_for_once_and_what_came_meanwhile_is_taken_in_order(bench: Bench) -> None:
    bench.hear(3, removed(2, 3))
    bench.hear(4, stored(2, 4))
    assert bench.blocks() == 0
    assert bench.asked() == [1] and bench.asked() == []
    bench.hear(5, stored(4, 5))
    bench.answer((1, (stored(0, 2),)), (2, (stored(2, 3),)))
    assert bench.blocks() == 5
    assert bench.is_complete() and bench.asked() == []


def test_a_batch_that_none_followed_is_asked_for_once_its_number_is_known(bench: Bench) -> None:
    bench.hear(1, stored(0, 2))
    bench.events.on_heartbeat("e", 0.0, 2)
    assert bench.asked() == []
    bench.events.on_heartbeat("e", 0.0, 3)
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
    bench.now_s = events_module.REPLAY_RETRY_S
    assert bench.asked() == []
    bench.now_s += 0.1
    assert bench.asked() == [1]


def test_what_the_source_has_forgotten_clears_what_was_known(bench: Bench) -> None:
    bench.hear(1, stored(0, 3))
    bench.hear(9, stored(0, 2))
    assert bench.asked() == [2]
    bench.answer((6, (stored(0, 1),)), (7, ()), (8, ()))
    assert bench.blocks() == 2
    assert bench.events.counts["lost_batches"] == 4 and bench.is_complete()


def test_a_source_that_cannot_replay_counts_from_what_it_last_sent(bench: Bench) -> None:
    bench.hear(1, stored(0, 3))
    bench.hear(9, stored(0, 2))
    assert bench.asked() == [2]
    bench.answer()
    assert bench.blocks() == 2 and bench.is_complete()


def test_a_snapshot_comes_in_pages_with_events_meanwhile() -> None:
    bench = Bench()
    assert bench.asked() == [0]
    bench.hear(9, stored(4, 5))
    bench.hear(6, CLEARED, stored(0, 2), replay=True)
    bench.hear(10, removed(4, 5))
    bench.hear(7, stored(2, 3), replay=True)
    bench.answer((8, (stored(3, 4),)))
    assert bench.blocks() == 4
    assert bench.is_complete() and bench.events.counts["lost_batches"] == 0


def test_a_snapshot_that_comes_unasked_ends_a_gap(bench: Bench) -> None:
    bench.hear(1, stored(0, 9))
    bench.hear(5, CLEARED, stored(0, 1))
    bench.hear(6, stored(1, 2))
    assert bench.blocks() == 2 and bench.is_complete() and bench.asked() == []


def test_an_old_snapshot_is_skipped(bench: Bench) -> None:
    bench.hear(1, CLEARED)
    bench.hear(2, stored(0, 4))
    bench.hear(1, CLEARED)
    assert bench.blocks() == 4


def test_what_waits_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "KEPT_BATCHES", 3)
    for seq in range(2, 9):
        bench.hear(seq, stored(seq - 1, seq))
    bench.answer((1, (stored(0, 1),)))
    assert bench.blocks() == 4 and not bench.is_complete()
    assert bench.asked() == [5]


def test_a_restarted_source_begins_anew_and_its_past_is_not_believed(bench: Bench) -> None:
    bench.hear(1, stored(0, 3))
    bench.hear(1, stored(1, 2), epoch="2")
    assert bench.blocks() == 0 and bench.asked() == [0]
    bench.answer((0, (stored(0, 1),)), epoch="2")
    assert bench.blocks() == 2
    bench.hear(2, stored(1, 3), epoch="1")
    assert bench.blocks() == 2 and bench.events.counts["late"] == 1
    bench.hear(0, stored(0, 1), epoch="3")
    assert bench.blocks() == 1 and bench.events.counts["late"] == 1
    bench.events.on_replay_end("e", "1", 0.0)
    assert bench.events.add_source("e", "4", 0.0) == bench.holder
    assert bench.blocks() == 0


def test_a_silent_source_expires_with_its_holders(bench: Bench) -> None:
    bench.hear(1, stored(0, 3))
    assert bench.events.poll(10.0).expired == []
    bench.events.on_heartbeat("e", 5.0)
    assert bench.events.poll(15.0).expired == []
    assert bench.events.poll(15.1).expired == ["e"]
    assert bench.index.match(KEYS).tolist() == [0]
    with pytest.raises(KeyError):
        bench.hear(2)
    assert bench.events.add_source("f", "1", 16.0) == 0


def test_sources_and_holders_are_bounded() -> None:
    events = KvEventProcessor(BlockIndex(2**20, max_holders=1))
    events.add_source("a", "1", 0.0)
    with pytest.raises(OverflowError, match="holders"):
        events.add_source("b", "1", 0.0)
    assert events.stats()["sources"] == 1
    events = KvEventProcessor(BlockIndex(2**20), max_sources=2)
    for name in "ab":
        events.add_source(name, "1", 0.0)
    with pytest.raises(OverflowError, match="sources"):
        events.add_source("c", "1", 0.0)
    assert events.stats()["sources"] == 2


def test_other_windows_under_the_same_name_are_another_source(bench: Bench) -> None:
    bench.hear(1, stored(0, 3))
    assert bench.events.add_source("e", "1", 0.0, windows=(4,)) == bench.holder
    assert bench.blocks() == 0


def test_groups_without_a_window_are_not_followed(bench: Bench) -> None:
    bench.hear(1, stored(0, 3, group_idx=1))
    assert bench.index.blocks == 0 and bench.events.counts["not_followed"] == 1


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
        ("group_idx", -1),
    ],
)
def test_an_event_that_cannot_be_names_its_field_and_loses_nothing_else(
    bench: Bench, field: str, wrong: object
) -> None:
    with pytest.raises(KvEventError, match=rf"e: batch 1, event 1: .*{field}"):
        bench.hear(1, stored(0, 2), stored(2, 4, **{field: wrong}), stored(2, 3))
    assert bench.blocks() == 3
    bench.hear(2, stored(3, 4))
    assert bench.blocks() == 4 and bench.events.counts["bad"] == 1


def test_a_hash_of_more_than_64_bits_cannot_be_a_number(bench: Bench) -> None:
    assert key_of(2**64 + 5) == 5


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01", msgspec.msgpack.encode([1, 2, 3])])
def test_a_batch_that_cannot_be_read_is_asked_for_and_then_passed(
    bench: Bench, payload: bytes
) -> None:
    with pytest.raises(KvEventError, match="e: batch 1"):
        bench.events.on_batch("e", "1", 1, payload, 0.0)
    bench.hear(2, stored(0, 4))
    assert bench.blocks() == 0 and bench.asked() == [1]
    with pytest.raises(KvEventError, match="e: batch 1"):
        bench.events.on_batch("e", "1", 1, payload, 0.0, replay=True)
    assert bench.blocks() == 4 and bench.is_complete()


def test_a_batch_that_waits_tells_its_error_once(bench: Bench) -> None:
    with pytest.raises(KvEventError, match="e: batch 2, event 0"):
        bench.hear(2, stored(0, 1, group_idx="1"), stored(0, 2))
    bench.hear(1)
    assert bench.blocks() == 2


def test_numbers_and_sizes_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "MAX_BATCH_BYTES", 100)
    with pytest.raises(KvEventError, match="number -1"):
        bench.hear(-1)
    with pytest.raises(KvEventError, match="more than 100 bytes"):
        bench.hear(1, stored(0, 20))


def test_events_with_more_fields_than_are_known_are_understood(bench: Bench) -> None:
    event = {"type": "BlockStored", "block_hashes": HASHES[:2], "block_size": 16, "new": [1]}
    payload = msgspec.msgpack.encode([1.0, [event], 0, "more"])
    bench.events.on_batch("e", "1", 1, payload, 0.0)
    assert bench.blocks() == 2


def test_asks_name_the_epoch(bench: Bench) -> None:
    bench.hear(5)
    assert bench.events.poll(0.0).requests == [ReplayRequest("e", "1", 1)]

"""KV events: vLLM's own decoder reads them, and a subscriber that falls behind catches up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.protocol import events
from headrace_kvstore.protocol.events import (
    DRAM,
    END_SEQ,
    NVME,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Change,
    EventBatch,
    EventLog,
    EventPublisher,
    batches,
    plain_hash,
)
from tests.support.kvnode import DIGEST, Engine, key, keys, settings, until

OTHER = b"another-digest-!"


def came(number: int, medium: str = DRAM, digest: bytes = DIGEST) -> Change:
    return Change(True, medium, digest, key(number))


def went(number: int, medium: str = DRAM) -> Change:
    return Change(False, medium, DIGEST, key(number))


# Making


def events_of(*changes: Change) -> list[Any]:
    return [event for batch in batches(changes) for event in batch]


def test_a_run_of_one_kind_is_one_event_and_order_is_kept() -> None:
    got = events_of(came(0), came(1, NVME), went(0), went(1), went(1, NVME), came(0, digest=OTHER))
    assert [type(event).__name__ for event in got] == [
        *("BlockStored", "BlockStored", "BlockRemoved", "BlockRemoved", "BlockStored")
    ]
    assert [event.medium for event in got] == [DRAM, NVME, DRAM, NVME, DRAM]
    assert got[2].block_hashes == keys(0, 1)
    assert got[4].ownership == OTHER.hex()


def test_no_batch_has_more_blocks_than_a_message_should_carry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "BATCH_BLOCKS", 2)
    got = list(batches(came(number) for number in range(5)))
    assert [[len(event.block_hashes) for event in batch] for batch in got] == [[2], [2], [1]]  # type: ignore[attr-defined]


# The log


def test_a_log_is_read_in_pages_from_any_number_it_has_and_else_from_its_beginning() -> None:
    log = EventLog(1000)
    assert log.read(0) == (0, []) and log.read(7) == (0, [])
    assert [log.add(bytes([n]) * 10) for n in range(5)] == list(range(5))
    assert log.read(3) == (3, [b"\3" * 10, b"\4" * 10])
    assert log.read(5) == (5, [])
    assert log.read(6)[0] == log.read(99)[0] == 0
    assert len(log.read(0, 25)[1]) == 2
    assert len(log.read(0, 0)[1]) == 1, "at least one, or nobody comes further"
    log.drop_before(3)
    assert log.read(0) == log.read(3) == (3, [b"\3" * 10, b"\4" * 10])
    assert log.next_seq == 5


def test_a_log_is_full_once_the_batches_behind_the_state_take_more_than_is_kept() -> None:
    log = EventLog(1000)
    log.add(bytes(5000))
    log.drop_before(0)
    assert not log.full, "the state itself may be of any size"
    log.add(bytes(900))
    assert log.full
    log.drop_before(log.add(b"state"))
    assert not log.full and log.next_seq == 3


def test_hashes_are_what_vllm_calls_blocks_by() -> None:
    assert plain_hash(b"s" * 16 + bytes(16)) == b"s" * 16
    assert plain_hash(b"s" * 31 + b"\0") == b"s" * 31 + b"\0"
    assert plain_hash(key(0)) == key(0)


def test_vllm_s_own_decoder_reads_them_and_writes_the_same_bytes() -> None:
    kv_events = pytest.importorskip("vllm.distributed.kv_events")
    made = events_of(came(0), came(1), went(0, NVME))
    sent = msgspec.msgpack.encode(EventBatch(1.5, [AllBlocksCleared(), *made], 0))
    batch = msgspec.msgpack.Decoder(kv_events.KVEventBatch).decode(sent)
    cleared, stored, removed = batch.events
    assert isinstance(cleared, kv_events.AllBlocksCleared)
    assert isinstance(stored, kv_events.BlockStored)
    assert isinstance(removed, kv_events.BlockRemoved)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 0)
    assert stored.block_hashes == keys(0, 1)
    assert (stored.medium, stored.token_ids, stored.locality) == (DRAM, [], "LOCAL")
    assert stored.ownership == removed.ownership == DIGEST.hex()
    assert msgspec.msgpack.encode(batch) == sent
    for ours, theirs in (
        (BlockStored, kv_events.BlockStored),
        (BlockRemoved, kv_events.BlockRemoved),
    ):
        assert ours.__struct_fields__ == theirs.__struct_fields__


# Publishing


@dataclass
class Subscriber:
    """Follows a publisher as vLLM's subscribers do: an index of (medium, hash), gaps replayed."""

    publisher: EventPublisher
    held: set[tuple[str, Any]] = field(default_factory=set)
    seqs: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(self.publisher.endpoint)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")

    def read(self, wait_s: float = 0.02) -> None:
        """What has come; a gap is filled first."""
        while self.socket.poll(int(1e3 * wait_s)):
            topic, seq_bytes, payload = self.socket.recv_multipart()
            assert topic == b""
            seq = int.from_bytes(seq_bytes, "big")
            expected = self.seqs[-1] + 1 if self.seqs else 0
            if seq > expected:
                self.replay(expected)
            if not self.seqs or seq > self.seqs[-1]:
                self.take(seq, payload)

    def replay(self, first: int) -> None:
        socket = self.context.socket(zmq.DEALER)
        socket.connect(self.publisher.replay_endpoint)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            assert socket.poll(10_000)
            _, _, seq_bytes, payload = socket.recv_multipart()
            if seq_bytes == END_SEQ:
                break
            self.replayed.append(int.from_bytes(seq_bytes, "big"))
            self.take(self.replayed[-1], payload)
        socket.close(0)

    def take(self, seq: int, payload: bytes) -> None:
        self.seqs.append(seq)
        for event in msgspec.msgpack.decode(payload, type=EventBatch).events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
            elif isinstance(event, BlockStored):
                self.held |= {(event.medium, block) for block in event.block_hashes}
            else:
                self.held -= {(event.medium, block) for block in event.block_hashes}


class Source:
    """A store of which each change is published."""

    def __init__(self, folder: Path, **limits: int) -> None:
        self.held: dict[int, Change] = {}
        self.lock = threading.Lock()
        ends = [f"ipc://{folder}/{name}" for name in ("events", "replay")]
        self.publisher = EventPublisher(ends[0], ends[1], self.contents, **limits)
        self.subscribers: list[Subscriber] = []

    def contents(self) -> list[Change]:
        with self.lock:
            return list(self.held.values())

    def put(self, *numbers: int) -> None:
        with self.lock:
            self.held |= {number: came(number) for number in numbers}
        self.publisher.publish([came(number) for number in numbers])

    def drop(self, *numbers: int) -> None:
        with self.lock:
            for number in numbers:
                self.held.pop(number, None)
        self.publisher.publish([went(number) for number in numbers])

    def subscribe(self) -> Subscriber:
        self.subscribers.append(Subscriber(self.publisher))
        return self.subscribers[-1]

    def agrees(self, subscriber: Subscriber) -> bool:
        subscriber.read()
        return subscriber.held == {(DRAM, key(number)) for number in self.held}

    def close(self) -> None:
        for subscriber in self.subscribers:
            subscriber.context.destroy(0)
        self.publisher.close()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    source = Source(tmp_path, kept_bytes=6000)
    until(lambda: source.publisher.resyncs == 1)  # changes before that would go into the state
    yield source
    source.close()


def sent(source: Source, batches: int) -> None:
    until(lambda: source.publisher.stats()["batches"] >= batches)


def joined(source: Source) -> Subscriber:
    """A subscriber that hears what is published from now on."""
    subscriber = source.subscribe()
    number = 1000
    while not subscriber.seqs:
        number += 1
        source.put(number)
        subscriber.read()
    return subscriber


def test_a_subscriber_sees_what_comes_and_goes(source: Source) -> None:
    subscriber = joined(source)
    source.put(0, 1, 2)
    source.drop(1)
    until(lambda: source.agrees(subscriber))
    assert subscriber.seqs == sorted(set(subscriber.seqs))


def test_a_subscriber_that_comes_late_replays_what_it_missed(source: Source) -> None:
    source.put(0)
    source.put(1)
    source.drop(0)
    sent(source, 4)
    subscriber = joined(source)
    until(lambda: source.agrees(subscriber))
    assert subscriber.replayed[:4] == [0, 1, 2, 3]


def test_a_subscriber_that_falls_behind_replays_from_where_it_was(source: Source) -> None:
    subscriber = joined(source)
    subscriber.read(0.1)
    at = subscriber.seqs[-1]
    subscriber.socket.setsockopt(zmq.UNSUBSCRIBE, b"")
    time.sleep(0.1)
    for number in range(5):
        source.put(number)
    sent(source, at + 6)
    subscriber.socket.setsockopt(zmq.SUBSCRIBE, b"")
    until(lambda: bool(source.put(7) or source.agrees(subscriber)))
    assert subscriber.seqs == list(dict.fromkeys(subscriber.seqs))
    assert set(range(at + 1, at + 6)) <= set(subscriber.seqs)


def test_what_is_too_old_to_replay_comes_as_the_whole_state(source: Source) -> None:
    for number in range(60):
        source.put(number)
        if number % 3 == 0:
            source.drop(number)
    until(lambda: source.publisher.resyncs > 1)
    subscriber = source.subscribe()

    def replayed() -> bool:
        subscriber.replayed.clear()
        subscriber.replay(0)
        return source.agrees(subscriber)

    until(replayed)
    first = subscriber.replayed[0]
    assert first > 0 and subscriber.replayed == list(range(first, first + len(subscriber.replayed)))


def test_a_state_of_any_size_is_told_in_pages(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "BATCH_BLOCKS", 3)
    source.put(*range(20))
    before = source.publisher.log.next_seq
    source.publisher.resync()
    until(lambda: source.publisher.resyncs > 1)
    first, told = source.publisher.log.read(0)
    assert first >= before and len(told) >= 1 + 20 // 3
    sizes = [msgspec.msgpack.decode(batch, type=EventBatch).events for batch in told]
    assert isinstance(sizes[0][0], AllBlocksCleared)
    late = source.subscribe()
    late.replay(0)
    assert source.agrees(late)


def test_a_replay_is_told_in_parts_and_the_rest_on_asking_again(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "REPLAYED_BATCHES", 4)
    for number in range(8):
        source.put(number)
    sent(source, 9)
    late = source.subscribe()
    late.replay(0)
    assert len(late.replayed) == 4 and not source.agrees(late)
    late.replay(late.replayed[-1] + 1)
    late.replay(late.replayed[-1] + 1)
    assert source.agrees(late)


def test_who_knows_a_later_number_than_there_is_gets_the_whole_state(source: Source) -> None:
    """The node was restarted and counts from 0 again."""
    source.put(0)
    sent(source, 2)
    subscriber = source.subscribe()
    subscriber.held = {(DRAM, key(99))}
    subscriber.replay(500)
    assert subscriber.held == {(DRAM, key(0))}


def test_a_publisher_that_cannot_keep_up_publishes_everything_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "QUEUED_BATCHES", 2)
    source = Source(tmp_path)
    subscriber = joined(source)
    for number in range(1000):
        source.put(number)
        if number % 2:
            source.drop(number - 1)
    until(lambda: source.agrees(subscriber))
    assert source.publisher.dropped_batches > 0 and source.publisher.resyncs > 1
    source.close()


def test_a_publisher_knows_whether_anybody_listens(source: Source) -> None:
    publisher = source.publisher
    assert not publisher.has_subscribers
    first, second = source.subscribe(), source.subscribe()
    second.socket.setsockopt(zmq.SUBSCRIBE, b"one of two topics")
    until(lambda: len(publisher._topics) == 2)
    second.context.destroy(0)
    until(lambda: len(publisher._topics) == 1)
    assert publisher.has_subscribers, "the first one listens"
    first.context.destroy(0)
    until(lambda: not publisher.has_subscribers)


def test_replay_requests_that_are_none_are_ignored(source: Source) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(source.publisher.replay_endpoint)
    for frames in ([b"x"], [b"", b"short"], [b"", b"a", b"b", b"c"]):
        socket.send_multipart(frames)
    socket.send_multipart([b"", bytes(8)])
    assert socket.poll(10_000)
    assert socket.recv_multipart()[2] == bytes(8)
    context.destroy(0)


# From a node


def test_a_node_tells_of_both_tiers(tmp_path: Path) -> None:
    ends = {name: f"ipc://{tmp_path}/{name}" for name in ("events", "replay")}
    file_io = FileIo()
    node = StoreNode(settings(tmp_path, **ends), file_io=file_io).start()
    engine = Engine(node.settings)
    assert node._events.publisher is not None
    subscriber = Subscriber(node._events.publisher)

    def sees(*expected: tuple[str, int]) -> bool:
        subscriber.read()
        return subscriber.held == {(medium, key(number)) for medium, number in expected}

    until(lambda: subscriber.read() is None and bool(subscriber.seqs or node._events.resync()))
    engine.put(0, 1)
    until(lambda: sees((DRAM, 0), (DRAM, 1), (NVME, 0), (NVME, 1)))
    engine.arena.discard(engine.row, keys(0))
    until(lambda: sees((DRAM, 1), (NVME, 0), (NVME, 1)))
    assert node.tiers.nvme is not None and node.tiers.nvme.discard(DIGEST, key(1))
    until(lambda: sees((DRAM, 1), (NVME, 0)))
    late = Subscriber(node._events.publisher)
    late.replay(0)
    assert late.held == subscriber.held
    for each in (subscriber, late):
        each.context.destroy(0)
    assert node.close() and file_io.close()
    engine.close()

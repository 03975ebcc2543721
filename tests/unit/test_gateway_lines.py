"""Real lines of replicas, and a gateway that follows them: what arrives, what is mended, and what
a stranger, garbage and a flood do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import zmq

from headrace.gateway.lines import MOST_MESSAGE_BYTES, LineInfo, Lines
from headrace.router.blocks.feed import Feed
from headrace.router.blocks.hashing import key_of
from headrace.router.blocks.index import BlockIndex
from headrace_engine.reporting.line import Line
from headrace_engine.reporting.report import Report, encode
from headrace_kvstore.protocol import events as protocol
from headrace_kvstore.protocol.events import Change
from headrace_kvstore.protocol.membership import Membership
from tests.support.reports import report

TOKEN = "a-token-of-the-replica's-own"
HOST = "127.0.0.1"


def block(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "big"), digest_size=8).digest()


def keys(*numbers: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array([key_of(block(number)) for number in numbers], np.uint64)


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        await asyncio.sleep(0.005)


class Replica:
    """A line, and the engine whose blocks it tells of."""

    def __init__(self, name: str = "a", token: str = TOKEN) -> None:
        self.name, self.token = name, token
        self.held: dict[bytes, None] = {}
        self._lock = threading.Lock()
        self.line = Line(token, HOST, self.contents)

    def contents(self) -> list[Change]:
        with self._lock:
            return [Change(True, "GPU", b"", key) for key in self.held]

    def change(self, stored: bool, *numbers: int) -> None:
        changes = [Change(stored, "GPU", b"", block(number)) for number in numbers]
        with self._lock:
            for _, _, _, key in changes:
                if stored:
                    self.held[key] = None
                else:
                    self.held.pop(key, None)
        self.line.publish(changes)

    def restart(self) -> None:
        self.line.close()
        self.held.clear()
        self.line = Line(self.token, HOST, self.contents)

    @property
    def info(self) -> LineInfo:
        info = LineInfo.of(self.line.info())
        assert info is not None
        return info


class Timed(Lines):
    """Knows how much processor time each of its turns takes."""

    longest_s = 0.0

    def _turn(self) -> None:
        began_s = time.thread_time()
        super()._turn()
        self.longest_s = max(self.longest_s, time.thread_time() - began_s)


class Gateway:
    """A feed, and the lines that fill it."""

    def __init__(self, silent_s: float = 10.0) -> None:
        self.index = BlockIndex(2**24)
        self.feed = Feed(self.index, silent_s=silent_s)
        self.reports: list[Report] = []
        self.lines = Timed(self.feed, self.reports.append)

    def follow(self, *replicas: Replica) -> None:
        self.lines.follow({replica.name: replica.info for replica in replicas})

    def has(self, replica: str, *numbers: int) -> bool:
        """Whether it holds these blocks, one behind the other, and nothing else."""
        holder = self.lines.holder(replica)
        if holder is None or self.index.entries != len(numbers):
            return False
        return int(self.index.match(keys(*numbers))[holder]) == len(numbers)


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = Replica()
    yield made
    made.line.close()


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    made = Gateway()
    yield made
    made.lines.close()


# What arrives


async def test_blocks_that_were_there_and_that_come_and_go(
    gateway: Gateway, replica: Replica
) -> None:
    replica.change(True, 0, 1)
    gateway.follow(replica)
    assert gateway.lines.holder("a") is not None, "a holder from the start"
    await until(lambda: gateway.has("a", 0, 1))
    replica.change(True, 2, 3)
    replica.change(False, 3)
    await until(lambda: gateway.has("a", 0, 1, 2))


async def test_reports_arrive_soon_and_only_the_newest_of_many(
    gateway: Gateway, replica: Replica
) -> None:
    gateway.follow(replica)
    replica.line.report(report("a", running=0))
    while not gateway.reports:
        replica.line.report(report("a", running=0))
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    gateway.reports.clear()
    for running in range(1, 101):
        replica.line.report(report("a", running=running))
    await until(lambda: bool(gateway.reports) and gateway.reports[-1].running == 100)
    assert len(gateway.reports) < 20
    numbers = [got.seq for got in gateway.reports]
    assert numbers == sorted(numbers)


async def test_reports_are_20_ms_apart_and_beats_stand_for_them_later(replica: Replica) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    Membership(TOKEN).enter(socket)
    socket.setsockopt(zmq.SUBSCRIBE, protocol.REPORT_TOPIC)
    socket.connect(replica.info.events)
    assert socket.poll(5000)
    times, payloads = [], []
    until_s = time.monotonic() + 0.5
    number = 0
    while time.monotonic() < until_s:
        number += 1
        replica.line.report(report("a", running=number))
        if socket.poll(1):
            times.append(time.monotonic())
            payloads.append(socket.recv_multipart()[2])
    assert 10 <= sum(map(bool, payloads)) <= 30
    while socket.poll(50):
        socket.recv()
    assert socket.poll(1000)
    assert socket.recv_multipart()[::2] == [protocol.REPORT_TOPIC, b""]
    context.destroy(0)


async def test_two_replicas_are_told_apart(gateway: Gateway, replica: Replica) -> None:
    other = Replica("b", "another-token-of-its-own")
    replica.change(True, 0, 1)
    other.change(True, 0)
    gateway.follow(replica, other)
    await until(lambda: gateway.index.entries == 3)
    match = gateway.index.match(keys(0, 1))
    assert match[gateway.lines.holder("a")] == 2 and match[gateway.lines.holder("b")] == 1
    other.line.close()


# What is mended


async def test_a_gap_is_replayed(gateway: Gateway, replica: Replica) -> None:
    replica.change(True, 0)
    gateway.follow(replica)
    await until(lambda: gateway.has("a", 0))
    stream = gateway.lines._sources["a"].events
    assert stream is not None
    stream.socket.setsockopt(zmq.UNSUBSCRIBE, b"")
    await asyncio.sleep(0.2)
    for number in range(1, 6):
        replica.change(True, number)
    await until(lambda: replica.line.stats()["queued"] == 0)
    await asyncio.sleep(0.1)
    stream.socket.setsockopt(zmq.SUBSCRIBE, b"")
    await asyncio.sleep(0.2)
    assert gateway.has("a", 0)
    replica.change(True, 6)
    await until(lambda: gateway.has("a", *range(7)))
    assert gateway.feed.counts["gaps"] == 1 and gateway.feed.counts["lost_batches"] == 0


async def test_a_long_history_is_replayed_part_by_part_without_pauses(
    gateway: Gateway, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "REPLAYED_BATCHES", 100)
    for number in range(1000):
        replica.change(True, number)
    await until(lambda: replica.line.stats()["batches"] > 1000)
    began_s = time.monotonic()
    gateway.follow(replica)
    await until(lambda: gateway.has("a", *range(1000)))
    assert gateway.lines.counts["replays"] >= 10
    assert time.monotonic() - began_s < 5.0


async def test_a_line_that_begins_anew_is_cleared(gateway: Gateway, replica: Replica) -> None:
    replica.change(True, 0, 1)
    gateway.follow(replica)
    await until(lambda: gateway.has("a", 0, 1))
    holder = gateway.lines.holder("a")
    replica.restart()
    replica.change(True, 5)
    gateway.follow(replica)
    await until(lambda: gateway.has("a", 5))
    assert gateway.lines.holder("a") == holder
    assert gateway.feed.counts["restarts"] == 1


async def test_a_replica_that_left_holds_nothing(gateway: Gateway, replica: Replica) -> None:
    replica.change(True, 0)
    gateway.follow(replica)
    await until(lambda: gateway.has("a", 0))
    gateway.lines.follow({})
    assert gateway.lines.holder("a") is None
    assert gateway.lines.stats()["lines"] == 0
    gateway.follow(replica)
    await until(lambda: gateway.lines.holder("a") is not None)


async def test_a_silent_replica_loses_its_holder_and_gets_one_when_it_is_back() -> None:
    gateway, replica = Gateway(silent_s=1.0), Replica()
    replica.change(True, 0)
    gateway.follow(replica)
    await until(lambda: gateway.has("a", 0))
    await asyncio.sleep(1.5)
    assert gateway.lines.holder("a") is not None, "beats keep it"
    stream = gateway.lines._sources["a"].events
    assert stream is not None
    stream.socket.setsockopt(zmq.UNSUBSCRIBE, b"")
    await until(lambda: gateway.lines.holder("a") is None)
    stream.socket.setsockopt(zmq.SUBSCRIBE, b"")
    await until(lambda: gateway.has("a", 0))
    gateway.lines.close()
    replica.line.close()


# Who is not of the app


@pytest.mark.parametrize("token", [None, "the-token-of-another-replica"])
async def test_a_stranger_gets_nothing(replica: Replica, token: str | None) -> None:
    replica.change(True, 0)
    context = zmq.Context()
    listener, asker = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    for socket in (listener, asker):
        if token is not None:
            Membership(token).enter(socket)
        socket.setsockopt(zmq.LINGER, 0)
    listener.setsockopt(zmq.SUBSCRIBE, b"")
    listener.connect(replica.info.events)
    asker.connect(replica.info.replay)
    asker.send_multipart((b"", bytes(8)))
    for number in range(5):
        replica.line.report(report("a", running=number))
        replica.change(True, number)
        await asyncio.sleep(0.1)
    assert not listener.poll(0) and not asker.poll(0)
    context.destroy(0)


async def test_a_gateway_with_another_token_follows_nothing_and_blames_nobody(
    gateway: Gateway, replica: Replica
) -> None:
    replica.change(True, 0)
    info = replica.info
    gateway.lines.follow(
        {"a": LineInfo(info.events, info.replay, info.epoch, "an-old-token-of-the-replica")}
    )
    await asyncio.sleep(0.5)
    assert gateway.index.entries == 0 and gateway.reports == []


@pytest.mark.parametrize(
    "told",
    [
        None,
        "tcp://127.0.0.1:1",
        {},
        {"events": "tcp://h:1", "replay": "tcp://h:2", "epoch": "e"},
        {"events": "tcp://h:1", "replay": "tcp://h:2", "epoch": "e", "token": "short"},
        {"events": 1, "replay": "tcp://h:2", "epoch": "e", "token": TOKEN},
        {"events": "x" * 300, "replay": "tcp://h:2", "epoch": "e", "token": TOKEN},
    ],
)
def test_what_is_no_line_is_none(told: Any) -> None:
    assert LineInfo.of(told) is None


async def test_an_endpoint_that_cannot_be_costs_the_others_nothing(
    gateway: Gateway, replica: Replica
) -> None:
    replica.change(True, 0)
    bad = LineInfo("tcp://nowhere", "also nowhere", "e", TOKEN)
    gateway.lines.follow({"bad": bad, "a": replica.info})
    await until(lambda: gateway.has("a", 0))
    assert gateway.lines.counts["unconnected"] >= 1


# What cannot be


class Member:
    """Has the token, and sends what it likes."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.sockets = [self.context.socket(kind) for kind in (zmq.PUB, zmq.ROUTER)]
        self.guard = Membership(TOKEN).guard(*self.sockets)
        for socket in self.sockets:
            socket.bind(f"tcp://{HOST}:*")
        ends = [socket.get_string(zmq.LAST_ENDPOINT) for socket in self.sockets]
        self.info = LineInfo(ends[0], ends[1], "1", TOKEN)

    def send(self, *frames: bytes) -> None:
        self.sockets[0].send_multipart(frames)

    def close(self) -> None:
        self.guard.stop()
        self.context.destroy(0)


async def test_garbage_is_counted_and_costs_nothing_else(
    gateway: Gateway, replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    member = Member()
    gateway.lines.follow({"bad": member.info, "a": replica.info})
    number = bytes(8)
    good = encode(report("bad", running=3))
    while not gateway.reports:
        member.send(protocol.REPORT_TOPIC, number, good)
        await asyncio.sleep(0.02)
    for frames in (
        (b"",),
        (b"", b"1", b"x"),
        (b"", number, b"x", b"y"),
        (b"", number, b"\xff\xff"),
        (b"", b"\xff" * 8, b"x"),
        (b"of-later", number, b"x"),
        (protocol.REPORT_TOPIC, (1).to_bytes(8, "big"), b"\xc1"),
        (protocol.REPORT_TOPIC, (2).to_bytes(8, "big"), encode(report("a", running=99))),
    ):
        member.send(*frames)
    replica.change(True, 0, 1)
    await until(lambda: gateway.has("a", 0, 1))
    replica.line.report(report("a", running=5))
    await until(lambda: any(got.replica == "a" for got in gateway.reports))
    counts = gateway.lines.counts
    await until(lambda: counts["bad_reports"] == 2 and counts["malformed"] == 3)
    assert counts["bad_batches"] == 2 and counts["unknown_topics"] == 1
    assert all(got.running != 99 for got in gateway.reports)
    said = [line for line in caplog.messages if "the line of bad" in line]
    assert len(said) == 1
    member.close()


async def test_a_replay_that_is_garbage_or_never_ends_is_given_up(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.gateway.lines.REPLAY_S", 0.3)
    member = Member()
    gateway.lines.follow({"bad": member.info})
    router = member.sockets[1]
    await until(lambda: bool(router.poll(0)))
    client, _, wanted = router.recv_multipart()
    assert wanted == bytes(8)
    router.send_multipart((client, b"", b"", b"short", b"x"))
    await until(lambda: gateway.lines.counts["malformed"] == 1)
    assert gateway.lines.stats()["replaying"] == 0
    await until(lambda: bool(router.poll(0)))
    await until(lambda: gateway.lines.counts["replays_given_up"] == 1)
    assert gateway.lines.stats()["replaying"] == 0
    member.close()


async def test_a_message_that_is_too_large_is_never_taken_in(gateway: Gateway) -> None:
    member = Member()
    gateway.lines.follow({"bad": member.info})
    good = encode(report("bad"))
    while not gateway.reports:
        member.send(protocol.REPORT_TOPIC, bytes(8), good)
        await asyncio.sleep(0.02)
    member.send(b"", bytes(8), bytes(MOST_MESSAGE_BYTES + 1))
    number = 1
    while len(gateway.reports) < 2:  # the connection was cut, and is made anew
        number += 1
        member.send(protocol.REPORT_TOPIC, number.to_bytes(8, "big"), good)
        await asyncio.sleep(0.02)
    assert gateway.lines.counts["bad_batches"] == 0
    member.close()


async def test_a_consumer_that_fails_is_asked_again(replica: Replica) -> None:
    seen: list[int] = []

    def fails(got: Report) -> None:
        seen.append(got.running)
        raise RuntimeError("no")

    lines = Lines(Feed(BlockIndex(2**20)), fails)
    lines.follow({"a": replica.info})
    for running in range(100):
        replica.line.report(report("a", running=running))
        await asyncio.sleep(0.02)
        if len(seen) >= 2:
            break
    assert len(seen) >= 2 and lines.counts["failed_reports"] == len(seen)
    lines.close()


# A flood


async def test_a_flood_of_blocks_leaves_the_loop_its_turns(
    gateway: Gateway, replica: Replica
) -> None:
    replica.change(True, *range(64))
    gateway.follow(replica)
    await until(lambda: gateway.has("a", *range(64)))
    gateway.lines.longest_s = 0.0
    turns = 0
    numbers = list(range(64, 100_000))
    flood = threading.Thread(
        target=lambda: [
            replica.change(True, *numbers[at : at + 100]) for at in range(0, len(numbers), 100)
        ]
    )
    flood.start()
    deadline = time.monotonic() + 60.0
    while gateway.index.entries < 100_000:
        assert time.monotonic() < deadline
        turns += 1
        await asyncio.sleep(0)
    flood.join()
    assert turns > 50
    # A turn ends 4 ms after it began, with the message that is being read.
    assert 0.0 < gateway.lines.longest_s < 0.01
    assert gateway.lines.stats()["longest_turn_s"] > 0.0


async def test_the_whole_state_of_a_large_engine_comes_in_pages(
    gateway: Gateway, replica: Replica
) -> None:
    replica.held = {block(number): None for number in range(100_000)}
    replica.line.resync()
    await until(lambda: replica.line.stats()["batches"] >= 25)
    small = Replica("b", "another-token-of-its-own")
    small.change(True, 0)
    gateway.follow(small)
    await until(lambda: gateway.has("b", 0))  # compiled by now
    gateway.lines.longest_s = 0.0
    gateway.follow(replica)
    await until(lambda: gateway.index.entries == 100_000)
    small.line.close()
    match = gateway.index.match(keys(*range(1000)))
    assert match[gateway.lines.holder("a")] == 1000
    assert gateway.lines.longest_s < 0.02

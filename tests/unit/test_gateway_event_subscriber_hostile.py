"""A gateway that follows lines: what a stranger, garbage and a flood do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest
import zmq

from headrace.gateway.placement.event_subscriber import (
    MAX_MESSAGE_BYTES,
    EndpointInfo,
    EventSubscriber,
)
from headrace.router.blocks.block_index import BlockIndex, warm
from headrace.router.blocks.kv_events import KvEventProcessor
from headrace_engine.reporting.report import Report, encode
from headrace_kvstore.protocol import events as protocol
from headrace_kvstore.protocol.membership import Membership
from tests.support.event_publishers import HOST, TOKEN, Gateway, Replica, block, keys, until
from tests.support.reports import report


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """The index takes its time the first time."""
    warm()


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = Replica()
    yield made
    made.line.close()


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    made = Gateway()
    yield made
    made.subscriber.close()


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
    with suppress(zmq.Again):  # its connection may have been cut by now
        asker.send_multipart((b"", bytes(8)), zmq.NOBLOCK)
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
    gateway.subscriber.follow(
        {"a": EndpointInfo(info.events, info.replay, info.epoch, "an-old-token-of-the-replica")}
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
        *(
            {"events": "a", "replay": "b", "epoch": "e", "token": TOKEN, "windows": windows}
            for windows in (3, [-1], [True], ["8"], [2**40], [1] * 5)
        ),
    ],
)
def test_what_is_no_line_is_none(told: Any) -> None:
    assert EndpointInfo.of(told) is None


async def test_an_endpoint_that_cannot_be_costs_the_others_nothing(
    gateway: Gateway, replica: Replica
) -> None:
    replica.change(True, 0)
    bad = EndpointInfo("tcp://nowhere", "also nowhere", "e", TOKEN)
    gateway.subscriber.follow({"bad": bad, "a": replica.info})
    await until(lambda: gateway.has("a", 0))
    assert gateway.subscriber.counts["unconnected"] >= 1


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
        self.info = EndpointInfo(ends[0], ends[1], "1", TOKEN)

    def send(self, *frames: bytes) -> None:
        self.sockets[0].send_multipart(frames)

    def close(self) -> None:
        self.guard.stop()
        self.context.destroy(0)


async def test_garbage_is_counted_and_costs_nothing_else(
    gateway: Gateway, replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    member = Member()
    gateway.subscriber.follow({"bad": member.info, "a": replica.info})
    number = bytes(8)
    good = encode(report("bad", running=3))
    while not gateway.reports:
        member.send(protocol.REPORT_TOPIC, number, number, good)
        await asyncio.sleep(0.02)
    for frames in (
        (b"",),
        (b"", b"1", b"x"),
        (b"", number, b"x", b"y"),
        (b"", number, b"\xff\xff"),
        (b"", b"\xff" * 8, b"x"),
        (b"of-later", number, b"x"),
        (protocol.REPORT_TOPIC, number, b"\xc1"),
        (protocol.REPORT_TOPIC, (1).to_bytes(8, "big"), number, b"\xc1"),
    ):
        member.send(*frames)
    await until(lambda: gateway.subscriber.counts["bad_reports"] == 1)
    of_another = encode(report("a", running=99))
    member.send(protocol.REPORT_TOPIC, (2).to_bytes(8, "big"), number, of_another)
    replica.change(True, 0, 1)
    await until(lambda: gateway.has("a", 0, 1))
    replica.line.report(report("a", running=5))
    await until(lambda: any(got.replica == "a" for got in gateway.reports))
    counts = gateway.subscriber.counts
    await until(lambda: counts["bad_reports"] == 2 and counts["malformed"] == 4)
    assert counts["bad_batches"] == 2 and counts["unknown_topics"] == 1
    assert all(got.running != 99 for got in gateway.reports)
    said = [line for line in caplog.messages if "the events of bad" in line]
    assert len(said) == 1
    member.close()


async def test_a_replay_that_is_garbage_or_never_ends_is_given_up(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.gateway.placement.event_subscriber.REPLAY_S", 0.3)
    member = Member()
    gateway.subscriber.follow({"bad": member.info})
    router = member.sockets[1]
    await until(lambda: bool(router.poll(0)))
    client, _, wanted = router.recv_multipart()
    assert wanted == bytes(8)
    router.send_multipart((client, b"", b"", b"short", b"x"))
    await until(lambda: gateway.subscriber.counts["malformed"] == 1)
    assert gateway.subscriber.stats()["replaying"] == 0
    await until(lambda: bool(router.poll(0)))
    await until(lambda: gateway.subscriber.counts["replays_given_up"] == 1)
    assert gateway.subscriber.stats()["replaying"] == 0
    member.close()


async def test_a_message_that_is_too_large_is_never_taken_in(gateway: Gateway) -> None:
    member = Member()
    gateway.subscriber.follow({"bad": member.info})
    good = encode(report("bad"))
    while not gateway.reports:
        member.send(protocol.REPORT_TOPIC, bytes(8), bytes(8), good)
        await asyncio.sleep(0.02)
    member.send(b"", bytes(8), bytes(MAX_MESSAGE_BYTES + 1))
    number = 1
    await until(lambda: gateway.subscriber.counts["connected_anew"] == 1)
    while len(gateway.reports) < 2:
        number += 1
        member.send(protocol.REPORT_TOPIC, number.to_bytes(8, "big"), bytes(8), good)
        await asyncio.sleep(0.02)
    assert gateway.subscriber.counts["bad_batches"] == 0
    member.close()


async def test_a_consumer_that_fails_is_asked_again(replica: Replica) -> None:
    seen: list[int] = []

    def fails(got: Report) -> None:
        seen.append(got.running)
        raise RuntimeError("no")

    lines = EventSubscriber(KvEventProcessor(BlockIndex(2**20)), fails)
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
    gateway.subscriber.longest_s = 0.0
    turns = 0
    numbers = list(range(64, 100_000))
    flood = threading.Thread(
        target=lambda: [
            replica.change(True, *numbers[at : at + 100]) for at in range(0, len(numbers), 100)
        ]
    )
    flood.start()
    began_s = time.monotonic()
    while gateway.index.entries < 100_000:
        assert time.monotonic() < began_s + 60.0
        turns += 1
        await asyncio.sleep(0)
    flood.join()
    assert turns > 10
    # A turn ends 4 ms after it began, with the message that is being read; on a busy machine the
    # process may be set aside within it.
    assert 0.0 < gateway.subscriber.longest_s < (time.monotonic() - began_s) / 4
    assert gateway.subscriber.stats()["longest_turn_s"] > 0.0


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
    gateway.subscriber.longest_s = 0.0
    began_s = time.monotonic()
    gateway.follow(replica)
    await until(lambda: gateway.index.entries == 100_000)
    taken_s = time.monotonic() - began_s
    small.line.close()
    match = gateway.index.match(keys(*range(1000)))
    assert match[gateway.holder("a")] == 1000
    assert gateway.subscriber.longest_s < taken_s / 4

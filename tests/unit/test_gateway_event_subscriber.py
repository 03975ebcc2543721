"""Real lines of replicas, and a gateway that follows them: what arrives, and what is mended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq

from headrace.router.blocks.block_index import warm
from headrace_kvstore.protocol import events as protocol
from headrace_kvstore.protocol.membership import Membership
from tests.support.event_publishers import TOKEN, Gateway, Replica, keys, until
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


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Ended also when a test fails: one with an open socket holds the thread that collects it."""
    made = zmq.Context()
    yield made
    made.destroy(0)


# What arrives


async def test_blocks_that_were_there_and_that_come_and_go(
    gateway: Gateway, replica: Replica
) -> None:
    replica.change(True, 0, 1)
    gateway.follow(replica)
    assert gateway.holder("a") is not None, "a holder from the start"
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


async def test_reports_are_20_ms_apart_and_beats_stand_for_them_later(
    replica: Replica, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
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
            payloads.append(socket.recv_multipart()[3])
    assert 10 <= sum(map(bool, payloads)) <= 30
    last: list[bytes] = []
    until_s = time.monotonic() + 30.0
    while last[3:] != [b""] and time.monotonic() < until_s:
        if socket.poll(1000):
            last = socket.recv_multipart()
    assert last[::3] == [protocol.REPORT_TOPIC, b""]


async def test_two_replicas_are_told_apart(gateway: Gateway, replica: Replica) -> None:
    other = Replica("b", "another-token-of-its-own")
    replica.change(True, 0, 1)
    other.change(True, 0)
    gateway.follow(replica, other)
    await until(lambda: gateway.index.entries == 3)
    match = gateway.index.match(keys(0, 1))
    assert match[gateway.holder("a")] == 2 and match[gateway.holder("b")] == 1
    other.line.close()


# What is mended


async def test_a_gap_is_replayed(gateway: Gateway, replica: Replica) -> None:
    replica.change(True, 0)
    gateway.follow(replica)
    await until(lambda: gateway.has("a", 0))
    stream = gateway.subscriber.subscriptions["a"].events
    assert stream is not None
    stream.socket.setsockopt(zmq.UNSUBSCRIBE, b"")
    await asyncio.sleep(0.2)
    for number in range(1, 6):
        replica.change(True, number)
    await until(lambda: replica.line.stats()["queued"] == 0)
    await asyncio.sleep(0.1)
    assert gateway.has("a", 0)
    replays = gateway.subscriber.counts["replays"]
    stream.socket.setsockopt(zmq.SUBSCRIBE, b"")
    replica.change(True, 6)
    await until(lambda: gateway.has("a", *range(7)))
    assert (
        gateway.subscriber.counts["replays"] > replays
        and gateway.events.counts["lost_batches"] == 0
    )


async def test_a_batch_that_nothing_follows_is_missed_all_the_same(
    gateway: Gateway, replica: Replica
) -> None:
    gateway.follow(replica)
    replica.change(True, 0)
    await until(lambda: gateway.has("a", 0))
    stream = gateway.subscriber.subscriptions["a"].events
    assert stream is not None
    stream.socket.setsockopt(zmq.UNSUBSCRIBE, b"")
    await asyncio.sleep(0.2)
    replica.change(True, 1)
    await asyncio.sleep(0.2)
    stream.socket.setsockopt(zmq.SUBSCRIBE, b"")
    await until(lambda: gateway.has("a", 0, 1), 5.0)


async def test_a_long_history_is_replayed_part_by_part_without_pauses(
    gateway: Gateway, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "REPLAYED_BATCHES", 100)
    await until(lambda: replica.line.stats()["resyncs"] == 1)
    for number in range(1000):
        replica.change(True, number)
    await until(lambda: replica.line.stats()["batches"] == 1001)
    began_s = time.monotonic()
    gateway.follow(replica)
    await until(lambda: gateway.has("a", *range(1000)))
    assert gateway.subscriber.counts["replays"] >= 10
    assert time.monotonic() - began_s < 5.0


async def test_a_line_that_begins_anew_is_cleared(gateway: Gateway, replica: Replica) -> None:
    replica.change(True, 0, 1)
    gateway.follow(replica)
    await until(lambda: gateway.has("a", 0, 1))
    holder = gateway.holder("a")
    replica.restart()
    replica.change(True, 5)
    gateway.follow(replica)
    await until(lambda: gateway.has("a", 5))
    assert gateway.holder("a") == holder
    assert gateway.events.counts["restarts"] == 1


async def test_a_replica_that_left_holds_nothing(gateway: Gateway, replica: Replica) -> None:
    replica.change(True, 0)
    gateway.follow(replica)
    await until(lambda: gateway.has("a", 0))
    gateway.subscriber.follow({})
    assert gateway.holder("a") is None
    assert gateway.subscriber.stats()["subscriptions"] == 0
    gateway.follow(replica)
    await until(lambda: gateway.holder("a") is not None)


async def test_a_silent_replica_loses_its_holder_and_gets_one_when_it_is_back() -> None:
    gateway, replica = Gateway(silent_s=1.0), Replica()
    replica.change(True, 0)
    gateway.follow(replica)
    await until(lambda: gateway.has("a", 0))
    await asyncio.sleep(1.5)
    assert gateway.holder("a") is not None, "beats keep it"
    stream = gateway.subscriber.subscriptions["a"].events
    assert stream is not None
    stream.socket.setsockopt(zmq.UNSUBSCRIBE, b"")
    await until(lambda: gateway.holder("a") is None)
    stream.socket.setsockopt(zmq.SUBSCRIBE, b"")
    await until(lambda: gateway.has("a", 0))
    gateway.subscriber.close()
    replica.line.close()

"""Replicas that are silent: what is probed, when requests move to others, and how many of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from headrace import replica_health
from headrace.gateway.relay import replica_monitor, retry
from tests.unit.gateway_fakes import (
    CHAT,
    EVENTS,
    PROMPT,
    Bench,
    FakeReplica,
    Handler,
    answer,
    begin_stream,
    gateway_over,
    soon,
)

SILENT_S, PROBE_S = 0.2, 0.1
DOWN_S = SILENT_S + 3 * PROBE_S
"""About the time until a replica that hangs is down."""


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_monitor, "SILENT_S", SILENT_S)
    monkeypatch.setattr(replica_monitor, "POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr(replica_monitor, "PROBE_INTERVAL_S", PROBE_S)
    monkeypatch.setattr(retry, "PROBE_TIMEOUT_S", PROBE_S)
    monkeypatch.setattr(replica_health, "MIN_GAP_S", 0.01)


class Gate:
    """Replicas that answer once they are let."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def handle(self, replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        await self.opened.wait()
        return await answer(replica, request)


def ask(bench: Bench, count: int = 1) -> list[asyncio.Task[Any]]:
    async def one(number: int) -> Any:
        async with bench.client.post(CHAT, json={**PROMPT, "seed": number}) as response:
            return response.status, await response.json()

    return [asyncio.create_task(one(number)) for number in range(count)]


def hangs(replica: FakeReplica) -> None:
    replica.health_s = 3600.0


async def at_first(bench: Bench) -> FakeReplica:
    """Have the first replica get all requests."""
    first, *others = bench.cluster.members
    for other in others:
        other.waiting = 1000
    await soon(lambda: bench.cluster.asked >= 2)
    return first


async def test_one_missed_probe_moves_nothing() -> None:
    gate = Gate()
    async with gateway_over(gate.handle, answer) as bench:
        first = await at_first(bench)
        asked = ask(bench)
        await soon(lambda: bool(first.seen))
        hangs(first)
        await soon(lambda: first.probes == 1)
        await asyncio.sleep(1.5 * PROBE_S)
        first.health_s = 0.0
        await asyncio.sleep(2 * DOWN_S)
        gate.opened.set()
        assert (await asked[0])[1]["by"] == "decode-1"
        assert not bench.cluster.members[1].seen


async def test_a_suspect_replica_gets_no_request_while_another_is_healthy() -> None:
    gate = Gate()
    async with gateway_over(gate.handle, answer) as bench:
        first = await at_first(bench)
        asked = ask(bench)
        await soon(lambda: bool(first.seen))
        first.health_s = 1.3 * PROBE_S
        (pool,) = (model.pool for model in bench.app.parts.models)  # type: ignore[union-attr]
        await soon(lambda: bool(pool.down))
        assert (await ask(bench)[0])[1]["by"] == "decode-2"
        gate.opened.set()
        await asked[0]


async def test_the_requests_of_a_replica_that_hangs_move_to_others() -> None:
    gate = Gate()
    async with gateway_over(gate.handle, answer) as bench:
        first = await at_first(bench)
        asked = ask(bench, 5)
        await soon(lambda: len(first.seen) == 5)
        hangs(first)
        told = await asyncio.wait_for(asyncio.gather(*asked), 20)
        assert {body["by"] for _, body in told} == {"decode-2"}
        assert first.probes >= replica_health.MAX_FAILURES


async def test_a_stall_does_not_move_a_whole_queue_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_health, "MIN_RETRIES_S", 5.0)
    gate = Gate()
    async with gateway_over(gate.handle, answer) as bench:
        first, second = await at_first(bench), bench.cluster.members[1]
        asked = ask(bench, 60)
        await soon(lambda: len(first.seen) == 60)
        second.waiting = 0
        await asyncio.sleep(1.5)  # the gateway knows that the second one is idle
        hangs(first)
        await soon(lambda: bool(second.seen))
        await asyncio.sleep(0.3)
        assert len(second.seen) <= 8, "five at once, and five a second"
        first.health_s = 0.0
        gate.opened.set()
        told = await asyncio.wait_for(asyncio.gather(*asked), 20)
        by = [body["by"] for _, body in told]
        assert {status for status, _ in told} == {200} and by.count("decode-1") > 40


async def test_requests_stay_where_nobody_else_can_take_them_over() -> None:
    gate = Gate()
    async with gateway_over(gate.handle) as bench:
        asked = ask(bench)
        await soon(lambda: bool(bench.replica.seen))
        hangs(bench.replica)
        await asyncio.sleep(3 * DOWN_S)
        bench.replica.health_s = 0.0
        gate.opened.set()
        assert (await asked[0])[0] == 200
        assert len(bench.replica.seen) == 1


async def test_requests_that_wait_beside_a_stream_are_not_silent() -> None:
    """They wait in the engine's queue, and the engine works."""
    gate = Gate()
    begun = asyncio.Event()

    async def handle(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        if begun.is_set():
            return await gate.handle(replica, request)
        begun.set()
        response = await begin_stream(request)
        while not gate.opened.is_set():
            await response.write(EVENTS[0])
            await asyncio.sleep(0.05)
        return response

    async with gateway_over(handle, answer) as bench:
        first = await at_first(bench)
        hangs(first)
        async with bench.client.post(CHAT, json={**PROMPT, "stream": True}) as stream:
            asked = ask(bench, 3)
            await soon(lambda: len(first.seen) == 4)
            await asyncio.sleep(3 * DOWN_S)  # silent requests would have moved by now
            gate.opened.set()
            told = await asyncio.gather(*asked)
            await stream.read()
        assert {body["by"] for _, body in told} == {"decode-1"}
        assert first.probes < replica_health.MAX_FAILURES, (
            "one or two, on a machine too busy to stream"
        )


async def test_new_requests_are_no_sign_of_life() -> None:
    gate = Gate()
    async with gateway_over(gate.handle) as bench:
        hangs(bench.replica)
        asked = []
        for _ in range(20):
            asked += ask(bench)
            await asyncio.sleep(SILENT_S / 4)
        assert bench.replica.probes >= 3
        gate.opened.set()
        bench.replica.health_s = 0.0
        await asyncio.gather(*asked)


async def test_a_replica_that_accepts_no_more_connections_keeps_its_requests() -> None:
    """It drains: its server closes the port first, and ends its requests then."""
    gate = Gate()
    async with gateway_over(gate.handle, answer) as bench:
        first = await at_first(bench)
        asked = ask(bench)
        await soon(lambda: bool(first.seen))
        await first.stop_listening()
        assert (await ask(bench)[0])[1]["by"] == "decode-2"
        await asyncio.sleep(3 * DOWN_S)
        gate.opened.set()
        assert (await asked[0])[1]["by"] == "decode-1"


async def test_a_request_whose_replicas_hang_is_given_up_but_not_put_in_quarantine() -> None:
    gate = Gate()
    handlers: list[Handler] = [gate.handle] * 4
    async with gateway_over(*handlers) as bench:
        for member in bench.cluster.members[:3]:
            hangs(member)
        bench.cluster.members[3].waiting = 1000
        await soon(lambda: bench.cluster.asked >= 2)
        (status, told) = await asyncio.wait_for(ask(bench)[0], 30)
        assert (status, told["error"]["code"]) == (502, "replica_lost")
        gate.opened.set()
        (status, told) = await asyncio.wait_for(ask(bench)[0], 30)
        assert (status, told["by"]) == (200, "decode-4")


async def test_a_dead_engine_that_comes_back_is_found_without_a_request() -> None:
    async def fail(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        return await answer(replica, request) if replica.healthy else web.Response(status=500)

    async with gateway_over(fail, answer) as bench:
        first = await at_first(bench)
        first.healthy = False
        assert (await ask(bench)[0])[1]["by"] == "decode-2"
        (pool,) = (model.pool for model in bench.app.parts.models)  # type: ignore[union-attr]
        assert set(pool.down) == {"decode-1"}
        await asyncio.sleep(3 * PROBE_S)
        assert len(first.seen) == 1
        first.healthy = True
        await soon(lambda: not pool.down)
        assert (await ask(bench)[0])[1]["by"] == "decode-1"

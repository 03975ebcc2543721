"""Request bodies: how many bytes all may hold, and until when each is kept."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing
from typing import Any

import pytest
from aiohttp import web

from headrace.gateway import errors
from headrace.gateway.ingress.body_budget import BodyBudget
from headrace.gateway.ingress.http_server import bind
from headrace.gateway.relay.call import Call
from tests.unit.gateway_fakes import (
    CHAT,
    EVENTS,
    PROMPT,
    FakeReplica,
    abort_connection,
    answer,
    begin_stream,
    gateway_over,
    in_turn,
    soon,
    stall,
)

LARGE = {**PROMPT, "user": "x" * 60_000}


def test_what_is_released_can_be_held_again() -> None:
    budget = BodyBudget(100)
    one, other = budget.reserve(), budget.reserve()
    one.add(60)
    with pytest.raises(errors.ApiError):
        other.add(41)
    other.add(40)
    one.release()
    one.release()
    other.add(60)
    assert budget.held_bytes == 100


def held(budget: BodyBudget, tenant: str, size: int = 1) -> int:
    """Bytes that a tenant can hold in bodies of this size."""
    count = 0
    with pytest.raises(errors.ApiError) as refused:
        while True:
            budget.reserve(tenant).add(size)
            count += size
    assert refused.value.status == 429
    return count


def test_tenants_that_take_all_they_can_leave_as_much_as_each_has_for_the_next_one() -> None:
    budget = BodyBudget(1200)
    assert held(budget, "first") == 600
    assert held(budget, "second") == 300
    assert held(budget, "third") == 150
    assert budget.held_bytes == 1050


def test_tenants_that_take_by_turns_get_equal_parts() -> None:
    budget = BodyBudget(1200)
    parts = [budget.reserve(name) for name in ("first", "second")]
    for _ in range(400):
        for part in parts:
            part.add(1)
    for part in parts:
        with pytest.raises(errors.ApiError):
            part.add(1)


def test_what_a_tenant_gives_back_it_can_take_again() -> None:
    budget = BodyBudget(100)
    one, other = budget.reserve("a"), budget.reserve("a")
    one.add(50)
    with pytest.raises(errors.ApiError, match="hold 50 bytes"):
        other.add(1)
    assert other.size == 0
    one.release()
    one.release()
    other.add(50)
    other.release()
    assert not budget.held_bytes and not budget._held_by_tenant


def test_without_tenants_the_budget_can_be_filled() -> None:
    BodyBudget(100).reserve().add(100)


async def test_a_tenant_that_fills_its_share_leaves_room_for_another() -> None:
    keys = {name: {"authorization": f"Bearer {name}"} for name in ("greedy", "other")}
    async with gateway_over(
        stall, api_keys=tuple(keys), body_budget_bytes=200_000, max_body_bytes=100_000
    ) as bench:

        def ask(name: str) -> Any:
            return bench.client.post(CHAT, json=LARGE, headers=keys[name])

        first = asyncio.create_task(ask("greedy").__aenter__())
        await soon(lambda: len(bench.replica.seen) == 1)
        async with ask("greedy") as refused:
            assert refused.status == 429
            message = (await refused.json())["error"]["message"]
            assert "is your tenant's share of the buffer" in message
        second = asyncio.create_task(ask("other").__aenter__())
        await soon(lambda: len(bench.replica.seen) == 2)
        for task in (first, second):
            task.cancel()
        gateway = bench.app
        await soon(lambda: gateway.body_reader.held_bytes == 0)


async def test_a_body_for_which_there_is_no_room_is_429_with_retry_after() -> None:
    async with gateway_over(stall, body_budget_bytes=100_000, max_body_bytes=100_000) as bench:
        first = asyncio.create_task(bench.client.post(CHAT, json=LARGE).__aenter__())
        await soon(lambda: len(bench.replica.seen) == 1)
        async with bench.client.post(CHAT, json=LARGE) as refused:
            said = await refused.json()
            assert (refused.status, said["error"]["code"]) == (429, "bodies_too_large")
            assert refused.headers["retry-after"] == "1"
        first.cancel()
        gateway = bench.app
        await soon(lambda: gateway.body_reader.held_bytes == 0)


async def test_a_length_that_is_only_announced_holds_nothing() -> None:
    async with gateway_over(answer, body_budget_bytes=100_000, max_body_bytes=100_000) as bench:
        _, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.port)
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            "content-length: 99999\r\n\r\n{".encode()
        )
        async with bench.client.post(CHAT, json=LARGE) as response:
            assert response.status == 200
        writer.close()


async def test_a_stream_that_has_begun_keeps_no_body(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = asyncio.Event()
    calls: list[Call] = []

    def made(**fields: Any) -> Call:
        calls.append(Call(**fields))
        return calls[-1]

    monkeypatch.setattr("headrace.gateway.app.Call", made)

    async def begun(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(EVENTS[0])
        await go_on.wait()
        await response.write(EVENTS[-1])
        return response

    async with (
        gateway_over(begun) as bench,
        bench.client.post(CHAT, json={**LARGE, "stream": True}) as response,
    ):
        assert await response.content.readany() == EVENTS[0]
        assert bench.app.body_reader.held_bytes == 0
        assert [call.body for call in calls if call.target == CHAT] == [b""]
        go_on.set()
        assert await response.read() == EVENTS[-1]


async def test_a_body_is_kept_for_as_long_as_it_may_be_sent_again() -> None:
    async with (
        gateway_over(in_turn(abort_connection, answer)) as bench,
        bench.client.post(CHAT, json=LARGE) as response,
    ):
        assert response.status == 200
    assert len(bench.replica.seen) == 2


async def test_each_answer_says_that_nobody_may_keep_it_or_guess_its_type() -> None:
    async with gateway_over(answer) as bench:
        for path in (CHAT, "/health", "/nowhere"):
            async with bench.client.request(
                "GET" if path != CHAT else "POST", path, json=PROMPT
            ) as r:
                assert r.headers["x-content-type-options"] == "nosniff"
                assert r.headers["cache-control"] == "no-store"
                assert "strict-transport-security" not in r.headers
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway.port)
        writer.write(b"no HTTP\r\n\r\n")
        head = await reader.read()
        assert b"400" in head and b"x-content-type-options: nosniff\r\n" in head
        writer.close()


def test_what_is_written_is_sent_at_once() -> None:
    """asyncio switches Nagle's algorithm off by the socket's protocol. With it the last bytes of an
    answer wait 40 ms for the client's acknowledgement."""
    with closing(bind("127.0.0.1", 0)) as sock:
        assert sock.proto == socket.IPPROTO_TCP

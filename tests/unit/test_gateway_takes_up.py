"""A stream whose replica is lost midway: another one takes it up, and the client sees nothing."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from headrace.gateway.backend import NoMetrics
from headrace.gateway.relay import watch
from headrace.gateway.relay.streams import MAX_TRIES
from headrace_decode.replay.said import HEADER, Said, line
from tests.unit.gateway_fakes import (
    BODY,
    CHAT,
    EVENTS,
    PROMPT,
    FakeReplica,
    Handler,
    begin_stream,
    cut,
    gateway_over,
    in_turn,
    stall,
)

ERROR_EVENT = b'data: {"error":{"message":"EngineDeadError","code":500}}\n\n'
NAME = HEADER.decode()


class Losses(NoMetrics):
    def __init__(self) -> None:
        self.when: list[str] = []

    def replica_lost(self, when: str) -> None:
        self.when.append(when)


def says(*tokens: int) -> bytes:
    """The line before the events of one output of the engine."""
    return line((Said(0, tokens),))


def tells(*parts: bytes, dies: bool = False, hangs: bool = False) -> Handler:
    """A replica whose stream has lines: these parts, then it dies, hangs, or ends the stream."""

    async def handler(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request, {NAME: "1"})
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0.02)
        if dies:
            cut(request)
        elif hangs:
            await stall(replica, request)
        return response

    return handler


WHOLE = (says(1), EVENTS[0], says(2), EVENTS[1], EVENTS[2])


async def test_a_stream_goes_on_from_another_replica_behind_what_the_client_has() -> None:
    losses = Losses()
    handler = in_turn(tells(*WHOLE[:3], b'data: {"half', dies=True), tells(*WHOLE))
    async with gateway_over(handler, handler, metrics=losses) as bench:
        for each in bench.cluster.members:
            each.healthy = False
        async with bench.client.post(CHAT, json={**PROMPT, "stream": True}) as response:
            assert await response.read() == b"".join(EVENTS)
            assert NAME not in response.headers
        first, second = [request for each in bench.cluster.members for request in each.seen]
    assert first.headers[NAME] == "0" and first[BODY] == second[BODY][len(says(1)) :]
    assert second.headers[NAME] == str(len(says(1)))
    assert second[BODY].startswith(says(1)), "the second line led to no event"
    assert first.headers["x-request-id"] == second.headers["x-request-id"]
    assert losses.when == ["taken_up"]


async def test_a_replica_that_lives_takes_its_stream_up_itself() -> None:
    handler = in_turn(tells(*WHOLE[:2], dies=True), tells(*WHOLE))
    async with gateway_over(handler, handler, handler) as bench:
        async with bench.client.post(CHAT, json={**PROMPT, "stream": True}) as response:
            assert await response.read() == b"".join(EVENTS)
        assert sorted(len(each.seen) for each in bench.cluster.members) == [0, 0, 2]


async def test_an_engines_death_midway_is_no_event_of_the_stream() -> None:
    handler = in_turn(tells(*WHOLE[:2], ERROR_EVENT), tells(*WHOLE))
    async with gateway_over(handler, handler) as bench:
        for each in bench.cluster.members:
            each.healthy = False
        async with bench.client.post(CHAT, json={**PROMPT, "stream": True}) as response:
            assert await response.read() == b"".join(EVENTS)


async def test_an_error_midway_of_a_healthy_engine_is_the_streams() -> None:
    async with gateway_over(tells(*WHOLE[:2], ERROR_EVENT)) as bench:
        async with bench.client.post(CHAT, json={**PROMPT, "stream": True}) as response:
            assert await response.read() == EVENTS[0] + ERROR_EVENT
        assert len(bench.replica.seen) == 1


async def test_a_replica_that_hangs_is_lost_and_one_that_is_busy_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "SILENT_S", 0.2)
    monkeypatch.setattr(watch, "LOOK_S", 0.05)
    handler = in_turn(tells(*WHOLE[:2], hangs=True), tells(*WHOLE))
    async with (
        gateway_over(handler, handler) as bench,
        bench.client.post(CHAT, json={**PROMPT, "stream": True}) as response,
    ):
        assert await response.content.readexactly(len(EVENTS[0])) == EVENTS[0]
        await asyncio.sleep(0.6)
        assert sum(len(each.seen) for each in bench.cluster.members) == 1, "it is well"
        for each in bench.cluster.members:
            each.healthy = not each.seen
        assert await response.read() == EVENTS[1] + EVENTS[2]


async def test_a_stream_that_differs_ends_with_an_error_event() -> None:
    handler = in_turn(tells(*WHOLE[:4], dies=True), tells(says(9), EVENTS[0], says(2), EVENTS[1]))
    async with (
        gateway_over(handler) as bench,
        bench.client.post(CHAT, json={**PROMPT, "stream": True}) as response,
    ):
        body = await response.read()
    assert body.startswith(EVENTS[0] + EVENTS[1])
    assert json.loads(body.split(b"data: ")[-1])["error"]["code"] == "replica_lost"


async def test_a_stream_that_loses_every_replica_without_a_new_event_is_given_up() -> None:
    handler = tells(*WHOLE[:2], dies=True)
    async with gateway_over(handler, handler) as bench:
        async with bench.client.post(CHAT, json={**PROMPT, "stream": True}) as response:
            body = await response.read()
        assert sum(len(each.seen) for each in bench.cluster.members) == 1 + MAX_TRIES
    assert body.startswith(EVENTS[0] + b'data: {"error"') and b"in a row" in body


async def test_a_stream_that_kills_engines_is_not_tried_again() -> None:
    handler = tells(*WHOLE[:2], ERROR_EVENT)
    async with gateway_over(handler, handler) as bench:
        for each in bench.cluster.members:
            each.healthy = False
        stream = {**PROMPT, "stream": True}
        async with bench.client.post(CHAT, json=stream) as response:
            assert b"in a row" in await response.read()
        async with bench.client.post(CHAT, json=stream) as response:
            assert response.status == 422
            assert (await response.json())["error"]["code"] == "request_quarantined"
        assert sum(len(each.seen) for each in bench.cluster.members) == 1 + MAX_TRIES
        async with bench.client.post(CHAT, json={**stream, "seed": 1}) as response:
            assert response.status == 200, "another request is asked"

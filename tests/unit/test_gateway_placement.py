"""A gateway with a choice asks for a prompt's keys and sends the request where the plan says."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from headrace.gateway.placement import placer as placing
from headrace.gateway.placement.endpoint_info import EndpointInfo
from headrace.gateway.placement.placer import Placer
from headrace.router.plan import RouterSettings
from headrace.router.plan_codec import decode
from headrace_decode.http.internal_port import KEYS_TARGET
from tests.unit.gateway_fakes import BODY, CHAT, PROMPT, FakeReplica, gateway_over
from tests.unit.test_router_cluster import BLOCK, report

KEYS = np.arange(1, 41, dtype="<u8")
NAMED = {"keys": base64.b64encode(KEYS.tobytes()).decode(), "prompt_tokens": 643, "max_tokens": 5}

Answer = Callable[[], Awaitable[web.Response]]


async def named() -> web.Response:
    return web.json_response(NAMED)


class App:
    """Two fake replicas that name keys, behind a gateway that knows them."""

    def __init__(self, keys: Answer = named, replicas: int = 2) -> None:
        self.keys, self.count = keys, replicas
        self.placer: Placer | None = None
        self.lost: set[str] = set()

    async def handle(self, replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        if request.path == KEYS_TARGET:
            return await self.keys()
        if replica.replica_id in self.lost:
            assert request.transport is not None
            request.transport.close()
        return web.json_response({"from": replica.replica_id})

    def make(self, *parts: Any) -> Placer:
        self.placer = Placer(RouterSettings(), self.endpoints, *parts)
        for name in self.names():
            self.placer.cluster.events.add_source(name, "e", 0.0)
        self.tell()
        return self.placer

    def names(self) -> list[str]:
        return [f"decode-{n}" for n in range(1, self.count + 1)]

    def tell(self) -> None:
        """Every replica reports that it is idle."""
        assert self.placer is not None
        for name in self.names():
            self.placer.cluster.report(report(name), self.placer.clock())

    def hold(self, replica: str) -> None:
        """A replica has all blocks of the prompt. Both report again: on a busy machine the first
        reports may be too old by now."""
        assert self.placer is not None
        self.tell()
        cluster = self.placer.cluster
        cluster.index.stored(cluster.events.holder(replica), None, KEYS.astype(np.uint64))

    async def endpoints(self) -> dict[str, EndpointInfo]:
        await asyncio.Event().wait()
        return {}

    def running(self) -> Any:
        return gateway_over(*[self.handle] * self.count, make_placer=self.make)


def asked(replica: FakeReplica, path: str = CHAT) -> list[web.Request]:
    return [request for request in replica.seen if request.path == path]


@pytest.fixture(autouse=True)
def no_key_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr(placing, "KEYS_LIMIT_S", 20.0)


@pytest.mark.parametrize("holder", ["decode-1", "decode-2"])
async def test_a_request_goes_to_the_replica_that_has_its_blocks_with_the_plan(holder: str) -> None:
    app = App()
    async with app.running() as bench:
        await bench.client.get("/v1/models")
        app.hold(holder)
        answer = await bench.client.post(CHAT, json=PROMPT)
        assert await answer.json() == {"from": holder}
        members = {member.replica_id: member for member in bench.cluster.members}
        (request,) = asked(members[holder])
        plan = decode(request.headers["x-headrace-plan"].encode())
        assert (plan.decode, plan.cached_decode_tokens) == (holder, 40 * BLOCK)
        (question,) = [each for member in members.values() for each in asked(member, KEYS_TARGET)]
        assert json.loads(question[BODY]) == {"target": CHAT, "body": PROMPT}
        assert question.headers["x-headrace-internal"] == request.headers["x-headrace-internal"]


async def late() -> web.Response:
    await asyncio.sleep(1.0)
    return web.json_response(NAMED)


async def no_keys() -> web.Response:
    return web.json_response({"keys": None})


async def refused() -> web.Response:
    return web.json_response({"error": {"message": "no"}}, status=400)


async def not_base64() -> web.Response:
    return web.json_response({**NAMED, "keys": "%%%"})


async def impossible() -> web.Response:
    return web.json_response({**NAMED, "prompt_tokens": -1})


async def endless() -> web.Response:
    return web.Response(body=b" " * 5_000_000)


@pytest.mark.parametrize(
    ("keys", "counted"),
    [
        (late, "keys_late"),
        (no_keys, "no_keys"),
        (refused, "keys_failed"),
        (not_base64, "keys_failed"),
        (impossible, "keys_failed"),
        (endless, "keys_failed"),
    ],
)
async def test_without_keys_the_pool_chooses(
    keys: Answer, counted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if keys is late:
        monkeypatch.setattr(placing, "KEYS_LIMIT_S", 0.2)
    app = App(keys)
    async with app.running() as bench:
        answer = await bench.client.post(CHAT, json=PROMPT)
        assert answer.status == 200
        (request,) = [each for member in bench.cluster.members for each in asked(member)]
        assert "x-headrace-plan" not in request.headers
    assert app.placer is not None and app.placer.cluster.counts == {counted: 1}


async def test_a_long_prompt_has_the_time_to_be_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow() -> web.Response:
        await asyncio.sleep(0.4)
        return await named()

    monkeypatch.setattr(placing, "KEYS_LIMIT_S", 0.1)
    long = {**PROMPT, "messages": [{"role": "user", "content": "long " * 600_000}]}
    app = App(slow)
    async with app.running() as bench:
        assert app.placer is not None and not app.placer.cluster.counts
        for prompt, plans in [(PROMPT, 0), (long, 1)]:
            app.tell()  # it may have been long ago
            assert (await bench.client.post(CHAT, json=prompt)).status == 200
            assert app.placer.cluster.counts["local"] == plans
        assert app.placer.cluster.counts["keys_late"] == 1


async def test_replicas_are_followed_though_compiling_the_router_fails_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed, tries = asyncio.Event(), list[int]()

    class Followed(App):
        async def endpoints(self) -> dict[str, EndpointInfo]:
            followed.set()
            return await super().endpoints()

    async def compiles() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("numba's cache is broken")

    monkeypatch.setattr(placing, "_compile", compiles)
    monkeypatch.setattr(placing, "_has_compiled", False)
    monkeypatch.setattr("headrace_engine.supervise.MIN_PAUSE_S", 0.01)
    async with Followed().running() as bench:
        await bench.client.get("/v1/models")
        await asyncio.wait_for(followed.wait(), 10)
    assert len(tries) == 3


async def test_the_placers_of_several_models_compile_the_router_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = list[str]()

    async def compiles() -> None:
        await asyncio.sleep(0.01)
        compiled.append("once")

    monkeypatch.setattr(placing, "_compile", compiles)
    monkeypatch.setattr(placing, "_has_compiled", False)
    await asyncio.gather(*(placing._compile_once() for _ in range(3)))
    assert compiled == ["once"]


@pytest.mark.parametrize("fault", ["no process", "hangs", "fails"])
async def test_the_router_is_compiled_here_where_no_other_process_can(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warmed: list[str] = []
    start = asyncio.create_subprocess_exec

    async def command(*_: str) -> Any:
        if fault == "no process":
            raise PermissionError("seccomp")
        script = "import time; time.sleep(60)" if fault == "hangs" else "raise SystemExit(3)"
        return await start(sys.executable, "-c", script)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", command)
    monkeypatch.setattr(placing, "COMPILE_LIMIT_S", 0.2 if fault == "hangs" else 20.0)
    monkeypatch.setattr(placing, "warm", lambda: warmed.append("here"))
    await placing._compile()
    assert warmed == ["here"] and "compile" in caplog.text


async def test_nothing_is_asked_where_there_is_nothing_to_choose() -> None:
    app = App(replicas=1)
    async with app.running() as bench:
        assert (await bench.client.post(CHAT, json=PROMPT)).status == 200
        assert asked(bench.replica, KEYS_TARGET) == []


async def test_a_client_s_own_plan_goes_nowhere() -> None:
    app = App(replicas=1)
    async with app.running() as bench:
        await bench.client.post(CHAT, json=PROMPT, headers={"x-headrace-plan": "{}"})
        assert "x-headrace-plan" not in asked(bench.replica)[0].headers


async def test_a_plan_whose_replica_is_lost_is_withdrawn_and_another_replica_answers() -> None:
    app = App()
    async with app.running() as bench:
        await bench.client.get("/v1/models")
        app.hold("decode-2")
        app.lost = {"decode-2"}
        answer = await bench.client.post(CHAT, json=PROMPT)
        assert await answer.json() == {"from": "decode-1"}
        members = {member.replica_id: member for member in bench.cluster.members}
        assert "x-headrace-plan" not in asked(members["decode-1"])[0].headers
    assert app.placer is not None and app.placer.stats()["booked"] == 0
    assert app.placer.cluster.counts["withdrawn"] == 1


async def test_the_status_tells_of_the_placing() -> None:
    app = App()
    async with app.running() as bench:
        await bench.client.post(CHAT, json=PROMPT)
        status = await (await bench.client.get("/headrace/v1/status")).json()
        router = status["gateway"]["router"]
        assert (router["replicas"], router["plans"]["local"]) == (2, 1)

"""A prefill replica that stands in: its port, what gateways are told, when its app is made."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI

from headrace.gateway.backend import ReplicaInfo
from headrace.replica import prefill_fallback
from headrace.replica.prefill_fallback import PrefillFallback
from headrace_decode.http.internal_port import INTERNAL_HEADER
from headrace_decode.http.public_routes import Route
from headrace_engine.serving.parsers import Parsers
from headrace_engine.usage.usage_book import UsageBook


def engine() -> Any:
    meter = SimpleNamespace(steps_total=0, running=2, waiting=1, usage=UsageBook())
    llm = SimpleNamespace(errored=False, offered_techniques="")
    parsers = Parsers("hermes", None)
    return SimpleNamespace(meter=meter, llm=llm, parsers=parsers, vllm_config=None)


class Maker:
    """Makes an application of one route."""

    def __init__(self) -> None:
        self.made = 0

    async def __call__(self) -> FastAPI:
        self.made += 1
        app = FastAPI()
        app.state.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(policy="fcfs"), watermark_config=None
        )
        app.state.args = SimpleNamespace(tool_server=None)

        @app.get("/v1/models")
        def models() -> dict[str, str]:
            return {"object": "list"}

        return app


async def asked(port: PrefillFallback) -> int:
    info = ReplicaInfo.of({"replica_id": "p", **port.info()})
    async with aiohttp.ClientSession() as client:
        proof = {INTERNAL_HEADER.decode(): info.token}
        async with client.get(f"{info.url}/v1/models", headers=proof) as answer:
            return answer.status


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_fallback, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(prefill_fallback, "shutdown_seconds", lambda: (1.0, 0.1))
    monkeypatch.setattr(prefill_fallback, "keep_public_routes", lambda app: None)
    offered = [Route("GET", "/v1/models", takes_json=False)]
    monkeypatch.setattr(prefill_fallback, "public_routes", lambda app: offered)


async def test_it_is_told_as_one_that_stands_in_once_it_listens() -> None:
    port = PrefillFallback(Maker(), engine())
    assert port.info()["url"] is None
    await port.start()
    info = ReplicaInfo.of({"replica_id": "p", **port.info()})
    assert info.is_fallback and info.url and info.reported == 3
    await port.stop()


async def test_its_application_is_made_at_the_first_request_and_once() -> None:
    maker = Maker()
    port = PrefillFallback(maker, engine())
    await port.start()
    assert maker.made == 0
    assert await asyncio.gather(*(asked(port) for _ in range(3))) == [200] * 3
    assert maker.made == 1
    assert [route["path"] for route in port.info()["routes"]] == ["/v1/models"]
    await port.stop()


async def test_its_application_is_made_after_a_while_without_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_fallback, "BUILD_AFTER_S", 0.05)
    maker = Maker()
    port = PrefillFallback(maker, engine())
    await port.start()
    await asyncio.sleep(0.3)
    assert maker.made == 1
    await port.stop()


async def test_nobody_is_sent_to_a_dead_engine() -> None:
    dead = engine()
    port = PrefillFallback(Maker(), dead)
    await port.start()
    dead.llm.errored = True
    assert port.info()["url"] is None
    await port.stop()


class FailsFirst(Maker):
    """Fails to make its first application."""

    async def __call__(self) -> FastAPI:
        if not self.made:
            self.made += 1
            raise RuntimeError("the tokenizer's file is locked")
        return await super().__call__()


async def test_an_application_that_could_not_be_made_is_made_at_the_next_request() -> None:
    maker = FailsFirst()
    port = PrefillFallback(maker, engine())
    await port.start()
    assert [await asked(port), await asked(port)] == [500, 200]
    assert maker.made == 2
    await port.stop()


async def test_an_application_that_could_not_be_made_is_made_without_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_fallback, "BUILD_AFTER_S", 0.05)
    monkeypatch.setattr("headrace_engine.supervise.MIN_PAUSE_S", 0.05)
    maker = FailsFirst()
    port = PrefillFallback(maker, engine())
    await port.start()
    async with asyncio.timeout(5):
        while not port.info()["routes"]:
            await asyncio.sleep(0.01)
    assert maker.made == 2
    await port.stop()

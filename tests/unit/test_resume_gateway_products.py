"""Faults that come together: a stream's replica is lost, its KV does not come, its client is slow.

Real are the gateway, the lines between the events, the prefill executor and vLLM's frontend, over
loopback. Fakes are the engine cores, the prefill side and the serving layer (`tests.support.
resuming`). `python -m benchmarks.chaos --products` does the same to processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.config.gateway import GatewaySettings
from headrace.gateway import ReplicaInfo, Server, build_gateway_app, serve_gateway
from headrace.gateway.relay import replica_monitor
from tests.support.prefill_executor import LATE_S, Planner, until
from tests.support.resuming import Completions, Core, Frontend, PrefillSide, text
from tests.unit.gateway_fakes import MODEL, ROUTES, TOKEN, FakeCluster
from tests.unit.test_gateway_stream_resume import SlowClient

TOKENS = 60
FAULT_AT = 12
"""Tokens that the engine of the first replica has said when it is hit."""
PAD = 10_000
"""Bytes of an event for a slow client. All together are more than is kept for it on the way."""
LOST = ("killed", "hung", "drained")
KV = ("late", "failed", "prefill dead", "prefill silent")
CLIENTS = ("patient", "slow", "gone")


class Replica:
    """A decode replica."""

    def __init__(self, name: str, pad: int) -> None:
        self.name, self.core, self.prefill = name, Core(), PrefillSide()
        self.llm = Frontend(self.core, Planner("p", LATE_S), self.prefill)
        self.serving = Completions(self.llm, pad)
        self.server: Server | None = None

    async def start(self) -> Replica:
        self.server = await serve_gateway(self.serving.app(), "127.0.0.1", 0)
        return self

    async def stop(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            for listener in server.uvicorn_server.servers:
                listener.close()
            for link in list(server.uvicorn_server.server_state.connections):
                link.transport.abort()
            await server.stop(grace_s=1)
        await self.llm.stop()

    @property
    def info(self) -> ReplicaInfo:
        port = 1 if self.server is None else self.server.port
        return ReplicaInfo(self.name, f"http://127.0.0.1:{port}", 0, 0, routes=ROUTES, token=TOKEN)

    async def hit(self, fault: str, cluster: FakeCluster) -> None:
        """Break it."""
        if fault == "killed":
            self.core.die()
        elif fault == "hung":
            self.core.runs = self.serving.well = False
        else:
            cluster.members = [each for each in cluster.members if each is not self]
            await self.stop()

    def lose_kv(self, fault: str) -> None:
        """Let no KV come from now on."""
        if fault == "late":
            self.core.kv = "never"
        elif fault == "failed":
            self.core.kv = "fails"
        else:
            self.prefill.does = "fails" if fault == "prefill dead" else "hangs"

    def assert_unharmed(self) -> None:
        """Assert that it got no request twice, and that nothing of any is left."""
        assert len(self.core.added) == len(set(self.core.added)), self.core.added
        assert not self.core.resources.engine_dead
        self.llm.assert_idle()


@contextlib.asynccontextmanager
async def app_of(*replicas: Replica) -> AsyncIterator[tuple[str, Any, FakeCluster]]:
    """A gateway over replicas: its URL, its app, its cluster."""
    cluster = FakeCluster([await each.start() for each in replicas])  # type: ignore[misc]
    app = build_gateway_app(GatewaySettings(), cluster, MODEL)
    gateway = await serve_gateway(app, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{gateway.port}", app, cluster
    finally:
        await gateway.stop(grace_s=1)
        for each in replicas:
            await each.stop()


@pytest.mark.parametrize(("lost", "kv", "client"), list(itertools.product(LOST, KV, CLIENTS)))
async def test_no_event_is_lost_or_repeated_whatever_fails_together(
    monkeypatch: pytest.MonkeyPatch, lost: str, kv: str, client: str
) -> None:
    monkeypatch.setattr(replica_monitor, "SILENT_S", 0.2)
    monkeypatch.setattr(replica_monitor, "POLL_INTERVAL_S", 0.05)
    replicas = [Replica(f"decode-{number}", PAD * (client == "slow")) for number in range(2)]
    prompt = [len(lost), len(kv), len(client)]
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "stream": True}
    async with app_of(*replicas) as (url, app, cluster), SlowClient(url, asked) as reader:
        first, other = await began(replicas)
        other.lose_kv(kv)
        await first.hit(lost, cluster)
        if client == "gone":
            await until(lambda: other.prefill.asked, 10)
            reader.sock.close()
        else:
            if client == "slow":
                await asyncio.sleep(0.6)
            events = await reader.events()
            assert events[-1] == b"data: [DONE]"
            assert tokens_of(events[:-1]) == text(prompt, TOKENS)
        await until(lambda: not other.core.running and app.relaying == 0, 10)
        await asyncio.sleep(0.05)
        other.assert_unharmed()
        assert other.prefill.asked, "its KV was to come from elsewhere"


async def began(replicas: list[Replica]) -> tuple[Replica, Replica]:
    """The replica that answers and the other one, when it has said some tokens."""

    def places(replica: Replica) -> list[int]:
        return [place for _, place in replica.core.running.values()]

    await until(lambda: any(max(places(each), default=0) > FAULT_AT for each in replicas), 10)
    first = next(each for each in replicas if places(each))
    return first, replicas[1 - replicas.index(first)]


def tokens_of(events: list[bytes]) -> list[int]:
    return [
        token
        for event in events
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]
        for token in choice["token_ids"]
    ]

"""Gateways are killed while they run a batch: others continue, and each line is answered once."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import openai
import pytest
from aiohttp import web

from headrace.gateway.batches import batch_execution, batch_runner
from tests.unit.batch_fakes import (
    answers,
    batch_state,
    batching,
    echo,
    lines_of,
    read_lines,
    slow_echo,
    start_batch,
    until_ended,
)
from tests.unit.gateway_fakes import FakeReplica, gateway_over, soon
from tests.unit.gateway_process import GatewayProcess
from tests.unit.responses_replica import client_of

LINES = 400
GATEWAY = """
import asyncio, sys
from pathlib import Path
from headrace.config import GatewaySettings
from headrace.gateway import build_gateway_app, serve_gateway
from headrace.gateway.batches import batch_execution, batch_runner
from tests.unit.batch_fakes import batch_state, echo
from tests.unit.gateway_fakes import MODEL, FakeCluster, FakeReplica

batch_execution.LEASE_S, batch_execution.BEAT_S, batch_runner.SCAN_S = 1.0, 0.1, 0.1

async def run() -> None:
    replica = FakeReplica(echo)
    replica.port = int(sys.argv[1])
    state = batch_state(Path(sys.argv[2]))
    app = build_gateway_app(GatewaySettings(), FakeCluster([replica]), MODEL, batches=state)
    server = await serve_gateway(app, "127.0.0.1", 0)
    await app.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(run())
"""


async def some_time(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(0.05)
    return await echo(replica, request)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.soak)])
async def test_each_line_is_answered_once_after_gateways_were_killed(
    tmp_path: Path, kills: int
) -> None:
    choice = random.Random(1)
    replica = await FakeReplica(some_time).start()
    gateway = await GatewayProcess.start(GATEWAY, replica, tmp_path)
    texts = [f"text {number}" for number in range(LINES)]
    try:
        async with openai.AsyncOpenAI(base_url=gateway.url, api_key="none") as client:
            batch_id = (await start_batch(client, lines_of(texts))).id
        for _ in range(kills):
            await asyncio.sleep(choice.uniform(0.1, 0.3))
            _, successor = await asyncio.gather(
                gateway.kill(), GatewayProcess.start(GATEWAY, replica, tmp_path)
            )
            gateway = successor
        async with openai.AsyncOpenAI(base_url=gateway.url, api_key="none") as client:
            done = await until_ended(client, batch_id, 120)
            assert done.status == "completed"
            lines = await read_lines(client, done.output_file_id)
        assert answers(lines) == {str(number): text for number, text in enumerate(texts)}
        assert len(replica.seen) >= LINES
    finally:
        await gateway.kill()
        await replica.stop()


async def test_another_gateway_continues_at_once_when_one_stops(tmp_path: Path) -> None:
    never = asyncio.Event()

    async def some(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        if len(replica.seen) > 5:
            await never.wait()
        return await echo(replica, request)

    texts = list(map(str, range(10)))
    async with batching(tmp_path, some) as (bench, client):
        made = await start_batch(client, lines_of(texts))
        await soon(lambda: [one["completed"] for one in bench.app.state()["batches"]] == [5])
        await bench.app.aclose()
    async with batching(tmp_path) as (bench, client):
        done = await until_ended(client, made.id)
        assert answers(await read_lines(client, done.output_file_id)) == {t: t for t in texts}
        assert len(bench.replica.seen) == 5, "the others were answered before"


async def test_a_gateway_leaves_a_batch_to_the_one_that_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "SCAN_S", 0.05)
    monkeypatch.setattr(batch_execution, "BEAT_S", 0.05)
    go = asyncio.Event()
    async with (
        batching(tmp_path, slow_echo(go)) as (one, client),
        gateway_over(echo, batch_state=batch_state(tmp_path)) as two,
        client_of(two) as other,
    ):
        await two.app.start()
        made = await start_batch(client, lines_of(["a", "b"]))
        await soon(lambda: len(one.replica.seen) == 2)
        await soon(lambda: [each["in_flight"] for each in two.app.state()["batches"]] == [2])
        assert not two.replica.seen
        assert (await other.batches.cancel(made.id)).status == "cancelling"
        assert (await until_ended(client, made.id)).status == "cancelled"
        assert one.replica.aborted == 2
        go.set()

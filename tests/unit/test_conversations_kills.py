"""Gateways are killed in the middle of turns: what a client has the last event of is found."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import openai
import pytest

from tests.unit.gateway_fakes import MODEL, FakeReplica
from tests.unit.gateway_process import GatewayProcess
from tests.unit.responses_replica import respond

CLIENTS = 3
GATEWAY = """
import asyncio, sys
from pathlib import Path
from headrace.config import GatewaySettings
from headrace.gateway import build_gateway_app, serve_gateway
from tests.unit.gateway_fakes import MODEL, FakeCluster, FakeReplica
from tests.unit.responses_replica import respond, state_in

async def run() -> None:
    replica = FakeReplica(respond)
    replica.port = int(sys.argv[1])
    state = state_in(Path(sys.argv[2]))
    app = build_gateway_app(GatewaySettings(), FakeCluster([replica]), MODEL, conversations=state)
    server = await serve_gateway(app, "127.0.0.1", 0)
    print(server.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(run())
"""


async def talk(url: str, name: str, any_whole: asyncio.Event) -> tuple[str | None, list[str]]:
    """Take turns until the gateway is gone; the last response that is whole, and its prompt.

    Args:
        any_whole: set when a response is whole.
    """
    last: str | None = None
    prompt: list[str] = []
    with contextlib.suppress(openai.APIError):
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            for turn in range(1000):
                text = f"{name}.{turn}"
                stream = await client.responses.create(
                    model=MODEL, input=text, previous_response_id=last, stream=True
                )
                async for event in stream:
                    if event.type == "response.completed":
                        last = event.response.id
                        prompt += [text, event.response.output_text]
                        any_whole.set()
    return last, prompt


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.soak)])
async def test_every_turn_that_a_client_has_is_found_after_a_gateway_was_killed(
    tmp_path: Path, kills: int
) -> None:
    choice = random.Random(1)
    replica = await FakeReplica(respond).start()
    survivor = await GatewayProcess.start(GATEWAY, replica, tmp_path)
    checked = 0
    try:
        async with openai.AsyncOpenAI(base_url=survivor.url, api_key="none") as client:
            for kill in range(kills):
                victim = await GatewayProcess.start(GATEWAY, replica, tmp_path)
                any_whole = asyncio.Event()
                talks = [
                    asyncio.create_task(talk(victim.url, f"{kill}.{number}", any_whole))
                    for number in range(CLIENTS)
                ]
                await any_whole.wait()
                await asyncio.sleep(choice.uniform(0, 0.4))
                await victim.kill()
                for last, prompt in await asyncio.gather(*talks):
                    if last is None:
                        continue
                    found = await client.responses.retrieve(last)
                    assert found.output_text == prompt[-1]
                    more = await client.responses.create(
                        model=MODEL, input="More", previous_response_id=last
                    )
                    assert more.output_text == f"{len(prompt) + 1}: More"
                    checked += 1
    finally:
        await survivor.kill()
        await replica.stop()
    assert checked >= kills

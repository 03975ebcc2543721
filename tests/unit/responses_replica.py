"""A fake replica that answers `/v1/responses` as vLLM does, and a gateway that keeps its state."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from headrace.config.conversations import ConversationSettings
from headrace.gateway.conversations.setup import StateSetup
from headrace.gateway.conversations.state import ConversationState
from tests.unit.gateway_fakes import (
    BODY,
    MODEL,
    Bench,
    FakeReplica,
    Handler,
    begin_stream,
    gateway_over,
)

SECRET = "a-secret-of-the-tests"


def state_in(folder: Path, secret: str = SECRET, **settings: Any) -> ConversationState:
    """The conversation state of one more gateway of the machine."""
    setup = StateSetup(ConversationSettings(**settings), secret)
    state = setup.make(lambda: folder, lambda made: made)
    assert state is not None
    return state


def texts_of(sent: dict[str, Any]) -> list[str]:
    """The texts of a request's input, as a model would read them."""
    given = sent["input"]
    if isinstance(given, str):
        return [given]
    found = []
    for item in given:
        content = item.get("content", item.get("output", item.get("arguments")))
        found.append(content if isinstance(content, str) else content[0]["text"])
    return found


def response_to(sent: dict[str, Any], status: str = "completed") -> dict[str, Any]:
    """The response to a request, whose text counts and repeats what the model has read."""
    texts = texts_of(sent)
    text = {"type": "output_text", "text": f"{len(texts)}: {texts[-1]}", "annotations": []}
    message = {"id": "msg_0123456789abcdef", "type": "message", "role": "assistant"}
    return {
        "id": sent.get("request_id", "resp_0123456789abcdef"),
        "object": "response",
        "created_at": 1,
        "status": status,
        "model": sent.get("model", MODEL),
        "output": [{**message, "status": "completed", "content": [text]}],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "background": False,
        "previous_response_id": None,
        "usage": {"input_tokens": len(texts), "output_tokens": 3, "total_tokens": len(texts) + 3},
    }


async def respond(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    """Answer whole, or as a stream if the request asks for one."""
    sent = json.loads(request[BODY])
    done = response_to(sent)
    if not sent.get("stream"):
        return web.json_response(done)
    response = await begin_stream(request)
    begun = {**done, "status": "in_progress", "output": [], "usage": None}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        ("response.output_text.delta", {"delta": done["output"][0]["content"][0]["text"]}),
        ("response.completed", {"response": done}),
    ]
    for number, (kind, data) in enumerate(events):
        document = {**data, "sequence_number": number, "type": kind}
        await response.write(f"event: {kind}\ndata: {json.dumps(document)}\n\n".encode())
        await asyncio.sleep(0)
    return response


def slow_respond(go: asyncio.Event) -> Handler:
    """Answer when an event is set."""

    async def handler(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        await go.wait()
        return await respond(replica, request)

    return handler


@contextlib.asynccontextmanager
async def keeping(
    folder: Path, handler: Handler = respond, **options: Any
) -> AsyncIterator[tuple[Bench, openai.AsyncOpenAI]]:
    """A gateway that keeps state, over one replica, and a client of it."""
    async with (
        gateway_over(handler, state=state_in(folder), **options) as bench,
        client_of(bench) as client,
    ):
        yield bench, client


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A gateway that keeps state, over one replica."""
    async with gateway_over(respond, state=state_in(tmp_path)) as bench:
        yield bench


@pytest.fixture
async def client(bench: Bench) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(bench) as client:
        yield client


def client_of(bench: Bench, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{bench.url}/v1", api_key=key, max_retries=0)


def sent(bench: Bench, number: int = -1) -> dict[str, Any]:
    """A request that the replica got."""
    return dict(json.loads(bench.replica.seen[number][BODY]))


async def until_ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    """The response, as soon as it is no longer made in the background."""
    async with asyncio.timeout(20):
        while True:
            found = await client.responses.retrieve(response_id)
            if found.status not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.02)

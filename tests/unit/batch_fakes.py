"""A gateway that keeps batches over a fake replica, and what its tests send and read."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import openai
from aiohttp import web

from headrace.config.batches import BatchSettings
from headrace.config.conversations import ConversationSettings
from headrace.gateway.batches.setup import make_batch_state
from headrace.gateway.batches.tenant_batches import BatchState
from headrace.gateway.conversations.setup import StateSetup
from tests.unit.gateway_fakes import BODY, CHAT, MODEL, Bench, FakeReplica, Handler, gateway_over
from tests.unit.responses_replica import SECRET, client_of

ENDED = ("completed", "failed", "expired", "cancelled")


def batch_state(folder: Path, settings: BatchSettings | None = None) -> BatchState:
    """The files and batches of one more gateway of the machine."""
    setup, own = StateSetup(ConversationSettings(), SECRET), settings or BatchSettings()
    state = make_batch_state(setup, own, lambda: folder, lambda made: made)
    assert state is not None
    return state


async def echo(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    """Answer with the text of the request's only message."""
    sent = json.loads(request[BODY])
    text = sent["messages"][0]["content"]
    if text.startswith("refuse"):
        error = {"message": "no", "type": "invalid_request_error", "code": "refused"}
        return web.json_response({"error": error}, status=400)
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    done = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL}
    return web.json_response({**done, "choices": [choice]})


def slow_echo(go: asyncio.Event) -> Handler:
    """Answer when an event is set."""

    async def handler(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        await go.wait()
        return await echo(replica, request)

    return handler


def line(custom_id: str, text: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    """A request of an input file."""
    message = {"role": "user", "content": text}
    request = {"model": MODEL, "messages": [message], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": request}


def lines_of(texts: Iterable[str]) -> bytes:
    """A file with a request for each text, whose id is its number."""
    lines = (line(str(number), text) for number, text in enumerate(texts))
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


@contextlib.asynccontextmanager
async def batching(
    folder: Path,
    handler: Handler = echo,
    key: str = "none",
    batch_settings: BatchSettings | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Bench, openai.AsyncOpenAI]]:
    """A gateway with batches over one replica, and a client of it."""
    own = batch_settings or BatchSettings()
    state = batch_state(folder, own)
    async with (
        gateway_over(handler, batch_state=state, batches=own, **options) as bench,
        client_of(bench, key) as client,
    ):
        yield bench, client


async def start_of(client: openai.AsyncOpenAI, file_id: str, **more: Any) -> Any:
    """A batch of a file that is uploaded."""
    return await client.batches.create(
        input_file_id=file_id, endpoint=CHAT, completion_window="24h", **more
    )


async def start_batch(client: openai.AsyncOpenAI, data: bytes, **more: Any) -> Any:
    """A batch of a file with this content."""
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await start_of(client, file.id, **more)


async def until_ended(client: openai.AsyncOpenAI, batch_id: str, limit_s: float = 30) -> Any:
    """The batch, as soon as it has ended."""
    async with asyncio.timeout(limit_s):
        while (found := await client.batches.retrieve(batch_id)).status not in ENDED:
            await asyncio.sleep(0.02)
        return found


async def read_lines(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output file; none if there is no file."""
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(each) for each in content.read().splitlines()]


def answers(lines: Iterable[dict[str, Any]]) -> dict[str, str]:
    """The texts of answers, by the line's id; every id comes once."""
    found: dict[str, str] = {}
    for each in lines:
        assert each["custom_id"] not in found
        body = each["response"]["body"]
        found[each["custom_id"]] = body["choices"][0]["message"]["content"]
    return found

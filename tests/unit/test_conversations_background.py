"""Background responses: queued, run, cancelled and ended."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from headrace.config.conversations import ConversationSettings
from headrace.config.gateway import AdmissionSettings
from headrace.config.key_file import hash_of
from headrace.gateway.admission.slo_classes import SloClass
from headrace.gateway.conversations import background
from tests.unit import responses_replica
from tests.unit.gateway_fakes import BODY, MODEL, Bench, FakeReplica, gateway_over, soon
from tests.unit.responses_replica import (
    client_of,
    keeping,
    respond,
    response_to,
    sent,
    slow_respond,
    state_in,
    until_ended,
)

bench, client = responses_replica.bench, responses_replica.client


async def test_a_background_response_is_queued_then_run_and_kept(tmp_path: Path) -> None:
    go = asyncio.Event()
    async with keeping(tmp_path, slow_respond(go)) as (bench, client):
        made = await client.responses.create(model=MODEL, input="One", background=True)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        await soon(lambda: len(bench.replica.seen) == 1)
        assert "background" not in sent(bench)
        assert (await client.responses.retrieve(made.id)).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="Wait"):
            await client.responses.create(model=MODEL, input="x", previous_response_id=made.id)
        assert bench.app.relaying == 1
        go.set()
        done = await until_ended(client, made.id)
        assert (done.status, done.output_text, done.background) == ("completed", "1: One", True)
        second = await client.responses.create(
            model=MODEL, input="Two", previous_response_id=made.id
        )
        assert second.output_text == "3: Two"
        await soon(lambda: bench.app.body_reader.held_bytes == 0)


async def test_a_background_response_is_made_even_if_its_client_hangs_up(
    bench: Bench, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.responses.create(model=MODEL, input="One")
    state = bench.app._conversations
    assert state is not None and state._opened is not None
    write = state._opened[0].write
    monkeypatch.setattr(state._opened[0], "write", lambda *args: time.sleep(0.3) or write(*args))
    with pytest.raises(openai.APITimeoutError):
        await client.responses.create(model=MODEL, input="Two", background=True, timeout=0.1)
    await soon(lambda: len(bench.replica.seen) == 2)
    made = sent(bench)["request_id"]
    assert (await until_ended(client, made)).output_text == "1: Two"
    await soon(lambda: bench.app.body_reader.held_bytes == 0)


async def test_a_background_response_is_cancelled_and_its_replica_stops(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with keeping(tmp_path, slow_respond(never)) as (bench, client):
        made = await client.responses.create(model=MODEL, input="One", background=True)
        await soon(lambda: len(bench.replica.seen) == 1)
        assert (await client.responses.cancel(made.id)).status == "cancelled"
        await soon(lambda: bench.replica.aborted == 1)
        assert (await client.responses.retrieve(made.id)).status == "cancelled"
        assert (await client.responses.cancel(made.id)).status == "cancelled"


async def test_only_a_background_response_is_cancelled(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model=MODEL, input="One")
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(made.id)


async def test_a_background_response_that_is_refused_has_failed(tmp_path: Path) -> None:
    async def refuse(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        error = {"message": "too long", "code": "context_length_exceeded"}
        return web.json_response({"error": error}, status=400)

    async with keeping(tmp_path, refuse) as (_, client):
        made = await client.responses.create(model=MODEL, input="One", background=True)
        done = await until_ended(client, made.id)
        assert (done.status, done.error.message) == ("failed", "too long")
        assert done.error.code == "context_length_exceeded"


async def test_a_background_response_that_cannot_be_kept_has_failed(tmp_path: Path) -> None:
    async def long(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        return web.json_response(response_to(json.loads(request[BODY])) | {"user": "x" * 2**20})

    async with keeping(tmp_path, long) as (_, client):
        made = await client.responses.create(model=MODEL, input="One", background=True)
        done = await until_ended(client, made.id)
        assert done.status == "failed" and "not kept" in done.error.message
        whole = await client.responses.create(model=MODEL, input="One")
        assert whole.output_text == "1: One" and "store" not in whole.model_dump()
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(whole.id)


async def test_a_deleted_background_response_stops_and_stays_deleted(tmp_path: Path) -> None:
    go = asyncio.Event()
    async with keeping(tmp_path, slow_respond(go)) as (bench, client):
        made = await client.responses.create(model=MODEL, input="One", background=True)
        await soon(lambda: len(bench.replica.seen) == 1)
        await client.responses.delete(made.id)
        await soon(lambda: bench.replica.aborted == 1)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)


async def test_background_responses_are_bounded(tmp_path: Path) -> None:
    never = asyncio.Event()
    settings = ConversationSettings(max_background=2)
    async with keeping(tmp_path, slow_respond(never), conversations=settings) as (bench, client):
        for _ in range(2):
            await client.responses.create(model=MODEL, input="One", background=True)
        with pytest.raises(openai.RateLimitError, match="2 background responses"):
            await client.responses.create(model=MODEL, input="One", background=True)
        never.set()
        await soon(lambda: bench.app.relaying == 0)


async def test_a_background_response_counts_for_its_key_until_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key = "key-of-one-request"
    entry = {"name": "a", "hash": hash_of(key.encode()), "tenant": "a", "max_concurrent": 1}
    file.write_text(json.dumps({"keys": [entry]}))
    go = asyncio.Event()
    async with (
        gateway_over(slow_respond(go), state=state_in(tmp_path), api_keys_file=str(file)) as bench,
        client_of(bench, key) as client,
    ):
        made = await client.responses.create(model=MODEL, input="One", background=True)
        await soon(lambda: len(bench.replica.seen) == 1)
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model=MODEL, input="Two")
        assert (await client.responses.retrieve(made.id)).status == "in_progress", "it is no work"
        go.set()
        assert (await until_ended(client, made.id)).status == "completed"


async def test_a_stopped_gateways_background_responses_have_failed(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with keeping(tmp_path, slow_respond(never)) as (bench, client):
        made = await client.responses.create(model=MODEL, input="One", background=True)
        await soon(lambda: len(bench.replica.seen) == 1)
        await bench.app.aclose()
    async with keeping(tmp_path) as (_, client):
        found = await client.responses.retrieve(made.id)
        assert found.status == "failed" and found.error is not None
        assert "was stopped" in found.error.message


async def test_a_dead_gateways_background_responses_have_failed(tmp_path: Path) -> None:
    """Another gateway sees no sign of life, and says so from then on."""
    never = asyncio.Event()
    async with keeping(tmp_path, slow_respond(never)) as (_, client):
        made = await client.responses.create(model=MODEL, input="One", background=True)
        later = state_in(tmp_path)
        async with gateway_over(respond, state=later) as two, client_of(two) as other:
            assert (await other.responses.retrieve(made.id)).status in ("queued", "in_progress")
            later._clock = lambda: time.time() + 21
            found = await other.responses.retrieve(made.id)
            assert found.status == "failed" and found.error is not None
            assert "died" in found.error.message
            again = await other.responses.create(
                model=MODEL, input="Again", previous_response_id=made.id
            )
            assert again.output_text == "2: Again"
        never.set()


async def test_another_gateway_cancels_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "BEAT_S", 0.05)
    never = asyncio.Event()
    async with (
        keeping(tmp_path, slow_respond(never)) as (one, client),
        keeping(tmp_path) as (_, other),
    ):
        made = await client.responses.create(model=MODEL, input="One", background=True)
        assert (await other.responses.cancel(made.id)).status == "cancelled"
        await soon(lambda: one.replica.aborted == 1 or not one.replica.seen)
        await soon(lambda: one.app.relaying == 0)
        assert (await client.responses.retrieve(made.id)).status == "cancelled"


async def test_with_admission_a_background_response_has_a_class_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent while no other request waits."""
    entered: list[tuple[str, bool]] = []
    async with keeping(tmp_path, admission=AdmissionSettings()) as (bench, client):
        await bench.app.start()
        assert bench.app.parts is not None
        (model,) = bench.app.parts.models
        queue = model.queue
        assert queue is not None
        enter = queue.enter

        async def recorded(tenant: str | None, slo: SloClass, *more: Any) -> Any:
            entered.append((slo.name, slo.background))
            return await enter(tenant, slo, *more)

        monkeypatch.setattr(queue, "enter", recorded)
        made = await client.responses.create(model=MODEL, input="One", background=True)
        assert (await until_ended(client, made.id)).output_text == "1: One"
        await client.responses.create(model=MODEL, input="One")
    assert entered == [("background", True), ("default", False)]

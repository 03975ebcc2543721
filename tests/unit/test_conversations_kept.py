"""What is kept of a response, and what a store that fails costs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from headrace.gateway.kept_records import state_runner as state_module
from headrace.gateway.kept_records.record_store import StoreError
from tests.unit import responses_replica
from tests.unit.gateway_fakes import BODY, MODEL, RESPONSES, Bench, FakeReplica, gateway_over
from tests.unit.responses_replica import keeping, sent, state_in

bench, client = responses_replica.bench, responses_replica.client


async def test_store_false_keeps_nothing_and_leaves_the_request_as_it_is(
    bench: Bench, client: openai.AsyncOpenAI
) -> None:
    body = b'{"model": "%s", "input": "One",  "store": false}' % MODEL.encode()
    reply = await bench.client.post(
        RESPONSES, data=body, headers={"content-type": "application/json"}
    )
    assert bench.replica.seen[0][BODY] == body
    made = await reply.json()
    assert "store" not in made
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made["id"])


async def test_a_response_that_is_not_kept_may_continue_one_that_is(
    bench: Bench, client: openai.AsyncOpenAI
) -> None:
    first = await client.responses.create(model=MODEL, input="One")
    second = await client.responses.create(
        model=MODEL, input="Two", previous_response_id=first.id, store=False
    )
    assert (second.output_text, second.store) == ("3: Two", False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model=MODEL, input="3", previous_response_id=second.id)


async def test_a_kept_response_is_the_one_that_the_client_got(
    bench: Bench, client: openai.AsyncOpenAI
) -> None:
    made = await client.responses.create(
        model=MODEL, input="One", instructions="Rhyme.", metadata={"a": "b"}
    )
    assert await client.responses.retrieve(made.id) == made


async def test_its_own_input_is_listed_in_the_form_of_openai(
    bench: Bench, client: openai.AsyncOpenAI
) -> None:
    made = await client.responses.create(model=MODEL, input="One")
    [item] = (await client.responses.input_items.list(made.id)).data
    assert item.type == "message" and item.role == "user" and item.id.startswith("msg_")
    assert item.content[0].type == "input_text" and item.content[0].text == "One"
    again = (await client.responses.input_items.list(made.id)).data
    assert again[0].id == item.id


async def test_a_deleted_response_is_gone_and_ends_what_continues_it(
    bench: Bench, client: openai.AsyncOpenAI
) -> None:
    first = await client.responses.create(model=MODEL, input="One")
    second = await client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    await client.responses.delete(first.id)
    for call in (client.responses.retrieve(first.id), client.responses.delete(first.id)):
        with pytest.raises(openai.NotFoundError):
            await call
    with pytest.raises(openai.NotFoundError, match=first.id) as refused:
        await client.responses.create(model=MODEL, input="3", previous_response_id=second.id)
    assert refused.value.code == "previous_response_not_found"
    assert (await client.responses.retrieve(second.id)).output_text == "3: Two"


async def test_an_answer_that_cannot_be_kept_says_so(
    bench: Bench, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await client.responses.create(model=MODEL, input="One")
    state = bench.app._conversations
    assert state is not None and state._opened is not None

    def full(*_: Any) -> None:
        raise StoreError("database or disk is full")

    monkeypatch.setattr(state._opened[0], "write", full)
    whole = await client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    assert (whole.output_text, whole.store) == ("3: Two", False)
    stream = await client.responses.create(model=MODEL, input="Three", stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.completed" and last.response.store is False
    monkeypatch.setattr(state._opened[0], "read", full)
    with pytest.raises(openai.InternalServerError, match="cannot be used now") as refused:
        await client.responses.retrieve(first.id)
    assert refused.value.status_code == 503


async def test_a_store_that_cannot_be_opened_costs_no_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with keeping(tmp_path / "file" / "folder") as (bench, client):
        made = await client.responses.create(model=MODEL, input="One")
        assert (made.output_text, made.store) == ("1: One", False)
        with pytest.raises(openai.InternalServerError, match="cannot be used now"):
            await client.responses.create(model=MODEL, input="x", background=True)
        assert len(bench.replica.seen) == 1 and bench.app.relaying == 0


async def test_an_answer_that_fails_is_not_kept(tmp_path: Path) -> None:
    async def refuse(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    async with gateway_over(refuse, state=state_in(tmp_path)) as bench:
        reply = await bench.client.post(RESPONSES, json={"input": "One"})
        assert (reply.status, await reply.json()) == (400, {"error": {"message": "too long"}})
        known = sent(bench)["request_id"]
        assert (await bench.client.get(f"{RESPONSES}/{known}")).status == 404


async def test_an_answer_that_is_no_response_reaches_the_client_as_it_is(tmp_path: Path) -> None:
    async def odd(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"[1]", content_type="application/json")

    async with gateway_over(odd, state=state_in(tmp_path)) as bench:
        reply = await bench.client.post(RESPONSES, json={"input": "One"})
        assert await reply.read() == b"[1]"


async def test_a_store_that_hangs_costs_a_request_a_few_seconds(
    bench: Bench, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await client.responses.create(model=MODEL, input="One")
    monkeypatch.setattr(state_module, "WAIT_S", 0.2)
    state = bench.app._conversations
    assert state is not None and state._opened is not None
    monkeypatch.setattr(state._opened[0], "read", lambda *_: time.sleep(1.0) or {})
    began = time.monotonic()
    with pytest.raises(openai.InternalServerError):
        await client.responses.retrieve(first.id)
    assert time.monotonic() - began < 0.9

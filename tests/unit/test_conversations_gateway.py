"""Conversation state at the gateway: what OpenAI's client can do, and what a replica gets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from headrace.config.gateway import AdmissionSettings
from headrace.gateway.admission.slo_classes import SloClass
from headrace.gateway.conversations import state as state_module
from headrace.gateway.conversations.record_store import StoreError
from tests.unit.gateway_fakes import (
    BODY,
    MODEL,
    RESPONSES,
    Bench,
    FakeReplica,
    gateway_over,
    soon,
)
from tests.unit.responses_replica import respond, response_to, slow_respond, state_in, texts_of


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
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


# Turns


async def test_a_response_continues_another_with_all_its_items(
    bench: Bench, client: openai.AsyncOpenAI
) -> None:
    first = await client.responses.create(model=MODEL, input="One")
    assert first.output_text == "1: One"
    second = await client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    third = await client.responses.create(
        model=MODEL, input=[{"role": "user", "content": "Three"}], previous_response_id=second.id
    )
    assert third.output_text == "5: Three"
    assert texts_of(sent(bench)) == ["One", "1: One", "Two", "3: Two", "Three"]
    assert not {"previous_response_id", "background", "conversation"} & sent(bench).keys()


async def test_a_replica_gets_what_a_client_would_send_itself(
    bench: Bench, client: openai.AsyncOpenAI
) -> None:
    first = await client.responses.create(model=MODEL, input="One")
    await client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    continued = sent(bench)
    whole = [
        {"role": "user", "content": "One"},
        first.output[0].model_dump(exclude_unset=True),
        {"role": "user", "content": "Two"},
    ]
    await client.responses.create(model=MODEL, input=whole, store=False)  # type: ignore[arg-type]
    assert continued["input"] == sent(bench)["input"]


async def test_a_stream_is_continued_as_soon_as_its_last_event_is_there(
    bench: Bench, client: openai.AsyncOpenAI
) -> None:
    previous: str | None = None
    for turn in range(3):
        stream = await client.responses.create(
            model=MODEL, input=f"T{turn}", previous_response_id=previous, stream=True
        )
        kinds = []
        async for event in stream:
            kinds.append(event.type)
            if event.type in ("response.created", "response.completed"):
                assert event.response.previous_response_id == previous
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        previous = event.response.id  # type: ignore[union-attr]
        assert event.response.store is True  # type: ignore[union-attr]
    assert texts_of(sent(bench)) == ["T0", "1: T0", "T1", "3: T1", "T2"]
    kept = await client.responses.retrieve(previous)  # type: ignore[arg-type]
    assert kept.output_text == "5: T2"


async def test_two_responses_may_continue_the_same_one(
    bench: Bench, client: openai.AsyncOpenAI
) -> None:
    first = await client.responses.create(model=MODEL, input="One")
    for text in ("Left", "Right"):
        await client.responses.create(model=MODEL, input=text, previous_response_id=first.id)
        assert texts_of(sent(bench)) == ["One", "1: One", text]


async def test_instructions_are_not_carried_over(bench: Bench, client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input="One", instructions="Rhyme.")
    await client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    assert "instructions" not in sent(bench)


async def test_tool_calls_and_their_results_are_items_like_any(tmp_path: Path) -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"}

    async def calls(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        given = json.loads(request[BODY])
        return web.json_response({**response_to(given), "output": [call]})

    async with (
        gateway_over(calls, state=state_in(tmp_path)) as bench,
        client_of(bench) as client,
    ):
        first = await client.responses.create(model=MODEL, input="Call")
        result = {"type": "function_call_output", "call_id": "c", "output": "42"}
        await client.responses.create(
            model=MODEL,
            input=[result],
            previous_response_id=first.id,  # type: ignore[list-item]
        )
        assert sent(bench)["input"] == [{"role": "user", "content": "Call"}, call, result]


async def test_each_turn_may_name_another_model(bench: Bench, client: openai.AsyncOpenAI) -> None:
    """The replica gets the model of the turn, such as a LoRA adapter."""
    first = await client.responses.create(model=MODEL, input="One")
    second = await client.responses.create(model="sql", input="Two", previous_response_id=first.id)
    assert (second.model, sent(bench)["model"]) == ("sql", "sql")
    assert texts_of(sent(bench)) == ["One", "1: One", "Two"]
    made = await client.responses.create(
        model="sql", input="Three", previous_response_id=second.id, background=True
    )
    assert made.model == "sql"
    assert (await until_ended(client, made.id)).model == "sql"
    await client.responses.create(model=MODEL, input="Four", previous_response_id=made.id)
    assert sent(bench)["model"] == MODEL


async def test_images_are_kept_and_sent_again_as_they_came(
    bench: Bench, client: openai.AsyncOpenAI
) -> None:
    """Longer than what is joined on the event loop."""
    image = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * 300_000}
    item = {"role": "user", "content": [{"type": "input_text", "text": "Look"}, image]}
    given: Any = [item]
    first = await client.responses.create(model=MODEL, input=given)
    await client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    assert sent(bench)["input"][0] == item
    conversation = await client.conversations.create(items=given)
    await client.responses.create(model=MODEL, input="Two", conversation=conversation.id)
    assert sent(bench)["input"][0] == item
    [listed, *_] = (await client.conversations.items.list(conversation.id, order="asc")).data
    assert listed.to_dict()["content"] == item["content"]


async def test_another_gateway_of_the_machine_finds_it(tmp_path: Path) -> None:
    async with gateway_over(respond, state=state_in(tmp_path)) as one, client_of(one) as client:
        first = await client.responses.create(model=MODEL, input="One")
        async with (
            gateway_over(respond, state=state_in(tmp_path)) as two,
            client_of(two) as other,
        ):
            second = await other.responses.create(
                model=MODEL, input="Two", previous_response_id=first.id
            )
            assert second.output_text == "3: Two"


async def test_a_gateway_that_starts_later_finds_it(tmp_path: Path) -> None:
    async with gateway_over(respond, state=state_in(tmp_path)) as bench, client_of(bench) as client:
        first = await client.responses.create(model=MODEL, input="One")
    async with gateway_over(respond, state=state_in(tmp_path)) as bench, client_of(bench) as client:
        assert (await client.responses.retrieve(first.id)).output_text == "1: One"


# What is kept


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
    async with (
        gateway_over(respond, state=state_in(tmp_path / "file" / "folder")) as bench,
        client_of(bench) as client,
    ):
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


# Refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": 1}, "previous_response_id"),
        ({"previous_response_id": "x" * 201}, "previous_response_id"),
        ({"conversation": 1}, "conversation"),
        ({"conversation": {}}, "conversation"),
        ({"store": "yes"}, "store"),
        ({"background": 1}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "stream"),
        ({"previous_response_id": "a", "conversation": "b"}, "previous_response_id"),
    ],
)
async def test_wrong_fields_are_refused_by_name(
    bench: Bench, fields: dict[str, Any], param: str
) -> None:
    reply = await bench.client.post(RESPONSES, json={"input": "x", **fields})
    assert reply.status == 400
    assert (await reply.json())["error"]["param"] == param
    assert not bench.replica.seen


UNKNOWN = ["resp_x", "resp_" + "0" * 40, "conv_" + "0" * 40, "", "resp_" + "0" * 41, "🦊"]


@pytest.mark.parametrize("previous", UNKNOWN)
async def test_what_is_not_kept_is_not_found(bench: Bench, previous: str) -> None:
    for field in ("previous_response_id", "conversation"):
        if field == "conversation" and previous.startswith("conv"):
            continue
        reply = await bench.client.post(RESPONSES, json={"input": "x", field: previous})
        assert reply.status == 404, field
        assert "not found" in (await reply.json())["error"]["message"]


async def test_another_tenants_response_is_not_found(tmp_path: Path) -> None:
    keys = ["key-of-the-first", "key-of-the-second"]
    async with gateway_over(respond, state=state_in(tmp_path), api_keys=keys) as bench:
        one, two = client_of(bench, keys[0]), client_of(bench, keys[1])
        made = await one.responses.create(model=MODEL, input="One")
        conversation = await one.conversations.create()
        for call in (
            two.responses.retrieve(made.id),
            two.responses.delete(made.id),
            two.responses.cancel(made.id),
            two.responses.input_items.list(made.id),
            two.responses.create(model=MODEL, input="x", previous_response_id=made.id),
            two.conversations.retrieve(conversation.id),
            two.conversations.delete(conversation.id),
            two.conversations.items.list(conversation.id),
            two.responses.create(model=MODEL, input="x", conversation=conversation.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert (await one.responses.retrieve(made.id)).id == made.id
        await one.close()
        await two.close()


async def test_a_conversation_longer_than_a_body_is_refused_by_its_size(tmp_path: Path) -> None:
    state = state_in(tmp_path)
    async with gateway_over(respond, state=state, max_body_bytes=3_000) as bench:
        previous = None
        for _ in range(5):
            reply = await bench.client.post(
                RESPONSES, json={"input": "x" * 500, "previous_response_id": previous}
            )
            if reply.status != 200:
                break
            previous = (await reply.json())["id"]
        error = (await reply.json())["error"]
        assert (reply.status, error["code"]) == (400, "conversation_too_long")
        assert "3000 is the limit" in error["message"] and len(bench.replica.seen) == 3


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", f"{RESPONSES}/resp_1", "GET, HEAD, DELETE"),
        ("POST", f"{RESPONSES}/resp_1/input_items", "GET, HEAD"),
        ("GET", f"{RESPONSES}/resp_1/cancel", "POST"),
        ("GET", "/v1/conversations", "POST"),
        ("PUT", "/v1/conversations/conv_1", "GET, HEAD, POST, DELETE"),
        ("DELETE", "/v1/conversations/conv_1/items", "GET, HEAD, POST"),
        ("POST", "/v1/conversations/conv_1/items/a", "GET, HEAD, DELETE"),
    ],
)
async def test_each_route_names_its_methods(
    bench: Bench, method: str, path: str, allow: str
) -> None:
    reply = await bench.client.request(method, path)
    assert (reply.status, reply.headers["allow"]) == (405, allow)


@pytest.mark.parametrize(
    "path",
    [
        f"{RESPONSES}/resp_1/x",
        f"{RESPONSES}/resp_1/cancel/x",
        "/v1/conversations//items",
        "/v1/conversations/conv_1/x",
        "/v1/conversations/conv_1/items/a/b",
        "/v1/conversations/conv_1/items",
        "/v1/conversations/conv_1",
        "/v1/conversations/conv_1/items/a",
    ],
)
async def test_other_paths_are_not_found(bench: Bench, path: str) -> None:
    assert (await bench.client.get(path)).status == 404


async def test_without_state_the_routes_are_the_replicas(tmp_path: Path) -> None:
    async with gateway_over(respond) as bench:
        reply = await bench.client.post(RESPONSES, json={"input": "x", "background": True})
        assert sent(bench)["background"] is True and "request_id" not in sent(bench)
        assert "store" not in await reply.json()


async def test_a_request_that_kills_replicas_is_known_again_by_its_own_bytes(
    tmp_path: Path,
) -> None:
    """The id that each request gets changes nothing about that."""
    from tests.unit.gateway_fakes import abort_connection

    async with gateway_over(abort_connection, state=state_in(tmp_path)) as bench:
        first = await bench.client.post(RESPONSES, json={"input": "x"})
        again = await bench.client.post(RESPONSES, json={"input": "x"})
        other = await bench.client.post(RESPONSES, json={"input": "y"})
        assert [first.status, again.status, other.status] == [502, 422, 502]


# Conversations


async def test_a_conversation_collects_the_items_of_its_responses(
    bench: Bench, client: openai.AsyncOpenAI
) -> None:
    conversation = await client.conversations.create(
        metadata={"topic": "tests"},
        items=[{"type": "message", "role": "system", "content": "Be short."}],
    )
    for text in ("One", "Two"):
        made = await client.responses.create(model=MODEL, input=text, conversation=conversation.id)
        assert made.conversation is not None and made.conversation.id == conversation.id
    assert texts_of(sent(bench)) == ["Be short.", "One", "2: One", "Two"]
    listed = await client.conversations.items.list(conversation.id, order="asc")
    assert [item.content[0].text for item in listed.data] == [  # type: ignore[union-attr]
        *("Be short.", "One", "2: One", "Two", "4: Two"),
    ]
    with pytest.raises(openai.BadRequestError, match=conversation.id):
        await client.responses.create(model=MODEL, input="x", previous_response_id=made.id)


async def test_a_streamed_response_joins_its_conversation(
    bench: Bench, client: openai.AsyncOpenAI
) -> None:
    conversation = await client.conversations.create()
    stream = await client.responses.create(
        model=MODEL, input="One", conversation={"id": conversation.id}, stream=True
    )
    async for _ in stream:
        pass
    assert len((await client.conversations.items.list(conversation.id)).data) == 2


async def test_a_conversation_is_changed_and_deleted(client: openai.AsyncOpenAI) -> None:
    made = await client.conversations.create(metadata={"a": "1"})
    assert (await client.conversations.retrieve(made.id)).metadata == {"a": "1"}
    changed = await client.conversations.update(made.id, metadata={"b": "2"})
    assert changed.metadata == {"b": "2"} and changed.created_at == made.created_at
    gone = await client.conversations.delete(made.id)
    assert gone.deleted and gone.object == "conversation.deleted"
    with pytest.raises(openai.NotFoundError):
        await client.conversations.retrieve(made.id)


async def test_items_are_added_found_paged_and_deleted(client: openai.AsyncOpenAI) -> None:
    made = await client.conversations.create()
    for start in (0, 20):
        added = await client.conversations.items.create(
            made.id,
            items=[
                {"type": "message", "role": "user", "content": f"{start + n}"} for n in range(20)
            ],
        )
    assert len(added.data) == 20 and not added.has_more
    texts = []
    async for item in client.conversations.items.list(made.id, limit=7, order="asc"):
        texts.append(item.content[0].text)  # type: ignore[union-attr]
    assert texts == [str(n) for n in range(40)]
    newest = (await client.conversations.items.list(made.id, limit=1)).data[0]
    assert newest.content[0].text == "39"  # type: ignore[union-attr]
    same = await client.conversations.items.retrieve(newest.id, conversation_id=made.id)  # type: ignore[arg-type]
    assert same == newest
    left = await client.conversations.items.delete(newest.id, conversation_id=made.id)  # type: ignore[arg-type]
    assert left.id == made.id
    newest = (await client.conversations.items.list(made.id, limit=1)).data[0]
    assert newest.content[0].text == "38"  # type: ignore[union-attr]


async def test_a_deleted_conversation_keeps_its_responses(
    bench: Bench, client: openai.AsyncOpenAI
) -> None:
    conversation = await client.conversations.create()
    made = await client.responses.create(model=MODEL, input="One", conversation=conversation.id)
    await client.conversations.delete(conversation.id)
    assert (await client.responses.retrieve(made.id)).output_text == "1: One"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [{}] * 21}, "items"),
        ({"items": [{"type": "web_search_call"}]}, "items"),
        ({"items": [{"content": "x"}]}, "items"),
        ({"items": [{"role": "user"}]}, "items"),
        ({"items": "x"}, "items"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a" * 65: ""}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ],
)
async def test_wrong_conversations_are_refused_by_field(
    bench: Bench, body: dict[str, Any], param: str
) -> None:
    reply = await bench.client.post("/v1/conversations", json=body)
    assert reply.status == 400
    assert (await reply.json())["error"]["param"] == param


@pytest.mark.parametrize("query", ["order=up", "limit=0", "limit=101", "limit=x", "after=x"])
async def test_wrong_parameters_of_lists_are_refused(bench: Bench, query: str) -> None:
    made = await (await bench.client.post("/v1/conversations", json={})).json()
    reply = await bench.client.get(f"/v1/conversations/{made['id']}/items?{query}")
    assert reply.status == 400


# Background


async def until_ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    async with asyncio.timeout(20):
        while True:
            found = await client.responses.retrieve(response_id)
            if found.status not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.02)


async def test_a_background_response_is_queued_then_run_and_kept(tmp_path: Path) -> None:
    go = asyncio.Event()
    handler = slow_respond(lambda: go)
    async with (
        gateway_over(handler, state=state_in(tmp_path)) as bench,
        client_of(bench) as client,
    ):
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
    async with (
        gateway_over(slow_respond(lambda: never), state=state_in(tmp_path)) as bench,
        client_of(bench) as client,
    ):
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

    async with (
        gateway_over(refuse, state=state_in(tmp_path)) as bench,
        client_of(bench) as client,
    ):
        made = await client.responses.create(model=MODEL, input="One", background=True)
        done = await until_ended(client, made.id)
        assert (done.status, done.error.message) == ("failed", "too long")
        assert done.error.code == "context_length_exceeded"


async def test_a_background_response_that_cannot_be_kept_has_failed(tmp_path: Path) -> None:
    async def long(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        return web.json_response(response_to(json.loads(request[BODY])) | {"user": "x" * 2**20})

    async with (
        gateway_over(long, state=state_in(tmp_path)) as bench,
        client_of(bench) as client,
    ):
        made = await client.responses.create(model=MODEL, input="One", background=True)
        done = await until_ended(client, made.id)
        assert done.status == "failed" and "not kept" in done.error.message
        whole = await client.responses.create(model=MODEL, input="One")
        assert whole.output_text == "1: One" and "store" not in whole.model_dump()
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(whole.id)


async def test_a_deleted_background_response_stops_and_stays_deleted(tmp_path: Path) -> None:
    go = asyncio.Event()
    async with (
        gateway_over(slow_respond(lambda: go), state=state_in(tmp_path)) as bench,
        client_of(bench) as client,
    ):
        made = await client.responses.create(model=MODEL, input="One", background=True)
        await soon(lambda: len(bench.replica.seen) == 1)
        await client.responses.delete(made.id)
        await soon(lambda: bench.replica.aborted == 1)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)


async def test_background_responses_are_bounded(tmp_path: Path) -> None:
    never = asyncio.Event()
    state = state_in(tmp_path)
    settings = {"conversations": state_settings(max_background=2)}
    async with (
        gateway_over(slow_respond(lambda: never), state=state, **settings) as bench,
        client_of(bench) as client,
    ):
        for _ in range(2):
            await client.responses.create(model=MODEL, input="One", background=True)
        with pytest.raises(openai.RateLimitError, match="2 background responses"):
            await client.responses.create(model=MODEL, input="One", background=True)
        never.set()
        await soon(lambda: bench.app.relaying == 0)


async def test_a_background_response_counts_for_its_key_until_it_ends(tmp_path: Path) -> None:
    from headrace.config.key_file import hash_of

    file = tmp_path / "keys.yaml"
    key = "key-of-one-request"
    entry = {"name": "a", "hash": hash_of(key.encode()), "tenant": "a", "max_concurrent": 1}
    file.write_text(json.dumps({"keys": [entry]}))
    go = asyncio.Event()
    async with (
        gateway_over(
            slow_respond(lambda: go), state=state_in(tmp_path), api_keys_file=str(file)
        ) as bench,
        client_of(bench, key) as client,
    ):
        made = await client.responses.create(model=MODEL, input="One", background=True)
        await soon(lambda: len(bench.replica.seen) == 1)
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model=MODEL, input="Two")
        go.set()
        await soon(lambda: bench.app.relaying == 0)
        assert (await until_ended(client, made.id)).status == "completed"


async def test_a_stopped_gateways_background_responses_have_failed(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with (
        gateway_over(slow_respond(lambda: never), state=state_in(tmp_path)) as bench,
        client_of(bench) as client,
    ):
        made = await client.responses.create(model=MODEL, input="One", background=True)
        await soon(lambda: len(bench.replica.seen) == 1)
        await bench.app.aclose()
    async with gateway_over(respond, state=state_in(tmp_path)) as bench, client_of(bench) as client:
        found = await client.responses.retrieve(made.id)
        assert found.status == "failed" and found.error is not None
        assert "was stopped" in found.error.message


async def test_a_dead_gateways_background_responses_have_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gateway sees no sign of life, and says so from then on."""
    never = asyncio.Event()
    async with (
        gateway_over(slow_respond(lambda: never), state=state_in(tmp_path)) as bench,
        client_of(bench) as client,
    ):
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
    from headrace.gateway.conversations import background

    monkeypatch.setattr(background, "BEAT_S", 0.05)
    never = asyncio.Event()
    async with (
        gateway_over(slow_respond(lambda: never), state=state_in(tmp_path)) as one,
        client_of(one) as client,
        gateway_over(respond, state=state_in(tmp_path)) as two,
        client_of(two) as other,
    ):
        made = await client.responses.create(model=MODEL, input="One", background=True)
        assert (await other.responses.cancel(made.id)).status == "cancelled"
        await soon(lambda: one.replica.aborted == 1 or not one.replica.seen)
        await soon(lambda: one.app.relaying == 0)
        assert (await client.responses.retrieve(made.id)).status == "cancelled"


def state_settings(**settings: Any) -> Any:
    from headrace.config.conversations import ConversationSettings

    return ConversationSettings(**settings)


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


async def test_a_stream_that_a_client_resumes_keeps_the_id_of_its_response(bench: Bench) -> None:
    """The client has events under the id that another gateway gave."""
    from headrace_decode.resume.emitted import RESUME

    body = json.dumps({"model": MODEL, "input": "One", "stream": True}).encode()
    kind = {"content-type": "application/json"}
    async with bench.client.post(RESPONSES, data=body, headers=kind) as reply:
        received = (await reply.read()).partition(b"event: response.output_text")[0]
    known = sent(bench)["request_id"]
    headers = {**kind, RESUME.decode(): str(len(received))}
    await bench.client.post(RESPONSES, data=received + body, headers=headers)
    assert len(bench.replica.seen) == 2 and sent(bench)["request_id"] == known
    foreign = received.replace(known.encode(), b"resp_" + b"0" * 16)
    headers[RESUME.decode()] = str(len(foreign))
    await bench.client.post(RESPONSES, data=foreign + body, headers=headers)
    assert sent(bench)["request_id"] != known


async def test_a_resumed_response_stays_in_the_thread_that_it_continues(
    bench: Bench, client: openai.AsyncOpenAI
) -> None:
    from headrace_decode.resume.emitted import RESUME

    first = await client.responses.create(model=MODEL, input="One")
    other = await client.responses.create(model=MODEL, input="Other")
    received = b'event: response.created\ndata: {"response":{"id":"%s"}}\n\n' % other.id.encode()
    fields = {"model": MODEL, "input": "x", "stream": True, "previous_response_id": first.id}
    headers = {"content-type": "application/json", RESUME.decode(): str(len(received))}
    await bench.client.post(RESPONSES, data=received + json.dumps(fields).encode(), headers=headers)
    given = sent(bench)["request_id"]
    assert given != other.id and given[:21] == first.id[:21]


async def test_with_admission_a_background_response_has_a_class_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent while no other request waits."""
    entered: list[tuple[str, bool]] = []
    settings = {"admission": AdmissionSettings()}
    async with (
        gateway_over(respond, state=state_in(tmp_path), **settings) as bench,
        client_of(bench) as client,
    ):
        await bench.app.start()
        assert bench.app.parts is not None
        (model,) = bench.app.parts.models
        queue = model.queue
        assert queue is not None
        enter = queue.enter

        async def recorded(tenant: str | None, slo: SloClass, body_bytes: int) -> Any:
            entered.append((slo.name, slo.background))
            return await enter(tenant, slo, body_bytes)

        monkeypatch.setattr(queue, "enter", recorded)
        made = await client.responses.create(model=MODEL, input="One", background=True)
        assert (await until_ended(client, made.id)).output_text == "1: One"
        await client.responses.create(model=MODEL, input="One")
    assert entered == [("background", True), ("default", False)]

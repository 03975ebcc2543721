"""What a replica gets of a turn with state: the earlier items, and the id of its response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
from aiohttp import web

from headrace_decode.resume.emitted import RESUME
from tests.unit import responses_replica
from tests.unit.gateway_fakes import BODY, MODEL, RESPONSES, Bench, FakeReplica
from tests.unit.responses_replica import keeping, response_to, sent, texts_of, until_ended

bench, client = responses_replica.bench, responses_replica.client


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

    async with keeping(tmp_path, calls) as (bench, client):
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
    async with keeping(tmp_path) as (_, client):
        first = await client.responses.create(model=MODEL, input="One")
        async with keeping(tmp_path) as (_, other):
            second = await other.responses.create(
                model=MODEL, input="Two", previous_response_id=first.id
            )
            assert second.output_text == "3: Two"


async def test_a_gateway_that_starts_later_finds_it(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (_, client):
        first = await client.responses.create(model=MODEL, input="One")
    async with keeping(tmp_path) as (_, client):
        assert (await client.responses.retrieve(first.id)).output_text == "1: One"


async def test_a_stream_that_a_client_resumes_keeps_the_id_of_its_response(bench: Bench) -> None:
    """The client has events under the id that another gateway gave."""
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
    first = await client.responses.create(model=MODEL, input="One")
    other = await client.responses.create(model=MODEL, input="Other")
    received = b'event: response.created\ndata: {"response":{"id":"%s"}}\n\n' % other.id.encode()
    fields = {"model": MODEL, "input": "x", "stream": True, "previous_response_id": first.id}
    headers = {"content-type": "application/json", RESUME.decode(): str(len(received))}
    await bench.client.post(RESPONSES, data=received + json.dumps(fields).encode(), headers=headers)
    given = sent(bench)["request_id"]
    assert given != other.id and given[:21] == first.id[:21]
